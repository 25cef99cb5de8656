"""What holds where the losses are convex, and Definition 1.3."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.theory.cases import averaged
from tsfl_jax import theory
from tsfl_jax.theory.bounds import BoundConstants
from tsfl_jax.types import UserError

convex_bound = jax.jit(theory.convex_bound)
bound = jax.jit(theory.theorem1_bound, static_argnums=3)


def known_constants(lr, L, distance, gamma, theta=1.0, square=0.0):
    gamma = np.asarray(gamma, float)
    return BoundConstants(lr, L, square, theta, distance, np.zeros(len(gamma)), gamma)


def convex_losses(rng, count, size, L):
    """Gradients and minimizers of quadratics, some singular, and of Σ log cosh."""
    gradients, minimizers = [], rng.normal(size=(count, size))
    for center in minimizers:
        turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
        curvature = L * rng.choice([0.0, 0.01, 0.3, 1.0], size)
        if rng.integers(2):
            hessian = turn * curvature @ turn.T
            gradients.append(lambda w, H=hessian, c=center: H @ (w - c))
        else:
            steep = rng.uniform(0.5, 3)  # Σ log cosh(s·z)/s² has curvature ≤ 1

            def gradient(w, Q=turn * curvature, P=turn, c=center, s=steep):
                return Q @ np.tanh(s * (P.T @ (w - c))) / s

            gradients.append(gradient)
    return gradients, minimizers


def test_no_convex_problem_is_above_the_bound():
    """For any w*, not only the minimizer of F, and weights that change in time."""
    rng = np.random.default_rng(0)
    largest = 0.0
    for _ in range(300):
        N, T, L = 3, 2, 10 ** rng.uniform(-1, 1)
        lr = rng.choice([0.05, 0.5, 1.0, 1.9]) / L
        gradients, minimizers = convex_losses(rng, N, 2, L)
        rho, tau = rng.dirichlet(np.ones(N), T), rng.integers(0, 7, (T, N))
        star = rng.normal(size=2)
        start = star + rng.choice([0.0, 0.3, 3.0]) * rng.normal(size=2)
        w = averaged(gradients, rho, tau, start, lr)
        gamma = ((minimizers - star) ** 2).sum(1)
        known = known_constants(lr, L, ((start - star) ** 2).sum(), gamma)
        with jax.enable_x64(True):
            limit = float(convex_bound(rho, tau, known))
        ratio = ((w - star) ** 2).sum() / limit
        assert ratio <= 1 + 1e-12
        largest = max(largest, ratio)
    assert largest > 0.6  # the problems come near


@pytest.mark.parametrize("step", [0.01, 0.5, 1.0, 1.5])  # ηL
def test_the_constant_is_the_smallest_possible(step):
    """Client 1 works, client 2, of weight r → 0, balances it: F has its minimum at 0.

    F_1 = (L/2)(w − 1)², F_2 = (L/2)(w + (1 − r)/r)². From w = (1 − ηL)/(2 − ηL) one
    step of client 1 ends at 1/(2 − ηL), where the bound holds with equality for r = 0.
    """
    L, r = 3.0, 1e-7
    lr, minimizers = step / L, np.array([1.0, -(1 - r) / r])
    rho, tau = np.array([[1 - r, r]]), np.array([[1, 0]])
    assert abs(rho[0] @ (L * (0 - minimizers))) < 1e-8  # ∇F(0) = 0
    gradients = [lambda w, c=c: L * (w - c) for c in minimizers]
    start = (1 - step) / (2 - step)
    w = averaged(gradients, rho, tau, start, lr)
    known = known_constants(lr, L, start**2, minimizers**2)
    with jax.enable_x64(True):
        limit = float(convex_bound(rho, tau, known))
        same = known._replace(distance=0.0)
        drift = float(convex_bound(rho, tau, same))
    assert w**2 <= limit
    assert w**2 > limit - 1e-5 * drift  # so a constant 0.001 % smaller fails


def test_there_is_no_bound_for_steps_of_two_over_l_or_more():
    """With Γ = 0 every bound of this form is the initial distance; steps overshoot."""
    for step, inside in ((1.99, True), (2.0, False), (2.1, False)):
        known = known_constants(step, 1.0, 1.0, [0.0])
        limit = float(theory.convex_bound(np.ones(1), np.array([3]), known))
        w = averaged([lambda w: w], np.ones((1, 1)), np.array([[3]]), 1.0, step)
        assert np.isfinite(limit) == inside
        assert w**2 <= limit and (w**2 > 1) == (step > 2)
    slope = jax.grad(lambda lr: theory.convex_bound([1.0], [3], known._replace(lr=lr)))
    assert slope(2.1) == 0
    with pytest.raises(UserError, match=r"constants.lr = -1.*expected"):
        theory.convex_bound([1.0], [3], known._replace(lr=-1))
    found = convex_bound(jnp.ones(1), jnp.ones(1), known)
    assert np.isinf(found)
    found = convex_bound(jnp.ones(1), -jnp.ones(1), known)
    assert np.isnan(found)


def test_theorem_1_with_1_for_the_square_of_the_rate_follows():
    """For ηL ≤ 1: 1 ≥ ηL/(2 − ηL), X, Y ≥ 0 and W ≤ 1; not so as printed."""
    rng = np.random.default_rng(0)
    checked, below = 0, 0
    for _ in range(100):
        L, step = 10 ** rng.uniform(-1, 1), rng.choice([0.02, 0.3, 1.0])
        rho, tau = rng.dirichlet(np.ones(3), 2), rng.integers(0, 4, (2, 3))
        theta = max(1 / step - 1, 3 * rho.max()) * (1 + 1e-9)
        known = known_constants(step / L, L, rng.choice([0, 1.0]), np.ones(3), theta)
        with jax.enable_x64(True):
            printed, repaired = (bound(rho, tau, known, flag) for flag in (False, True))
            limit = float(convex_bound(rho, tau, known))
        if bool(repaired.valid):
            assert limit <= float(repaired.total) * (1 + 1e-12)
            checked, below = checked + 1, below + (limit > float(printed.total))
    assert checked > 40 and below > 5


# ---- Definition 1.3 ----


def test_the_minimizer_under_the_other_reading_of_definition_1_3():
    """ηL(1+θ) = 0.378 ≤ 1: A < 0 < B, the slowest get nothing; but it is no bound."""
    known = BoundConstants(0.003, 42.0, 1.0, 2.0, 1.0, np.ones(4), np.full(4, 0.1))
    tau = np.array([1, 2, 3, 4])
    A, B, _ = theory.coefficients(known, 4)
    assert A < 0 < B
    found = theory.bound_optimal_weights(tau, known)
    np.testing.assert_array_equal(found.rho, np.float32([0, 0, 0.5, 0.5]))
    assert not bool(found.limit_holds)
    # With the smallest θ for which the proof holds, weights fall with τ.
    theta = theory.tightest_limit(2.0, 4, known.lr, known.smoothness)
    least = theory.bound_optimal_weights(
        tau, known._replace(weight_limit=theta), limit=2
    )
    assert bool(least.limit_holds) and bool(least.valid)
    assert all(a >= b for a, b in itertools.pairwise(least.rho.tolist()))
    assert least.rho[0] > least.rho[3]
