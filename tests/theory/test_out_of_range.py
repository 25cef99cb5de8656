"""While tracing, values are not known; out of their range they must give NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsfl_jax.theory import bounds, minimum
from tsfl_jax.theory.bounds import BoundConstants

TAU = np.array([0.0, 1.0, 2.0, 4.0, 4.0])
RHO = np.array([0.0, 0.4, 0.3, 0.2, 0.1])
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


def of_theorem_1(rho, tau, **constants):
    known = BoundConstants(**constants)
    found = bounds.theorem1_bound(rho, tau, known)
    # False would be 0, which is no NaN.
    valid = jnp.where(found.valid, 1.0, jnp.nan)
    return found[:6], valid, bounds.printed_derivative(rho, tau, known)


def of_the_minimum(tau, limit, present, **constants):
    known = BoundConstants(**constants)
    found = minimum.bound_optimal_weights(tau, known, present, limit)
    certificate = minimum.kkt_residual(RHO, tau, known, present, limit)
    flags = [jnp.where(x, 1.0, jnp.nan) for x in (found.valid, found.converged)]
    return found.rho, found.value, found.kkt_residual, certificate, flags


NEGATIVE = {"tau": [np.array([0, -1, 2, 4, 4])]}
CASES = {
    of_theorem_1: (
        {"rho": RHO, "tau": TAU} | BOUND._asdict(),
        OUTSIDE | NEGATIVE | {"rho": [RHO * [1, np.nan, 1, 1, 1]]},
    ),
    of_the_minimum: (
        {"tau": TAU, "limit": 2.5, "present": np.sign(TAU)} | BOUND._asdict(),
        OUTSIDE | NEGATIVE | {"limit": [0.5, np.nan]},
    ),
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_values_out_of_range_give_nan(function):
    """Of arguments in range the result has no NaN; of each change, nothing else."""
    arguments, changes = CASES[function]
    compiled = jax.jit(lambda kwargs: function(**kwargs))

    def leaves(**change):
        kwargs = jax.tree.map(lambda x: jnp.asarray(x, float), arguments | change)
        return jax.tree.leaves(compiled(kwargs))

    assert not any(np.isnan(x).any() for x in leaves())
    for name, values in changes.items():
        for value in values:
            found = leaves(**{name: value})
            assert all(np.isnan(x).all() for x in found), (name, value, found)
