"""Rules of this package in a Flower server: arithmetic, and Flower's runtime."""

import json
import os
import pathlib
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
from tsfl_jax.experiment import prepare
from tsfl_jax.types import Constants, UserError

APP = pathlib.Path(__file__).parents[1] / "docs" / "examples" / "flower"
HPARAMS = tsfl_jax.HParams(lr=0.5, constants=Constants(1.51, 0.37, 0.034))
PACES, SECONDS = (0.75, 1.5, 3.0), 4.0
TAU, SIZE = [3, 0, 1, 2], [10, 1, 30, 20]


def dms_weights(key, tau):
    constants = HPARAMS.constants._asdict()
    return tsfl_jax.dms_weights(key, np.array(tau), lr=0.5, **constants)


def replies(models):
    """What clients send, by node; node 7 has not replied."""

    def arrays(model):
        return {n: types.SimpleNamespace(numpy=lambda a=a: a) for n, a in model.items()}

    metrics = [
        {"tau": t, "num-examples": s} for t, s in zip(TAU, SIZE, strict=True) if t
    ]
    return {
        node: {"arrays": arrays(model), "metrics": own}
        for node, model, own in zip((5, 6, 8), models, metrics, strict=True)
    }


@pytest.mark.parametrize("name", ["dms", "fedavg", "fednova", "median", "fedadam"])
def test_the_model_is_that_of_the_rule(name):
    """With the clients that replied; for weights Σ ρ_i w_i, computed apart."""
    draws = np.random.default_rng(0)
    old, *models = (
        {"a": draws.normal(size=(2, 3)).astype(np.float32), "b": np.float32([i])}
        for i in range(4)
    )
    rule, nodes, key = tsfl_jax.AGGREGATORS[name], [5, 7, 6, 8], rng.key(3)
    state = tsfl_jax.init_rule(rule, old, 4)
    given = {"hparams": HPARAMS, "key": key}
    new, _, done = flower._aggregated(rule, nodes, replies(models), old, state, given)
    assert done.tau.tolist() == TAU and done.size.tolist() == SIZE
    if name == "dms":
        rho = dms_weights(key, TAU)
        np.testing.assert_allclose(done.rho, rho)
    if name == "fedavg":
        np.testing.assert_allclose(done.rho, np.array([1, 0, 3, 2]) / 6, rtol=1e-6)
    for leaf in old:
        own = np.stack([m[leaf] for m in models])
        if name == "median":
            np.testing.assert_allclose(new[leaf], np.median(own, axis=0), atol=1e-6)
        elif name in ("dms", "fedavg"):
            expected = np.tensordot(done.rho[[0, 2, 3]], own, 1)
            np.testing.assert_allclose(new[leaf], expected, atol=1e-6)
        assert new[leaf].dtype == old[leaf].dtype and np.isfinite(new[leaf]).all()


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


@pytest.mark.slow
def test_flowers_own_runtime_delivers_what_the_simulation_says(fleet, tmp_path):
    """Three clients that sleep, of which the slowest dies in the second round."""
    env, nodes = fleet
    log = tmp_path / "rounds.json"
    command = ["flwr", "run", str(APP), "local", "--stream", "-c", f'log="{log}"']
    pipe = {"text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, **pipe) as run:
        for line in run.stdout:
            if "aggregate_train" in line:  # the first round has ended
                kill(nodes[2])
                break
        rest = run.stdout.read()
    assert run.returncode == 0, rest
    rounds = json.loads(log.read_text())
    expected = simulated_tau()
    assert len(rounds) == 3
    assert sorted(rounds[0][0]) == sorted(expected[0])
    for number, (tau, size, rho) in enumerate(rounds):
        if number:  # the dead one delivers nothing, or is no longer asked
            assert sorted(t for t in tau if t) == sorted(expected[number][:2])
        key = jax.random.fold_in(rng.fold(rng.key(0), "rule"), number + 1)
        found = dms_weights(key, tau)
        np.testing.assert_allclose(rho, found, atol=1e-6)
        assert {s for s, t in zip(size, tau, strict=True) if t} == {599}
    assert "accuracy 0.9" in rest or "accuracy 0.8" in rest
