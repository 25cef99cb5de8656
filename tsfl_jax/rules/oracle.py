"""The best weights from updates: what any weights could have won in an interval.

After training, the server knows all client models w_i and has samples of its own that
no client holds. The oracle takes the ρ on the simplex that minimizes their loss
F_val(Σ_i ρ_i w_i), as far as a few steps of a search find it: F_val is never above that
of equal or FedAvg's weights. On test data it may lose by fitting those samples.

The published relative is FedLAW: Li, Lin, Shang, Wu, "Revisiting Weighted Aggregation
in Federated Learning with Neural Networks", ICML 2023. It learns ρ on a proxy data set
as well, by gradient steps on a softmax, and in addition Σρ < 1, a shrinking factor that
acts as weight decay. NOT done here: shrinking; Σρ = 1.

The search is the spectral projected gradient method of Birgin, Martínez and Raydan,
"Nonmonotone Spectral Projected Gradient Methods on Convex Sets", SIAM Journal on
Optimization, 2000, in its monotone form: every step starts from the best point so far,
∂F_val/∂ρ_i = ⟨∇F_val(w(ρ)), w_i − w^t⟩ costs N inner products.
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax.components import component, setting
from tsfl_jax.rules import base
from tsfl_jax.theory import simplex
from tsfl_jax.types import HParams


@component("oracle")
class Oracle:
    """Search for the best weights on validation samples; also of measure_regret."""

    steps: int = setting(
        12, "evaluations of the search after those of its starts", low=0, high=1000
    )
    step: float = setting(0.1, "most that a weight changes in its first step", above=0)


class Point(NamedTuple):
    """A point of the search."""

    rho: Float[Array, "N"]
    loss: Float[Array, ""]  # F_val; inf: not evaluated yet
    slope: Float[Array, "N"]  # ∂F_val/∂ρ_i, 0 where a client is not present


class _Search(NamedTuple):
    """What one evaluation hands to the next."""

    best: Point
    first: Point  # the first start
    length: Float[Array, ""]  # of the next step, in weight per slope


def starting_weights(
    info: base.RoundInfo, present: Bool[Array, "N"]
) -> Float[Array, "2 N"]:
    """Where the oracle's search starts: equal weights, and those of FedAvg ∝ |D_i|."""
    tau = present.astype(jnp.int32)
    equal = base.normalized(jnp.ones_like(info.size), tau)
    return jnp.stack([equal, base.normalized(info.size, tau)])


def _projected_step(point: Point, length: Array, present: Bool[Array, "N"]) -> Array:
    """The projection of ρ − length·slope onto the simplex of the present clients."""
    # Shifted, so that the present entry with the least slope stays: a common shift
    # changes nothing, and no large numbers cancel.
    least = jnp.where(present, point.slope, jnp.inf).min()
    step = jnp.where(present, point.slope - least, 0.0)
    # Who falls by 2 has no weight, however much farther it would fall.
    target = jnp.where(present, point.rho - jnp.minimum(length * step, 2.0), 0.0)
    return simplex.project(target, jnp.ones(()), present, jnp.ones(()))


def _first_length(
    slope: Float[Array, "N"], present: Bool[Array, "N"], step: Array | float
) -> Array:
    """The length with which the largest change of a weight, unprojected, is `step`."""
    count = jnp.maximum(present.sum(), 1)
    apart = jnp.where(present, slope - slope.sum() / count, 0.0)
    largest = jnp.abs(apart).max()
    return jnp.where(largest > 0, step / jnp.where(largest > 0, largest, 1.0), 0.0)


def _next_length(old: Point, new: Point, length: Array, better: Array) -> Array:
    """Barzilai and Borwein's length after a success, a shorter one after a failure."""
    step, bend = new.rho - old.rho, new.slope - old.slope
    square, curvature = jnp.vdot(step, step), jnp.vdot(step, bend)
    convex = curvature > 0
    spectral = jnp.where(convex, square / jnp.where(convex, curvature, 1.0), 4 * length)
    # The minimum of the parabola through both losses with the slope at the old point.
    falls = jnp.vdot(old.slope, step)
    above = new.loss - old.loss - falls
    bends = jnp.isfinite(above) & (above > 0)
    share = jnp.where(bends, -falls / (2 * jnp.where(bends, above, 1.0)), 0.1)
    return jnp.where(better, spectral, length * jnp.clip(share, 0.1, 0.5))


def search(
    objective: base.Objective,
    starts: Float[Array, "S N"],
    present: Bool[Array, "N"],
    steps: Int[Array, ""] | int,
    step: Float[Array, ""] | float,
    counts: Bool[Array, "S"] | None = None,
) -> tuple[Point, Point]:
    """Minimize F_val over the simplex of the present clients: ρ ≥ 0, Σρ = 1.

    Args:
      objective: ρ → (F_val, ∂F_val/∂ρ); evaluated S + `steps` times.
      starts: points that are evaluated first; the search goes on from the best.
      present: clients that may have weight.
      steps: ≥ 0, evaluations after those of the starts.
      step: > 0, most that a weight changes in the first step, before the projection.
      counts: whether a start may be the answer; None: all may.

    Returns:
      The best point found, never worse than a start that counts; and the first start.
      Where no start has a finite loss, the last that counts, with an infinite loss.
    """
    number = starts.shape[0]
    counts = jnp.ones(number, bool) if counts is None else counts

    def evaluate(k: Array, at: _Search) -> _Search:
        place = jnp.minimum(k, number - 1)
        starting, allowed = k < number, counts[place] | (k >= number)
        rho = _projected_step(at.best, at.length, present)
        rho = jnp.where(starting, starts[place], rho)
        loss, slope = map(jnp.asarray, objective(rho))
        good = jnp.isfinite(loss) & jnp.isfinite(slope).all()
        loss_or_inf = jnp.where(good, loss, jnp.inf)
        new = Point(rho, loss_or_inf, jnp.where(good & present, slope, 0.0))
        better = allowed & ((new.loss < at.best.loss) | jnp.isinf(at.best.loss))
        length = _next_length(at.best, new, at.length, better)
        fresh = jnp.where(better, _first_length(new.slope, present, step), at.length)
        best = optax.tree.where(better, new, at.best)
        first = optax.tree.where(k == 0, Point(rho, loss, slope), at.first)
        return _Search(best, first, jnp.where(starting, fresh, length))

    nothing = jnp.zeros_like(starts[0])
    zero = jnp.zeros((), starts.dtype)
    point = Point(nothing, zero + jnp.inf, nothing)
    begun = _Search(point, point, zero)
    end = lax.fori_loop(0, number + steps, evaluate, begun)
    return end.best, end.first


def lengths(hparams: HParams) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """The settings of the search: how many steps, and the first one."""
    settings = hparams.of(Oracle)
    steps = jnp.asarray(settings.steps).astype(jnp.int32)
    return steps, jnp.asarray(settings.step, jnp.float32)


def oracle_weights(
    outputs: base.ClientOutputs, state: tuple, received: base.Received, hparams: HParams
) -> tuple[base.Weights, tuple]:
    """ρ = argmin F_val(Σ_i ρ_i w_i) on the simplex, from equal and FedAvg's weights."""
    assert outputs.validation is not None, "the rule declares that it uses it"
    starts = starting_weights(received.info, received.present)
    best, _ = search(outputs.validation, starts, received.present, *lengths(hparams))
    return base.weights_of(best.rho, received.info.tau), state


ORACLE = base.Aggregator(
    base.Mixing(from_updates=oracle_weights, uses_validation=True), sections=(Oracle,)
)
