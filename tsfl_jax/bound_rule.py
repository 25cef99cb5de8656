"""The minimiser of Theorem 1's bound as an aggregation rule, to set beside DMS."""

import jax
import jax.numpy as jnp

from tsfl_jax.aggregate import Situation, Weights, weights_of
from tsfl_jax.bound_constants import BoundConstants
from tsfl_jax.bound_minimum import bound_optimal_weights
from tsfl_jax.types import HParams


def bound_optimal(situation: Situation, hparams: HParams) -> Weights:
    """The minimiser of Theorem 1's bound of this interval alone: T = 1, from w^t.

    Γ_i = ‖∇F_i − ∇F‖²/L² and ‖w^t − w*‖² = ‖∇F‖²/L², which is what gradients at w^t
    let one say; θ = N without a limit. Where the bound is void, or a gradient was not
    finite, 1/N over the clients that took part. See `bound_minimum`.
    """
    tau, measured = situation.tau, situation.gradients
    L = situation.constants.smoothness
    present = tau > 0

    # Unbiased estimates of what is ≥ 0 may be below.
    def usable(values):
        return jnp.where(present, jnp.maximum(values, 0.0), 0.0)

    known = BoundConstants(
        lr=hparams.lr,
        smoothness=L,
        grad_sq_norm=situation.constants.grad_sq_norm,
        weight_limit=jnp.minimum(hparams.weight_limit, tau.shape[0]),
        distance=jnp.maximum(measured.square, 0.0) / L**2,
        grad_variance=usable(measured.variance),
        dissimilarity=usable(measured.dissimilarity) / L**2,
    )
    finite = jnp.stack([jnp.isfinite(a).all() for a in known]).all() & (L > 0)
    known = jax.tree.map(lambda a: jnp.where(finite, a, 1.0), known)
    found = bound_optimal_weights(tau, known)
    equal = present / jnp.maximum(present.sum(), 1)
    rho = jnp.where(finite & found.valid, found.rho, equal)
    return weights_of(rho, tau)
