"""What rules do with the share of a client whose model is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tsfl_jax.config import replace
from tsfl_jax.rules.staleness import KINDS as STALENESS

TAU = (2, 30, 30)


def applied(name, updates, **changes):
    """w^{t+1} − w^t of a rule; the updates are numbers."""
    rule, params = tsfl_jax.AGGREGATORS[name], {"w": jnp.zeros(1)}
    state = tsfl_jax.init_rule(rule, params, len(updates))
    given = {"w": jnp.asarray(updates, jnp.float32)[:, None]}
    new, _ = tsfl_jax.aggregate(rule, given, params, state, **changes)
    return float(new["w"][0])


def test_fednova_divides_the_share_not_the_weight():
    # ρ = τ_eff p_i/‖a_i‖ is largest for the client with the least work.
    tau = [1, 100, 100]
    updates = [-1.0, -100.0, -100.0]
    assert applied("fednova", updates, tau=tau) == pytest.approx(-67)
    # τ_eff = 67, the others' p = 1/2 each: 67·(½·1 + ½·1).
    assert applied("fednova", [np.nan, *updates[1:]], tau=tau) == pytest.approx(-67)
    assert applied("fednova", [*updates[:2], np.nan], tau=tau) == pytest.approx(-67)


def test_a_stale_model_does_not_count_for_a_fresh_one():
    kind = STALENESS.index("polynomial")
    hparams = problems.hparams(staleness__kind=kind, staleness__a=1.0)
    found = {"lag": [0, 9], "hparams": hparams}
    for name in ("fedbuff", "fedasync"):
        both = applied(name, [1.0, 1.0], **found)
        alone = applied(name, [np.nan, 1.0], **found)
        # s(0)/2 + s(9)/2 = 0.55; s(9)/1 = 0.1, times 1 − γ = ½ for FedAsync.
        factor = 1.0 if name == "fedbuff" else 0.5
        assert both == pytest.approx(0.55 * factor)
        assert alone == pytest.approx(0.1 * factor)


@pytest.fixture(scope="module")
def three():
    """Data of three clients; the samples of the first overflow."""
    draws = np.random.default_rng(0)
    y = draws.integers(0, 3, 400)
    x = (draws.normal(size=(400, 4)) + 2 * y[:, None]).astype(np.float32)
    x[:100] *= 1e30
    lists = [np.arange(100), np.arange(100, 200), np.arange(200, 300)]
    return tsfl_jax.make_dataset(x[:300], y[:300], x[300:], y[300:]), lists


@pytest.mark.parametrize(
    ("mapping", "sweep"),
    [
        ("sequential", False),
        pytest.param("vmap", False, marks=pytest.mark.slow),
        pytest.param("sequential", True, marks=pytest.mark.slow),
        pytest.param("vmap", True, marks=pytest.mark.slow),
    ],
)
def test_in_a_simulation_as_the_others_alone(three, mapping, sweep):
    dataset, lists = three
    config = tsfl_jax.Config(
        num_intervals=1, num_clients=3, batch_size=100, lr=0.01, momentum=0.0
    )
    config = replace(config, {"model.hidden": 0, "devices": 1, "mapping": mapping})
    config = replace(config, {"schedule.kind": "explicit", "schedule.tau": TAU})
    nova = replace(config, {"algorithm": "fednova"})
    two = replace(config, {"num_clients": 2, "schedule.tau": TAU[1:]})
    alone = tsfl_jax.simulate(two, dataset=dataset, partition=lists[1:])
    still = replace(two, {"lr": 1e-30})
    first = tsfl_jax.simulate(still, dataset=dataset, partition=lists[1:]).params
    if sweep:  # both rules in one program
        points = {"algorithm": ["fednova", "fedavg"]}
        found = tsfl_jax.sweep(nova, points, dataset=dataset, partition=lists)
        assert (found.history["num_discarded"] == 1).all()
        losses = found.history["test_loss"][:, 0]
        single = tsfl_jax.simulate(nova, dataset=dataset, partition=lists)
        # Another program: without optimization, as in tests, its loss is the next
        # float32 on some processors.
        np.testing.assert_array_max_ulp(losses[0], single.history["test_loss"][0], 1)
        assert losses[1] == pytest.approx(alone.history["test_loss"][0], rel=1e-5)
        return
    found = tsfl_jax.simulate(nova, dataset=dataset, partition=lists)
    assert found.history["num_discarded"].tolist() == [1]
    # Both alone have ‖a‖ = 30; with all three τ_eff is 62/3.
    leaves = map(jax.tree.leaves, (found.params, first, alone.params))
    for one, start, other in zip(*leaves, strict=True):
        expected = start + 62 / 3 / 30 * (np.asarray(other) - start)
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-6)
