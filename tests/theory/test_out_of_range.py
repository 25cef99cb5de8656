"""While tracing, values are not known; out of their range they must give NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsfl_jax.theory import bounds, fixed_point, minimum
from tsfl_jax.theory.bounds import BoundConstants

KEY = jax.random.key(0)
TAU = [0.0, 1.0, 2.0, 4.0, 4.0]
ALL = jnp.ones(5, bool)
BOUND = BoundConstants(0.25, 1.0, 1.0, 3.0, 0.1, np.full(5, 5.0), np.full(5, 0.1))
OUTSIDE = {  # of `BoundConstants`
    "lr": [-0.25, 0.0, np.inf],
    "smoothness": [-1.0, 0.0],
    "grad_sq_norm": [-1.0, np.nan],
    "weight_limit": [0.5, np.inf],
    "distance": [-0.1],
    "grad_variance": [np.array([5.0, np.nan, 5, 5, 5]), np.array([5.0, 5, -1, 5, 5])],
    "dissimilarity": [np.array([0.1, 0.1, 0.1, 0.1, -0.1])],
}


def assert_nan_for(function, good, changes):
    """Of good arguments the result has no NaN; of each change, nothing else."""
    compiled = jax.jit(lambda kwargs: function(**kwargs))

    def found(**change):
        given = {name: jnp.asarray(x, float) for name, x in (good | change).items()}
        return jax.tree.leaves(compiled(given))

    assert not any(np.isnan(x).any() for x in found())
    for name, values in changes.items():
        for value in values:
            leaves = found(**{name: value})
            assert all(np.isnan(x).all() for x in leaves), (name, value, leaves)


@pytest.mark.parametrize("repaired", [False, True])
def test_theorem_1(repaired):
    rho = np.array([0.0, 0.4, 0.3, 0.2, 0.1])

    def values(**kwargs):
        rho, tau = kwargs.pop("rho"), kwargs.pop("tau")
        known = BoundConstants(**kwargs)
        found = bounds.theorem1_bound(rho, tau, known, repaired)
        return found[:6], bounds.printed_derivative(rho, tau, known)

    changes = OUTSIDE | {"tau": [[0, -1, 2, 4, 4]], "rho": [[0, np.nan, 0, 0.5, 0.5]]}
    assert_nan_for(values, {"rho": rho, "tau": TAU} | BOUND._asdict(), changes)
    negative = BOUND._replace(distance=jnp.float32(-1.0))
    found = jax.jit(lambda k: bounds.theorem1_bound(rho, TAU, k, repaired))(negative)
    assert not bool(found.valid)


def test_theorem_4():
    names = ("num_intervals", "gap", "lr", "smoothness", "epsilon", "dissimilarity_sq")
    good = dict(zip(names, (5.0, 6.0, 0.1, 2.0, 0.5, 3.0), strict=True))
    changes = {name: [-1.0, np.inf] for name in names}
    assert_nan_for(lambda **kwargs: bounds.theorem4_bound(**kwargs)[:2], good, changes)


def test_the_minimizer_and_its_certificate():
    def weights(**kwargs):
        tau, limit = kwargs.pop("tau"), kwargs.pop("limit")
        known = BoundConstants(**kwargs)
        found = minimum.bound_optimal_weights(tau, known, limit=limit)
        rho = np.array([0.0, 0.4, 0.3, 0.2, 0.1])
        certificate = minimum.kkt_residual(rho, tau, known, limit=limit)
        flags = [jnp.where(x, 1.0, jnp.nan) for x in (found.valid, found.converged)]
        return found.rho, found.value, found.kkt_residual, certificate, flags

    good = {"tau": TAU, "limit": 2.5} | BOUND._asdict()
    changes = OUTSIDE | {"tau": [[0, -1, 2, 4, 4]], "limit": [0.5, np.nan]}
    assert_nan_for(weights, good, changes)


def test_nobody_present_does_not_hide_it():
    def found(variance):
        known = BOUND._replace(grad_variance=variance)
        return minimum.bound_optimal_weights(TAU, known, np.zeros(5, bool))

    found = jax.jit(found)(jnp.array([5.0, np.nan, 5, 5, 5]))
    assert np.isnan(found.rho).all() and not bool(found.valid)


def test_theorem_2():
    def weights(**kwargs):
        tau = kwargs.pop("tau")
        found = fixed_point.theorem2_weights(tau, BoundConstants(**kwargs))
        return found.rho, found.residual, jnp.where(found.converged, 1.0, jnp.nan)

    good = {"tau": TAU} | BOUND._asdict()
    changes = {"distance": [-0.1], "tau": [[0, -1, 2, 4, 4]]}
    assert_nan_for(weights, good, changes)
