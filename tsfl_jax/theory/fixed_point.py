"""Theorems 2 and 3: weights that satisfy equation (4), or (10), found by iteration.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". The equation has its unknowns on both sides; the paper calls it a
closed form. The right side depends on them through three sums only, so a search in
three dimensions suffices for any T and N. Not here: weights that minimize the
bound, see `minimum`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax import trees
from tsfl_jax.theory import bounds
from tsfl_jax.theory.bounds import BoundConstants, coefficients, nan_unless
from tsfl_jax.types import Numbers

# Starting points of the search, Σρτ in units of its value where W = 0.
_OF_POLE = (0.5, 0.9, 1.1, 2.0, 8.0, -1.0, -8.0)


class FixedPoint(NamedTuple):
    """Weights that satisfy (4) or (10), if `converged`."""

    rho: Float[Array, "..."]  # like τ; any sum, any sign
    residual: Float[Array, ""]  # max |right side(ρ) − ρ| / max |ρ|; inf if not finite
    iterations: Int[Array, ""]  # steps from all starting points together
    converged: Bool[Array, ""]


class _Equation(NamedTuple):
    """What the right side of (4) depends on, apart from the weights."""

    tau: Float[Array, "T N"]
    kept: Bool[Array, "T N"]  # β
    constants: BoundConstants


def _sums(rho: Float[Array, "T N"], tau: Float[Array, "T N"]) -> Float[Array, "3"]:
    """Σρτ, Σρ²τ, Σρτ²."""
    return jnp.stack([(rho * tau).sum(), (rho**2 * tau).sum(), (rho * tau**2).sum()])


def _right_side(
    sums: Float[Array, "3"], problem: _Equation, share: float = 1.0
) -> Float[Array, "T N"]:
    """ρ of (4) from the three sums; `share` scales the term that contains them."""
    tau, kept, constants = problem
    A, B, C = coefficients(constants, tau.max())
    gamma = constants.dissimilarity[None]
    twice = 2 * constants.lr**2 * tau.shape[1] * constants.grad_variance[None]
    D = constants.distance + twice / 2 * sums[1] + A * gamma * sums[0] + C * sums[2]
    above = share * B * D / (1 + B * sums[0]) + A * gamma + C * tau
    return jnp.where(kept, above / jnp.where(kept, twice, 1.0), 0.0)


def _linear(matrix: Float[Array, "3 3"], right: Float[Array, "3"]) -> Float[Array, "3"]:
    """Solve matrix·x = right by cross products, which compile fast."""
    a, b, c = matrix
    rows = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)])
    return right @ rows / jnp.sum(a * rows[0])


def _gap(
    x: Float[Array, "3"], scale: Float[Array, "3"], problem: _Equation
) -> Float[Array, "3"]:
    """The sums of the ρ that (4) gives for the sums x·scale, over scale, minus x."""
    return _sums(_right_side(x * scale, problem), problem.tau) / scale - x


# x, its error, steps taken, whether the last step was an improvement
_State = tuple[Float[Array, "3"], Float[Array, ""], Int[Array, ""], Bool[Array, ""]]


def _search(
    x: Float[Array, "3"],
    scale: Float[Array, "3"],
    problem: _Equation,
    max_iterations: int,
) -> tuple[Float[Array, "3"], Float[Array, ""], Int[Array, ""]]:
    """Solve `_gap` = 0 by damped Newton steps, or fixed-point steps where better."""
    share = 0.5 ** jnp.arange(12, dtype=x.dtype)[:, None]

    def error(x: Float[Array, "3"]) -> Float[Array, ""]:
        largest = jnp.max(jnp.abs(_gap(x, scale, problem)) / (1 + jnp.abs(x)))
        return jnp.where(jnp.isfinite(largest), largest, jnp.inf)

    def step(state: _State) -> _State:
        x, least, count, _ = state
        gap = _gap(x, scale, problem)
        newton = _linear(jax.jacfwd(_gap)(x, scale, problem), -gap)
        points = x[None] + jnp.concatenate([share * newton[None], share * gap[None]])
        errors = jax.vmap(error)(points)
        best = jnp.argmin(errors)
        better = errors[best] < least
        x = jnp.where(better, points[best], x)
        return x, jnp.minimum(errors[best], least), count + 1, better

    return lax.while_loop(
        lambda state: state[3] & (state[1] > 0) & (state[2] < max_iterations),
        step,
        (x, error(x), jnp.int32(0), jnp.bool_(True)),
    )[:3]


@functools.partial(jax.jit, static_argnums=1)  # not op by op
def _solution(problem: _Equation, max_iterations: int) -> FixedPoint:
    """`theorem2_weights`, after its checks."""
    tau = problem.tau
    fixed = lax.stop_gradient(problem)  # a while loop has no reverse derivative
    start = _right_side(jnp.zeros(3, tau.dtype), fixed, share=0.0)
    scale = _sums(jnp.abs(start) + 1 / tau.shape[1], tau)
    scale = jnp.where(scale > 0, scale, 1.0)
    # The right side has a pole at W = 0, which a search cannot cross. So further
    # searches start from Σρτ = −1/B times `_OF_POLE`, on both sides of it.
    B = coefficients(fixed.constants, tau.max()).B
    pole = -1 / jnp.where(B == 0, 1.0, B) / scale[0]
    x = jnp.tile((_sums(start, tau) / scale)[None], (len(_OF_POLE) + 1, 1))
    x = x.at[1:, 0].set(pole * jnp.asarray(_OF_POLE, x.dtype))
    scale, x = lax.stop_gradient((scale, x))
    search = jax.vmap(_search, in_axes=(0, None, None, None))
    x, error, count = search(x, scale, fixed, max_iterations)
    tolerance = float(jnp.finfo(tau.dtype).eps) ** (2 / 3)
    first = jnp.where(error.min() < tolerance, error < tolerance, error == error.min())
    x, count = x[first.argmax()], count.sum()
    # One more Newton step, which gives x the derivative of the implicit function.
    jacobian = jax.jacfwd(_gap)(x, scale, fixed)
    change = _linear(jacobian, _gap(x, scale, problem))
    x = jnp.where(jnp.isfinite(change).all(), x - change, x)

    rho = _right_side(x * scale, problem)
    apart = jnp.abs(_right_side(_sums(rho, tau), problem) - rho).max()
    size = jnp.abs(rho).max()
    residual = lax.stop_gradient(apart / jnp.where(size > 0, size, 1.0))
    residual = jnp.where(jnp.isfinite(residual), residual, jnp.inf)
    return FixedPoint(rho, residual, count, residual <= tolerance)


@trees.arithmetic()
def theorem2_weights(
    tau: Numbers,
    constants: BoundConstants,
    selected: Numbers | None = None,
    *,
    max_iterations: int = 100,
) -> FixedPoint:
    """The weights of Theorem 2 (4)–(5), or Theorem 3 (10)–(11), as printed.

    ρ = {BD + (AΓ_i + Cτ_i)W}/(2η²Nσ_i²W).

    In the print, D has σ_i² and Γ_i outside its sums, where the derivation has σ_j² and
    Γ_j inside; the sign is that of `bounds.printed_derivative`; and there is no
    multiplier for Σρ = 1, so ρ may have any sum and any sign. (11) has β_i inside its
    sums over j where β_j is meant, which changes nothing, as ρ_j = 0 where β_j = 0.

    The search starts from ρ = (AΓ_i + Cτ_i)/(2η²Nσ_i²), the solution for B = 0, and
    from seven other points, and takes only steps that reduce the residual.

    Args:
      tau: ``[T, N]``, or ``[N]`` for one interval, local iterations ≥ 0.
      constants: see `BoundConstants`; σ_i² > 0 for the selected clients.
      selected: bool like `tau`, β of Theorem 3; None: all, Theorem 2.
      max_iterations: most steps from each starting point; a step tries 24 points.

    Returns:
      `FixedPoint`. There may be several solutions (two where all σ_i and all Γ_i are
      equal, as the equation is then quadratic). The one found from the first starting
      point that leads to any, in the order above, is returned, for either sign of W.
      If none does, or σ_i = 0, `converged` is False, and ρ, perhaps not finite, is not
      a solution. Converged means a residual of at most eps^(2/3) of the dtype.
      Gradients are those of the solution, and meaningless where not converged.
    """
    constants, taus, _, good = bounds.inputs(constants, tau)
    shape = np.shape(tau)
    selected = np.ones(shape, bool) if selected is None else selected
    bounds.check("selected", selected, shape, np.isfinite, "booleans, as many as τ has")
    kept = jnp.atleast_2d(jnp.asarray(selected, bool))
    if not isinstance(kept, Tracer):
        unused, variance = ~jax.device_get(kept).any(0), constants.grad_variance
        bounds.check(
            "constants.grad_variance",
            variance,
            variance.shape,
            lambda x: unused | (x > 0),
            "σ_i² > 0, as (4) divides by it; or leave out the client (selected)",
        )

    solution = _solution(_Equation(taus, kept, constants), max_iterations)
    return nan_unless(good, solution._replace(rho=solution.rho.reshape(shape)))
