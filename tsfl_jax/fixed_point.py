"""Theorems 2 and 3: the weights that equation (4), or (10), asks for, by iteration.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". The equation has its unknowns on both sides; the paper calls it a
closed form. The right side depends on them through three sums only, so that a search
in three dimensions decides, whatever T and N are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax.bound_constants import BoundConstants, check, inputs
from tsfl_jax.theory import coefficients
from tsfl_jax.types import Array, UserError

# Starts of the search, Σρτ in units of its value where W = 0.
_OF_POLE = (0.5, 0.9, 1.1, 2.0, 8.0, -1.0, -8.0)


class FixedPoint(NamedTuple):
    """Weights that satisfy (4) or (10), if `converged`."""

    rho: Array  # like τ; any sum, any sign
    residual: Array  # [] max |right side(ρ) − ρ| / max |ρ|, inf where not finite
    iterations: Array  # [] int32, steps from all starts together
    converged: Array  # [] bool


class _Problem(NamedTuple):
    tau: jax.Array  # [T, N]
    kept: jax.Array  # [T, N] bool, β
    known: BoundConstants


def _sums(rho, tau):
    return jnp.stack([(rho * tau).sum(), (rho**2 * tau).sum(), (rho * tau**2).sum()])


def _right_side(sums, problem: _Problem, share=1.0):
    """ρ of (4) from Σρτ, Σρ²τ, Σρτ²; with `share` of the item that has them."""
    tau, kept, known = problem
    A, B, C = coefficients(known, tau.max())
    gamma = known.dissimilarity[None]
    twice = 2 * known.lr**2 * tau.shape[1] * known.grad_variance[None]
    D = known.distance + twice / 2 * sums[1] + A * gamma * sums[0] + C * sums[2]
    above = share * B * D / (1 + B * sums[0]) + A * gamma + C * tau
    return jnp.where(kept, above / jnp.where(kept, twice, 1.0), 0.0)


def _linear(matrix, right):
    """x of matrix·x = right ``[3]``, by cross products: compiled in no time."""
    a, b, c = matrix
    rows = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)])
    return right @ rows / jnp.sum(a * rows[0])


def _gap(x, scale, problem):
    """What (4) makes of the three sums x·scale, less what they are, over the scale."""
    return _sums(_right_side(x * scale, problem), problem.tau) / scale - x


def _search(x, scale, problem, max_iterations):
    """Newton's method on `_gap`, or plain iteration where that helps more, damped."""
    share = 0.5 ** jnp.arange(12, dtype=x.dtype)[:, None]

    def error(x):
        found = jnp.max(jnp.abs(_gap(x, scale, problem)) / (1 + jnp.abs(x)))
        return jnp.where(jnp.isfinite(found), found, jnp.inf)

    def step(state):
        x, least, count, _ = state
        gap = _gap(x, scale, problem)
        newton = _linear(jax.jacfwd(_gap)(x, scale, problem), -gap)
        points = x[None] + jnp.concatenate([share * newton[None], share * gap[None]])
        errors = jax.vmap(error)(points)
        best = jnp.argmin(errors)
        better = errors[best] < least
        x = jnp.where(better, points[best], x)
        return x, jnp.minimum(errors[best], least), count + 1, better

    def unfinished(state):
        return state[3] & (state[1] > 0) & (state[2] < max_iterations)

    start = (x, error(x), jnp.int32(0), jnp.bool_(True))
    return lax.while_loop(unfinished, step, start)[:3]


@functools.partial(jax.jit, static_argnums=1)  # not op by op
def _solution(problem: _Problem, max_iterations: int) -> FixedPoint:
    """`theorem2_weights`, after its checks."""
    tau = problem.tau
    fixed = lax.stop_gradient(problem)  # a loop has no reverse derivative
    start = _right_side(jnp.zeros(3, tau.dtype), fixed, share=0.0)
    scale = _sums(jnp.abs(start) + 1 / tau.shape[1], tau)
    scale = jnp.where(scale > 0, scale, 1.0)
    # The right side has a pole at W = 0, where a search from one side gets stuck:
    # further ones start from Σρτ = −1/B times these, on either side of it.
    B = coefficients(fixed.known, tau.max()).B
    pole = -1 / jnp.where(B == 0, 1.0, B) / scale[0]
    x = jnp.tile((_sums(start, tau) / scale)[None], (len(_OF_POLE) + 1, 1))
    x = x.at[1:, 0].set(pole * jnp.asarray(_OF_POLE, x.dtype))
    scale, x = lax.stop_gradient((scale, x))
    search = jax.vmap(_search, in_axes=(0, None, None, None))
    x, error, count = search(x, scale, fixed, max_iterations)
    tolerance = float(jnp.finfo(tau.dtype).eps) ** (2 / 3)
    first = jnp.where(error.min() < tolerance, error < tolerance, error == error.min())
    x, count = x[first.argmax()], count.sum()
    # One more step of Newton: it gives x the derivative of the implicit function.
    jacobian = jax.jacfwd(_gap)(x, scale, fixed)
    change = _linear(jacobian, _gap(x, scale, problem))
    x = jnp.where(jnp.isfinite(change).all(), x - change, x)

    rho = _right_side(x * scale, problem)
    apart = jnp.abs(_right_side(_sums(rho, tau), problem) - rho).max()
    size = jnp.abs(rho).max()
    residual = lax.stop_gradient(apart / jnp.where(size > 0, size, 1.0))
    residual = jnp.where(jnp.isfinite(residual), residual, jnp.inf)
    return FixedPoint(rho, residual, count, residual <= tolerance)


def theorem2_weights(
    tau: Array,
    constants: BoundConstants,
    selected: Array | None = None,
    *,
    max_iterations: int = 100,
) -> FixedPoint:
    """ρ = {BD + (AΓ_i + Cτ_i)W}/(2η²Nσ_i²W): Theorem 2 (4)–(5), Theorem 3 (10)–(11).

    As printed: D has σ_i² and Γ_i outside its sums, where the derivation has σ_j² and
    Γ_j inside; the sign is that of `theory.printed_derivative`; and there is no
    multiplier for Σρ = 1, so ρ may have any sum and any sign. (11) has β_i inside its
    sums over j; β_j is meant, and changes nothing, as ρ_j = 0 where it is 0.

    The search starts from ρ = (AΓ_i + Cτ_i)/(2η²Nσ_i²), the solution for B = 0, and
    from seven other points, and takes only steps that make the residual smaller.

    Args:
      tau: ``[T, N]``, or ``[N]`` for one interval, local iterations ≥ 0.
      constants: what the bound takes as known; σ_i² > 0 of the selected.
      selected: bool like `tau`, β of Theorem 3; None: all, Theorem 2.
      max_iterations: most steps from each start; a step tries 24 points.

    Returns:
      `FixedPoint`. There may be several solutions (two where all σ_i and all Γ_i are
      equal, as the equation is then quadratic): that of the first start, in the order
      above, that finds one is returned, whatever the sign of W. If none does, or σ_i
      = 0, `converged` is False, and ρ, perhaps not finite, solves nothing. The limit
      of the residual is eps^(2/3) of the dtype. Gradients are those of the solution;
      they mean nothing where not converged.
    """
    known, many = inputs(constants, tau)
    shape, tau = np.shape(tau), many
    selected = np.ones(shape, bool) if selected is None else selected
    check("selected", selected, shape, np.isfinite, "booleans, as many as τ has")
    kept = jnp.atleast_2d(jnp.asarray(selected, bool))
    if not any(isinstance(x, jax.core.Tracer) for x in (kept, known.grad_variance)):
        zero = jax.device_get(kept).any(0) & (jax.device_get(known.grad_variance) == 0)
        if zero.any():
            raise UserError(
                f"constants.grad_variance[{zero.argmax()}] = 0: expected σ_i² > 0, as "
                "(4) divides by it; or leave the client out with selected"
            )

    found = _solution(_Problem(tau, kept, known), max_iterations)
    return found._replace(rho=found.rho.reshape(shape))
