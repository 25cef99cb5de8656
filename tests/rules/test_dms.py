"""DMS: hand-worked numbers, rational arithmetic, statistics, limits, gradients."""

import functools
from fractions import Fraction
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import problems
from tsfl_jax.rules import dms
from tsfl_jax.theory import simplex
from tsfl_jax.types import UserError

KEY = jax.random.key(0)
DTYPES = (np.float32, np.float64)
CONSTANTS = dict(lr=0.1, smoothness=2.0, grad_sq_norm=3.0, grad_variance=5.0)
SIZES = (1, 8)  # few, because every size is another compilation
modest = settings(max_examples=50, deadline=None)
affine_weights = jax.jit(dms.affine_weights, compiler_options=problems.AS_USERS)
dms_weights = jax.jit(dms.dms_weights, compiler_options=problems.AS_USERS)
select = jax.jit(dms.select)


@functools.partial(jax.jit, compiler_options=problems.AS_USERS)
def project(v, mask, upper):
    """The projection of v by itself."""
    return simplex.project(v, jnp.ones(()), mask, jnp.minimum(upper, 1))


def precision(dtype):
    return jax.enable_x64(dtype == np.float64)


def exactly(values) -> list[Fraction]:
    """Floating numbers as they are, without another rounding."""
    return [Fraction(float(x)) for x in values]


def exact_projection(v: list[Fraction], upper: Fraction) -> list[Fraction]:
    """Breakpoint search for Σ clip(v − λ, 0, u) = 1 in rational arithmetic."""
    if not v or len(v) * upper <= 1:
        return [Fraction(1, len(v)) for _ in v]

    def clipped(level):
        return [min(max(x - level, Fraction(0)), upper) for x in v]

    for low, high in pairwise(sorted({x - d for x in v for d in (upper, 0)})):
        most, least = sum(clipped(low)), sum(clipped(high))
        if most >= 1 >= least:
            part = (most - 1) / (most - least) if most > least else Fraction(0)
            return clipped(low + part * (high - low))
    raise AssertionError("Σρ = 1 must be crossed")


def exact_weights(tau, selected, coupling, limit) -> list[Fraction]:
    """ρ for finite c; `limit` is θ or inf."""
    chosen = [i for i, t in enumerate(tau) if selected[i] and t > 0]
    part = exactly(tau[i] for i in chosen)
    rho = [Fraction(0)] * len(tau)
    if chosen:
        mean, c = sum(part) / len(part), Fraction(float(coupling))
        v = [Fraction(1, len(part)) + c * (t - mean) for t in part]
        upper = Fraction(1)
        if np.isfinite(limit):
            upper = min(upper, Fraction(float(limit)) / len(tau))
        for i, x in zip(chosen, exact_projection(v, upper), strict=True):
            rho[i] = x
    return rho


@st.composite
def situations(draw):
    """(dtype, τ, selected, c, θ), in the dtype's own numbers."""
    dtype = draw(st.sampled_from(DTYPES))
    n = draw(st.sampled_from(SIZES))
    iterations = draw(
        st.sampled_from(
            [
                st.integers(0, 9),
                st.floats(0, 50, width=32, allow_subnormal=False),
                st.sampled_from([0.0, 0.1, 3.0, 3.0 + 2**-20]),  # ties, nearly ties
            ]
        )
    )
    tau = draw(st.lists(iterations, min_size=n, max_size=n))
    selected = draw(st.lists(st.sampled_from([True, True, False]), min_size=n))
    selected = (selected + [True] * n)[:n]
    coupling = draw(
        st.one_of(st.floats(0, 0.3), st.floats(-8, 30).map(lambda x: 10.0**x))
    )
    limit = draw(st.one_of(st.just(np.inf), st.floats(1, n + 0.5)))
    return (
        np.array(tau, dtype),
        np.array(selected),
        dtype(coupling),
        dtype(limit),
    )


# ---- Equations (7), (8), (9) ----


def test_threshold_and_filter_probability_of_case_1():
    tau = jnp.array([1] * 10 + [4] * 10)
    assert dms.threshold(tau) == 2.5
    expected = np.array([0.375] * 10 + [0.0] * 10, np.float32)
    np.testing.assert_array_equal(dms.filter_probability(tau), expected)


def test_absent_clients_count_in_the_threshold():
    zeros = jnp.zeros(4)
    np.testing.assert_array_equal(dms.filter_probability(zeros), zeros)
    assert np.isfinite(jax.jit(jax.jacobian(dms.filter_probability))(zeros)).all()
    assert dms.threshold([0, 0, 1, 7]) == 2.0
    expected = np.array([2 / 7, 2 / 7, 1 / 7, 0], np.float32)
    np.testing.assert_array_equal(dms.filter_probability([0, 0, 1, 7]), expected)


def test_a_client_exactly_at_the_threshold_is_safe():
    """Also after rounding: N = 3, 7, 49 have no exact 1/N, 0.1 no exact mean."""
    probability = jax.jit(dms.filter_probability)
    for n in (3, 7, 49):
        for middle in range(1, 9):
            tau = np.full(n, middle)
            tau[0], tau[-1] = middle - 1, middle + 1
            p = np.asarray(probability(tau))
            assert p[0] > 0 and not p[1:].any(), tau
        assert not np.asarray(probability(np.full(n, 0.1, np.float32))).any()


def test_selection_frequencies_are_one_minus_p():
    """20,000 keys, five standard deviations; clients draw independently."""
    tau = jnp.array([0, 1, 1, 3, 4, 9])  # K = 3, P = 3/9, 2/9, 2/9, 0, 0, 0
    draws = 20_000
    keys = jax.random.split(KEY, draws)
    kept = np.asarray(jax.jit(jax.vmap(lambda key: dms.select(key, tau)))(keys))
    assert not kept[:, 0].any()  # τ = 0 delivers nothing
    assert kept[:, 3:].all()  # τ ≥ K, the one at K included

    def check(events, probability):
        deviation = np.sqrt(probability * (1 - probability) / draws)
        assert abs(events.mean() - probability) < 5 * deviation

    check(kept[:, 1], 7 / 9)
    check(kept[:, 2], 7 / 9)
    check(kept[:, 1] & kept[:, 2], (7 / 9) ** 2)


# ---- Corollary 1: the coupling ----


def test_coupling_by_hand():
    tau = [0, 1, 2, 4]  # H = 4, N = 4
    c = dms.coupling(tau, lr=0.25, smoothness=2.0, grad_sq_norm=3.0, grad_variance=0.75)
    assert c == 0.25 * 2 * 3 * 3 / (2 * 4 * 0.75) == 0.75
    for variance in (0.0, 1.0):  # without a second iteration
        assert dms.coupling([0.0, 1], **CONSTANTS | {"grad_variance": variance}) == 0


def test_coupling_of_tiny_gradients():
    """In float32 the square of σ² underflows, σ² does not."""
    tiny = dict(lr=0.5, smoothness=1.0)

    def rule(variance):
        return dms.coupling([1, 3], grad_sq_norm=1e-29, grad_variance=variance, **tiny)

    c, slope = jax.jit(jax.value_and_grad(rule))(1e-28)
    np.testing.assert_allclose([c, slope], [0.025, -0.025e28], rtol=1e-6)


def test_coupling_without_variance_or_gradient():
    coupling = jax.jit(dms.coupling)

    def both(**changes):
        constants = CONSTANTS | changes
        c = coupling(jnp.array([1, 2, 5]), **constants)
        return c, dms_weights(KEY, jnp.array([3, 3, 5, 5]), **constants)

    c, rho = both(grad_variance=0.0)
    assert c == np.finfo(np.float32).max
    np.testing.assert_array_equal(rho, np.array([0, 0, 0.5, 0.5], np.float32))
    c, rho = both(grad_variance=0.0, grad_sq_norm=0.0)
    kept = np.asarray(select(KEY, jnp.array([3, 3, 5, 5])))
    assert c == 0
    np.testing.assert_array_equal(rho, (kept / kept.sum()).astype(np.float32))
    assert both(grad_sq_norm=1e38, smoothness=1e6)[0] == np.finfo(np.float32).max


# ---- Weights ----


@modest
@given(situations())
def test_affine_weights_are_the_exact_ones(info):
    tau, selected, coupling, limit = info
    with precision(tau.dtype.type):
        rho = affine_weights(tau, selected, coupling, limit)
    rho = np.asarray(rho)
    assert rho.dtype == tau.dtype
    eps = np.finfo(tau.dtype).eps
    exact = exact_weights(tau, selected, coupling, limit)
    error = [float(abs(a - b)) for a, b in zip(exactly(rho), exact, strict=True)]
    assert max(error) <= 8 * eps * max(1, tau.max())

    inside = selected & (tau > 0)
    assert not rho[~inside].any()
    if not inside.any():
        return
    n, upper = tau.size, tau.dtype.type(limit) / tau.dtype.type(tau.size)
    assert abs(float(sum(exactly(rho))) - 1) <= 8 * eps * n * max(1, tau.max())
    assert (rho >= 0).all()
    if inside.sum() * upper > 1 + 8 * eps:
        assert (rho <= upper).all()
    by_tau = np.argsort(tau[inside])
    assert (np.diff(rho[inside][by_tau]) >= 0).all(), "ρ must not fall with τ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 20.0])
def test_feasible_affine_weights_are_the_closed_form_to_the_bit(dtype, limit):
    rng = np.random.default_rng(0)
    cases = 0
    with precision(dtype):
        compiled = jax.jit(
            functools.partial(dms.affine_weights, weight_limit=limit),
            compiler_options=problems.AS_USERS,
        )
        for _ in range(60):
            tau, c = rng.integers(0, 9, 20).astype(dtype), dtype(rng.uniform(0, 0.02))
            inside = (rng.random(20) < 0.8) & (tau > 0)
            size = dtype(inside.sum())
            mean = tau[inside].sum(dtype=dtype) / size
            closed = np.where(inside, dtype(1) / size + c * (tau - mean), dtype(0))
            if (closed >= 0).all():
                cases += 1
                np.testing.assert_array_equal(compiled(tau, inside, c), closed)
                if cases < 3:  # operation by operation it is the same
                    rho = dms.affine_weights(tau, inside, c, limit)
                    np.testing.assert_array_equal(rho, closed)
    assert cases > 20


@pytest.mark.parametrize("coupling", [1e5, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_huge_coupling_gives_all_to_the_largest(coupling, dtype):
    """0.1 has no exact mean: c times its rounding must not show."""
    for tau in ([0.1] * 7, [2, 3, 3], [1, 0.1, 1], [1e-3, 1e6, 1e6]):
        tau = np.array(tau + [0] * (8 - len(tau)), dtype)
        with precision(dtype), jax.debug_nans(True):
            given = tau, tau > 0, dtype(coupling), dtype(np.inf)
            rho = np.asarray(affine_weights(*given))
        best = tau == tau.max()
        np.testing.assert_allclose(rho, best / best.sum(), rtol=1e-6)
        assert not rho[~best].any()


# ---- The projection ----


def test_projection_survives_rounding_where_the_limit_is_just_met():
    """u next to 1/k: whether k or k + 1 entries carry all hangs on the last bit."""
    cases, n = 5000, 64
    rng = np.random.default_rng(1)
    k = rng.integers(2, 40, cases)
    upper = np.float32(1) / k.astype(np.float32)
    for _ in range(2):
        lower = np.nextafter(upper, np.float32(0))
        upper = np.where(rng.random(cases) < 0.5, lower, upper)
    entry, k = np.arange(n)[None], k[:, None]
    almost = upper[:, None] * (1 - rng.integers(0, 8, (cases, n)) * 2.0**-24)
    far, below = rng.choice([0.5, 1.0], (cases, 1)), rng.choice([0, -1], (cases, 1))
    large = np.where(rng.random((cases, n)) < far, 1e3 * (1 + entry), almost)
    small = np.where(entry == k, 0, below * rng.random((cases, n)))
    v = np.where(entry < k, large, small).astype(np.float32)
    many = jax.vmap(project)
    rho = np.asarray(many(v, np.ones_like(v, bool), upper))
    np.testing.assert_allclose(rho.sum(axis=1, dtype=np.float64), 1, atol=1e-6)
    assert (rho >= 0).all() and (rho <= upper[:, None]).all()
    rho = np.asarray(many(v, entry < k, upper))
    equal = np.where(entry < k, np.float32(1) / k.astype(np.float32), np.float32(0))
    np.testing.assert_array_equal(rho, equal)


# ---- Everything together ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [np.inf, 1.5])
def test_dms_weights_are_algorithm_1(dtype, limit):
    """The formulas once more in rational numbers, for the clients that were drawn."""
    tau = np.array([1, 1, 2, 0, 3, 4, 4, 5])
    cut = 0
    for seed in range(10):
        key = jax.random.key(seed)
        with precision(dtype):
            rho = dms_weights(key, tau.astype(dtype), **CONSTANTS, weight_limit=limit)
            kept = np.asarray(select(key, tau))
        assert rho.dtype == dtype
        c = 0.1 * 2 * (5 - 1) * 3 / (2 * 8 * 5)
        exact = exact_weights(tau, kept, c, limit)
        tolerance = 32 * np.finfo(dtype).eps
        np.testing.assert_allclose(
            rho, [float(x) for x in exact], rtol=0, atol=tolerance
        )
        cut += kept.sum() < 7
    assert 0 < cut <= 10


def test_all_weights_are_zero_only_if_no_client_worked():
    zeros = dms_weights(KEY, jnp.zeros(8, int), **CONSTANTS)
    np.testing.assert_array_equal(zeros, np.zeros(8, np.float32))
    rule = jax.jit(jax.vmap(lambda k, t: dms.dms_weights(k, t, **CONSTANTS)))
    rng = np.random.default_rng(0)
    tau = rng.integers(0, 5, (500, 6)) * (rng.random((500, 6)) < 0.3)
    rho = np.asarray(rule(jax.random.split(KEY, 500), tau))
    at_work = tau.any(axis=1)
    assert 0 < at_work.sum() < 500
    np.testing.assert_allclose(rho.sum(axis=1), at_work, atol=1e-6)
    assert not rho[tau == 0].any()


# ---- Gradients ----


@functools.partial(jax.jit, static_argnums=2)
@jax.value_and_grad
def loss_and_slope(scalars, tau, limited):
    constants = dict(zip(CONSTANTS, scalars, strict=False))
    limit = scalars[4] if limited else None
    rho = dms.dms_weights(KEY, tau, **constants, weight_limit=limit)
    return (rho * jnp.cos(jnp.arange(tau.shape[0]) * 1.7)).sum()


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("lr", [0.005, 0.02, 0.07])
def test_gradients_equal_finite_differences(lr, limited):
    """From all free, over some at 0 or at θ/N, to both; away from the kinks."""
    scalars = np.array([lr, 2.0, 3.0, 0.7, 1.85])
    tau = np.array([3, 4, 5.5, 6, 6.25, 7, 9])
    with precision(np.float64):
        slope = np.asarray(loss_and_slope(scalars, tau, limited)[1])
        for i, x in enumerate(scalars):
            step = np.zeros(5)
            step[i] = 1e-6 * x
            above, below = (
                loss_and_slope(scalars + change, tau, limited)[0]
                for change in (step, -step)
            )
            rise = (above - below) / (2e-6 * x)
            np.testing.assert_allclose(slope[i], rise, rtol=1e-5, atol=1e-8)
    assert slope[:4].all(), "the weights must react to every constant"
    assert bool(slope[4]) == (limited and lr > 0.005)


@pytest.mark.parametrize("tau", [[0, 0, 0], [0, 1, 0], [2, 2, 5], [7, 7, 7]])
@pytest.mark.parametrize("limited", [False, True])
def test_gradients_are_finite_everywhere(tau, limited):
    """Kinks, ties, σ² = 0, overflow: no NaN from a branch that was not taken."""
    tau = np.array(tau, np.float32)
    for lr in (1e-30, 0.1, 1e30):
        for square in (0.0, 1e-20, 1.0, 1e38):
            for variance in (0.0, 1e-38, 1e-25, 1e-12, 1.0, 1e38):
                scalars = np.array([lr, 1.0, square, variance, 1.5], np.float32)
                # A slope beyond the dtype's range may be inf, but nothing is NaN.
                found = np.asarray(loss_and_slope(scalars, tau, limited)[1])
                assert not np.isnan(found).any(), scalars
                if variance == 0:  # c is at one of its ends
                    assert not found[:4].any(), scalars


# ---- At the border ----


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tau": [1, -2]}, r"tau\[1\] = -2"),
        ({"lr": 0.0}, "lr = 0.0"),
        (lambda: dms.select(KEY, [1, 2], [1]), "client"),
        (lambda: dms.affine_weights([1, 2], [True, True], np.nan), "coupling"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(change, named):
    with pytest.raises(UserError, match=rf"^{named}.*expected") as error:
        if callable(change):
            change()
        else:
            dms.dms_weights(KEY, **{"tau": [1, 2], **CONSTANTS, **change})
    assert "\n" not in str(error.value)
