"""Weights of cohorts: unbiased ones by enumerating all cohorts of a small N."""

import itertools

import numpy as np
import pytest

import tsfl_jax
from tests.problems import small
from tsfl_jax.prepare import weighting
from tsfl_jax.timeline import cohort, crowd
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.types import UserError

SIZE = np.array([5, 1, 9, 2, 3, 4], np.int32)
VALUE = np.array([1.0, -2.0, 0.5, 4.0, 8.0, -1.0])  # the clients' updates
GOAL = SIZE @ VALUE / SIZE.sum()


def mean_update(chosen, sampler, several, chance=1.0):
    """Σ_S P(S) Σ_{i ∈ S} ρ_i Δ_i of [(S, P(S))], with the sampler's own π."""
    everyone = crowd.make_crowd(6, 0, num_samples=SIZE)
    settings = cohort.CohortConfig(size=2, sampler=sampler)
    cohorts = cohort.make_cohorts(everyone, settings)
    client = np.array([ids for ids, _ in several])
    tau = np.random.default_rng(0).integers(1, 5, client.shape)
    times = complete(tau, SIZE[client], client=client)
    asked_for = cohort.inclusion(cohorts, client, True)
    rho = weighting.shares(chosen, times, SIZE, asked_for, 1 - chance)
    assert rho.dtype == np.float32 and rho.shape == client.shape
    return sum(
        p * r @ VALUE[list(ids)] for r, (ids, p) in zip(rho, several, strict=True)
    )


def pairs(*clients, p=1.0):
    found = list(itertools.combinations(clients, 2))
    return [(ids, p / len(found)) for ids in found]


def with_replacement():
    share = SIZE / SIZE.sum()
    found = itertools.product(range(6), repeat=2)
    return [((i, j), share[i] * share[j]) for i, j in found]


CASES = [
    ("unbiased", "uniform", pairs(*range(6))),
    ("inverse", "uniform", pairs(*range(6))),
    ("unbiased", "round_robin", pairs(*range(6))),
    ("inverse", "round_robin", pairs(*range(6))),
    ("mean", "by_size", with_replacement()),
    ("inverse", "by_size", with_replacement()),
]


@pytest.mark.parametrize(("chosen", "sampler", "several"), CASES)
def test_the_mean_of_all_cohorts_is_that_of_all_clients(chosen, sampler, several):
    assert sum(p for _, p in several) == pytest.approx(1)
    assert mean_update(chosen, sampler, several) == pytest.approx(GOAL, rel=1e-6)


def test_some_are_biased():
    for chosen, sampler in (("mean", "uniform"), ("mean", "round_robin")):
        found = mean_update(chosen, sampler, pairs(*range(6)))
        assert found == pytest.approx(VALUE.mean()) and abs(found - GOAL) > 0.1


def test_lost_updates_are_in_the_chance():
    """With dropout 1/2 each update counts twice where it arrives."""
    several = pairs(*range(6))
    whole = mean_update("inverse", "uniform", several, chance=0.5)
    assert whole / 2 == pytest.approx(GOAL, rel=1e-6)


def test_of_those_that_deliver():
    client, tau = np.array([[0, 2, 3], [1, 4, 5]]), np.array([[1, 0, 2], [0, 0, 0]])
    times = complete(tau, SIZE[client], client=client)
    chance = np.full((2, 3), 0.5)
    assert np.isnan(weighting.shares("ratio", times, SIZE, chance)).all()
    rho = weighting.shares("unbiased", times, SIZE, chance)
    np.testing.assert_allclose(rho, [[3 * 5 / 24, 0, 3 * 2 / 24], [0, 0, 0]], rtol=1e-6)
    rho = weighting.shares("mean", times, SIZE, chance)
    np.testing.assert_array_equal(rho, [[0.5, 0, 0.5], [0, 0, 0]])


def test_nobody_may_deliver():
    """Then there is no update: the mean of `unbiased` is 1 − d^K of that of all."""
    asked = itertools.product(pairs(*range(6)), itertools.product((0, 1), repeat=2))
    (chosen, came), d = zip(*asked, strict=True), 0.3
    client, tau = np.array([ids for ids, _ in chosen]), np.array(came)
    chance = np.array([p for _, p in chosen]) * np.where(tau, 1 - d, d).prod(axis=1)
    times = complete(tau, SIZE[client], client=client)
    rho = weighting.shares("unbiased", times, SIZE, np.full(client.shape, 1 / 3))
    found = chance @ (rho * VALUE[client]).sum(axis=1)
    assert found == pytest.approx((1 - d**2) * GOAL, rel=1e-6)


@pytest.mark.parametrize("name", ["unbiased", "inverse"])
def test_chances_must_be_known(name):
    client, tau = np.array([[0], [1]]), np.ones((2, 1), int)
    times = complete(tau, SIZE[client], client=client)
    assert (weighting.shares(name, times, SIZE, np.full((2, 1), 0.5)) > 0).all()
    with pytest.raises(UserError, match="not known how often"):
        weighting.shares(name, times, SIZE, np.full((2, 1), np.nan))
    if name == "unbiased":
        with pytest.raises(UserError, match="use inverse"):
            weighting.shares(name, times, SIZE, np.array([[0.5], [0.25]]))


def config_of(algorithm, **changes):
    settings = {
        "hidden": 4,
        "num_clients": 30,
        "num_intervals": 3,
        "schedule__size_groups": "uniform(12,24)",
        "partition__kind": "iid",
        "partition__replacement": True,
        "cohort__size": 4,
        "cohort__weighting": "mean",
    }
    return small(algorithm=algorithm, **settings | changes)


@pytest.mark.parametrize(
    "algorithm", ["fedadam", pytest.param("fedprox", marks=pytest.mark.slow)]
)
def test_runs_have_these_weights(algorithm):
    config = config_of(algorithm, cohort__weighting="unbiased")
    history = tsfl_jax.simulate(config).history
    schedule = tsfl_jax.explain(config).schedule
    np.testing.assert_array_equal(history["rho"], schedule.share)
    assert (np.abs(history["rho"].sum(1) - 1) > 1e-3).any()
    assert not history["diverged"].any()


@pytest.mark.parametrize("algorithm", ["dms", "fedbuff", "scaffold", "fedat"])
def test_rules_with_weights_of_their_own_have_no_others(algorithm):
    with pytest.raises(UserError, match=f"algorithm={algorithm} are its own"):
        tsfl_jax.explain(config_of(algorithm))
