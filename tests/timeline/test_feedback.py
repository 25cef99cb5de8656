"""Cohorts that are chosen while training: choices worked by hand and in float64."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from tests import reference_choice
from tsfl_jax.timeline import crowd, feedback
from tsfl_jax.timeline.cohort import CohortConfig, draw_cohort, make_cohorts
from tsfl_jax.types import Lots


def known_of(utility, last):
    return feedback.Known(jnp.array(utility, jnp.float32), jnp.array(last, jnp.int32))


def test_power_of_choice_takes_the_largest_losses():
    for loss, size, chosen in (
        ([0.5, 2.0, 1.0, 3.0], 2, [1, 3]),
        ([1.0, 1.0, 2.0, 1.0], 2, [0, 2]),  # of equal ones the first
        ([-3.0, -1.0, math.nan, math.inf], 2, [2, 3]),
    ):
        places = feedback.power_of_choice(jnp.array(loss), size)
        assert places.tolist() == chosen and places.dtype == jnp.int32


def candidates(held, d, sampler="power_of_choice", seed=0):
    everyone = crowd.make_crowd(len(held), seed, num_samples=np.array(held))
    return make_cohorts(everyone, CohortConfig(1, sampler, d))


def test_candidates_by_size_are_drawn_one_after_another():
    held, T = [1, 2, 3, 6], 6000
    cohorts = candidates(held, 2)
    count = collections.Counter(tuple(draw_cohort(cohorts, t)) for t in range(T))
    p = np.array(held) / 12
    expected = {
        (i, j): p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        for i, j in itertools.combinations(range(4), 2)
    }
    assert count.keys() == expected.keys() and sum(expected.values()) == pytest.approx(
        1
    )
    pairs = [(count[k], T * expected[k]) for k in expected]
    assert scipy.stats.chisquare(*zip(*pairs, strict=True)).pvalue > 1e-3


def test_utilities_by_hand():
    known = known_of([10, 20, 0, 30], [1, 2, 0, 3])
    utilities = jax.jit(feedback.utilities)
    found = utilities(known, jnp.array([1.0, 0.25, 1.0, 1.0]), 4)
    # From 9.99 to 30, nothing cut off: 3·19//20 is the last of three.
    stale = math.sqrt(0.1 * math.log(4))
    expected = [0.01 / 20.01 + stale, 0, 0, 1 + stale / math.sqrt(3)]
    expected[1] = (10.01 / 20.01 + stale / math.sqrt(2)) / 4
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The largest of twenty is whole; of 21 it is cut off at the second, not in U_max.
    many = known_of([*range(1, 20), 1000], [1] * 20)
    found = utilities(many, jnp.ones(20), 1)
    np.testing.assert_allclose(found[19], 1, rtol=1e-5)
    many = known_of([*range(1, 21), 1000], [1] * 21)
    found = utilities(many, jnp.ones(21), 1)
    np.testing.assert_allclose(found[20], 19.001 / 999.001, rtol=1e-5)


def test_penalties_by_hand():
    client, steps = np.arange(4)[None], np.array([[10, 80, 20, 40]])
    for preferred, factor in (
        (50.0, [1, 0.25, 1, 1]),  # T = 40, the one of place 2
        (30.0, [1, 1 / 16, 1, 1 / 4]),  # T = 20
        (100.0, [1, 1, 1, 1]),
    ):
        found = feedback.draw_lots(0, client, steps, preferred, 2.0)
        np.testing.assert_allclose(found.factor, [factor])
    assert (feedback.draw_lots(0, client, steps, 30.0, 0.0).factor == 1).all()
    # Clients that have no steps are not late, and nobody is in time if T = 0.
    none = feedback.draw_lots(0, client, np.array([[0, 0, 0, 5]]), 50.0, 1.0)
    assert none.factor.tolist() == [[1, 1, 1, 0]]


def test_lots_are_of_client_and_interval():
    client = np.array([[5, 7, 9], [9, 5, 7]])
    one = feedback.draw_lots(3, client, client, 100.0, 2.0).gumbel
    other = feedback.draw_lots(3, client[:, ::-1], client, 100.0, 2.0).gumbel
    np.testing.assert_array_equal(one, other[:, ::-1])
    assert len(np.unique(one)) == 6
    many = np.arange(4000)[None]
    found = feedback.draw_lots(0, many, many, 100.0, 2.0).gumbel.ravel()
    assert scipy.stats.kstest(found, "gumbel_r").pvalue > 1e-3


def drawn(known, held, number, size, factor=None, draws=4000):
    """How often each candidate is chosen."""
    gumbel = np.random.default_rng(0).gumbel(size=(draws, len(held)))
    factor = jnp.ones(len(held)) if factor is None else jnp.array(factor)

    def one(gumbel):
        return feedback.oort(known, held, Lots(gumbel, factor), number, size)

    found = jax.jit(jax.vmap(one))(jnp.array(gumbel, jnp.float32))
    return np.bincount(np.ravel(found), minlength=len(held))


def test_who_was_never_heard_of_is_drawn_by_size_and_penalty():
    held = jnp.array([10, 20, 40, 40])
    count = drawn(known_of([0] * 4, [0] * 4), held, 1, 1, [1, 1, 1, 0.25])
    expected = count.sum() * np.array([1, 2, 4, 1]) / 8
    assert scipy.stats.chisquare(count, expected).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_oort_is_its_reference_over_many_rounds(seed):
    rng, d, K, T = np.random.default_rng(seed), 25, 6, 60
    held, steps = rng.integers(5, 60, d), rng.integers(0, 30, (T, d))
    client = np.tile(np.arange(d), (T, 1))
    lots = feedback.draw_lots(seed, client, steps, 60.0, 2.0)
    known, state = feedback.nothing_known(d), reference_choice.start(d)
    choose = jax.jit(feedback.oort, static_argnums=4)
    for t in range(T):
        mine = Lots(*(part[t] for part in lots))
        chosen = choose(known, jnp.array(held), mine, t + 1, K).tolist()
        assert chosen == reference_choice.oort(
            state, held, steps[t], lots.gumbel[t], t + 1, K, 60.0, 2.0
        )
        for i in chosen:
            utility = float(np.float32(held[i] * rng.lognormal()))
            state[i] = utility, t + 1
            known = feedback.Known(
                known.utility.at[i].set(utility), known.last.at[i].set(t + 1)
            )
    assert all(last for _, last in state)
