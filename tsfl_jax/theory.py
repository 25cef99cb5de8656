"""The paper's theorems, executable: one pure function per equation.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". Everything is written *as printed*; where the print is wrong, the
docstring says so and docs/theory.md shows how to check it.
"""

from typing import NamedTuple

from tsfl_jax.types import Array


class BoundConstants(NamedTuple):
    """What the bound of Theorem 1 takes as known."""

    lr: Array  # [] η > 0
    smoothness: Array  # [] L > 0
    grad_sq_norm: Array  # [] G² ≥ 0, bound on E‖g‖²
    weight_limit: Array  # [] θ ≥ 1, ρ_i ≤ θ/N
    distance: Array  # [] ‖w⁰ − w*‖² ≥ 0
    grad_variance: Array  # [N] σ_i² ≥ 0, of a mini-batch gradient
    dissimilarity: Array  # [N] Γ_i = ‖w* − w_i*‖² ≥ 0


class Coefficients(NamedTuple):
    """A, B, C of Theorem 2, with which X + Z and W are linear in ρ."""

    A: Array  # [] of Γ_i τ_i: η{2L[ηL(1+θ) − 1] + η}
    B: Array  # [] of τ_i in W: 2ηL[1 − ηL(1+θ)]
    C: Array  # [] of τ_i²: η³L(H−1)G²


def coefficients(constants: BoundConstants, most: Array) -> Coefficients:
    """A, B and C: equation (5).

    Args:
      constants: η, L, G², θ; the rest is not read.
      most: H ``[]`` ≥ 1, most local iterations of any client in any interval.

    Returns:
      `Coefficients`. B ≤ 0 ≤ A wherever ηL(1+θ) ≥ 1, as Definition 1.3 demands.
    """
    eta, L, theta = constants.lr, constants.smoothness, constants.weight_limit
    excess = eta * L * (1 + theta) - 1
    return Coefficients(
        A=eta * (2 * L * excess + eta),
        B=-2 * eta * L * excess,
        C=eta**3 * L * (most - 1) * constants.grad_sq_norm,
    )
