"""A run's files, resuming, losing every client, and the way in from Python."""

import json

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import tsfl_jax
from tests import problems
from tsfl_jax import config
from tsfl_jax.engine import scan
from tsfl_jax.experiment import checkpoint, runner
from tsfl_jax.models import networks
from tsfl_jax.report import files as report
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.types import UserError

OWN = networks.ModelConfig.hidden  # no setting of a network beside model=


def own(given: dict) -> int:
    return OWN if "model" in given else 8


def small(hidden=8, **changes) -> config.Config:
    """Four clients on digits, six intervals in calls of two."""
    settings = config.Config(
        num_intervals=6, num_clients=4, lr=0.02, batch_size=8, report_every=2, devices=1
    )
    settings.schedule.data_size = 48
    settings.schedule.interval_seconds = 2.5
    settings.model.hidden = hidden
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


def files(folder):
    """What must not depend on where a run was interrupted."""
    with np.load(folder / "model.npz") as model, np.load(folder / "clients.npz") as c:
        arrays = {**model, **c}
    return (folder / "metrics.jsonl").read_bytes(), arrays


def same(first, second):
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        np.testing.assert_array_equal(value, second[1][name], err_msg=name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, tsfl_jax.simulate(small(), workdir=folder)


def test_files_of_a_run(finished):
    folder, result = finished
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".lock",
        "config.json",
        "metrics.jsonl",
        "clients.npz",
        "model.npz",
        "summary.json",
        "curves.png",
        "participation.png",
        "checkpoints",
    }
    rows = report.read_metrics(folder / "metrics.jsonl")
    assert [row["interval"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["virtual_time"] for row in rows] == [2.5, 5, 7.5, 10, 12.5, 15]
    measured = [name for name in scan.History._fields if name in rows[0]]
    assert measured == [
        "test_accuracy",
        "test_loss",
        "train_loss",
        "threshold",
        "num_selected",
        "weight_entropy",
        "smoothness",
        "grad_sq_norm",
        "grad_variance",
        "grad_square",
        "coupling",
        "num_discarded",
    ]
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


def test_it_learns():
    # Few skewed clients learn or not by luck of the split: equal ones must learn.
    settings = small(algorithm="fedavg")
    settings.partition.kind = "iid"
    result = tsfl_jax.simulate(settings)
    loss = result.history["test_loss"]
    assert loss[-1] < 0.8 * loss[0]
    assert result.history["test_accuracy"][-1] > 0.3  # chance is 0.1


def test_resumed_run_ends_with_the_same_bits(finished, tmp_path, monkeypatch):
    calls = []

    def killed(path, rows):
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt  # after the checkpoint, before the metrics
        real(path, rows)

    real = report.write_metrics
    monkeypatch.setattr(report, "write_metrics", killed)
    monkeypatch.setattr(checkpoint, "now", lambda: 0.0)  # all saves are due
    with pytest.raises(KeyboardInterrupt):
        runner.run(runner.build(small()), tmp_path)
    monkeypatch.setattr(report, "write_metrics", real)
    assert len(report.read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert (tmp_path / "checkpoints/4.npz").exists()
    tsfl_jax.simulate(small(), workdir=tmp_path)
    same(files(tmp_path), files(finished[0]))


def test_finished_run_is_not_run_again(finished, tmp_path):
    tsfl_jax.simulate(small(), workdir=tmp_path)
    before = files(tmp_path)
    result = tsfl_jax.simulate(small(), workdir=tmp_path)
    assert result.summary["compile_seconds"] > 0  # of the process that ran it
    assert result.summary["train_seconds"] > 0
    same(files(tmp_path), before)


def test_workdir_of_another_experiment(finished):
    with pytest.raises(UserError, match="lr") as error:
        tsfl_jax.simulate(small(lr=0.5), workdir=finished[0])
    assert "\n" not in str(error.value)


def test_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file"):
        tsfl_jax.simulate(small(), workdir=tmp_path / "file")


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


def test_own_model_data_optimizer_and_rule():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(7)(x))
            return nn.Dense(3)(x)

    data = problems.dataset(samples=400)
    settings = small(OWN, num_intervals=8)
    result = tsfl_jax.simulate(
        settings,
        model=Net(),
        dataset=data,
        optimizer=optax.adam(3e-2),
        aggregator=AGGREGATORS["fedavg"],
    )
    assert result.params["params"]["Dense_0"]["kernel"].shape == (5, 7)
    assert result.history["test_accuracy"][-1] > 0.8
    assert result.history["rho"].shape == (8, 4)
    assert np.isnan(result.history["coupling"]).all()


def test_damaged_data_in_memory_is_answered_in_one_line():
    data = problems.dataset(samples=400)
    damaged = [
        (data._replace(y_train=data.y_train[:-1]), r"y_train has shape \(399,\)"),
        (
            data._replace(y_train=data.y_train + 5),
            "y_train holds [567] at row .*; expected 0..2",
        ),
        (data._replace(y_test=data.y_test - 1), "y_test holds -1"),
        (data._replace(x_train=data.x_train * np.nan), "x_train holds nan"),
        (data._replace(x_test=data.x_test[:, :3]), "x_test has samples float32"),
        (
            data._replace(x_test=data.x_test[:0], y_test=data.y_test[:0]),
            r"x_test has shape \(0,",
        ),
        (data._replace(std=np.zeros(5)), "std="),
        (tuple(data), "expected a tsfl_jax.Dataset"),
    ]
    for wrong, words in damaged:
        with pytest.raises(UserError, match=words) as error:
            tsfl_jax.simulate(small(), dataset=wrong)
        assert "\n" not in str(error.value)


def test_plain_arrays_make_a_data_set():
    data = problems.dataset(samples=300)
    made = tsfl_jax.make_dataset(*data[1:5], name="mine")
    assert (made.name, made.num_classes) == ("mine", 3)
    settings = small(num_intervals=2, algorithm="fedavg")
    result = tsfl_jax.simulate(settings, dataset=made)
    assert result.summary["data"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 42}, "flax.linen.Module"),
        ({"model": nn.Dense}, "flax.linen.Module"),
        ({"model": nn.Dense(2)}, "logits"),
        ({"optimizer": 3}, "optax"),
        ({"aggregator": "fedavg"}, "Aggregator"),
        ({"config": None}, "Config"),
        ({"config": {"lr": 1}}, "Config"),
    ],
)
def test_wrong_objects_from_python(arguments, words):
    data = problems.dataset(samples=300)
    with pytest.raises(UserError, match=words) as error:
        tsfl_jax.simulate(
            **{"config": small(own(arguments)), "dataset": data} | arguments
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": optax.adam(1e-3)},
        {"aggregator": AGGREGATORS["fedasync"]},
        {"model": networks.MLP(10, 9)},
    ],
)
def test_workdir_of_another_optimizer_rule_or_model(finished, other):
    with pytest.raises(UserError, match="another experiment"):
        tsfl_jax.simulate(small(own(other)), workdir=finished[0], **other)


def test_without_checkpoints_another_experiment_is_not_overwritten(tmp_path):
    settings = {"algorithm": "fedavg", "checkpoint": False}
    tsfl_jax.simulate(small(**settings), workdir=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="holds a run without checkpoints"):
        tsfl_jax.simulate(small(**settings, seed=1), workdir=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_stopping_saves_the_chunk(finished, tmp_path):
    exp = runner.build(small())
    with pytest.raises(KeyboardInterrupt):
        runner.run(exp, tmp_path, stop=lambda: True)
    assert len(report.read_metrics(tmp_path / "metrics.jsonl")) == 2
    runner.run(exp, tmp_path)
    same(files(tmp_path), files(finished[0]))


def test_counters_and_dropout_of_own_modules():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            count = self.variable("counters", "calls", lambda: np.int32(3))
            x = nn.Dropout(0.5)(nn.Dense(8)(x), deterministic=deterministic)
            return nn.Dense(3)(x) + 0 * count.value

    data = problems.dataset(samples=300)
    result = tsfl_jax.simulate(
        small(OWN, algorithm="fedasync"), model=Net(), dataset=data
    )
    assert result.params["counters"]["calls"] == 3
    assert result.summary["num_discarded"] == 0


def test_evaluation_now_and_then():
    result = tsfl_jax.simulate(small(eval_every=4, algorithm="fedavg"))
    measured = ~np.isnan(result.history["test_accuracy"])
    assert measured.tolist() == [False, False, False, True, False, True]


@pytest.mark.slow
def test_report_every_does_not_change_a_bit(finished):
    result = tsfl_jax.simulate(small(report_every=3))
    jax.tree.map(np.testing.assert_array_equal, result.params, finished[1].params)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_clients():
    """What the compiler sets aside, for 20 and for 2,000 clients of 64 samples."""
    chosen = {"devices": 2, "num_intervals": 1, "batch_size": 32}

    def memory(clients):
        settings = small(num_clients=clients, **chosen)
        settings.data.name, settings.data.shape = "synthetic", (28, 28, 1)
        settings.data.train_size, settings.partition.replacement = 4096, True
        settings.partition.kind = "iid"
        settings.model.hidden = 20
        settings.schedule.kind, settings.schedule.data_size = "case1", 64
        exp = runner.build(settings)
        memory = exp.program.compile(exp.arrays).memory()
        return sum(memory.values()), exp.arrays.problem.rows.nbytes

    (few, table), (many, larger_table) = memory(20), memory(2000)
    # Per client beside its row of the table: τ, size, id, ρ, its place, its result.
    assert many - few < 2 * (larger_table - table) + 1980 * 200
    assert many - few < 2**21  # 2 MiB; one model of 16,000 parameters each: 120 MiB


def test_one_trace_and_no_transfer_in_a_run():
    exp = runner.build(small())
    start = exp.arrays.start
    arguments = [exp.program.arguments(exp.arrays, start, t) for t in (0, 2, 4)]
    # Within a lambda: chex takes what shard_map returns for a jitted function.
    once = chex.assert_max_traces(lambda *given: exp.program.run(*given), n=1)
    run = jax.jit(once)
    with jax.transfer_guard("disallow"):
        for argument in arguments:
            jax.block_until_ready(run(*argument))


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_call_takes_over_the_memory_of_its_state(algorithm):
    settings = small(algorithm=algorithm)
    exp = runner.build(settings)
    compiled = exp.program.compile(exp.arrays)
    state = sum(a.nbytes for a in jax.tree.leaves(exp.arrays.start))
    models = 1 if algorithm == "fedavg" else 5  # SCAFFOLD: one per client as well
    params = sum(a.nbytes for a in jax.tree.leaves(exp.arrays.start.params))
    assert state >= models * params
    history = compiled.memory()["results"]
    assert history < compiled.call.memory_analysis().output_size_in_bytes - state + 512
    first = next(compiled.chunks(exp.arrays))
    # The start stays on the host, so that another run can begin from it.
    again = next(compiled.chunks(exp.arrays))
    for a, b in zip(*map(jax.tree.leaves, (first.state, again.state)), strict=True):
        np.testing.assert_array_equal(a, b)
