"""Rules of this package in a Flower server: arithmetic, and Flower's runtime."""

import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
import types

import jax
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax import flower, rng
from tsfl_jax.prepare import prepare
from tsfl_jax.types import Constants, UserError

APP = pathlib.Path(__file__).parents[1] / "docs" / "examples" / "flower"
HPARAMS = tsfl_jax.HParams(lr=0.5, constants=Constants(1.51, 0.37, 0.034))
PACES, SECONDS = (0.75, 1.5, 3.0), 4.0


def record(model):
    """A model as Flower sends it."""
    app = pytest.importorskip("flwr.app")
    return app.ArrayRecord({n: app.Array(np.asarray(a)) for n, a in model.items()})


def reply(model, tau=1, size=1, **metrics):
    """A client's reply."""
    app = pytest.importorskip("flwr.app")
    metrics = {"tau": tau, "num-examples": size, **metrics}
    metrics = {name: value for name, value in metrics.items() if value is not None}
    metrics = app.MetricRecord(metrics)
    return app.RecordDict({"arrays": record(model), "metrics": metrics})


def made(rule, **settings):
    """A strategy whose messages need no runtime of Flower."""
    pytest.importorskip("flwr")
    least = dict.fromkeys(("min_train_nodes", "min_available_nodes"), 1)
    server = flower.strategy(rule, seconds=1.0, **least, **settings)
    server._construct_messages = lambda content, nodes, kind: [
        types.SimpleNamespace(metadata=types.SimpleNamespace(dst_node_id=node))
        for node in nodes
    ]
    return server


def messages(replies):
    """Replies by node as messages."""
    return [
        types.SimpleNamespace(
            content=content,
            metadata=types.SimpleNamespace(src_node_id=node),
            has_error=lambda: False,
        )
        for node, content in replies.items()
    ]


def one_round(server, number, model, replies, nodes=None):
    """The new model and the mean metrics; Flower asks the nodes in any order."""
    app = pytest.importorskip("flwr.app")
    grid = types.SimpleNamespace(get_node_ids=lambda: list(nodes or replies))
    server.configure_train(number, record(model), app.ConfigRecord({}), grid)
    arrays, metrics = server.aggregate_train(number, messages(replies))
    return {name: array.numpy() for name, array in arrays.items()}, metrics


@pytest.mark.parametrize("name", ["dms", "fedavg", "median"])
def test_the_model_is_that_of_the_rule(name):
    """With the clients that replied; for weights Σ ρ_i w_i, computed apart."""
    draws, server = np.random.default_rng(0), made(name, hparams=HPARAMS, seed=3)
    old, *models = (
        {"a": draws.normal(size=(2, 3)).astype(np.float32), "b": np.float32([i])}
        for i in range(4)
    )
    replies = {5: (3, 10), 6: (1, 30), 8: (2, 20)}
    replies = {
        node: reply(model, *counts)
        for model, (node, counts) in zip(models, replies.items(), strict=True)
    }
    random.seed(0)
    new, _ = one_round(server, 1, old, replies, nodes=[5, 6, 7, 8])
    (done,) = server.rounds
    order = np.argsort(done.nodes)
    assert done.tau[order].tolist() == [3, 1, 0, 2]
    assert done.size[order].tolist() == [10, 30, 1, 20]
    if name == "dms":
        key = jax.random.fold_in(rng.fold(rng.key(3), "rule"), 1)
        constants = HPARAMS.constants._asdict()
        rho = tsfl_jax.dms_weights(key, done.tau, lr=0.5, **constants)
        np.testing.assert_allclose(done.rho, rho)
    for leaf in old:
        own = np.stack([m[leaf] for m in models])
        expected = np.median(own, axis=0)
        if name != "median":
            rho = done.rho[order][[0, 1, 3]]
            expected = np.tensordot(rho, own, 1)
        np.testing.assert_allclose(new[leaf], expected, atol=1e-6)
    if name == "fedavg":
        np.testing.assert_allclose(done.rho[order], np.array([1, 3, 0, 2]) / 6)


ONE, NAN = {"w": np.float32([1, 2])}, float("nan")
MISFITS = {  # made in the test: Flower may not be installed
    "shape": functools.partial(reply, {"w": np.float32([1])}),
    "type": functools.partial(reply, {"w": np.array([1j, 2])}),
    "more arrays": functools.partial(reply, {**ONE, "v": np.float32([1])}),
    "not finite": functools.partial(reply, {"w": np.float32([1, NAN])}),
    **{f"tau {v}": functools.partial(reply, ONE, v) for v in (None, -1, [1])},
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_reply_that_does_not_fit_is_left_out(case, caplog):
    """The mean of the two that fit; ρ, the count and one line say so."""
    model, server = {"w": np.zeros(2, np.float32)}, made("fedavg")
    good = {5: reply({"w": np.float32([2, 4])}, 1, 3), 6: reply(ONE, 2, 1)}
    new, metrics = one_round(server, 1, model, {4: MISFITS[case](), **good})
    np.testing.assert_allclose(new["w"], [1.75, 3.5], rtol=1e-6)
    (done,) = server.rounds
    expected = {4: (0, 0), 5: (1, 0.75), 6: (2, 0.25)}
    for node, tau, rho in zip(done.nodes, done.tau, done.rho, strict=True):
        assert (tau, rho) == expected[node]
    assert done.rejected == 1 and metrics["tau"] == 1.25
    lines = [r.getMessage() for r in caplog.records if r.name == "tsfl_jax"]
    assert len(lines) == 1 and lines[0].startswith("reply of node 4 left out: ")
    assert "\n" not in lines[0]


def test_a_round_without_a_reply_that_fits_leaves_the_model():
    """Two clients whose arrays would broadcast."""
    model, server = {"w": np.float32([1, 2])}, made("safa")
    bad = {node: reply({"w": np.float32([9])}) for node in (4, 5)}
    new, metrics = one_round(server, 1, model, bad)
    np.testing.assert_array_equal(new["w"], model["w"])
    assert metrics is None and server.rounds[0].rejected == 2


def test_metrics_of_one_client_do_not_end_the_server():
    """Lists of two lengths have no mean; an evaluation of no samples is left out."""
    model, server = {"w": np.zeros(1, np.float32)}, made("fedavg")
    ones = {"w": np.ones(1, np.float32)}
    replies = {4: reply(ones, by=[1.0, 2.0]), 5: reply(ones, by=[1.0])}
    new, metrics = one_round(server, 1, model, replies)
    assert new["w"] == 1 and metrics is None
    evaluations = {4: reply(ones, None, 0, loss=1.0), 5: reply(ones, None, 2, loss=3.0)}
    found = server.aggregate_evaluate(1, messages(evaluations))
    assert found["loss"] == 3.0


def test_only_parameters_are_changed_by_the_server_s_optimizer():
    """All report the variance 0.005; the counter is a mean and a flag stays."""
    old = {
        "w": np.ones(2),  # float64
        "bn.running_var": np.ones(2, np.float32),
        "bn.custom": np.ones(1, np.float32),
        "bn.num_batches_tracked": np.int64([0]),
        "flag": np.array([True]),
    }
    new = {
        "w": np.zeros(2),
        "bn.running_var": np.full(2, 0.005, np.float32),
        "bn.custom": np.zeros(1, np.float32),
        "bn.num_batches_tracked": np.int64([7]),
        "flag": np.array([False]),
    }
    for more in ({}, {"buffers": "bn."}):
        server = made("fedadam", **more)
        model, _ = one_round(server, 1, old, {4: reply(new), 5: reply(new)})
        np.testing.assert_allclose(model["w"], 0.99, rtol=1e-3)  # Adam's step η_g
        np.testing.assert_allclose(model["bn.custom"], 0 if more else 0.99, atol=1e-4)
        if not more:
            np.testing.assert_allclose(model["bn.running_var"], 0.005, rtol=1e-5)
        assert model["bn.num_batches_tracked"] == 7 and model["flag"].all()
        assert all(model[name].dtype == w.dtype for name, w in old.items())


def test_safa_goes_by_nodes_of_which_one_joins_later():
    """Three nodes in any order, p = 1/6, 2/6, 3/6; 9 joins in round 3."""
    random.seed(0)
    server, cache, size = made("safa"), {}, {5: 1, 7: 2, 8: 3}
    model, draws = {"w": np.zeros(2, np.float32)}, np.random.default_rng(0)
    for number in range(1, 6):
        if number == 3:
            size = {5: 4, 7: 2, 8: 3, 9: 6}  # 5 reports other samples, too
        at = {node: draws.normal(size=2).astype(np.float32) for node in size}
        if number == 4:
            del at[7]  # does not reply: its model of round 3 counts
        replies = {node: reply({"w": w}, 1, size[node]) for node, w in at.items()}
        model, _ = one_round(server, number, model, replies, nodes=size)
        cache |= at
        mean = sum(size[n] * w for n, w in cache.items()) / sum(size.values())
        np.testing.assert_allclose(model["w"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule, words",
    [("scaffold", "more than the models"), ("dms", "depend on L"), ("dmz", "dms")],
)
def test_rules_that_need_more_are_one_line(rule, words):
    pytest.importorskip("flwr")
    with pytest.raises(UserError, match=words):
        flower.strategy(rule, seconds=1.0)


def simulated_tau():
    """τ of each client in an interval, as a simulation of the fleet has it."""
    config = tsfl_jax.Config(num_clients=3, num_intervals=3, batch_size=479, lr=0.5)
    config.data.name, config.model.hidden = "digits", 0
    config.partition.kind, config.schedule.data_size = "iid", 479
    config.timeline.framework, config.schedule.interval_seconds = "tsfl", SECONDS
    config.timeline.speed = "; ".join(f"constant({p})" for p in PACES)
    return prepare.prepare(config).workload.schedule.tau


@pytest.fixture
def fleet(tmp_path):
    """A server and three clients of Flower as processes of their own."""
    programs = [shutil.which(f"flower-{name}") for name in ("superlink", "supernode")]
    if None in programs or not shutil.which("flwr"):
        pytest.skip("flwr is not installed")
    home = tmp_path / "home"
    home.mkdir()
    address = "127.0.0.1:8123"
    (home / "config.toml").write_text(
        f'[superlink.local]\naddress = "{address}"\ninsecure = true\n'
    )
    env = os.environ | {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    started = []

    def start(*command):
        log = open(tmp_path / f"{len(started)}.log", "w")  # noqa: SIM115
        out = {"stdout": log, "stderr": subprocess.STDOUT}
        started.append(
            subprocess.Popen(command, env=env, start_new_session=True, **out)
        )
        log.close()
        return started[-1]

    link, node = programs
    start(
        link,
        "--insecure",
        "--port",
        "8123",
        "--disable-runtime-dependency-installation",
    )
    time.sleep(8)
    nodes = [
        start(
            node,
            *("--insecure", "--superlink", address, "--port", str(8130 + i)),
            *("--node-config", f"partition-id={i} num-partitions=3 pace={pace}"),
        )
        for i, pace in enumerate(PACES)
    ]
    time.sleep(8)
    yield env, nodes
    for process in started:
        kill(process)


def kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def logged(app, fleet, tmp_path, rounds, kill_after_first=None):
    """What the server logged of its rounds, ρ by ids checked, and what it printed."""
    env, nodes = fleet
    log = tmp_path / "rounds.json"
    settings = f'log="{log}" rounds={rounds} slack=60.0'  # busy machines are slow
    command = ["flwr", "run", str(app), "local", "--stream", "-c", settings]
    pipe = {"text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, **pipe) as run:
        for line in run.stdout:
            if "aggregate_train" in line:  # the first round has ended
                if kill_after_first is not None:
                    kill(nodes[kill_after_first])
                break
        rest = run.stdout.read()
    assert run.returncode == 0, rest
    done, ids = json.loads(log.read_text()), []
    assert len(done) == rounds
    for number, (asked, tau, _, rho, _) in enumerate(done, 1):
        ids += [node for node in asked if node not in ids]
        key = jax.random.fold_in(rng.fold(rng.key(0), "rule"), number)
        given = {"client": [ids.index(n) for n in asked], "key": key}
        dms = tsfl_jax.AGGREGATORS["dms"]
        found = tsfl_jax.weights(dms, tau=np.array(tau), hparams=HPARAMS, **given)
        np.testing.assert_allclose(rho, found, atol=1e-6)
    return done, rest


@pytest.mark.slow
def test_flowers_own_runtime_delivers_what_the_simulation_says(fleet, tmp_path):
    """Three clients that sleep, of which the slowest dies in the second round."""
    rounds, rest = logged(APP, fleet, tmp_path, 3, kill_after_first=2)
    expected = simulated_tau()
    assert sorted(rounds[0][1]) == sorted(expected[0])
    for number, (_, tau, size, _, rejected) in enumerate(rounds):
        if number:  # the dead one delivers nothing, or is no longer asked
            assert sorted(t for t in tau if t) == sorted(expected[number][:2])
        assert {s for s, t in zip(size, tau, strict=True) if t} == {599}
        assert rejected == 0
    assert "accuracy 0.9" in rest or "accuracy 0.8" in rest
