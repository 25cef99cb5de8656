"""A run's files, losing every client, and the way in from Python."""

import json

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import tsfl_jax
from tests import problems
from tests.problems import small
from tsfl_jax.engine import scan
from tsfl_jax.report import files as report
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.run import runner


def test_files_of_a_run(tmp_path):
    folder = tmp_path / "run"
    result = tsfl_jax.simulate(small(), workdir=folder)
    names = {path.name for path in folder.iterdir()}
    arrays = {"checkpoints", "clients.npz", "model.npz"}
    texts = {".lock", "config.json", "metrics.jsonl", "summary.json"}
    assert names == arrays | texts | {"curves.png", "participation.png"}
    rows = report.read_metrics(folder / "metrics.jsonl")
    assert [row["interval"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["virtual_time"] for row in rows] == [2.5, 5, 7.5, 10, 12.5, 15]
    measured = [name for name in scan.History._fields if name in rows[0]]
    assert len(measured) == 12
    for t, row in enumerate(rows):
        assert set(row) == {"interval", "virtual_time", *measured}
        # ‖∇F‖² only where clients are measured.
        assert row["grad_square"] is None
        for name in set(measured) - {"grad_square"}:
            assert row[name] == pytest.approx(result.history[name][t].item())
            assert np.isfinite(row[name])
    with np.load(folder / "clients.npz") as clients:
        assert clients["tau"].shape == clients["rho"].shape == (6, 4)
        np.testing.assert_allclose(clients["rho"].sum(axis=1), 1, rtol=1e-5)
        assert (clients["rho"][~clients["selected"]] == 0).all()
        threshold = clients["tau"].mean(axis=1)
        worked = (clients["tau"] * clients["size"]).sum()
    np.testing.assert_allclose([row["threshold"] for row in rows], threshold)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_trained"] == worked
    assert summary["best_test_accuracy"] == max(row["test_accuracy"] for row in rows)
    assert summary["final_test_accuracy"] == rows[-1]["test_accuracy"]
    assert summary["samples_per_second"] == pytest.approx(
        worked / summary["train_seconds"]
    )
    assert set(summary["fingerprints"]) == {"data", "scale", "split", "schedule"}
    assert summary["seed"] == 0
    assert {"device", "versions", "compile_seconds"} <= set(summary)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["schedule"]["data_size"] == 48
    for name in ("curves.png", "participation.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_total_loss_stops_the_run_with_the_last_good_model(tmp_path):
    lost = small(algorithm="fedavg", lr=1e30)
    result = tsfl_jax.simulate(lost, workdir=tmp_path)
    assert result.summary["diverged_at"] == 1
    assert len(result.history["test_accuracy"]) == 1
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(result.params))
    rows = report.read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 1
    assert rows[0]["num_discarded"] == 4
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["diverged_at"] == 1
    # Asking again does not go on from there.
    again = tsfl_jax.simulate(lost, workdir=tmp_path)
    assert again.summary["num_intervals"] == 1


def test_a_network_rule_and_optimizer_of_the_users_own():
    """With dropout, and a counter that goes along."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            count = self.variable("counters", "calls", lambda: np.int32(3))
            x = nn.relu(nn.Dense(7)(x))
            x = nn.Dropout(0.1)(x, deterministic=deterministic)
            return nn.Dense(3)(x) + 0 * count.value

    result = tsfl_jax.simulate(
        small(None, num_intervals=8),
        model=Net(),
        dataset=problems.dataset(samples=400),
        optimizer=optax.adam(3e-2),
        aggregator=AGGREGATORS["fedavg"],
    )
    assert result.params["params"]["Dense_0"]["kernel"].shape == (5, 7)
    assert result.params["counters"]["calls"] == 3
    assert result.history["test_accuracy"][-1] > 0.8
    assert result.history["rho"].shape == (8, 4)
    assert np.isnan(result.history["coupling"]).all()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_clients():
    """What the compiler sets aside, for 20 and for 2,000 clients of 64 samples."""
    chosen = {
        "devices": 2,
        "num_intervals": 1,
        "batch_size": 32,
        "data__name": "synthetic",
        "data__shape": (28, 28, 1),
        "data__train_size": 4096,
        "partition__kind": "iid",
        "partition__replacement": True,
        "schedule__kind": "case1",
        "schedule__data_size": 64,
    }

    def memory(clients):
        exp = runner.build(small(20, num_clients=clients, **chosen))
        memory = exp.program.compile(exp.arrays).memory()
        return sum(memory.values()), exp.arrays.problem.rows.nbytes

    (few, table), (many, larger_table) = memory(20), memory(2000)
    # Per client beside its row of the table: τ, size, id, ρ, its place, its result.
    assert many - few < 2 * (larger_table - table) + 1980 * 200
    assert many - few < 2**21  # 2 MiB; one model of 16,000 parameters each: 120 MiB


def test_runs_of_the_same_parts_are_compiled_once():
    several = ({}, {"lr": 0.5, "num_intervals": 7}, {"algorithm": "fedavg"})
    one, same, other = (runner.build(small(**c)).program.run for c in several)
    assert one is same is not other
    # A custom function may read what has changed meanwhile.
    rule = {"aggregator": tsfl_jax.rule(lambda info: info.tau)}
    one, other = (runner.build(small(), **rule).program.run for _ in range(2))
    assert one is not other


def test_one_trace_and_no_transfer_in_a_run():
    exp = runner.build(small(algorithm="fedavg"))
    start = exp.arrays.start
    arguments = [exp.program.arguments(exp.arrays, start, t) for t in (0, 2, 4)]
    # Within a lambda: chex takes what shard_map returns for a jitted function.
    once = chex.assert_max_traces(lambda *given: exp.program.run(*given), n=1)
    run = jax.jit(once)
    with jax.transfer_guard("disallow"):
        for argument in arguments:
            jax.block_until_ready(run(*argument))


def test_a_call_takes_over_the_memory_of_its_state():
    exp = runner.build(small(algorithm="scaffold"))
    compiled = exp.program.compile(exp.arrays)
    state = sum(a.nbytes for a in jax.tree.leaves(exp.arrays.start))
    params = sum(a.nbytes for a in jax.tree.leaves(exp.arrays.start.params))
    assert state >= 5 * params  # one per client as well
    history = compiled.memory()["results"]
    assert history < compiled.call.memory_analysis().output_size_in_bytes - state + 512
    first = next(compiled.chunks(exp.arrays))
    # The start stays on the host, so that another run can begin from it.
    again = next(compiled.chunks(exp.arrays))
    for a, b in zip(*map(jax.tree.leaves, (first.state, again.state)), strict=True):
        np.testing.assert_array_equal(a, b)
