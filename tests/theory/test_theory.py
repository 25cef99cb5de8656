"""Theorems 1 and 4: numbers by hand, loops, limits, and what is wrong in the print."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import problems
from tests.theory import cases
from tests.theory.cases import DTYPES, averaged, precision
from tsfl_jax.theory import bounds, convex, minimum, simplex
from tsfl_jax.theory.bounds import BoundConstants
from tsfl_jax.types import UserError

modest = settings(max_examples=30, deadline=None)
bound = jax.jit(bounds.theorem1_bound, static_argnums=3)
derivative = jax.jit(bounds.printed_derivative, static_argnums=3)
slopes_of_bound = jax.jit(
    jax.grad(lambda *args: bounds.theorem1_bound(*args).total, argnums=(0, 2))
)


def constants(n, **changes):
    """Those of the example by hand, of which the first n clients."""
    default = dict(lr=0.1, smoothness=5.0, grad_sq_norm=2.0, weight_limit=1.2)
    default |= dict(distance=0.5, grad_variance=[2, 3], dissimilarity=[1, 2])
    return cases.constants(n, default, **changes)


HAND_RHO = np.array([[0.5, 0.5], [0.4, 0.6]])
HAND_TAU = np.array([[1, 3], [2, 1]])


@st.composite
def situations(draw):
    """(ρ, τ, constants) with ηL(1+θ) ≥ 1 and Σρ = 1, W of either sign."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    known = cases.random_constants(rng, 3, highest=1.1)
    return rng.dirichlet(np.ones(3), 2), rng.integers(0, 6, (2, 3)), known


# ---- Theorem 1 ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_by_hand(dtype):
    """N = 2, T = 2, η = 0.1, L = 5, G² = 2, θ = 1.2, H = 3.

    ηL(1+θ) = 1.1, A = 0.1(10·0.1 + 0.1) = 0.11, B = −0.1, C = 0.001·5·2·2 = 0.02.
    X = 0.02(0.5·1 + 0.5·9 + 0.4·4 + 0.6·1) = 0.144
    Y = 0.01·2{2(0.25·1 + 0.16·2) + 3(0.25·3 + 0.36·1)} = 0.02(1.14 + 3.33) = 0.0894
    Z = 0.11{1(0.5 + 0.8) + 2(1.5 + 0.6)} = 0.605
    W = 1 − 0.1(0.5 + 1.5 + 0.8 + 0.6) = 0.66
    """
    with precision(dtype):
        known = cases.cast(constants(2), dtype)
        found = bound(HAND_RHO.astype(dtype), HAND_TAU.astype(dtype), known)
    items = np.array([0.5, 0.144, 0.0894, 0.605])
    tolerance = dict(rtol=50 * np.finfo(dtype).eps)
    np.testing.assert_allclose(found[:4], items / 0.66, **tolerance)
    np.testing.assert_allclose(found.total, items.sum() / 0.66, **tolerance)
    np.testing.assert_allclose(found.W, 0.66, **tolerance)
    assert found.total.dtype == found.W.dtype == dtype
    assert bool(found.limit_holds) and bool(found.valid)


def test_coefficients_by_hand():
    for repaired, A in ((False, 0.11), (True, 1.1)):
        found = bounds.coefficients(constants(2), 3, repaired)
        np.testing.assert_allclose(found, [A, -0.1, 0.02], rtol=1e-6)
    assert bounds.coefficients(constants(2), 1).C == 0
    assert bounds.coefficients(constants(2), 0).C == 0


@modest
@given(situations(), st.booleans())
def test_bound_is_that_of_loops(info, repaired):
    rho, tau, known = info
    with precision(np.float64):
        found = jax.tree.map(np.asarray, bound(rho, tau, known, repaired))
    X, Y, Z, W = cases.by_loops(rho, tau, known, repaired)
    np.testing.assert_allclose(found.W, W, rtol=1e-10, atol=1e-12)
    if abs(W) > 1e-6:
        items = np.array([known.distance, X, Y, Z]) / W if W > 0 else np.full(4, np.inf)
        np.testing.assert_allclose(found[:4], items, rtol=1e-8, atol=1e-15)
        np.testing.assert_allclose(found.total, items.sum(), rtol=1e-8)
        # Definition 1.3 makes B ≤ 0 ≤ A, so nothing is negative and nothing is gained.
        assert min(found[:4]) >= 0 and found.total >= known.distance * (1 - 1e-9)
    inside = bool((rho <= known.weight_limit / tau.shape[1] * (1 + 1e-12)).all())
    assert bool(found.limit_holds) == inside
    assert bool(found.valid) == (inside and W > 0)


@pytest.mark.parametrize("theta", [2.0, 1.6])  # B = −0.5, −0.3; Σρτ = 3.4
def test_void_where_w_is_not_positive(theta):
    known = constants(2, weight_limit=theta)
    found = bound(HAND_RHO, HAND_TAU, known)
    assert found.W < 0 and np.isinf(found[:5]).all() and min(found[:5]) > 0
    assert bool(found.limit_holds) and not bool(found.valid)
    for slope in jax.tree.leaves(slopes_of_bound(HAND_RHO, HAND_TAU, known)):
        np.testing.assert_array_equal(slope, 0)


def test_limit_of_definition_1_3():
    def holds(rho, **changes):
        rho, tau = np.array([rho, [0, 0]]), np.array([[1, 1], [0, 0]])
        found = bound(rho, tau, constants(2, **changes))
        assert bool(found.valid) == bool(found.limit_holds)
        return bool(found.limit_holds)

    assert holds([0.4, 0.6])  # θ/N = 0.6, up to rounding
    assert not holds([0.39, 0.61])
    # ηL(1+θ) = 0.99 and 1, of which the second is not exact.
    assert not holds([0.5, 0.5], lr=0.09)
    assert holds([0.5, 0.5], lr=0.1, smoothness=1.0, weight_limit=9.0)


# ---- The slip in Theorem 1 ----


@pytest.mark.parametrize(
    ("n", "tau", "L", "lr", "theta"),
    [
        (2, [8, 1], 1.0, 0.01, 99.0),
        (100, [8, 1], 1.0, 0.01, 99.0),  # θ is below N
        (20, [2, 1], 10.0, 1 / 210, 20.0),  # θ = N
    ],
)
def test_theorem_1_as_printed_fails_for_a_convex_quadratic(n, tau, L, lr, theta):
    """F_i = (L/2)(w ∓ 1)², σ = 0, ρ = 1/N, so w⁰ = w* = 0; ηL(1+θ) = 1, so W = 1.

    With q = 1 − ηL, w¹ = {(1 − q^τ_1) − (1 − q)}/2 = ∇F(w¹)/L, and G² = L², at w = 0.
    For τ = 8, 1 and L = 1: w¹ = 0.0336, X = 1e-6·7·(64 + 1)/2 = 2.275e-4, Z =
    1e-4·(8 + 1)/2 = 4.5e-4. For τ = 2, 1 and L = 10: w¹ = q(1 − q)/2 = 10/441, whose
    square is 5.14e-4, X = η³·10·1·100·(4 + 1)/2 = 2.70e-4, Z = η²(2 + 1)/2 = 3.40e-5.
    """
    most, q = tau[0], 1 - lr * L
    rho, tau = np.full((1, n), 1 / n), np.resize(tau, (1, n))
    optimum = np.resize([1.0, -1.0], n)
    w = averaged([lambda w, c=c: w - c for c in optimum], rho, tau, 0.0, lr * L)
    assert w == pytest.approx(((1 - q**most) - (1 - q)) / 2)
    known = BoundConstants(lr, L, L**2, theta, 0.0, np.zeros(n), optimum**2)
    with precision(np.float64):
        printed, repaired = (bound(rho, tau, known, flag) for flag in (False, True))
    assert bool(printed.valid) and bool(repaired.valid)
    X, Z = lr**3 * L**3 * (most - 1) * (most**2 + 1) / 2, (most + 1) / 2
    assert printed.total == pytest.approx(X + lr**2 * Z)
    assert repaired.total == pytest.approx(X + Z)
    assert 1.6 * float(printed.total) < w**2 < float(repaired.total)


def test_the_inequality_of_the_proof_fails_where_the_loss_is_not_convex():
    """F = 1 − cos w + w²/100, L = 1.02, w* = 0: beyond a hill, w moves away from w*.

    One client, one step: ρ = 1, θ = 1, η = 1/(2L), so W = 1, and X = Y = Z = 0. This
    is step (c): the proof takes ⟨w − w*, ∇F⟩ ≥ 0 from "optimization theory". It breaks
    ‖w^T − w*‖² ≤ bound. Theorem 1 itself, ‖∇F(w^T)‖²/L² ≤ bound, cannot fail with one
    client: F does not rise, and ‖∇F‖²/L² ≤ 2(F − F*)/L ≤ ‖w⁰ − w*‖².
    """
    w, L = 4.0, 1.02
    g = math.sin(w) + w / 50
    assert w * g < 0 and 1 - math.cos(w) + w**2 / 100 > 0  # F(w*) = 0 is the least
    known = BoundConstants(0.5 / L, L, g * g, 1.0, w**2, np.zeros(1), np.zeros(1))
    for repaired in (False, True):
        found = bound(np.ones(1), np.array([1]), known, repaired)
        assert bool(found.valid) and found.total == pytest.approx(16, rel=1e-6)
    end = w - 0.5 / L * g
    assert end**2 > 18 and (math.sin(end) + end / 50) ** 2 / L**2 < 16


def test_theorem_1_fails_where_a_loss_is_not_convex():
    """‖∇F(w^T)‖²/L² itself, in either form, although all clients have the same optimum.

    N = 400 = θ, L = 1.02, η = 1/{L(1 + θ)}: Definition 1.3 with equality, W = 1. 80
    clients have F_i = 1 − cos w + w²/100 and τ = 60, the others F_i = (L/2)w² and τ =
    1, each its minimum at w* = 0, so Γ_i = 0 and Y = Z = 0. The clients that do more
    pull the model off w* = 0, into their valley near 2π, and up the others' losses.
    """
    N, T, L, w0 = 400, 200, 1.02, 3.5
    lr, wavy = 1 / (L * (N + 1)), np.arange(N) < 80
    w, most = w0, 0.0
    for _ in range(T):
        x = w
        for _ in range(60):
            g = math.sin(x) + x / 50
            most, x = max(most, g * g), x - lr * g
        most = max(most, (L * w) ** 2)
        w = 0.2 * x + 0.8 * (w - lr * L * w)
    slope = 0.2 * (math.sin(w) + w / 50) + 0.8 * L * w
    rho = np.full((T, N), 1 / N)
    tau = np.broadcast_to(np.where(wavy, 60, 1), (T, N))
    zeros = np.zeros(N)
    known = BoundConstants(lr, L, most, float(N), w0**2, zeros, zeros)
    with precision(np.float64):
        for repaired in (False, True):
            found = bound(rho, tau, known, repaired)
            assert bool(found.valid) and abs(found.W - 1) < 1e-9
            assert slope**2 / L**2 > 1.1 * found.total > 1.1 * w0**2


# ---- The proof of Theorem 2: the sign ----


def test_derivative_by_hand():
    """Of ρ_1^0 in the example: W·2η²Nσ²ρτ = 0.66·0.04·2·0.5 = 0.0264,

    [AΓτ + Cτ²]W = (0.11 + 0.02)0.66 = 0.0858, −Bτ·1.3384 = 0.13384.
    """
    for sign, slope in ((1, 0.24604), (-1, 0.07444)):
        found = derivative(HAND_RHO, HAND_TAU, constants(2), sign)
        np.testing.assert_allclose(found[0, 0], slope, rtol=1e-5)


def compare_signs(rho, tau, known):
    with precision(np.float64):
        W = float(bound(rho, tau, known).W)
        if W < 1e-3:
            return False
        slope = np.asarray(slopes_of_bound(rho, tau, known)[0]) * W**2
        plus, minus = (np.asarray(derivative(rho, tau, known, s)) for s in (1, -1))
    tolerance = dict(rtol=1e-8, atol=1e-13)
    np.testing.assert_allclose(plus, slope, **tolerance)
    assert (plus >= 0).all(), "each weight alone makes the bound larger"
    A, _, C = map(float, bounds.coefficients(known, int(tau.max())))
    bracket = A * known.dissimilarity * tau + C * tau.astype(float) ** 2
    # Apart by twice the bracket, where it is not 0.
    np.testing.assert_allclose(plus - minus, 2 * W * bracket, rtol=1e-4, atol=1e-12)
    return bool((abs(minus - slope) > 1e-3 * abs(slope)).any())


@modest
@given(situations())
def test_the_gradient_of_the_bound_has_a_plus(info):
    compare_signs(*info)


# Of the constants, nothing but these rounded values is known; they were fitted to them.
EXAMPLE_TAU = np.array([1, 2, 2, 3, 4, 4])
EXAMPLE = BoundConstants(0.03, 1.0, 0.1, 34.0, 1.0, np.full(6, 0.1), np.full(6, 0.2))


def test_the_sign_where_it_matters():
    """N = 6: minus is wrong, and weights that grow with τ are worse than equal ones."""
    equal, growing = np.full(6, 1 / 6), EXAMPLE_TAU / 16
    for rho in (equal, growing):
        assert compare_signs(rho, EXAMPLE_TAU, EXAMPLE)
    with precision(np.float64):
        found = [bound(r, EXAMPLE_TAU, EXAMPLE) for r in (growing, equal, np.eye(6)[0])]
    assert all(bool(x.valid) for x in found)
    np.testing.assert_allclose(
        [x.total for x in found], [1.0124, 1.0105, 1.0043], atol=5e-5
    )
    # The last is the least on the simplex: moving weight to another client is worse.
    with precision(np.float64):
        slope = slopes_of_bound(np.eye(6)[0], EXAMPLE_TAU, EXAMPLE)[0]
    assert (slope[1:] > slope[0]).all()


# ---- Theorem 4 ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_theorem_4_by_hand(dtype):
    """2ε − ηLV² = 1 − 0.1·2·3 = 0.4: 2·0.1·6/(5·0.4) = 0.6, 2·6/(0.1·5·0.4) = 60."""
    scalars = dict(lr=0.1, smoothness=2.0, epsilon=0.5, dissimilarity_sq=3.0)
    with precision(dtype):
        scalars = {name: dtype(x) for name, x in scalars.items()}
        found = jax.jit(bounds.theorem4_bound)(5, dtype(6), **scalars)
    assert found.printed.dtype == found.derived.dtype == dtype
    np.testing.assert_allclose(found[:2], [0.6, 60], rtol=20 * np.finfo(dtype).eps)
    assert bool(found.valid)


def test_theorem_4_is_void_for_large_steps():
    """η < 2ε/(V²L) = 1/4 fails at 1/4, where the denominator is exactly 0."""

    def derived(lr):
        scalars = dict(smoothness=2.0, epsilon=0.5, dissimilarity_sq=2.0)
        return bounds.theorem4_bound(5, 6.0, lr=lr, **scalars).derived

    rates = jnp.array([0.1, 0.2, 0.25, 0.5])
    values, slopes = jax.vmap(jax.value_and_grad(derived))(rates)
    np.testing.assert_array_equal(np.isfinite(values), [True, True, False, False])
    assert np.isfinite(slopes).all()
    np.testing.assert_array_equal(slopes != 0, [True, True, False, False])


@pytest.mark.parametrize("T", [1, 10, 100])
def test_theorem_4_as_printed_fails_for_gradient_descent(T):
    """F = w²/2 of one client, H = 1, L = ε = V = 1: η belongs in the denominator."""
    lr, w = 0.1, 2.0 * 0.9 ** np.arange(T)
    scalars = dict(lr=lr, smoothness=1.0, epsilon=1.0, dissimilarity_sq=1.0)
    found = bounds.theorem4_bound(T, w[0] ** 2 / 2, **scalars)
    assert found.printed < (w**2).mean() <= found.derived * (1 + 1e-6)
    np.testing.assert_allclose(found.printed, found.derived * lr**2, rtol=1e-6)


# ---- Heterogeneity degree ----


def test_heterogeneity_degree():
    degree = bounds.heterogeneity_degree
    assert degree(np.array([2, 4, 6])) == pytest.approx(8 / 3)
    assert isinstance(degree([1, 1]), float) and isinstance(degree((1, 3)), float)
    found = degree(np.array([[1, 4], [2, 2]], np.int32))
    assert isinstance(found, np.ndarray) and found.dtype == np.float64
    assert found.tolist() == [2.25, 0]
    found = jax.jit(degree)(jnp.array([[1, 4], [2, 2]]))
    np.testing.assert_array_equal(found, np.array([2.25, 0], np.float32))
    slope = jax.grad(degree)(jnp.array([1.0, 2.0, 6.0]))  # 2(τ_i − τ̄)/N
    np.testing.assert_allclose(slope, [-4 / 3, -2 / 3, 2], rtol=1e-6)


# ---- At the border ----


OUT_OF_RANGE = {
    r"constants.lr has shape \[1\]: expected \[\]": {"lr": [0.1]},
    r"tau\[1\] = -2: expected .*, finite local iterations ≥ 0": {"tau": [1, -2]},
    r"tau = \[\[1\], \[1, 2\]\]": {"tau": [[1], [1, 2]]},
    r"rho has shape \[1\]: expected \[2\]": {"rho": [0.5]},
    r"rho\[1\] = nan: expected .*finite": {"rho": [0.5, np.nan]},
}


@pytest.mark.parametrize("named", OUT_OF_RANGE)
def test_wrong_arguments_are_named_in_one_line(named):
    change = dict(OUT_OF_RANGE[named])
    tau = change.pop("tau", [1, 3])
    rho, known = change.pop("rho", tau), constants(2)._replace(**change)
    for function in (bounds.theorem1_bound, minimum.kkt_residual):
        with pytest.raises(UserError, match=named) as error:
            function(rho, tau, known)
        assert "expected" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("module", [bounds, convex, minimum, simplex])
def test_examples_in_the_docstrings(module):
    results = problems.run_examples(module)
    assert results.attempted and not results.failed
