"""The weights that minimise the bound of Theorem 1, exactly, with a certificate.

Shao et al. derive their weights as this minimiser, but the printed proof has a sign
error (see `dms`); here is the true one, to set beside DMS. With A, B, C of equation (5)
and everything in the bound as printed, minimise g = f/W, where

    f(ρ) = ‖w⁰ − w*‖² + Σ_t Σ_i [η²N σ_i² τ_i (ρ_i)² + (AΓ_i τ_i + C(τ_i)²) ρ_i],
    W(ρ) = 1 + B Σ_t Σ_i ρ_i τ_i,   ρ_i and τ_i being those of interval t,

over all ρ with 0 ≤ ρ_i ≤ u = θ/N and Σ_i ρ_i = 1 in every interval. Clients without
iterations get no weight: else the minimum would belong to those who did nothing.

Method: f is convex and W affine, so Dinkelbach's iteration λ ← g(ρ), ρ ← argmin f − λW
descends to the global minimum, superlinearly. f − λW falls apart into one problem per
interval, min Σ_i ½a_i ρ_i² + b_i ρ_i, which `water_filling` solves in closed form. Only
differences of b matter there, so only these are computed.

All functions are pure and work under jit and vmap. Reverse-mode gradients raise an
error (`lax.while_loop`). All raise `UserError` for a wrong shape and, except while
tracing, a value out of its range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax.bound_constants import BoundConstants, check, inputs, shape_of
from tsfl_jax.theory import coefficients
from tsfl_jax.types import Array
from tsfl_jax.water_filling import fill

MOST_ITERATIONS = 50  # a handful suffices; a guard against rounding that cycles


class Minimum(NamedTuple):
    """What minimises the bound, and how well."""

    rho: Array  # like τ, weights; Σ_i ρ_i^t = 1 wherever somebody is present
    value: Array  # [] g(ρ) in ‖∇F(w^T)‖²/L² ≤ g; inf if void; can be < 0 if A < 0
    kkt_residual: Array  # [] of ρ, see `kkt_residual`; inf if void
    iterations: Array  # [] int32, of Dinkelbach; 0 if void
    converged: Array  # [] bool, kkt_residual ≤ 100 × the dtype's eps
    valid: Array  # [] bool; False: W ≤ 0 for all weights, the bound says nothing
    limit_holds: Array  # [] bool, ηL(1+θ) ≥ 1; else g, though minimised, is no bound


class _Problem(NamedTuple):
    """g, in units of `scale`; T intervals, N clients."""

    tau: jax.Array  # [T, N], 0 where absent
    curvature: jax.Array  # [N] 2η²Nσ_i²
    gamma: jax.Array  # [N] Γ_i
    A: jax.Array  # []
    B: jax.Array  # []
    C: jax.Array  # []
    distance: jax.Array  # []
    upper: jax.Array  # [T] u, or 1/M where M clients are too few for the limit
    scale: jax.Array  # [], power of two


def _inputs(tau, constants: BoundConstants, present, **others):
    """Constants, τ and the others ``[T, N]`` in one dtype, and who is present."""
    constants, tau_2d, *others = inputs(constants, tau, **others)
    if present is None:
        return constants, tau_2d, jnp.ones(tau_2d.shape, bool), *others
    expected = "booleans, like tau"
    check("present", present, shape_of("tau", tau, expected), np.isfinite, expected)
    present = jnp.atleast_2d(jnp.asarray(present)).astype(bool)
    return constants, tau_2d, present, *others


def _limit(limit, tau) -> jax.Array:
    """In τ's dtype, inf for none."""
    if limit is not None:
        check("limit", limit, (), lambda x: x >= 1, "1 ≤ θ < ∞, or None")
    return jnp.asarray(jnp.inf if limit is None else limit, tau.dtype)


def _problem(tau, constants: BoundConstants, present, limit) -> _Problem:
    """τ ``[T, N]``; H is the most iterations of anyone, present or not."""
    size, eps = tau.shape[1], jnp.finfo(tau.dtype).eps
    # g is homogeneous in these four. In units of the largest, tiny ones do not
    # underflow when multiplied with η³; a power of two leaves every digit as it is.
    names = "distance", "grad_sq_norm", "grad_variance", "dissimilarity"
    squares = {name: getattr(constants, name) for name in names}
    most = jnp.stack([x.max() for x in squares.values()]).max()
    exponent = jnp.frexp(jnp.where(most > 0, most, 1))[1] - 1
    scale = jnp.ldexp(jnp.ones((), tau.dtype), exponent)
    constants = constants._replace(**{k: x / scale for k, x in squares.items()})
    A, B, C = coefficients(constants, jnp.maximum(tau.max(), 1))
    tau = jnp.where(present, tau, 0)
    upper = jnp.minimum(jnp.minimum(limit, constants.weight_limit) / size, 1)
    crowd = jnp.maximum((tau > 0).sum(1), 1).astype(tau.dtype)
    return _Problem(
        tau=tau,
        curvature=2 * constants.lr**2 * size * constants.grad_variance,
        gamma=constants.dissimilarity,
        A=A,
        B=B,
        C=C,
        distance=constants.distance,
        upper=jnp.where(crowd * upper <= 1 + 4 * eps, 1 / crowd, upper),
        scale=scale,
    )


def _below(problem: _Problem, rho):
    """W(ρ) ``[]``."""
    return 1 + problem.B * (rho * problem.tau).sum()


def _ratio(problem: _Problem, rho):
    """g(ρ) ``[]`` in units of `scale`, where W(ρ) > 0."""
    half, linear = problem.curvature[None] / 2, problem.A * problem.gamma[None]
    each = rho * problem.tau * (half * rho + linear + problem.C * problem.tau)
    return (problem.distance + each.sum()) / _below(problem, rho)


def _slopes(problem: _Problem, tau, ratio, pivot):
    """b_i − b_p of one interval ``[N]``, b = AΓτ + Cτ² − λBτ, and its terms' size.

    From differences of τ and Γ: where b_i and b_p are large and nearly equal, their
    own rounding would drown the curvature η²Nσ².
    """
    gamma, apart = problem.gamma, tau - tau[pivot]
    of_gamma = problem.A * tau * (gamma - gamma[pivot])
    of_tau = problem.A * gamma[pivot], problem.C * (tau + tau[pivot])
    of_tau += (-ratio * problem.B,)
    size = jnp.abs(apart) * sum(map(jnp.abs, of_tau)) + jnp.abs(of_gamma)
    return apart * sum(of_tau) + of_gamma, size


def _best_for(problem: _Problem, ratio):
    """argmin f − λW, ``[T, N]``."""

    def interval(tau, upper):
        # Seen from the ⌈1/u⌉-th smallest b, the level is within the largest a·u.
        far, _ = _slopes(problem, tau, ratio, jnp.argmax(tau))
        rank = jnp.minimum(jnp.ceil(1 / upper).astype(int), (tau > 0).sum())
        order = jnp.argsort(jnp.where(tau > 0, far, jnp.inf))
        near, _ = _slopes(problem, tau, ratio, order[jnp.maximum(rank - 1, 0)])
        return fill(problem.curvature * tau, near, tau > 0, upper)

    return jax.vmap(interval)(problem.tau, problem.upper)


def _residual(problem: _Problem, rho):
    """`kkt_residual` for ρ ``[T, N]``."""
    eps = 8 * jnp.finfo(rho.dtype).eps
    ratio = _ratio(problem, rho)

    def interval(rho, tau, upper):
        inside = tau > 0
        pivot = jnp.argmax(jnp.where(inside, rho, -jnp.inf))
        a = problem.curvature * tau
        b, size = _slopes(problem, tau, ratio, pivot)
        slope = a * rho + b
        gives, takes = inside & (rho > eps * upper), inside & (rho < (1 - eps) * upper)
        largest = jnp.max(jnp.where(gives, slope, -jnp.inf))
        smallest = jnp.min(jnp.where(takes, slope, jnp.inf))
        # The best ν lies in the middle between those who should give and take.
        gap = jnp.where(gives.any() & takes.any(), largest - smallest, 0) / 2
        size = jnp.max(jnp.where(inside, size + a * upper, 0))
        beyond = jnp.where(inside, jnp.maximum(-rho, rho - upper), jnp.abs(rho)).max()
        missing = jnp.abs(rho.sum() - inside.any())
        dual = jnp.maximum(gap, 0) / jnp.where(size > 0, size, 1)
        return jnp.maximum(dual, jnp.maximum(beyond, missing))

    worst = jax.vmap(interval)(rho, problem.tau, problem.upper).max()
    return jnp.where(_below(problem, rho) > 0, worst, jnp.inf)


@jax.jit
def _certify(rho, tau, constants, present, limit):
    return _residual(_problem(tau, constants, present, limit), rho)


@jax.jit
def _minimise(tau, constants, present, limit) -> Minimum:
    problem = _problem(tau, constants, present, limit)
    only_w = problem._replace(
        curvature=jnp.zeros_like(problem.curvature),
        A=jnp.zeros_like(problem.A),
        C=jnp.zeros_like(problem.C),
    )
    start = _best_for(only_w, jnp.ones((), tau.dtype))  # the largest W there is
    valid = _below(problem, start) > 0

    def step(state):
        rho, ratio, _, count = state
        new = _best_for(problem, ratio)
        usable = _below(problem, new) > 0  # always, but for rounding
        reached = jnp.where(usable, _ratio(problem, new), ratio)
        # ρ of the last step too, though its g may be the same: where ‖w⁰ − w*‖²
        # dominates, the rounded g does not tell good weights from bad ones.
        rho = jnp.where(usable, new, rho)
        return rho, jnp.minimum(reached, ratio), reached < ratio, count + 1

    def go_on(state):
        return state[2] & (state[3] < MOST_ITERATIONS)

    ratio = jnp.where(valid, _ratio(problem, start), 0)
    state = (start, ratio, valid, jnp.zeros((), jnp.int32))
    rho, _, _, iterations = lax.while_loop(go_on, step, state)
    here = problem.tau > 0
    equal = here / jnp.maximum(here.sum(1, keepdims=True), 1).astype(tau.dtype)
    rho = jnp.where(valid, rho, equal)
    residual = jnp.where(valid, _residual(problem, rho), jnp.inf)
    value = jnp.where(valid, _ratio(problem, rho) * problem.scale, jnp.inf)
    converged = residual <= 100 * jnp.finfo(tau.dtype).eps
    eta, L, theta = constants.lr, constants.smoothness, constants.weight_limit
    limit_holds = eta * L * (1 + theta) * (1 + 8 * jnp.finfo(tau.dtype).eps) >= 1
    return Minimum(rho, value, residual, iterations, converged, valid, limit_holds)


def kkt_residual(
    rho, tau, constants: BoundConstants, present=None, limit=None
) -> jax.Array:
    """How far ρ is from satisfying the optimality conditions of the minimum of g.

    For the minimum of a convex function over a positive affine one, these conditions
    (Karush, Kuhn, Tucker) are not only necessary but sufficient: g is pseudoconvex
    there. For if ∇g(ρ)·(ρ' − ρ) ≥ 0, the convex function f − g(ρ)W, whose gradient at ρ
    is W(ρ)∇g(ρ) and whose value there is 0, is ≥ 0 at ρ', so g(ρ') ≥ g(ρ). Hence no
    search is needed to know that ρ is the global minimum.

    Args:
      rho: shaped like τ, any weights.
      tau, constants, present, limit: as in `bound_optimal_weights`.

    Returns:
      ``[]`` ≥ 0, dimensionless, the larger of two violations. Of stationarity: with
      v = W∇g and the best multiplier ν^t, how much v_i > ν^t for a client with
      ρ_i > 0 or v_i < ν^t for one with ρ_i < u, per interval, over the largest
      difference that the terms of v can make there (what all clients have in common
      does not matter as Σρ = 1). Of feasibility: |Σρ − 1|, and ρ beyond its limits.
      inf where W(ρ) ≤ 0.
    """
    constants, tau, present, rho = _inputs(tau, constants, present, rho=rho)
    return _certify(rho, tau, constants, present, _limit(limit, tau))


def bound_optimal_weights(
    tau, constants: BoundConstants, present=None, limit=None
) -> Minimum:
    """The weights that minimise Theorem 1's bound over all intervals at once.

    >>> alike, tau = jnp.ones(3), jnp.array([1, 2, 3])
    >>> constants = BoundConstants(0.25, 1.0, 1.0, 3.0, 0.1, 5 * alike, 0.1 * alike)
    >>> print(*(f"{x:.3f}" for x in bound_optimal_weights(tau, constants).rho))
    0.585 0.266 0.148

    Args:
      tau: ``[T, N]`` local iterations ≥ 0, or ``[N]`` for T = 1; 0 = absent. H is the
        largest of all.
      constants: as in Theorem 1, scalars and ``[N]``; θ finite, as it enters A and B.
        Where ηL(1+θ) < 1, g is no bound, and its minimiser may favour clients with more
        iterations or more dissimilarity; `bound_constants.tightest_limit` avoids that.
      present: bool, shaped like τ; where False, a client gets no weight though τ > 0.
      limit: ``[]`` ≥ 1, ρ_i ≤ limit/N where that is below θ/N; None: θ alone.

    Returns:
      `Minimum`. An interval with nobody gets all 0, one with M·θ/N ≤ 1 (up to rounding)
      the only choice, 1/M each. If W ≤ 0 whatever the weights, the bound is void:
      `valid` False, `value` inf, ρ = 1/M for each of the M present.
    """
    known, tau_2d, present = _inputs(tau, constants, present)
    found = _minimise(tau_2d, known, present, _limit(limit, tau_2d))
    return found._replace(rho=found.rho.reshape(jnp.shape(tau)))
