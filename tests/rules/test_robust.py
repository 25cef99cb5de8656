"""Robust aggregates: hand-worked numbers, float64 loops, properties, limit cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tsfl_jax.rules import robust
from tsfl_jax.types import UserError

N = 7  # clients in the random tests: one size, one compilation
modest = settings(max_examples=60, deadline=None)
median = jax.jit(robust.coordinate_median)
trimmed = jax.jit(robust.trimmed_mean)
weiszfeld = jax.jit(robust.geometric_median, static_argnames="iterations")
krum = jax.jit(robust.krum)
multi_krum = jax.jit(robust.multi_krum)
RULES = {  # name -> (models, present) -> aggregate
    "median": robust.coordinate_median,
    "trimmed": lambda x, p: robust.trimmed_mean(x, p, 0.2),
    "geometric": lambda x, p: robust.geometric_median(x, p),
    "geometric_mean": lambda x, p: robust.geometric_mean(x, p),
    "krum": lambda x, p: robust.krum(x, p, 0.2),
    "multi_krum": lambda x, p: robust.multi_krum(x, p, 0.2),
}
COMPILED = {name: jax.jit(rule) for name, rule in RULES.items()}
every_rule = pytest.mark.parametrize("name", RULES)


def tree(flat):
    """``[N, 7]`` numbers as a pytree with leaves of three ranks."""
    flat = jnp.asarray(flat)
    return {"b": flat[:, 0], "w": (flat[:, 1:5].reshape(-1, 2, 2), flat[:, 5:])}


def flat(models):
    """What `tree` makes of one model, as ``[7]`` float64 again."""
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(models)]
    return np.concatenate(leaves)


def whole(low=-9, high=9):
    """``[N, 7]`` small integers: float32 sums and squares of them are exact."""
    row = st.lists(st.integers(low, high), min_size=7, max_size=7)
    rows = st.lists(row, min_size=N, max_size=N)
    return rows.map(lambda x: np.array(x, np.float32))


def real():
    """``[N, 7]`` floats without ties."""
    seeds = st.integers(0, 10**6).map(np.random.default_rng)
    return seeds.map(lambda rng: rng.normal(size=(N, 7)).astype(np.float32))


someone = st.lists(st.booleans(), min_size=N, max_size=N).filter(any).map(np.array)
trims = st.sampled_from([0.0, 0.1, 0.2, 0.25, 1 / 3, 0.4, 0.49])


def spoiled(x, present):
    """The rows of the absent hold NaN and infinity."""
    x = np.array(x)
    x[~present] = np.nan
    if (~present).any():
        x[np.argmin(present), ::2] = np.inf
    return x


# ---- Hand-worked numbers ----


def test_krum_by_hand():
    """0 1 3 4.5 90, f = 1, 2 nearest: 1 + 9, 1 + 4, 4 + 2.25, 2.25 + 12.25, far."""
    models = jnp.array([90.0, 4.5, 3.0, 1.0, 0.0])
    assert krum(models, jnp.ones(5, bool), 0.2) == 1.0
    assert multi_krum(models, jnp.ones(5, bool), 0.2) == 2.0  # sums 5 and 6.25
    # f = 0, three: 1 + 9 + 20.25, 1 + 4 + 12.25, 4 + 2.25 + 9, 2.25 + 12.25 + 20.25
    assert krum(models, jnp.ones(5, bool), 0.0) == 3.0
    best = multi_krum(models, jnp.ones(5, bool), 0.0)
    np.testing.assert_allclose(best, 4 / 3, rtol=1e-6)


@pytest.mark.parametrize("n", [10, 49])
def test_left_out_is_exact(n):
    """0.1·10, 0.3·10, k/49·49: an integer in spite of two roundings."""
    k = np.arange((n - 1) // 2 + 1)
    np.testing.assert_array_equal(robust._left_out(k / n, jnp.int32(n)), k)
    below = np.float32(k / n) * np.float32(1 - 1e-6)
    found = robust._left_out(below, jnp.int32(n))
    np.testing.assert_array_equal(found, np.maximum(k - 1, 0))
    assert robust._left_out(0.3, jnp.int32(n)) == 3 * n // 10


# ---- Against the references in float64 ----


@modest
@given(whole(), someone, trims)
def test_order_statistics_agree_with_numpy(x, present, trim):
    """Integers: Krum's sums are exact, so ties are the same ties."""
    models, rows = tree(spoiled(x, present)), x[present].astype(float)
    np.testing.assert_array_equal(flat(median(models, present)), np.median(rows, 0))
    for name, rule in (("trimmed_mean", trimmed), ("multi_krum", multi_krum)):
        expected = reference.robust_mean(name, rows, trim)
        found = flat(rule(models, present, trim))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    expected = reference.robust_mean("krum", rows, trim)
    np.testing.assert_array_equal(flat(krum(models, present, trim)), expected)


@modest
@given(real(), someone, st.sampled_from([1e-3, 2.0]))
def test_weiszfeld_agrees_with_numpy(x, present, smoothing):
    rows = x[present].astype(float)
    expected = reference.robust_mean("geometric_median", rows, 0, smoothing)
    models = tree(spoiled(x, present))
    found = flat(weiszfeld(models, present, iterations=8, smoothing=smoothing))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_weiszfeld_finds_the_minimum():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(N, 7)).astype(np.float32)
    w = flat(weiszfeld(tree(x), jnp.ones(N, bool), iterations=100))

    def cost(at):
        return np.sqrt(((x - at) ** 2).sum(axis=1)).sum()

    for _ in range(100):
        assert cost(w) <= cost(w + rng.normal(size=7) * 0.05) + 1e-5


# ---- Properties ----


@every_rule
@modest
@given(x=real(), order=st.permutations(range(N)), lost=st.integers(0, N))
def test_the_order_of_clients_does_not_matter(name, x, order, lost):
    """At most one absent: two neighbors count, so that Krum has no ties."""
    present, order = np.arange(N) != lost, np.array(order)
    rule = COMPILED[name]
    moved = rule(tree(spoiled(x, present)[order]), present[order])
    np.testing.assert_allclose(flat(rule(tree(x), present)), flat(moved), atol=2e-6)


@modest
@given(real(), st.integers(1, 2), st.floats(1e2, 1e6), st.integers(0, 10**6))
def test_far_outliers_are_ignored(x, bad, far, seed):
    """f = 1 or 2 of 7; n > 2f + 2, so that Krum's guarantee holds."""
    rng = np.random.default_rng(seed)
    evil = rng.permutation(N)[:bad]
    x[evil] += far * np.sign(rng.normal(size=7)).astype(np.float32)
    good = np.delete(x, evil, axis=0)
    present, trim = np.ones(N, bool), bad / N
    assert any(np.array_equal(flat(krum(tree(x), present, trim)), row) for row in good)
    for w in (
        flat(multi_krum(tree(x), present, trim)),
        flat(trimmed(tree(x), present, trim)),
        flat(median(tree(x), present)),
    ):
        assert np.all(w >= good.min(axis=0) - 1e-6)
        assert np.all(w <= good.max(axis=0) + 1e-6)
    w = flat(weiszfeld(tree(x), present, iterations=60))
    assert np.linalg.norm(w - good.mean(axis=0)) < 5


def test_distances_of_close_models_are_exact():
    """Apart by 2⁻¹² at 1000: in float32 a² − 2ab + b² would be 0 or noise."""
    step = 2.0**-12
    models = jnp.float32(1000) + step * jnp.array([[0.0], [7.0], [9.0], [10.0], [40.0]])
    assert krum(models, jnp.ones(5, bool), 0.2) == 1000 + 9 * step
    best = multi_krum(models, jnp.ones(5, bool), 0.2)
    # Half a unit in the last place.
    assert np.abs(best - (1000 + 9.5 * step)) <= 2.0**-13


@every_rule
def test_huge_outliers_give_no_nan(name):
    x = np.random.default_rng(0).normal(size=(N, 7)).astype(np.float32)
    x[0], x[3] = 1e30, -3e38
    w = flat(COMPILED[name](tree(x), jnp.ones(N, bool)))
    assert np.isfinite(w).all()
    if name == "krum":  # no finite sum: still one that is present
        x = np.diag(np.linspace(1e30, 2e30, N)).astype(np.float32)
        present = np.arange(N) > 1
        assert flat(COMPILED[name](tree(spoiled(x, present)), present)).max() == x[2, 2]


# ---- Limit cases ----


@every_rule
def test_one_client_is_returned_as_it_is_and_none_gives_zeros(name):
    x = np.random.default_rng(0).normal(size=(N, 7)).astype(np.float32)
    for i in (0, 4, N - 1):
        present = np.arange(N) == i
        w = COMPILED[name](tree(spoiled(x, present)), present)
        np.testing.assert_array_equal(flat(w), x[i])
    alone = COMPILED[name](tree(x[:1]), jnp.ones(1, bool))  # N = 1: no pairs at all
    np.testing.assert_array_equal(flat(alone), x[0])
    nothing = COMPILED[name](tree(np.full((N, 7), np.nan, np.float32)), present & False)
    np.testing.assert_array_equal(flat(nothing), np.zeros(7))


def test_what_does_not_fit_is_refused():
    words = r"\['count'\] is int32 \[3\]: expected floating"
    with pytest.raises(UserError, match=words):
        robust.coordinate_median({"count": jnp.arange(3)}, jnp.ones(3, bool))


def test_the_geometric_mean_by_hand():
    rows = jnp.array(
        [[1.0, -2.0, 0.0, 3.0], [3.0, 2.0, 0.0, 3.0], [7.0, 2.0, 5.0, 3.0]]
    )
    present = jnp.ones(3, bool)
    found = COMPILED["geometric_mean"]({"w": rows}, present)["w"]
    # s = 3: 1 + |w|/s are 4/3, 2 and 10/3, whose product's third root is 2.0711; of the
    # second, s = 2, logs are −1, 1 and 1 times ln 2; s = 0; equal ones stay.
    root = (4 / 3 * 2 * 10 / 3) ** (1 / 3)
    expected = [3 * (root - 1), 2 * (2 ** (1 / 3) - 1), 0.0, 3.0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
