"""Staleness: hand-worked numbers, a loop, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tsfl_jax
from tests import problems
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules import averages as staleness
from tsfl_jax.rules.averages import KINDS as STALENESS

modest = settings(max_examples=60, deadline=None)
staleness_factor = jax.jit(staleness.staleness_factor)
N = 5  # clients in the random tests: one size, one compilation


def slow_staleness(lag, kind, a, b):
    def factor(x):
        if STALENESS[kind] == "polynomial":
            return (x + 1.0) ** -a
        if STALENESS[kind] == "hinge":
            return 1.0 if x <= b else 1 / (a * (x - b) + 1)
        return (np.e / 2) ** -x if STALENESS[kind] == "exponential" else 1.0

    return np.array([factor(float(x)) for x in lag])


lags = st.lists(st.integers(0, 400), min_size=N, max_size=N).map(np.array)


@modest
@given(lags, st.integers(0, 3), st.floats(0, 10), st.integers(0, 20))
def test_staleness_agrees_with_the_loop(lag, kind, a, b):
    expected = slow_staleness(lag, kind, float(np.float32(a)), b)
    found = staleness_factor(lag, kind, jnp.float32(a), b)
    np.testing.assert_allclose(found, expected, rtol=5e-5, atol=1e-30)
    assert found.dtype == jnp.float32
    order = np.argsort(lag)  # the later, the less; nothing counts more than 1
    assert np.all(np.diff(np.asarray(found)[order]) <= 0) and found.max() <= 1


def test_parameters_of_other_kinds_are_not_read():
    """NaN there reaches neither the value nor a gradient, with a vmapped kind."""
    lag = jnp.array([0, 2, 9])
    a = jnp.array([jnp.nan, 0.5, 0.5, jnp.nan])
    b = jnp.array([jnp.nan, jnp.nan, 2.0, jnp.nan])

    def factors(kind, a, b):
        value = staleness.staleness_factor(lag, kind, a, b)
        return value, value

    slopes = jax.jit(jax.vmap(jax.jacobian(factors, (1, 2), has_aux=True)))
    (by_a, by_b), values = slopes(jnp.arange(4), a, b)
    for kind in range(4):
        expected = slow_staleness([0, 2, 9], kind, float(a[kind]), float(b[kind]))
        np.testing.assert_allclose(values[kind], expected, rtol=1e-6)
    np.testing.assert_allclose(by_a[1], -np.log([1, 3, 10]) * values[1], rtol=1e-6)
    # 1/(a(l − b) + 1) at 9: 1/4.5.
    np.testing.assert_allclose(by_a[2], [0, 0, -7 / 4.5**2], rtol=1e-6)
    np.testing.assert_allclose(by_b[2], [0, 0, 0.5 / 4.5**2], rtol=1e-6)
    assert not by_a[::3].any() and not by_b[jnp.array([0, 1, 3])].any()


def test_very_late_updates_keep_their_proportions():
    """(e/2)^−500 is 0 in float32, but (e/2)^−500 : (e/2)^−502 is not 0 : 0."""
    hp = problems.hparams(staleness__kind=staleness.EXPONENTIAL)
    updates, lag = {"w": jnp.array([[1.0], [0.0], [9.0]])}, [500, 502, 3]
    given = {"tau": [1, 1, 0], "size": [1, 2, 1], "hparams": hp}
    rule, start = AGGREGATORS["fedavg"], {"w": jnp.zeros(1)}
    moved, _ = tsfl_jax.aggregate(rule, updates, start, lag=lag, **given)
    expected = 1 / (1 + 2 * (np.e / 2) ** -2)
    np.testing.assert_allclose(moved["w"], [expected], rtol=1e-5)
