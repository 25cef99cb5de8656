"""Networks of several experiments: traced once where they are the same."""

from tsfl_jax import config
from tsfl_jax.experiment import network, own_hooks, prepare


def digits(**changes):
    chosen = {"data.name": "digits", "schedule.data_size": 50, "num_clients": 4}
    return config.replace(config.Config(), chosen | changes)


def test_lanes_with_an_own_metric_share_one_network(monkeypatch):
    traced = []
    real = network._known_network
    monkeypatch.setattr(
        network, "_known_network", lambda *given: traced.append(given) or real(*given)
    )
    own = own_hooks.Own(metrics={"highest": lambda outputs, labels: outputs.max(-1)})
    several = prepare.prepare_all([digits(seed=s) for s in range(3)], own)
    assert len(traced) == 1
    assert all(one.network.params is several[0].network.params for one in several)
    assert dict(several[0].network.model.metrics) == own.metrics


def test_lanes_with_other_networks_do_not():
    own = own_hooks.Own(metrics={"zero": lambda outputs, labels: 0 * outputs[:, 0]})
    narrow, wide = prepare.prepare_all([digits(), digits(**{"model.hidden": 8})], own)
    assert narrow.network.params != wide.network.params
