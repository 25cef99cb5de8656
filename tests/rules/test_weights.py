"""Weights of every rule from arrays of NumPy, as in a server without JAX."""

import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.types import ClientGradients, Constants, UserError

TAU, SIZE, LAG = np.array([1, 2, 4, 0]), np.array([120, 80, 100, 90]), [0, 1, 2, 0]
HPARAMS = tsfl_jax.HParams(lr=0.01, constants=Constants(10.0, 4.0, 0.5))
GRADIENTS = ClientGradients(np.ones(4), np.ones(4), np.float32(1.0))
RULES = tsfl_jax.AGGREGATORS
WEIGHT_RULES = [name for name, rule in RULES.items() if not rule.stacks]


@pytest.mark.parametrize("name", WEIGHT_RULES)
def test_numpy_in_and_out(name):
    given = {"tau": TAU, "size": SIZE, "lag": LAG, "gradients": GRADIENTS}
    rho = tsfl_jax.weights(RULES[name], hparams=HPARAMS, **given)
    assert type(rho) is np.ndarray and rho.dtype == np.float32
    assert rho.shape == (4,) and rho[3] == 0 and np.isfinite(rho).all()
    # One column per client: the new model of such updates is ρ itself, for the rules
    # that have no step of the server.
    updates = np.eye(4, dtype=np.float32)
    new, _ = tsfl_jax.aggregate(
        RULES[name],
        updates,
        np.zeros(4, np.float32),
        tsfl_jax.init_rule(RULES[name], np.zeros(4, np.float32), 4),
        hparams=HPARAMS,
        **given,
    )
    if name in ("fedavg", "fedprox", "dms", "bound_optimal", "fednova"):
        np.testing.assert_allclose(new, rho, rtol=1e-6)


def test_fedavg_by_hand_from_lists():
    rho = tsfl_jax.weights(RULES["fedavg"], tau=[3, 1, 0], size=[10, 30, 60])
    np.testing.assert_allclose(rho, [0.25, 0.75, 0.0])


@pytest.mark.parametrize("name", sorted({*RULES} - {*WEIGHT_RULES}))
def test_rules_that_are_more_than_weights(name):
    with pytest.raises(UserError, match=r"use tsfl_jax\.aggregate"):
        tsfl_jax.weights(RULES[name], tau=TAU)


def test_what_a_rule_needs_is_asked_for():
    with pytest.raises(UserError, match="expected gradients="):
        tsfl_jax.weights(RULES["bound_optimal"], tau=TAU)
