"""DMS that fades: decays by hand, and the adaptive rule."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import problems
from tests.rules.test_rules import received
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules import dms_rule as adaptive
from tsfl_jax.rules.base import ClientOutputs

TAU = [1, 3, 4, 4]


def weights(t, **changes):
    happened = received(TAU)
    info = happened.info._replace(interval=jnp.int32(t))
    hp = problems.hparams(coupling=0.02, **changes)
    return by_dms(info, hp)


by_dms = jax.jit(AGGREGATORS["dms"].mixing.weights)


def test_decays_by_hand():
    centered = np.array(TAU) - 3
    for kind, factor in ((0, 1.0), (1, np.exp(-6 / 4)), (2, 1 / (1 + 6 / 4))):
        found = weights(6, drop=0.0, decay=kind, decay_time=4.0)
        np.testing.assert_allclose(found.coupling, 0.02 * factor, rtol=1e-6)
        np.testing.assert_allclose(found.rho, 0.25 + 0.02 * factor * centered)
        start = weights(0, drop=0.0, decay=kind, decay_time=4.0)
        np.testing.assert_allclose(start.coupling, 0.02, rtol=1e-6)
    # In late intervals no client is dropped; in early ones client 0 sometimes is.
    kept = []
    for t in (0, 400):
        happened = [received(TAU).info for _ in range(20)]
        happened = [
            s._replace(interval=jnp.int32(t), key=jax.random.key(i))
            for i, s in enumerate(happened)
        ]
        hp = problems.hparams(coupling=0.0, decay_time=4.0, decay=1)
        kept.append([bool(by_dms(s, hp).selected[0]) for s in happened])
    assert 0 < sum(kept[0]) < 20 and all(kept[1])


def adapted(target, scale, t=0, present=None, coupling=0.1, **changes):
    """The adaptive rule where F_val = (ρ_0 − target)²."""
    happened = received(TAU)
    if present is not None:
        happened = happened._replace(present=jnp.array(present))

    hp = problems.hparams(coupling=coupling, drop=0.0, adapt=2.0, **changes)
    return _adapted(jnp.float32(target), jnp.float32(scale), happened, hp)


@jax.jit
def _adapted(target, scale, happened, hp):
    def objective(rho):
        away = rho[0] - target
        return away**2, jnp.zeros(4).at[0].set(2 * away)

    outputs = ClientOutputs(jnp.ones(4), objective)
    return adaptive.adaptive_weights(outputs, scale, happened, hp)


def test_the_adaptive_factor_moves_to_the_smaller_loss_by_hand():
    """ρ_0 = ¼ − 0.1 s·2: with s = 1 it is 0.05, with ¼ 0.2, with 0.5 0.15."""
    found, scale = adapted(target=0.25, scale=0.5)
    assert scale == 0.25
    np.testing.assert_allclose(found.rho[0], 0.2, rtol=1e-6)
    np.testing.assert_allclose(found.coupling, 0.025, rtol=1e-6)
    found, scale = adapted(target=0.0, scale=0.5)
    assert scale == 1.0
    np.testing.assert_allclose(found.rho[0], 0.05, rtol=1e-5)
    # Never above the paper's, never below the least.
    assert adapted(target=0.0, scale=1.0)[1] == 1.0
    least = np.float32(adaptive.LEAST)
    assert adapted(target=0.25, scale=least)[1] == least


def test_the_adaptive_factor_falls_where_a_large_c_makes_both_the_same():
    """c·s ≥ 5 gives all to the largest τ: s must not stay at 1, as DMS for good."""
    for scale in (1.0, 0.5):
        found, lower = adapted(target=0.25, scale=scale, coupling=20.0)
        np.testing.assert_allclose(found.rho, [0, 0, 0.5, 0.5], atol=1e-6)
        assert lower == scale / 2
    # With other weights F_val decides.
    assert adapted(target=0.25, scale=2.0**-8, coupling=20.0)[1] == 2.0**-9
    assert adapted(target=0.0, scale=2.0**-8, coupling=20.0)[1] == 2.0**-7


def test_the_adaptive_factor_stays_where_no_s_makes_a_difference():
    """One client alone has all the weight, whatever s is; or no loss is finite."""
    alone = [True, False, False, False]
    assert adapted(target=0.0, scale=0.5, present=alone)[1] == 0.5
    assert adapted(target=np.nan, scale=0.25)[1] == 0.25


def test_lost_models_give_their_weight_to_the_others():
    found, _ = adapted(target=0.25, scale=1e-3, present=[True, True, False, True])
    np.testing.assert_allclose(found.rho, [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-3)
    found, _ = adapted(target=0.25, scale=1.0, present=[False] * 4)
    np.testing.assert_array_equal(found.rho, np.zeros(4))
