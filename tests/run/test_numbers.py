"""Numbers of single runs by hand or from other libraries; seeds of single sources."""

import chex
import flax.linen as nn
import jax
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.problems import small
from tsfl_jax.config import replace
from tsfl_jax.prepare import network
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.run import identity, program


def test_outputs_give_scikit_learn_what_the_run_measured():
    """Tests of more than one batch, the last one padded; and bytes by hand."""
    from sklearn import metrics  # slow to import

    rng = np.random.default_rng(0)
    x = rng.normal(size=(700, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0.5)
    data = tsfl_jax.make_dataset(x[:400], y[:400], x[400:], y[400:])
    schedule = {"schedule__kind": "explicit", "schedule__tau": (1, 0)}
    config = small(None, algorithm="fedavg", lr=0.1, partition__kind="iid", **schedule)
    model = nn.Dense(3)
    result = tsfl_jax.simulate(config, model=model, dataset=data)
    outputs, labels = tsfl_jax.predict(config, result.params, model=model, dataset=data)
    assert outputs.shape == (300, 3) and outputs.dtype == np.float32
    np.testing.assert_array_equal(labels, data.y_test)
    layer = result.params["params"]
    x = (data.x_test - data.mean) / data.std
    np.testing.assert_allclose(
        outputs, x @ layer["kernel"] + layer["bias"], rtol=1e-5, atol=1e-6
    )
    accuracy = metrics.accuracy_score(labels, outputs.argmax(1))
    assert accuracy == pytest.approx(result.history["test_accuracy"][-1])
    share = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    loss = metrics.log_loss(labels, share)
    assert loss == pytest.approx(result.history["test_loss"][-1], rel=1e-5)
    # 21 parameters, float32, down and up, of two of four clients in six intervals.
    assert result.summary["bytes_moved"] == 21 * 4 * 2 * 2 * 6


def test_a_short_batch_is_the_whole_of_a_small_client():
    """Two samples in a batch of up to 10 are as in a batch of two."""

    def run(batch_size):
        config = small(
            None,
            algorithm="fedavg",
            num_intervals=2,
            num_clients=1,
            batch_size=batch_size,
            schedule__data_size=None,
            schedule__kind="explicit",
            schedule__tau=(1,),
        )
        data = problems.dataset(samples=300)
        return tsfl_jax.simulate(config, dataset=data, partition=[[3, 7]])

    exact = run(2)
    assert not any("short mini-batch" in note for note in exact.summary["notes"])
    result = run(10)
    chex.assert_trees_all_close(result.params, exact.params, rtol=1e-6, atol=1e-7)
    assert result.history["samples"].tolist() == [2, 2]
    assert any("1 of 1 clients" in note for note in result.summary["notes"])


def test_a_free_rider_delivers_and_an_absent_client_does_not():
    found = network.delivers(np.array([[2, 0, 0]]), np.array([[0.5, 0.5, 0.0]]))
    assert found.tolist() == [[True, True, False]]


@pytest.mark.parametrize("source", ["model", "split", "fleet", "batches"])
def test_a_source_has_its_own_seed(source):
    def drawn(**changes):
        """What each source has drawn, as text."""
        prepared = prepare(replace(config, changes))
        keys = map(jax.random.key_data, program.keys_of(prepared))
        prints = prepared.fingerprints
        drawn = (*map(str, keys), prints["split"], prints["schedule"])
        return dict(zip(("model", "batches", "split", "fleet"), drawn, strict=True))

    # Sizes do not follow the fleet's seed here, so that the split does not either.
    schedule = {"kind": "distribution", "tau_groups": "uniform(1,9)"}
    config = small(seed=3, **{f"schedule__{n}": v for n, v in schedule.items()})
    before, after = drawn(), drawn(**{f"seeds.{source}": 4})
    assert drawn(**{f"seeds.{source}": 3}) == before
    assert [name for name in before if after[name] != before[name]] == [source]


def test_times_of_a_changed_file_are_another_experiment(tmp_path):
    """SFL with a slower slowest client: the same deliveries, later."""
    path, runs = tmp_path / "speeds.csv", []
    for slowest in (1.7, 1.9):
        path.write_text(f"client,seconds\n0,{slowest}\n" + "1,0.5\n2,0.5\n3,0.5\n")
        timed = {"timeline__framework": "sfl", "timeline__speeds": str(path)}
        config = small(num_intervals=20, algorithm="fedavg", **timed)
        runs.append(prepare(replace(config, {"schedule.interval_seconds": 1.0})))
    first, second = (run.fingerprints for run in runs)
    assert first["schedule"] == second["schedule"]
    assert first["times"] != second["times"]
    assert identity.identity_of(runs[0]) != identity.identity_of(runs[1])
    assert "times" not in prepare(small()).fingerprints
