"""The minimizer of the bound as a rule: its inputs, and what happens without them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests import problems
from tests.rules.test_rules import received
from tsfl_jax.rules.bound_optimal import BOUND_OPTIMAL
from tsfl_jax.theory.bounds import BoundConstants, tightest_limit
from tsfl_jax.theory.minimum import bound_optimal_weights
from tsfl_jax.types import ClientGradients, Constants

TAU = jnp.array([1, 2, 0, 4, 4])
VARIANCE = jnp.array([2.0, 1.0, jnp.nan, 3.0, 1.0])
APART = jnp.array([0.4, -0.1, jnp.nan, 0.2, 1.0])  # an estimate may be below 0
HP = problems.hparams(lr=0.02, weight_limit=3.0)


def info(tau=TAU, variance=VARIANCE, apart=APART, square=0.8, L=5.0, square_norm=7.0):
    constants = Constants(jnp.float32(L), jnp.float32(square_norm), jnp.float32(9.0))
    gradients = ClientGradients(variance, apart, jnp.float32(square))
    seen = received(tau, [8] * len(tau)).info
    return seen._replace(constants=constants, gradients=gradients)


def known(theta, L=5.0, square=0.8):
    """Γ_i = ‖∇F_i − ∇F‖²/L², the negative one 0; ‖w − w*‖² = ‖∇F‖²/L²."""
    return BoundConstants(
        lr=0.02,
        smoothness=L,
        grad_sq_norm=7.0,
        weight_limit=theta,
        distance=square / L**2,
        grad_variance=np.array([2.0, 1.0, 0.0, 3.0, 1.0]),
        dissimilarity=np.array([0.4, 0.0, 0.0, 0.2, 1.0]) / L**2,
    )


def test_weights_are_the_minimum_for_what_was_measured():
    # ηL = 0.1, so θ = 1/(ηL) − 1 = 9 in the bound, and 3 for the weights.
    rho = BOUND_OPTIMAL.mixing.weights(info(), HP).rho
    best = bound_optimal_weights(TAU, known(9.0), limit=3.0)
    np.testing.assert_allclose(rho, best.rho, atol=1e-6)
    assert rho[2] == 0 and rho.dtype == jnp.float32 and rho.max() <= 0.6 * (1 + 1e-6)
    np.testing.assert_allclose(rho.sum(), 1, rtol=1e-6)
    # With θ = 3 in the bound, A < 0: the client furthest from the others is preferred.
    wrong = bound_optimal_weights(TAU, known(3.0))
    assert not wrong.limit_holds and best.limit_holds
    assert wrong.rho[4] > 0.5 > rho[4]


@pytest.mark.parametrize(("L", "theta"), [(5.0, 9.0), (10.5, 5.0)])
def test_without_a_limit_theta_is_the_tightest(L, theta):
    free = problems.changed(HP, weight_limit=jnp.inf)
    rho = BOUND_OPTIMAL.mixing.weights(info(L=L), free).rho
    best = bound_optimal_weights(TAU, known(theta, L))
    assert best.valid
    np.testing.assert_allclose(rho, best.rho, atol=1e-5)


def test_tightest_limit_by_hand():
    for given, expected in ((math.inf, 9), (3.0, 9), (12.0, 12)):
        found = tightest_limit(given, 5, 0.02, 5.0)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert 0.02 * 5.0 * (1 + found) >= 1
    assert tightest_limit(math.inf, 5, 1.0, 5.0) == 5


@pytest.mark.parametrize(
    "changes",
    [
        dict(L=jnp.nan),  # not finite
        dict(variance=VARIANCE.at[0].set(jnp.inf)),
        dict(L=400.0),  # W ≤ 0 for all weights: void
    ],
)
def test_without_a_bound_the_cohort_gets_equal_weights(changes):
    rho = BOUND_OPTIMAL.mixing.weights(info(**changes), HP).rho
    np.testing.assert_allclose(rho, [0.25, 0.25, 0, 0.25, 0.25])


def test_no_client_has_weight_in_an_interval_without_work():
    nan = jnp.full(5, jnp.nan)
    empty = info(jnp.zeros(5, int), nan, nan, jnp.nan, 0.0, 0.0)
    assert BOUND_OPTIMAL.mixing.weights(empty, HP).rho.tolist() == [0] * 5
