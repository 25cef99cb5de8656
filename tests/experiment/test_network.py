"""Networks of several experiments: traced once where they are the same."""

import numpy as np

import tsfl_jax
from tsfl_jax import config
from tsfl_jax.experiment import custom_hooks, network, prepare


def digits(**changes):
    chosen = {"data.name": "digits", "schedule.data_size": 50, "num_clients": 4}
    return config.replace(config.Config(), chosen | changes)


def test_lanes_with_an_own_metric_share_one_network(monkeypatch):
    traced = []
    real = network._with_measures
    monkeypatch.setattr(
        network, "_with_measures", lambda *parts: traced.append(parts) or real(*parts)
    )
    metrics = {"highest": lambda outputs, labels: outputs.max(-1)}
    custom = custom_hooks.Custom(metrics=metrics)
    several = prepare.prepare_all([digits(seed=s) for s in range(3)], custom)
    assert len(traced) == 1
    assert all(one.network.params is several[0].network.params for one in several)
    assert dict(several[0].network.model.metrics) == metrics


def test_lanes_with_other_networks_do_not():
    metrics = {"zero": lambda outputs, labels: 0 * outputs[:, 0]}
    configs = [digits(), digits(**{"model.hidden": 8})]
    custom = custom_hooks.Custom(metrics=metrics)
    narrow, wide = prepare.prepare_all(configs, custom)
    assert narrow.network.params != wide.network.params


def test_a_free_rider_delivers_and_an_absent_client_does_not():
    found = network.delivers(np.array([[2, 0, 0]]), np.array([[0.5, 0.5, 0.0]]))
    assert found.tolist() == [[True, True, False]]


def test_a_run_and_a_sweep_count_the_same_bytes():
    """650 parameters of logistic regression, float32, down and up, per delivery."""
    chosen = {"algorithm": "fedavg", "num_intervals": 2, "model.hidden": 0}
    chosen |= {"schedule.kind": "explicit", "schedule.tau": (1, 0), "devices": 1}
    settings = digits(**chosen)
    moved = 2 * 4 * 650 * 2 * 2  # two of four clients in two intervals
    assert tsfl_jax.simulate(settings).summary["bytes_moved"] == moved
    (row,) = tsfl_jax.sweep(settings, {"seed": [0]}).rows
    assert row["bytes_moved"] == moved
