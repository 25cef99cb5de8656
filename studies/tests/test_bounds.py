"""Theorems 1 and 4 against what is measured where every constant is known."""

import functools

import numpy as np
import pytest

from studies import bounds as bound_study
from tsfl_jax import config_files
from tsfl_jax.data.quadratic import Exact
from tsfl_jax.run import grid
from tsfl_jax.theory import bounds as theory
from tsfl_jax.theory.bounds import BoundConstants

KNOWN = Exact(
    curvature=np.ones(2),
    shares=np.full(2, 0.5),
    optima=np.array([[1.0, 0], [-1, 0]]),
    optimum=np.zeros(2),
    dissimilarity=np.ones(2),
    grad_variance=np.array([0.5, 1.0]),
    grad_sq_norm=9.0,
    smoothness=1.0,
    distance=4.0,
)


@functools.cache
def result(label, seeds=4, intervals=12):
    base = config_files.load("quadratic")
    changes = bound_study.SETTINGS[label] | {"num_intervals": intervals}
    return bound_study.run_setting(label, grid.changed(base, changes), seeds)


def test_bounds_are_those_of_the_intervals_so_far():
    tau = np.array([[1, 3], [2, 2], [4, 1]])
    rho = np.array([[0.5, 0.5], [0.25, 0.75], [0.6, 0.4]], np.float32)
    printed, repaired, valid = bound_study.bounds_of(KNOWN, 0.2, rho, tau)
    assert valid.all()
    # θ = 1/(ηL) − 1 = 4, more than the N·max ρ = 1.5 in use.
    known = BoundConstants(0.2, 1.0, 9.0, 4 * (1 + 1e-6), 4.0, *KNOWN[5:3:-1])
    for t in range(3):
        for mine, mended in ((printed, False), (repaired, True)):
            bound = theory.theorem1_bound(rho[: t + 1], tau[: t + 1], known, mended)
            np.testing.assert_allclose(mine[t], bound.total, rtol=1e-5)


def test_theorem_4_by_hand():
    # ‖∇F‖² = 2·excess = 4, 1; E_i‖∇F_i‖² = ‖∇F‖² + 1 = 5, 2; V² = max(5/4, 2) = 2.
    mean, bound = bound_study.theorem4_of(KNOWN, 0.5, np.array([2.0, 0.5]))
    assert mean == 2.5
    # gap = ½·4 = 2; 2ε − ηLV² = 2 − 0.5·2 = 1: 2·2/(0.5·2·1) and 2·0.5·2/(2·1).
    np.testing.assert_allclose([bound.derived, bound.printed], [4.0, 1.0])


@pytest.mark.slow
def test_theorem_1_holds_from_afar():
    found = result("unequal Γ_i and σ_i², DMS")
    assert found.valid
    assert (found.distance + 4 * found.error <= found.printed).all()
    # Not because nothing happens: the models do come near.
    assert found.distance[-1] < 0.3 * found.printed[0]


def test_theorem_1_as_printed_fails_near_the_optimum():
    found = result("the same, whole batches, η = 0.01", seeds=1)
    assert found.valid
    assert bound_study.ratio(found, found.printed)[0] > 1.5
    assert bound_study.ratio(found, found.repaired)[0] < 1


def test_theorem_4_as_printed_fails_and_as_derived_holds_for_gradient_descent():
    found = result("gradient descent: τ = 1, whole batches", seeds=1, intervals=40)
    four = found.theorem4
    assert four.valid
    assert four.printed < 0.05 * found.gradient
    # Σ_t ‖∇F‖² is a geometric series that the bound sums to the end: nearly tight.
    assert 0.9 * four.derived < found.gradient <= four.derived * (1 + 1e-5)
