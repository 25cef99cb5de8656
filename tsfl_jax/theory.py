"""The paper's theorems, executable: one pure function per equation.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". Everything is written *as printed*; where the print is wrong, the
docstring says so and docs/theory.md shows how to check it. Theorems 2 and 3 are solved
in `fixed_point`; Corollary 1 is `dms.coupling`, and (7)–(9) are in `dms` too.

All functions are pure and work under jit, vmap and grad, in float32 and float64. All
raise `UserError` for a wrong shape and, except while tracing, a value out of its range.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax.bound_constants import (
    BoundConstants,
    check,
    check_constants,
    inputs,
    shape_of,
)
from tsfl_jax.types import Array, UserError


class Coefficients(NamedTuple):
    """A, B, C of Theorem 2, with which X + Z and W are linear in ρ."""

    A: Array  # [] of Γ_i τ_i: η{2L[ηL(1+θ) − 1] + η}
    B: Array  # [] of τ_i in W: 2ηL[1 − ηL(1+θ)]
    C: Array  # [] of τ_i²: η³L(H−1)G²


class Bound(NamedTuple):
    """Theorem 1: the items of the bound, and whether it says anything."""

    initial: Array  # [] ‖w⁰ − w*‖²/W
    gradient: Array  # [] X/W
    mini_batch: Array  # [] Y/W
    data_distribution: Array  # [] Z/W
    total: Array  # [] their sum
    W: Array  # [] denominator
    limit_holds: Array  # [] bool, ηL(1+θ) ≥ 1 and all ρ ≤ θ/N: Definition 1.3
    valid: Array  # [] bool, W > 0 and limit_holds


class Terms(NamedTuple):
    """What the bound of Theorem 1 is made of: (‖w⁰ − w*‖² + X + Y + Z)/W."""

    X: Array  # [] gradient
    Y: Array  # [] mini-batch
    Z: Array  # [] data distribution
    W: Array  # []


class GradientBound(NamedTuple):
    """Theorem 4, as printed and as its proof gives it."""

    printed: Array  # [] (12); inf where not valid
    derived: Array  # [] the same over η²; inf where not valid
    valid: Array  # [] bool, 0 < η < 2ε/(V²L)


def coefficients(
    constants: BoundConstants, most: Array, repaired: bool = False
) -> Coefficients:
    """A, B and C: equation (5).

    Args:
      constants: η, L, G², θ; the rest is not read.
      most: H ``[]`` ≥ 0, most local iterations of any client in any interval.
      repaired: A = 2ηL[ηL(1+θ) − 1] + 1, see `theorem1_bound`.

    Returns:
      `Coefficients`. B ≤ 0 ≤ A wherever ηL(1+θ) ≥ 1, as Definition 1.3 demands. C = 0
      if H ≤ 1.
    """
    check_constants(constants, None)
    check("most", most, (), lambda x: x >= 0, "0 ≤ H < ∞")
    eta, L, theta = constants.lr, constants.smoothness, constants.weight_limit
    excess = eta * L * (1 + theta) - 1
    return Coefficients(
        A=2 * eta * L * excess + (1 if repaired else eta**2),
        B=-2 * eta * L * excess,
        C=eta**3 * L * jnp.maximum(most - 1, 0) * constants.grad_sq_norm,
    )


def _terms(rho, tau, known: BoundConstants, repaired: bool = False):
    """Coefficients and X, Y, Z, W of equation (3)."""
    factors = coefficients(known, tau.max(), repaired)
    N, variance, gamma = tau.shape[1], known.grad_variance, known.dissimilarity
    X = factors.C * (rho * tau**2).sum()
    Y = known.lr**2 * N * (variance * (rho**2 * tau).sum(0)).sum()
    Z = factors.A * (gamma * (rho * tau).sum(0)).sum()
    return factors, X, Y, Z, 1 + factors.B * (rho * tau).sum()


def theorem1_terms(rho: Array, tau: Array, constants: BoundConstants) -> Terms:
    """X, Y, Z and W as they are, also where W ≤ 0: equation (3).

    Args:
      rho, tau, constants: as in `theorem1_bound`.
    """
    known, tau, rho = inputs(constants, tau, rho=rho)
    return Terms(*_terms(rho, tau, known)[1:])


def theorem1_bound(
    rho: Array, tau: Array, constants: BoundConstants, repaired: bool = False
) -> Bound:
    """(‖w⁰ − w*‖² + X + Y + Z)/W ≥ ‖w^T − w*‖² ≥ ‖∇F(w^T)‖²/L²: equations (2)–(3).

    Steps of the printed proof that are wrong: (a) Young's inequality leaves V₂ with
    Σρα‖w_i* − w*‖²; the next line, and with it Z and A, has η² in front of it. Units
    tell: ηL has none, η² has. (b) V₁ needs F_i(w̄) − F_i(w_i,h) ≥ F_i(w_i,h) − F_i*,
    but at h = 0 the left side is 0, as w̄ = w_i,h. (c) V₂ needs ⟨w − w_i*, ∇F_i(w)⟩ ≥ 0,
    which a loss that is not convex need not satisfy. (d) It replaces ‖w_i,h − w_i*‖ of
    all intervals by that of the last one, where it should be smallest. (e) Its first
    lemma is used with α inside the sum, where the equality behind it is lost. Because
    of (a) quadratic losses violate the bound as printed. `repaired` mends (a) only.

    Where ηL(1+θ) ≥ 1, as Definition 1.3 demands, B ≤ 0: W ≤ 1, and the bound is never
    below the distance at the start. It tells how far w may go astray, not that it
    arrives. With ρ ≥ 0 it then also grows with each single ρ_i^t.

    >>> known = BoundConstants(0.1, 5.0, 2.0, 1.0, 3.0, jnp.ones(2), jnp.zeros(2))
    >>> print(theorem1_bound(jnp.full(2, 0.5), jnp.array([1, 3]), known).total)
    3.12

    Args:
      rho: ``[T, N]``, or ``[N]`` for one interval, finite; Σρ = 1 is not looked at.
      tau: like `rho`, local iterations ≥ 0. H is the largest of all.
      constants: what the bound takes as known.
      repaired: Z with 1 for η², so that (a) is mended.

    Returns:
      `Bound`, floating. All items inf, with gradient 0, where W ≤ 0: there the bound is
      void. Elsewhere they are what (2) says, whether or not `limit_holds`, which is
      decided up to rounding.
    """
    known, tau, rho = inputs(constants, tau, rho=rho)
    _, X, Y, Z, W = _terms(rho, tau, known, repaired)
    slack = 1 + 8 * jnp.finfo(tau.dtype).eps
    theta, N = known.weight_limit, tau.shape[1]
    limit = jnp.all(rho <= slack * theta / N)
    limit &= known.lr * known.smoothness * (1 + theta) * slack >= 1
    positive = W > 0
    divisor = jnp.where(positive, W, 1.0)  # another branch's 1/0 reaches gradients
    parts = [jnp.where(positive, x / divisor, jnp.inf) for x in (known.distance, X)]
    parts += [jnp.where(positive, x / divisor, jnp.inf) for x in (Y, Z)]
    return Bound(*parts, sum(parts), W, limit, positive & limit)


def so_far(function: Callable, rho: Array, tau: Array):
    """``function(rho, tau)`` of the first 1, 2, …, T intervals, leading axis ``[T]``.

    Later intervals count as 0; one prefix after another, so that memory stays that of
    one.

    Args:
      function: of two arrays ``[T, N]``.
      rho, tau: ``[T, N]``.
    """

    def until(last):
        past = (jnp.arange(len(tau)) <= last)[:, None]
        return function(jnp.where(past, rho, 0), jnp.where(past, tau, 0))

    return lax.map(until, jnp.arange(len(tau)))


def printed_derivative(
    rho: Array, tau: Array, constants: BoundConstants, sign: int = -1
) -> jax.Array:
    """W·2η²Nσ_i²ρ_i^tτ_i^t + sign·W·[AΓ_iτ_i^t + C(τ_i^t)²] − Bτ_i^t[‖w⁰−w*‖² + X+Y+Z].

    The proof of Theorem 2 prints it, times L², with a minus as ∂g/∂ρ_i^t, where
    g = L²·(the bound). X and Z have positive coefficients, so the sign is plus: with
    `sign` = 1 this is W²·∂(bound)/∂ρ_i^t, so the print also lacks a factor 1/W², which
    does not matter where it is 0. It is then ≥ 0 for all ρ ≥ 0 with W ≥ 0 ≥ B.

    Args:
      rho, tau, constants: as in `theorem1_bound`.
      sign: −1 as printed, 1 as the calculus says.

    Returns:
      Like `rho`, without L².
    """
    known, tau, many = inputs(constants, tau, rho=rho)
    shape, rho = np.shape(rho), many
    (A, B, C), X, Y, Z, W = _terms(rho, tau, known)
    variance, gamma = known.grad_variance[None], known.dissimilarity[None]
    linear = A * gamma * tau + C * tau**2
    square = 2 * known.lr**2 * tau.shape[1] * variance * rho * tau
    slope = W * (square + sign * linear) - B * tau * (known.distance + X + Y + Z)
    return slope.reshape(shape)


def theorem4_bound(
    num_intervals: int, gap, *, lr, smoothness, epsilon, dissimilarity_sq
) -> GradientBound:
    """(1/T) Σ_t ‖∇F(w^t)‖² ≤ 2[F(w⁰) − F(w*)]/{ηT(2ε − ηLV²)}: Theorem 4 (12).

    The print has η above the line. Its own proof has η(ε − ηLV²/2) Σ‖∇F‖² ≤ F(w⁰) −
    F(w*), so η belongs below it; units agree: ‖∇F‖² is loss²/weight², η is
    weight²/loss. For η < 1 the print promises too much, by a factor of η². The proof
    also takes every client's gradient at w̄ and drops the noise of mini-batches, so it
    is strict only for H = 1, whole batches, and everybody at work.

    >>> print(theorem4_bound(10, 1.9, lr=0.1, smoothness=1.0, epsilon=1.0,
    ...                      dissimilarity_sq=1.0).derived)
    2.0

    Args:
      num_intervals: T ≥ 1.
      gap: F(w⁰) − F(w*) ``[]`` ≥ 0.
      lr, smoothness: η > 0 and L > 0.
      epsilon: ε ``[]`` > 0, ∇F·E_i[∇F_i] ≥ ε‖∇F‖²: Assumption 2.2.
      dissimilarity_sq: V² ``[]`` > 0, E_i‖∇F_i‖² ≤ V²‖∇F‖²: Definition 3.

    Returns:
      `GradientBound`, floating; inf, with gradient 0, where η ≥ 2ε/(V²L).
    """
    check("num_intervals", num_intervals, (), lambda x: x >= 1, "1 ≤ T < ∞")
    check("gap", gap, (), lambda x: x >= 0, "0 ≤ F(w⁰) − F(w*) < ∞")
    scalars = dict(lr=lr, smoothness=smoothness, epsilon=epsilon)
    scalars["dissimilarity_sq"] = dissimilarity_sq
    for name, value in scalars.items():
        check(name, value, (), lambda x: x > 0, "0 < x < ∞")
    dtype = jnp.result_type(float, num_intervals, gap, *scalars.values())
    T, gap = jnp.asarray(num_intervals, dtype), jnp.asarray(gap, dtype)
    eta, L, eps, V2 = (jnp.asarray(x, dtype) for x in scalars.values())
    below = 2 * eps - eta * L * V2
    valid = (below > 0) & (eta > 0)
    quotient = 2 * gap / (T * jnp.where(valid, below, 1.0))
    return GradientBound(
        jnp.where(valid, eta * quotient, jnp.inf),
        jnp.where(valid, quotient / jnp.where(valid, eta, 1.0), jnp.inf),
        valid,
    )


def heterogeneity_degree(tau: Array) -> float | Array:
    """How unequal the clients' work is, δ = (1/N) Σ_i (τ_i − τ̄)²: section V.

    JAX is not started for what is not a JAX array.

    Args:
      tau: ``[..., N]`` local iterations.

    Returns:
      ``[...]``, floating; of a JAX array a JAX array, else float64, and a float where
      there is one N only. 2.25 in Case 1, 1.25 in Case 2.
    """
    expected = "[..., N] finite local iterations ≥ 0"
    shape = shape_of("tau", tau, expected)
    if not shape or 0 in shape:
        raise UserError(f"tau has shape {list(shape)}: expected {expected}")
    check("tau", tau, shape, lambda x: x >= 0, expected)
    if not isinstance(tau, jax.Array):
        tau = np.asarray(tau, np.float64)
    degree = tau.var(axis=-1)
    return float(degree) if isinstance(degree, np.floating) else degree
