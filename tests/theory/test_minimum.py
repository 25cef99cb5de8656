"""The minimum of Theorem 1's bound: by hand, by other solvers, limits, certificate."""

from fractions import Fraction
from itertools import pairwise

import jax
import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.theory import cases
from tests.theory.cases import DTYPES, precision
from tsfl_jax.rules import dms
from tsfl_jax.theory import simplex
from tsfl_jax.theory.bounds import BoundConstants
from tsfl_jax.theory.minimum import bound_optimal_weights, kkt_residual

# ηL(1+θ) ≥ 1, as Definition 1.3 demands; small enough for W > 0.
PAPER = dict(lr=0.1, smoothness=1.5, grad_sq_norm=2.0, weight_limit=6.0, distance=1.0)
TAU = np.array([1, 2, 2, 3, 4, 4])
minimizer, certificate = jax.jit(bound_optimal_weights), jax.jit(kkt_residual)


def constants(n=6, **changes):
    default = PAPER | dict(grad_variance=1.0, dissimilarity=0.1)
    return cases.constants(n, default, **changes)


def parts(rho, tau, c):
    """(f, W) of Theorem 1, step by step, as printed."""
    tau = np.atleast_2d(tau).astype(int)
    rho = np.asarray(rho, np.float64).reshape(tau.shape)
    *items, W = cases.by_loops(rho, tau, c)
    return float(c.distance) + sum(items), W


def bound(rho, tau, c):
    f, W = parts(rho, tau, c)
    return f / W if W > 0 else np.inf


def upper(tau, c):
    """u, or 1/M where the limit leaves no choice, ``[T]``."""
    tau = np.atleast_2d(tau)
    limit = min(float(c.weight_limit) / tau.shape[1], 1.0)
    return np.maximum(limit, 1 / np.maximum((tau > 0).sum(1), 1))


def solve(tau, c, dtype=np.float64, present=None):
    """As NumPy."""
    with precision(dtype):
        found = minimizer(np.asarray(tau, dtype), cases.cast(c, dtype), present)
        return jax.tree.map(np.asarray, found)


def random_feasible(rng, tau, c):
    """Some ρ with 0 ≤ ρ ≤ u, Σρ = 1: a mixture of equal weights and a greedy one."""
    tau = np.atleast_2d(tau)
    rho = np.zeros(tau.shape)
    for t, u in enumerate(upper(tau, c)):
        left = 1.0
        working = np.flatnonzero(tau[t] > 0)
        for i in rng.permutation(working):
            rho[t, i] = min(u, left)
            left -= rho[t, i]
        if working.size:
            part = rng.random() ** 3
            rho[t, working] = part * rho[t, working] + (1 - part) / working.size
    return rho


def check_feasible(found, tau, c):
    tau = np.atleast_2d(tau)
    rho = found.rho.reshape(tau.shape)
    eps = np.finfo(rho.dtype).eps
    np.testing.assert_allclose(rho.sum(1), (tau > 0).any(1), atol=16 * eps)
    assert (rho >= 0).all() and not rho[tau == 0].any()
    assert (rho <= upper(tau, c)[:, None] * (1 + 4 * eps)).all()


# ---- By hand ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_clients_by_hand(dtype):
    """ηL(1+θ) = 1, so A = 1/16, B = 0, C = 1/16; a = (1, 1), b = (3/16, 3/4)."""
    c = BoundConstants(0.25, 1.0, 4.0, 3.0, 1.0, np.array([4, 2]), np.array([2, 4]))
    found = solve([1, 2], c, dtype)
    assert found.rho.dtype == found.value.dtype == dtype
    np.testing.assert_array_equal(found.rho, np.array([25, 7]) / 32)
    assert found.value == 1 + (25**2 + 7**2) / 2048 + 75 / 512 + 21 / 128
    assert found.kkt_residual == 0 and found.converged and found.valid


def test_weights_that_fall_with_the_iterations_and_beat_dms():
    """The error of Theorem 2: weights that grow with τ do not make the bound small."""
    c = constants(grad_variance=1.0)
    found = solve(TAU, c)
    assert found.converged and (np.diff(found.rho) <= 1e-15).all()
    assert found.rho[0] > found.rho[1] == found.rho[2] > found.rho[3] >= found.rho[5]
    with precision(np.float64):
        selected = np.ones(6, bool)
        rising = np.asarray(dms.affine_weights(TAU.astype(float), selected, 0.02))
    assert rising[0] < rising[5]
    uniform = bound(np.full(6, 1 / 6), TAU, c)
    assert found.value < uniform < bound(rising, TAU, c)
    np.testing.assert_allclose(found.value, bound(found.rho, TAU, c), rtol=1e-14)


# ---- Against other solvers ----


@pytest.mark.parametrize("seed", range(2))
def test_same_minimum_as_a_general_solver(seed):
    rng = np.random.default_rng(seed)
    n, intervals = 6, 3
    tau = rng.integers(0, 5, (intervals, n))
    c = constants(
        n,
        lr=rng.uniform(0.02, 0.1),
        smoothness=rng.uniform(0.2, 1.5),
        weight_limit=rng.uniform(1.2, n),
        distance=rng.uniform(0.1, 3),
        grad_variance=rng.uniform(0, 5, n),
        dissimilarity=rng.uniform(0, 0.5, n),
    )
    found = solve(tau, c)
    start = (tau > 0) / np.maximum((tau > 0).sum(1, keepdims=True), 1)
    assert found.valid and parts(start, tau, c)[1] > 0
    sums = np.kron(np.eye(intervals), np.ones(n))
    limits = np.where(tau > 0, upper(tau, c)[:, None], 0).ravel()
    is_one = dict(type="eq", fun=lambda x: sums @ x - (tau > 0).any(1))
    other = scipy.optimize.minimize(
        lambda x: bound(x, tau, c),
        start.ravel(),
        method="SLSQP",
        bounds=[(0, limit) for limit in limits],
        constraints=is_one | dict(jac=lambda x: sums),
        options=dict(ftol=1e-15, maxiter=500),
    )
    np.testing.assert_allclose(found.value, other.fun, rtol=1e-7)
    assert found.value <= other.fun + 1e-9 * abs(other.fun)
    check_feasible(found, tau, c)


def exact_fill(a, b, u):
    """`simplex.fill` in rational arithmetic."""
    if len(a) * u <= 1:
        return [Fraction(1, len(a))] * len(a)

    def at(level, jumped):
        rho = []
        for x, y in zip(a, b, strict=True):
            full = y <= level if jumped else y < level
            rho.append(min(max((level - y) / x, 0), u) if x else u * full)
        return rho

    levels = sorted({*b, *(y + x * u for x, y in zip(a, b, strict=True))})
    points = [at(level, jumped) for level in levels for jumped in (False, True)]
    for low, high in pairwise(points):  # Σρ grows from 0, linearly between two points
        if sum(low) <= 1 <= sum(high):
            gap = sum(high) - sum(low)
            part = (1 - sum(low)) / gap if gap else 0
            return [x + part * (y - x) for x, y in zip(low, high, strict=True)]
    raise AssertionError("Σρ = 1 must be crossed")


fill = jax.jit(simplex.fill)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_fill_equals_rational_arithmetic(data):
    dtype, n = data.draw(st.sampled_from(DTYPES)), 8

    def many(entry):
        return np.array(data.draw(st.lists(entry, min_size=n, max_size=n)), dtype)

    a = many(st.sampled_from([0.0, 2.0**-12, 0.1, 0.7, 1.0, 30.0]))
    b = many(st.one_of(st.integers(-2, 2), st.floats(-0.5, 0.5, width=16)))
    u = dtype(data.draw(st.floats(0.125, 1, width=32)))
    inside = many(st.sampled_from([1, 1, 0])).astype(bool)
    with precision(dtype):
        rho = np.asarray(fill(a, b, inside, u))
    assert rho.dtype == dtype and not rho[~inside].any()
    if inside.any():
        exact = [[Fraction(float(x)) for x in v[inside]] for v in (a, b)]
        exact = exact_fill(*exact, Fraction(float(u)))
        steepest = max(1, np.abs(b).max() / min(a[a > 0], default=1))
        atol = 4 * n * np.finfo(dtype).eps * steepest
        np.testing.assert_allclose(rho[inside], np.array(exact, float), atol=atol)


# ---- Limits ----


def test_without_variance_the_cheapest_clients_are_full():
    c = constants(grad_variance=0.0, weight_limit=2.0, smoothness=3.5)  # B < 0
    found = solve(TAU, c)
    np.testing.assert_allclose(found.rho, [1 / 3, 1 / 3, 1 / 3, 0, 0, 0], rtol=1e-15)
    assert found.converged
    c = c._replace(weight_limit=3.0)  # the two with τ = 2 share what remains
    np.testing.assert_allclose(solve(TAU, c).rho, [1 / 2, 1 / 4, 1 / 4, 0, 0, 0])
    c = c._replace(weight_limit=6.0, smoothness=1.5)
    np.testing.assert_array_equal(solve(TAU, c).rho, [1, 0, 0, 0, 0, 0])
    c = c._replace(weight_limit=2.0, smoothness=1.0)  # B > 0, W outweighs f
    rho = solve(TAU, c).rho
    np.testing.assert_allclose(rho, [0, 0, 0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-15)


def test_absent_clients_and_empty_intervals():
    c = constants(grad_variance=np.arange(1.0, 7), weight_limit=2.0)
    tau = np.array([[0, 3, 1, 2, 0, 1], [0] * 6, [0, 4, 0, 0, 0, 1]])
    found = solve(tau, c)
    check_feasible(found, tau, c)
    assert found.converged and not found.rho[1].any()
    np.testing.assert_array_equal(found.rho[2], [0, 0.5, 0, 0, 0, 0.5])  # 2·θ/N < 1
    empty = solve(tau * 0, c)
    assert not empty.rho.any() and empty.value == 1.0 and empty.converged

    present = np.array([[True] * 5 + [False], [True] * 6, [True] * 6])
    without = solve(tau, c, present=present)
    expected = solve(np.where(present, tau, 0), c)
    assert not without.rho[~present].any()
    np.testing.assert_array_equal(without.rho, expected.rho)


def test_a_void_bound():
    c, tau = constants(lr=0.5, smoothness=2.0), np.minimum(TAU, 2)
    found = solve(tau, c)
    assert not found.valid and not found.converged and found.iterations == 0
    assert found.value == found.kkt_residual == np.inf
    np.testing.assert_array_equal(found.rho, np.full(6, 1 / 6))
    with precision(np.float64):
        assert certificate(found.rho, tau.astype(float), c) == np.inf


def test_a_bound_that_is_valid_for_some_weights_only():
    """Uniform weights make it void; the start must not be one of these."""
    c = constants(grad_variance=5.0, lr=0.2, smoothness=1.4, dissimilarity=0.0)
    tau = np.array([1, 5, 5, 5, 5, 5])
    assert parts(np.full(6, 1 / 6), tau, c)[1] < 0
    found = solve(tau, c)
    assert found.valid and found.converged and found.rho[0] > 0.9
    np.testing.assert_allclose(found.value, bound(found.rho, tau, c), rtol=1e-12)


# ---- Properties ----


@st.composite
def problems(draw):
    """(dtype, τ [T, N], constants); one shape, as each is another compilation."""
    dtype = draw(st.sampled_from(DTYPES))
    intervals, n = 3, 6
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0, 1e-3, 1, 1e3]))
    c = BoundConstants(
        lr=draw(st.floats(1e-4, 0.3)),
        smoothness=draw(st.floats(0.1, 2)),
        grad_sq_norm=draw(st.sampled_from([0.0, 1.0, 50.0])),
        weight_limit=draw(st.one_of(st.just(float(n)), st.floats(1, n + 1))),
        distance=draw(st.sampled_from([1e-4, 1.0, 100.0])),
        grad_variance=rng.choice([0, 0.5, 1, 2, 1e-3], n) * scale,
        dissimilarity=draw(st.sampled_from([0, 0.1, 3])) * rng.uniform(0, 1, n),
    )
    tau = rng.integers(0, draw(st.integers(1, 6)), (intervals, n))
    tau[:, draw(st.sampled_from([1, 3, n])) :] = 0  # few clients
    return dtype, tau, cases.cast(c, dtype)


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_feasible_certified_and_not_above_others(problem, seed):
    dtype, tau, c = problem
    found = solve(tau, c, dtype)
    check_feasible(found, tau, c)
    assert (found.value < np.inf) == found.valid
    if not found.valid:
        return
    assert found.converged, found
    # In float32, W itself can lose digits where it is nearly 0.
    f, W = parts(found.rho, tau, c)
    loss = 100 * np.finfo(dtype).eps * (1 + 1 / W) if W > 0 else np.inf
    if loss > 0.01:
        return
    size = max(abs(f), float(c.distance)) / W
    np.testing.assert_allclose(found.value, f / W, rtol=0, atol=loss * size)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        other = bound(random_feasible(rng, tau, c), tau, c)
        assert f / W <= other + loss * size


# B > 0: few iterations are no longer best for W.
FRIENDLY = dict(lr=0.05, smoothness=1.0)


@pytest.mark.parametrize("scalars", [dict(smoothness=2.6), FRIENDLY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_certificate_rejects_everything_else(scalars, dtype):
    c = constants(**scalars | dict(weight_limit=3.0), grad_variance=np.arange(1.0, 7))
    tau = np.stack([TAU, TAU[::-1], TAU])
    found = solve(tau, c, dtype)

    def residual(rho, tau=tau, present=None):
        with precision(dtype):
            present = np.ones(tau.shape, bool) if present is None else present
            rho, tau = rho.astype(dtype), tau.astype(dtype)
            return float(certificate(rho, tau, cases.cast(c, dtype), present))

    small = 100 * np.finfo(dtype).eps
    assert residual(found.rho) == found.kkt_residual <= small
    rng = np.random.default_rng(0)
    for part in (0.01, 0.1, 1.0):
        for _ in range(20):
            other = random_feasible(rng, tau, c)
            mixed = (1 - part) * found.rho + part * other
            if np.abs(mixed - found.rho).max() > 1e-3:
                assert residual(mixed) > 1e-4
                assert bound(mixed, tau, c) > found.value * (1 - small)
    # Not feasible, though the slopes may be right.
    assert residual(found.rho * 1.01) > 5e-3
    moved = found.rho.copy()
    moved[0, :2] += np.array([-0.6, 0.6])
    assert residual(moved) > 0.05
    assert residual(0 * found.rho) >= 0.99
    absent, uniform = np.where(np.arange(6) == 5, 0, tau), np.full(tau.shape, 1 / 6)
    assert residual(uniform, absent) > 0.1
    assert residual(uniform, present=absent > 0) > 0.1
