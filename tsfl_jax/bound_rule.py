"""The minimiser of Theorem 1's bound as an aggregation rule, to set beside DMS."""

import jax
import jax.numpy as jnp

from tsfl_jax.aggregate import Situation, Weights, weights_of
from tsfl_jax.bound_constants import estimated
from tsfl_jax.bound_minimum import bound_optimal_weights
from tsfl_jax.types import HParams


def bound_optimal(situation: Situation, hparams: HParams) -> Weights:
    """The minimiser of Theorem 1's bound of this interval alone: T = 1, from w^t.

    With the constants that gradients at w^t let one say, see
    `bound_constants.estimated`; τ_i are local iterations, as for DMS, whatever the
    steps and the momentum in them. Where the bound is void, or a gradient was not
    finite, 1/N over the clients that took part. See `bound_minimum`.
    """
    tau, constants = situation.tau, situation.constants
    present = tau > 0
    known = estimated(
        hparams.lr,
        hparams.weight_limit,
        constants.smoothness,
        constants.grad_sq_norm,
        situation.gradients,
        present,
    )
    finite = jnp.stack([jnp.isfinite(a).all() for a in known]).all()
    finite &= constants.smoothness > 0
    known = jax.tree.map(lambda a: jnp.where(finite, a, 1.0), known)
    limit = jnp.minimum(hparams.weight_limit, tau.shape[0])  # finite; N limits nothing
    found = bound_optimal_weights(tau, known, limit=limit)
    equal = present / jnp.maximum(present.sum(), 1)
    rho = jnp.where(finite & found.valid, found.rho, equal)
    return weights_of(rho, tau)
