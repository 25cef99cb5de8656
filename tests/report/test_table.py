"""The labelled table: dimensions, coordinates, units, and what is computed from it."""

import itertools

import numpy as np
import pytest

import tsfl_jax
from studies.verdicts import over
from tsfl_jax.config import Config, replace
from tsfl_jax.report import table

SMALL = {
    "num_intervals": 3,
    "num_clients": 2,
    "batch_size": 4,
    "devices": 1,
    "schedule.data_size": 16,
    "model.hidden": 0,
}
SWEPT = {"algorithm": ["fedavg", "dms"], "lr": [0.3, 0.1], "seed": [1, 0]}


@pytest.fixture(scope="module")
def sweep():
    return tsfl_jax.sweep(replace(Config(), SMALL), SWEPT)


def test_a_run(tmp_path):
    result = tsfl_jax.simulate(replace(Config(), SMALL))
    found = result.to_xarray()
    assert dict(found.sizes) == {"interval": 3, "client": 2}
    assert found["interval"].values.tolist() == [1, 2, 3]
    for name, values in result.history.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype
    assert found["rho"].dims == ("interval", "client")
    assert found["virtual_time"].attrs == {"units": "s"}
    assert found.attrs["algorithm"] == "dms" and found.attrs["seed"] == 0
    frame = result.to_pandas()
    assert list(frame)[:3] == ["interval", "virtual_time", "test_accuracy"]
    assert len(frame) == 3 and "rho" not in frame and "coupling" in frame


def test_deliveries_have_clients():
    clock = {"timeline.framework": "afl", "algorithm": "fedasync"}
    found = tsfl_jax.simulate(replace(Config(), SMALL | clock)).to_xarray()
    assert found["rho"].dims == found["client"].dims == ("interval", "slot")
    assert set(np.unique(found["client"])) <= {0, 1}
    assert found["rho"].groupby("client").sum().sum() == pytest.approx(
        float(found["rho"].sum())
    )


def test_a_sweep_has_a_dimension_per_setting(sweep):
    found = sweep.to_xarray()
    assert found["rho"].dims == ("algorithm", "lr", "seed", "interval", "client")
    for name, values in SWEPT.items():
        assert found[name].values.tolist() == values
    for name, values in sweep.history.items():
        shape = (2, 2, 2, *values.shape[1:])
        np.testing.assert_array_equal(found[name], values.reshape(shape))
        assert found[name].dtype == values.dtype
    best = [row["best_test_accuracy"] for row in sweep.rows]
    np.testing.assert_array_equal(found["best_test_accuracy"].values.ravel(), best)
    assert found["seconds"].attrs["units"] == "s"


def test_means_over_seeds_and_paired_differences_by_hand(sweep):
    best = sweep.to_xarray()["best_test_accuracy"]
    by_hand = np.array([row["best_test_accuracy"] for row in sweep.rows])
    by_hand = by_hand.reshape(2, 2, 2)
    np.testing.assert_allclose(best.mean("seed"), by_hand.mean(axis=2))
    gain = best.sel(algorithm="dms") - best.sel(algorithm="fedavg")
    first, second = (by_hand[1] - by_hand[0]).T  # of two seeds
    both = over(gain)
    assert both.dims == ("statistic", "lr")
    np.testing.assert_array_equal(both["lr"], SWEPT["lr"])
    mean, half = both.sel(statistic="mean"), both.sel(statistic="half")
    np.testing.assert_allclose(mean, (first + second) / 2)
    np.testing.assert_allclose(half, 12.706205 * abs(first - second) / 2, rtol=1e-6)
    long = sweep.to_pandas()
    assert list(long)[:5] == ["run", "algorithm", "lr", "seed", "interval"]
    curves = sweep.to_xarray()["test_loss"].mean("seed")
    grouped = long.groupby(["algorithm", "lr", "interval"])["test_loss"].mean()
    for point in itertools.product(SWEPT["algorithm"], SWEPT["lr"], [1, 2, 3]):
        one = curves.sel(algorithm=point[0], lr=point[1], interval=point[2])
        assert grouped[point] == pytest.approx(float(one), rel=1e-5)


@pytest.mark.slow
def test_points_that_are_no_product_are_runs_of_their_own_length():
    points = [{"lr": 0.1, "num_intervals": 2}, {"lr": 0.2, "num_intervals": 3}]
    result = tsfl_jax.sweep(replace(Config(), SMALL), points)
    found = result.to_xarray()
    assert found["test_accuracy"].dims == ("run", "interval")
    assert found["lr"].dims == ("run",) and found["lr"].values.tolist() == [0.1, 0.2]
    assert np.isnan(found["virtual_time"].values).tolist() == [
        [False, False, True],
        [False] * 3,
    ]
    assert result.to_pandas()["run"].tolist() == [0, 0, 1, 1, 1]
    assert len(result.plot().axes[0].lines) == 2


def test_lists_and_mixed_values_are_coordinates():
    rows = [{"a": (1, 2), "b": "auto"}, {"a": (3,), "b": 0.5}]
    found = table.of_sweep(["a", "b"], rows, {"x": np.zeros((2, 4))})
    assert found["a"].values.tolist() == ["(1, 2)", "(3,)"]
    assert found["b"].values.tolist() == ["auto", 0.5]
    assert table.unstacked(found, ["a"])["x"].dims == ("a", "interval")


def test_the_same_point_twice_counts_once():
    """Copies of a run would make the confidence interval shorter."""
    points = [("a", 0), ("a", 1), ("a", 0), ("b", 0)]
    rows = [{"algorithm": name, "seed": seed} for name, seed in points]
    found = table.grouped(["algorithm", "seed"], rows)
    assert found == {"algorithm=a": [0, 1], "algorithm=b": [3]}
