"""What results give: the labelled table, pandas, text, and a table for a paper."""

import itertools

import numpy as np
import pandas as pd
import pytest

import tsfl_jax
from studies.verdicts import over
from tsfl_jax.config import Config, replace
from tsfl_jax.report import bands, page, table
from tsfl_jax.run import runner, summary, sweeps

SMALL = {
    "num_intervals": 3,
    "num_clients": 2,
    "batch_size": 4,
    "devices": 1,
    "schedule.data_size": 16,
    "model.hidden": 0,
}
SWEPT = {"algorithm": ["fedavg", "fednova"], "lr": [0.3, 0.1], "seed": [1, 0]}
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results") / "sweep"


@pytest.fixture(scope="module")
def sweep(folder):
    return tsfl_jax.sweep(replace(Config(), SMALL), SWEPT, workdir=folder)


def test_a_sweep_has_a_dimension_per_setting(sweep):
    dataset = sweep.to_xarray()
    assert dataset["rho"].dims == ("algorithm", "lr", "seed", "interval", "client")
    for name, values in SWEPT.items():
        assert dataset[name].values.tolist() == values
    for name, values in sweep.history.items():
        shape = (2, 2, 2, *values.shape[1:])
        np.testing.assert_array_equal(dataset[name], values.reshape(shape))
        assert dataset[name].dtype == values.dtype
    best = [row["best_test_accuracy"] for row in sweep.rows]
    np.testing.assert_array_equal(dataset["best_test_accuracy"].values.ravel(), best)
    assert dataset["train_seconds"].attrs["units"] == "s"


def test_means_over_seeds_and_paired_differences_by_hand(sweep):
    best = sweep.to_xarray()["best_test_accuracy"]
    by_hand = np.array([row["best_test_accuracy"] for row in sweep.rows])
    by_hand = by_hand.reshape(2, 2, 2)
    np.testing.assert_allclose(best.mean("seed"), by_hand.mean(axis=2))
    gain = best.sel(algorithm="fednova") - best.sel(algorithm="fedavg")
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


def test_a_sweep_is_a_table_for_a_paper_in_one_command(sweep, folder, capsys):
    base = "algorithm=fedavg, lr=0.3"
    page.main([str(folder), "--table", f"--base={base}"])
    assert "| algorithm=fednova, lr=0.1" in capsys.readouterr().out
    rows = pd.read_csv(folder / "table.csv").set_index("group")
    scores = 100 * sweep.to_xarray()["final_test_accuracy"].mean("seed")
    for rule, lr in itertools.product(SWEPT["algorithm"], SWEPT["lr"]):
        row = rows.loc[f"algorithm={rule}, lr={lr}"]
        mean = float(scores.sel(algorithm=rule, lr=lr))
        gap = mean - float(scores.sel(algorithm="fedavg", lr=0.3))
        assert row["mean"] == pytest.approx(mean)
        assert row.name == base or row["difference"] == pytest.approx(gap)


def test_a_run_and_deliveries_have_clients():
    clock = {"timeline.framework": "afl", "algorithm": "fedasync"}
    result = tsfl_jax.simulate(replace(Config(), SMALL | clock))
    dataset = result.to_xarray()
    assert dataset["rho"].dims == dataset["client"].dims == ("interval", "slot")
    assert set(np.unique(dataset["client"])) <= {0, 1}
    weights = dataset["rho"].groupby("client").sum().sum()
    assert weights == pytest.approx(float(dataset["rho"].sum()))
    for name, values in result.history.items():
        np.testing.assert_array_equal(dataset[name], values)
        assert dataset[name].dtype == values.dtype
    assert dataset["virtual_time"].attrs == {"units": "s"}
    assert dataset.attrs["algorithm"] == "fedasync" and dataset.attrs["seed"] == 0
    frame = result.to_pandas()
    assert list(frame)[:3] == ["interval", "virtual_time", "test_accuracy"]
    assert frame["interval"].tolist() == [*range(1, len(result.history["rho"]) + 1)]
    assert "rho" not in frame and "coupling" in frame


def series(value=0.5, intervals=3):
    loss = np.array([1.0, NAN, 0.5])[:intervals]
    constant = np.full(intervals, value)
    time = np.arange(1.0, intervals + 1)
    return {"virtual_time": time, "test_accuracy": constant, "test_loss": loss}


def test_points_that_are_no_product_are_runs_of_their_own_length():
    runs = [series(intervals=2), series()]
    rows = [{"lr": lr, "data": "x", "seed": 0} for lr in (0.1, 0.2)]
    result = sweeps.SweepResult(rows, {}, ["lr", "num_intervals"], runs)
    for row, intervals in zip(rows, (2, 3), strict=True):
        row["num_intervals"] = intervals
    dataset = result.to_xarray()
    assert dataset["test_accuracy"].dims == ("run", "interval")
    assert dataset["lr"].dims == ("run",)
    assert dataset["lr"].values.tolist() == [0.1, 0.2]
    lacking = np.isnan(dataset["virtual_time"].values).tolist()
    assert lacking == [[False, False, True], [False] * 3]
    assert result.to_pandas()["run"].tolist() == [0, 0, 1, 1, 1]
    assert len(result.plot().axes[0].lines) == 2


def test_lists_and_mixed_values_are_coordinates():
    rows = [{"a": (1, 2), "b": "auto"}, {"a": (3,), "b": 0.5}]
    dataset = table.of_sweep(["a", "b"], rows, {"x": np.zeros((2, 4))})
    assert dataset["a"].values.tolist() == ["(1, 2)", "(3,)"]
    assert dataset["b"].values.tolist() == ["auto", 0.5]
    assert table.unstacked(dataset, ["a"])["x"].dims == ("a", "interval")


def test_the_same_point_twice_counts_once():
    """Copies of a run would make the confidence interval shorter."""
    points = [("a", 0), ("a", 1), ("a", 0), ("b", 0)]
    rows = [{"algorithm": name, "seed": seed} for name, seed in points]
    groups = table.grouped(["algorithm", "seed"], rows)
    assert groups == {"algorithm=a": [0, 1], "algorithm=b": [3]}


def lane(rate, best, loss=1.0, **changes):
    """A row of a sweep over learning rates."""
    row = {"lr": rate, "best_test_accuracy": best, "final_test_accuracy": best}
    row |= {"final_test_loss": loss, "diverged_at": None, "train_seconds": 1.0}
    return row | {"data": "digits"} | changes


def test_an_infinite_regret_is_in_the_mean():
    regrets = enumerate((INF, 0.1, NAN))
    rows = [lane(0.1, 0.9, mean_regret=value, seed=seed) for seed, value in regrets]
    groups = bands.groups_table(["lr", "seed"], rows)
    assert groups["mean regret"][0] == "inf (1 of 2)"
    history = {"regret": np.array([INF, NAN, 0.1]), "gap": np.array([0.2, 0.4])}
    measured = {"test_accuracy": np.ones(2), "test_loss": np.ones(2)}
    scores = summary.scores_of(history | measured | {"diverged": np.zeros(2, bool)})
    assert scores["mean_regret"] == INF and scores["mean_gap"] == pytest.approx(0.3)


def test_results_show_themselves():
    history = series() | {"train_loss": np.ones(3)}
    facts = {"best_test_accuracy": 0.5, "diverged_at": 2}
    result = runner.Result({}, history, facts)
    assert "no model was finite in interval 2" in repr(result)
    np.testing.assert_allclose(result.plot().axes[0].lines[0].get_ydata(), 50)
    rows = [lane(f"<b>{i}", 0.5 + 0.001 * i) for i in range(60)]
    many = sweeps.SweepResult(rows, {}, ["lr"], [series()] * 60)
    text = many._repr_html_()
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert text.count("<tr") == 1 + 51 and "60 rows" in text
    assert repr(many).splitlines()[0] == "SweepResult: 60 runs over lr"
