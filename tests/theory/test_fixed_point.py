"""Theorems 2 and 3: the weights satisfy the printed equation, or are not converged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.theory import cases
from tests.theory.cases import DTYPES, precision
from tsfl_jax.rules import dms
from tsfl_jax.theory import bounds, fixed_point
from tsfl_jax.theory.bounds import BoundConstants

modest = settings(max_examples=30, deadline=None)
solve = jax.jit(fixed_point.theorem2_weights, static_argnames="max_iterations")
bound = jax.jit(bounds.theorem1_bound)
derivative = jax.jit(bounds.printed_derivative, static_argnums=3)


def constants(n, **changes):
    """ηL(1+θ) = 1.05, B = −0.01; different clients."""
    default = dict(lr=0.1, smoothness=1.0, grad_sq_norm=2.0, weight_limit=9.5)
    default |= dict(distance=0.5, grad_variance=[0.5, 1, 2], dissimilarity=[0.2, 0.1])
    return cases.constants(n, default, **changes)


TAU = np.array([1, 2, 2, 3, 4, 4])


def printed(rho, tau, known, selected):
    """The right side of (4)–(5), or (10)–(11), in Python's numbers."""
    eta, L, G2, theta, distance = map(float, known[:5])
    T, N = np.shape(tau)
    H = max(int(x) for x in np.ravel(tau))
    A = eta * (2 * L * (eta * L * (1 + theta) - 1) + eta)
    B = 2 * eta * L * (1 - eta * L * (1 + theta))
    C = eta**3 * L * (H - 1) * G2
    entries = [(t, j) for t in range(T) for j in range(N)]
    linear = sum(float(rho[t][j]) * tau[t][j] for t, j in entries)
    square = sum(float(rho[t][j]) ** 2 * tau[t][j] for t, j in entries)
    twice = sum(float(rho[t][j]) * tau[t][j] ** 2 for t, j in entries)
    W = 1 + B * linear
    found = np.zeros((T, N))
    for t, i in entries:
        if selected[t][i]:
            variance, gamma = known.grad_variance[i], known.dissimilarity[i]
            D = distance + eta**2 * N * variance * square + A * gamma * linear
            D += C * twice
            above = B * D + (A * gamma + C * tau[t][i]) * W
            found[t, i] = above / (W * 2 * eta**2 * N * variance)
    return found


@st.composite
def situations(draw, equal=False):
    """(τ, constants, selected) of T = 2, N = 3; ηL(1+θ) from 1 to 1.3, σ_i² > 0."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    known = cases.random_constants(rng, 3, highest=1.3, clients=1 if equal else 3)
    return rng.integers(1, 6, (2, 3)), known, rng.random((2, 3)) < 0.7


def test_by_hand_where_b_is_zero():
    """ηL(1+θ) = 1, η = L = 0.5, θ = 3, G² = 4, N = 2, H = 3: A = 0.25, B = 0, C = 0.5.

    ρ = (AΓ_i + Cτ_i)/(2·0.25·2·σ_i²) = (0.25·1 + 0.5·1)/1, (0.25·2 + 0.5·3)/4.
    """
    known = BoundConstants(
        0.5, 0.5, 4.0, 3.0, 1.0, np.array([1.0, 4.0]), np.array([1.0, 2.0])
    )
    found = fixed_point.theorem2_weights(np.array([1, 3]), known)
    np.testing.assert_allclose(found.rho, [0.75, 0.5], rtol=1e-6)
    assert bool(found.converged) and found.residual == 0
    assert found.rho.sum() == 1.25, "the print has no multiplier for Σρ = 1"


@modest
@given(situations(), st.booleans())
def test_the_weights_satisfy_the_printed_equation(info, theorem_3):
    tau, known, selected = info
    selected |= not theorem_3
    with precision(np.float64):
        found = jax.tree.map(np.asarray, solve(tau, known, selected))
    assert found.converged, found
    assert found.rho.shape == tau.shape and not found.rho[~selected].any()
    right = printed(found.rho, tau, known, selected)
    size = abs(found.rho).max()
    np.testing.assert_allclose(found.rho, right, rtol=0, atol=1e-8 * size)


@modest
@given(situations(equal=True))
def test_differences_are_those_of_corollary_1(info):
    """Equal σ_i and Γ_i; over intervals too, which share H and the three sums."""
    tau, known, selected = info
    with precision(np.float64):
        found = jax.tree.map(np.asarray, solve(tau, known, selected))
        slope = dms.coupling(
            tau.ravel(),  # its N is T·N here
            lr=known.lr,
            smoothness=known.smoothness,
            grad_sq_norm=known.grad_sq_norm,
            grad_variance=known.grad_variance[0],
        )
        slope = len(tau) * float(slope)
    assert found.converged, found
    if selected.any():
        rest = (found.rho - slope * tau)[selected]
        size = abs(found.rho).max() + slope * tau.max()
        np.testing.assert_allclose(rest, rest[0], rtol=0, atol=1e-9 * size)


def test_the_bound_rises_along_the_printed_weights():
    """A stationary point with the printed sign, but not with the right one."""
    tau, known = TAU, constants(6)
    with precision(np.float64):
        rho = solve(tau, known).rho
        W = bound(rho, tau, known).W
        minus, plus = (derivative(rho, tau, known, s) for s in (-1, 1))
        assert W > 0 and (plus > 1e-4).all()
    # (4) has σ_i², Γ_i outside the sums of D, the derivative inside: equal for one.
    assert abs(np.asarray(minus)).max() > 1e-8
    one = constants(1)
    with precision(np.float64):
        rho = solve(np.array([3]), one).rho
        minus = derivative(rho, np.array([3]), one)
    np.testing.assert_allclose(minus, 0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_and_one_interval(dtype):
    with precision(dtype):
        known = cases.cast(constants(6), dtype)
        found = solve(TAU.astype(dtype), known)
    assert found.rho.dtype == found.residual.dtype == dtype
    assert bool(found.converged) and int(found.iterations) > 0
    right = printed(np.asarray(found.rho)[None], TAU[None], known, np.ones((1, 6)))
    rtol = 1e-3 if dtype == np.float32 else 1e-11
    np.testing.assert_allclose(found.rho, right[0], rtol=rtol)


def test_gradients_are_finite_differences():
    @jax.jit
    def loss(scalars):
        known = constants(6)._replace(lr=scalars[0], distance=scalars[1])
        rho = fixed_point.theorem2_weights(TAU, known).rho
        return (rho * jnp.cos(jnp.arange(6.0))).sum()

    with precision(np.float64):
        point = np.array([0.12, 0.1])
        slope = jax.jit(jax.grad(loss))(point)
        for i, step in enumerate(1e-6 * np.eye(2)):
            rise = loss(point + step) - loss(point - step)
            np.testing.assert_allclose(slope[i], rise / 2e-6, rtol=1e-5)


def test_failed_searches_are_not_converged():
    tau, known = TAU, constants(6)
    with precision(np.float64):
        found = solve(tau, known, max_iterations=0)
        assert not bool(found.converged) and 1e-10 < found.residual < np.inf
    without = constants(6, grad_variance=np.array([1.0, 0, 1, 1, 1, 1]))
    found = solve(tau, without)
    assert not bool(found.converged) and np.isinf(found.residual)
    found = solve(tau, without, tau != 2)  # (4) is not asked of the one without
    assert bool(found.converged) and np.isfinite(found.rho).all()
