"""A bound like Theorem 1 for convex losses and exact gradients, with a full proof.

Not in the paper. The proof is in docs/theory.md.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tsfl_jax import trees
from tsfl_jax.theory.bounds import BoundConstants, inputs, nan_unless
from tsfl_jax.types import Numbers


@trees.arithmetic()
def convex_bound(
    rho: Numbers, tau: Numbers, constants: BoundConstants
) -> Float[Array, ""]:
    """The bound on the distance to any point w* where the F_i are convex.

    ‖w^T − w*‖² ≤ ‖w⁰ − w*‖² + ηL/(2 − ηL) Σ_t Σ_i ρ_i^t τ_i^t Γ_i for convex L-smooth
    F_i, exact gradients, ηL < 2 and weights with ρ ≥ 0, Σρ = 1 in every interval. The
    constant ηL/(2 − ηL) is the smallest possible.

    >>> known = BoundConstants(0.1, 5.0, 0.0, 1.0, 3.0, jnp.zeros(2), jnp.ones(2))
    >>> print(f"{convex_bound(jnp.full(2, 0.5), jnp.array([1, 3]), known):.4f}")
    3.6667

    Args:
      rho: ``[T, N]``, or ``[N]`` for one interval; ρ ≥ 0 and Σρ = 1 are not checked.
      tau: like `rho`, local iterations ≥ 0.
      constants: η, L, ‖w⁰ − w*‖² and Γ_i = ‖w* − w_i*‖², w_i* any minimizer of F_i;
        G², θ and σ_i² are not used.

    Returns:
      The bound, floating; inf where ηL ≥ 2, NaN where a traced value is out of range.
    """
    constants, tau, rho, good = inputs(constants, tau, rho)
    step = constants.lr * constants.smoothness
    small = step < 2
    factor = step / jnp.where(small, 2 - step, 1.0)
    drift = (constants.dissimilarity * (rho * tau).sum(0)).sum()
    bound = jnp.where(small, constants.distance + factor * drift, jnp.inf)
    return nan_unless(good, bound)
