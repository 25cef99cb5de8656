"""Theorems 1 to 4 of the paper, and the weights that minimize its bound."""

from tsfl_jax.theory.bounds import BoundConstants as BoundConstants
from tsfl_jax.theory.bounds import coefficients as coefficients
from tsfl_jax.theory.bounds import heterogeneity_degree as heterogeneity_degree
from tsfl_jax.theory.bounds import printed_derivative as printed_derivative
from tsfl_jax.theory.bounds import theorem1_bound as theorem1_bound
from tsfl_jax.theory.bounds import theorem1_terms as theorem1_terms
from tsfl_jax.theory.bounds import theorem4_bound as theorem4_bound
from tsfl_jax.theory.bounds import tightest_limit as tightest_limit
from tsfl_jax.theory.convex import convex_bound as convex_bound
from tsfl_jax.theory.fixed_point import theorem2_weights as theorem2_weights
from tsfl_jax.theory.minimum import bound_optimal_weights as bound_optimal_weights
from tsfl_jax.theory.minimum import kkt_residual as kkt_residual
