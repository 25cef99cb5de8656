"""The weights that minimize the bound of Theorem 1, exactly, with a certificate.

Shao et al. derive their weights as this minimizer, but the printed proof has a sign
error (see `dms`). This is the true minimizer, for comparison with DMS. With A, B, C of
equation (5) and everything in the bound as printed, it minimizes g = f/W, where

    f(ρ) = ‖w⁰ − w*‖² + Σ_t Σ_i [η²N σ_i² τ_i (ρ_i)² + (AΓ_i τ_i + C(τ_i)²) ρ_i],
    W(ρ) = 1 + B Σ_t Σ_i ρ_i τ_i,   ρ_i and τ_i being those of interval t,

over all ρ with 0 ≤ ρ_i ≤ u = θ/N and Σ_i ρ_i = 1 in every interval. Clients without
iterations get no weight: otherwise they would get all of it.

Method: f is convex and W affine, so the iteration λ ← g(ρ), ρ ← argmin f − λW of
Dinkelbach, "On Nonlinear Fractional Programming", Management Science, 1967, descends to
the global minimum, superlinearly. f − λW separates into one problem per interval,
min Σ_i ½a_i ρ_i² + b_i ρ_i, which `simplex.fill` solves in closed form. Only
differences of b matter there, so only these are computed.

All functions work under jit and vmap, with inputs checked as in `bounds`. Reverse-mode
gradients raise an error (`lax.while_loop`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax import trees
from tsfl_jax.theory import bounds
from tsfl_jax.theory.bounds import BoundConstants, Coefficients, nan_unless
from tsfl_jax.theory.simplex import fill
from tsfl_jax.types import Numbers

MOST_ITERATIONS = 50  # few are needed; a guard against cycles due to rounding


class Minimum(NamedTuple):
    """The minimizer of the bound, and its certificate."""

    rho: Float[Array, "..."]  # like τ; Σ_i ρ_i^t = 1 if any client is present
    value: Float[Array, ""]  # g(ρ) ≥ ‖∇F(w^T)‖²/L²; inf if void; can be < 0 if A < 0
    kkt_residual: Float[Array, ""]  # of ρ, see `kkt_residual`; inf if void
    iterations: Int[Array, ""]  # of Dinkelbach; 0 if void
    converged: Bool[Array, ""]  # kkt_residual ≤ 100 × the dtype's eps
    valid: Bool[Array, ""]  # False: W ≤ 0 for all weights, the bound is void
    limit_holds: Bool[Array, ""]  # ηL(1+θ) ≥ 1; otherwise g is not a bound


class _Problem(NamedTuple):
    """The function g to minimize, in units of `scale`; T intervals, N clients."""

    tau: Float[Array, "T N"]  # 0 where absent
    curvature: Float[Array, "N"]  # 2η²Nσ_i²
    gamma: Float[Array, "N"]  # Γ_i
    factors: Coefficients
    distance: Float[Array, ""]
    upper: Float[Array, "T"]  # u, or 1/M where M clients are too few for the limit
    scale: Float[Array, ""]  # power of two


def _checked(
    tau: Numbers,
    constants: BoundConstants,
    present: Numbers | None,
    limit: Numbers | None,
    rho: Numbers | None = None,
) -> tuple[Array, BoundConstants, Array, Array, Array, Array]:
    """The inputs of `_problem`, ρ, and whether all are in range."""
    constants, taus, rho, good = bounds.inputs(constants, tau, rho)
    shape = np.shape(tau)
    present = np.ones(shape, bool) if present is None else present
    bounds.check("present", present, shape, np.isfinite, "booleans, like tau")
    present = jnp.atleast_2d(jnp.asarray(present, bool))
    if limit is not None:
        bounds.check("limit", limit, (), lambda x: x >= 1, "1 ≤ θ < ∞, or None")
    limit = jnp.asarray(jnp.inf if limit is None else limit, taus.dtype)
    return taus, constants, present, limit, rho, good & (limit >= 1)


def _problem(
    tau: Float[Array, "T N"],
    constants: BoundConstants,
    present: Bool[Array, "T N"],
    limit: Float[Array, ""],
) -> _Problem:
    """State the problem; H is the most iterations of any client, present or not."""
    size, eps = tau.shape[1], jnp.finfo(tau.dtype).eps
    # g is homogeneous in these four. In units of the largest, tiny ones do not
    # underflow when multiplied by η³; a power of two does not change any digit.
    names = "distance", "grad_sq_norm", "grad_variance", "dissimilarity"
    squares = {name: getattr(constants, name) for name in names}
    most = jnp.stack([x.max() for x in squares.values()]).max()
    exponent = jnp.frexp(jnp.where(most > 0, most, 1))[1] - 1
    scale = jnp.ldexp(jnp.ones((), tau.dtype), exponent)
    constants = constants._replace(**{k: x / scale for k, x in squares.items()})
    factors = bounds.coefficients(constants, jnp.maximum(tau.max(), 1))
    tau = jnp.where(present, tau, 0)
    upper = jnp.minimum(jnp.minimum(limit, constants.weight_limit) / size, 1)
    count = jnp.maximum((tau > 0).sum(1), 1).astype(tau.dtype)
    return _Problem(
        tau=tau,
        curvature=2 * constants.lr**2 * size * constants.grad_variance,
        gamma=constants.dissimilarity,
        factors=factors,
        distance=constants.distance,
        upper=jnp.where(count * upper <= 1 + 4 * eps, 1 / count, upper),
        scale=scale,
    )


def _denominator(problem: _Problem, rho: Float[Array, "T N"]) -> Float[Array, ""]:
    """W(ρ)."""
    return 1 + problem.factors.B * (rho * problem.tau).sum()


def _ratio(problem: _Problem, rho: Float[Array, "T N"]) -> Float[Array, ""]:
    """g(ρ) in units of `scale`, where W(ρ) > 0."""
    (A, _, C), tau = problem.factors, problem.tau
    half, linear = problem.curvature[None] / 2, A * problem.gamma[None]
    items = rho * tau * (half * rho + linear + C * tau)
    return (problem.distance + items.sum()) / _denominator(problem, rho)


def _slopes(
    problem: _Problem,
    tau: Float[Array, "N"],
    ratio: Float[Array, ""],
    pivot: Int[Array, ""],
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """b_i − b_p of one interval, b = AΓτ + Cτ² − λBτ, and the size of its terms.

    Computed from differences of τ and Γ: where b_i and b_p are large and nearly equal,
    their own rounding would exceed the curvature η²Nσ².
    """
    (A, B, C), gamma, apart = problem.factors, problem.gamma, tau - tau[pivot]
    of_gamma = A * tau * (gamma - gamma[pivot])
    of_tau = A * gamma[pivot], C * (tau + tau[pivot]), -ratio * B
    size = jnp.abs(apart) * sum(map(jnp.abs, of_tau)) + jnp.abs(of_gamma)
    return apart * sum(of_tau) + of_gamma, size


def _best_for(problem: _Problem, ratio: Float[Array, ""]) -> Float[Array, "T N"]:
    """Minimize f − λW."""

    def interval(tau: Float[Array, "N"], upper: Float[Array, ""]) -> Float[Array, "N"]:
        # Relative to the ⌈1/u⌉-th smallest b, the level is within the largest a·u.
        far, _ = _slopes(problem, tau, ratio, jnp.argmax(tau))
        rank = jnp.minimum(jnp.ceil(1 / upper).astype(int), (tau > 0).sum())
        order = jnp.argsort(jnp.where(tau > 0, far, jnp.inf))
        near, _ = _slopes(problem, tau, ratio, order[jnp.maximum(rank - 1, 0)])
        return fill(problem.curvature * tau, near, tau > 0, upper)

    return jax.vmap(interval)(problem.tau, problem.upper)


def _residual(problem: _Problem, rho: Float[Array, "T N"]) -> Float[Array, ""]:
    """`kkt_residual` of a stated problem."""
    eps = 8 * jnp.finfo(rho.dtype).eps
    ratio = _ratio(problem, rho)

    def interval(
        rho: Float[Array, "N"], tau: Float[Array, "N"], upper: Float[Array, ""]
    ) -> Float[Array, ""]:
        inside = tau > 0
        pivot = jnp.argmax(jnp.where(inside, rho, -jnp.inf))
        a = problem.curvature * tau
        b, size = _slopes(problem, tau, ratio, pivot)
        slope = a * rho + b
        gives, takes = inside & (rho > eps * upper), inside & (rho < (1 - eps) * upper)
        largest = jnp.max(jnp.where(gives, slope, -jnp.inf))
        smallest = jnp.min(jnp.where(takes, slope, jnp.inf))
        # The best ν lies halfway between those that should give and those that take.
        gap = jnp.where(gives.any() & takes.any(), largest - smallest, 0) / 2
        size = jnp.max(jnp.where(inside, size + a * upper, 0))
        beyond = jnp.where(inside, jnp.maximum(-rho, rho - upper), jnp.abs(rho)).max()
        missing = jnp.abs(rho.sum() - inside.any())
        dual = jnp.maximum(gap, 0) / jnp.where(size > 0, size, 1)
        return jnp.maximum(dual, jnp.maximum(beyond, missing))

    worst = jax.vmap(interval)(rho, problem.tau, problem.upper).max()
    return jnp.where(_denominator(problem, rho) > 0, worst, jnp.inf)


# `kkt_residual`, after its checks
_certify = jax.jit(lambda rho, *inputs: _residual(_problem(*inputs), rho))

# ρ, the least g so far, whether the last step reduced it, steps taken
_State = tuple[Float[Array, "T N"], Float[Array, ""], Bool[Array, ""], Int[Array, ""]]


def _dinkelbach(
    problem: _Problem, start: Float[Array, "T N"], valid: Bool[Array, ""]
) -> tuple[Float[Array, "T N"], Int[Array, ""]]:
    """Iterate λ ← g(ρ), ρ ← argmin f − λW until g no longer falls; ρ and the steps."""

    def step(state: _State) -> _State:
        rho, ratio, _, count = state
        new = _best_for(problem, ratio)
        usable = _denominator(problem, new) > 0  # always, except for rounding
        reached = jnp.where(usable, _ratio(problem, new), ratio)
        # ρ of the last step, too, though its g may be the same: where ‖w⁰ − w*‖²
        # dominates, the rounded g does not distinguish good weights from bad ones.
        rho = jnp.where(usable, new, rho)
        return rho, jnp.minimum(reached, ratio), reached < ratio, count + 1

    ratio = jnp.where(valid, _ratio(problem, start), 0)
    rho, _, _, iterations = lax.while_loop(
        lambda state: state[2] & (state[3] < MOST_ITERATIONS),
        step,
        (start, ratio, valid, jnp.zeros((), jnp.int32)),
    )
    return rho, iterations


@jax.jit
def _minimize(
    tau: Float[Array, "T N"],
    constants: BoundConstants,
    present: Bool[Array, "T N"],
    limit: Float[Array, ""],
) -> Minimum:
    """`bound_optimal_weights`, after its checks."""
    problem = _problem(tau, constants, present, limit)
    A, B, C = problem.factors
    without_f = Coefficients(jnp.zeros_like(A), B, jnp.zeros_like(C))
    flat = jnp.zeros_like(problem.curvature)
    only_w = problem._replace(curvature=flat, factors=without_f)
    start = _best_for(only_w, jnp.ones((), tau.dtype))  # the largest W there is
    valid = _denominator(problem, start) > 0

    rho, iterations = _dinkelbach(problem, start, valid)
    works = problem.tau > 0
    equal = works / jnp.maximum(works.sum(1, keepdims=True), 1).astype(tau.dtype)
    rho = jnp.where(valid, rho, equal)
    residual = jnp.where(valid, _residual(problem, rho), jnp.inf)
    value = jnp.where(valid, _ratio(problem, rho) * problem.scale, jnp.inf)
    converged = residual <= 100 * jnp.finfo(tau.dtype).eps
    eta, L, theta = constants.lr, constants.smoothness, constants.weight_limit
    limit_holds = eta * L * (1 + theta) * (1 + 8 * jnp.finfo(tau.dtype).eps) >= 1
    return Minimum(rho, value, residual, iterations, converged, valid, limit_holds)


@trees.arithmetic()
def kkt_residual(
    rho: Numbers,
    tau: Numbers,
    constants: BoundConstants,
    present: Numbers | None = None,
    limit: Numbers | None = None,
) -> Float[Array, ""]:
    """How far ρ is from satisfying the optimality conditions of the minimum of g.

    For the minimum of a convex function over a positive affine one, these conditions
    (Karush, Kuhn, Tucker) are not only necessary but sufficient: g is pseudoconvex
    there. For if ∇g(ρ)·(ρ' − ρ) ≥ 0, the convex function f − g(ρ)W, whose gradient at ρ
    is W(ρ)∇g(ρ) and whose value there is 0, is ≥ 0 at ρ', so g(ρ') ≥ g(ρ). Hence a
    residual of 0 proves that ρ is the global minimum.

    Args:
      rho: shaped like τ, any weights.
      tau, constants, present, limit: as in `bound_optimal_weights`.

    Returns:
      ≥ 0, dimensionless, the larger of two violations. Of stationarity: with v = W∇g
      and the best multiplier ν^t, how much v_i > ν^t for a client with ρ_i > 0 or
      v_i < ν^t for one with ρ_i < u, per interval, over the largest difference that the
      terms of v can make there (what all clients have in common does not matter as
      Σρ = 1). Of feasibility: |Σρ − 1|, and ρ beyond its limits. inf where W(ρ) ≤ 0.
    """
    tau, constants, present, limit, rho, good = _checked(
        tau, constants, present, limit, rho
    )
    return nan_unless(good, _certify(rho, tau, constants, present, limit))


@trees.arithmetic()
def bound_optimal_weights(
    tau: Numbers,
    constants: BoundConstants,
    present: Numbers | None = None,
    limit: Numbers | None = None,
) -> Minimum:
    """The weights that minimize Theorem 1's bound over all intervals at once.

    >>> alike, tau = jnp.ones(3), jnp.array([1, 2, 3])
    >>> constants = BoundConstants(0.25, 1.0, 1.0, 3.0, 0.1, 5 * alike, 0.1 * alike)
    >>> print(*(f"{x:.3f}" for x in bound_optimal_weights(tau, constants).rho))
    0.585 0.266 0.148

    Args:
      tau: ``[T, N]`` local iterations ≥ 0, or ``[N]`` for T = 1; 0 = absent. H is the
        largest of all.
      constants: as in Theorem 1, scalars and ``[N]``; θ finite, as it enters A and B.
        Where ηL(1+θ) < 1, g is not a bound, and its minimizer may favor clients with
        more iterations or more dissimilarity; `bounds.tightest_limit` avoids that.
      present: bool, shaped like τ; where False, a client gets no weight though τ > 0.
      limit: ``[]`` ≥ 1, ρ_i ≤ limit/N where that is below θ/N; None: θ alone.

    Returns:
      `Minimum`. In an interval without clients all weights are 0; in one with M·θ/N ≤ 1
      (up to rounding) they are 1/M, the only choice. If W ≤ 0 for all weights, the
      bound is void: `valid` False, `value` inf, ρ = 1/M for each of the M present.
    """
    taus, constants, present, limit, _, good = _checked(tau, constants, present, limit)
    result = _minimize(taus, constants, present, limit)
    return nan_unless(good, result._replace(rho=result.rho.reshape(np.shape(tau))))
