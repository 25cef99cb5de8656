"""Theorems 1 to 4 of the paper, and the weights that minimize its bound."""

from tsfl_jax.theory.bounds import (
    BoundConstants,
    coefficients,
    heterogeneity_degree,
    printed_derivative,
    theorem1_bound,
    theorem1_terms,
    theorem4_bound,
    tightest_limit,
)
from tsfl_jax.theory.convex import convex_bound
from tsfl_jax.theory.fixed_point import theorem2_weights
from tsfl_jax.theory.minimum import bound_optimal_weights, kkt_residual

__all__ = [
    "BoundConstants",
    "bound_optimal_weights",
    "coefficients",
    "convex_bound",
    "heterogeneity_degree",
    "kkt_residual",
    "printed_derivative",
    "theorem1_bound",
    "theorem1_terms",
    "theorem2_weights",
    "theorem4_bound",
    "tightest_limit",
]
