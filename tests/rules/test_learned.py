"""Learned weights: features by hand, limits, the published θ."""

import jax.numpy as jnp
import numpy as np

from tests import problems
from tests.rules.test_rules import received
from tsfl_jax.rules import learned
from tsfl_jax.rules.base import ClientOutputs

HAPPENED = received([1, 0, 4, 2], [10, 99, 20, 30], lag=[0, 0, 3, 1])
LOSS = jnp.array([2.0, jnp.nan, 1.0, 3.0])


def test_features_by_hand():
    """max τ = 4, mean |D| = 20, mean loss = 2, one quarter of the run is over."""
    info = HAPPENED.info._replace(interval=jnp.int32(5))
    found = learned.features(info, LOSS, HAPPENED.present, jnp.float32(20.0))
    log = np.log
    want = [
        [0.25, 0.75 * 0.25, log(0.5), 0.0, 0.0],
        [0.0] * 5,
        [1.0, 0.75, 0.0, 0.75, log(0.5)],
        [0.5, 0.75 * 0.5, log(1.5), 0.5, log(1.5)],
    ]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)


def test_features_have_no_unit():
    scaled = received([3, 0, 12, 6], [70, 693, 140, 210], lag=[0, 0, 3, 1])
    pairs = ((HAPPENED, LOSS), (scaled, 9 * LOSS))
    one, other = (learned.features(e.info, loss, e.present, 1.0) for e, loss in pairs)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def weights(happened=HAPPENED, losses=LOSS, **theta):
    plain = {f"learned__{name}": 0.0 for name in learned.FEATURES}
    hp = problems.hparams(**plain | {f"learned__{n}": v for n, v in theta.items()})
    found, state = learned.learned_weights(
        ClientOutputs(losses, None), (), happened, hp
    )
    assert state == ()
    return found.rho


def test_limits():
    np.testing.assert_allclose(weights(), [1 / 3, 0, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(weights(size=1.0), [1 / 6, 0, 1 / 3, 1 / 2], rtol=1e-5)
    far = weights(tau=200.0)
    np.testing.assert_allclose(far, [0, 0, 1, 0], atol=1e-6)
    ratio = weights(loss=2.0)
    np.testing.assert_allclose(ratio[3] / ratio[2], 9.0, rtol=1e-4)


def test_unknown_losses_and_nobody_present():
    missing = jnp.full(4, jnp.nan)
    np.testing.assert_allclose(
        weights(losses=missing, tau=1.0), weights(tau=1.0), rtol=1e-6
    )
    np.testing.assert_allclose(weights(losses=0 * LOSS).sum(), 1, rtol=1e-6)
    away = received([0, 0, 0, 0])
    np.testing.assert_array_equal(weights(away), np.zeros(4))
