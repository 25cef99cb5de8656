"""Centered clipping: a mean of updates that are clipped around the last one.

    v ← v + (1/n) Σ_i (u_i − v) min(1, τ/‖u_i − v‖),   several times
    w^{t+1} = w^t + η_g v

from the v of the interval before. An attacker moves v by at most τ/n, and as v follows
the updates of earlier intervals, a small bias does not add up over time.

Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", ICML
2021, Algorithm 2. Simplified: clients have no momentum over intervals, as their updates
are of many steps; their SGD has its own. τ is a length in the paper; with 0 it is the
median of ‖u_i − v‖, so that it fits every network and phase of training.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules.averages import Server, server_step
from tsfl_jax.rules.base import Aggregator, Mixing, Received, ServerSide
from tsfl_jax.types import HParams, Params


@component("centered_clipping")
class CenteredClipping:
    """Updates clipped around the last one."""

    radius: float = setting(0.0, "τ; 0: the median distance", low=0)
    iterations: int = setting(1, "how often updates are clipped", low=1, high=100)


def clipped_mean(
    updates: Params,
    present: Bool[Array, "N"],
    center: Params,
    radius: ArrayLike,
    iterations: ArrayLike = 1,
) -> Params:
    """v + (1/n) Σ_i (u_i − v) min(1, τ/‖u_i − v‖), `iterations` times.

    Args:
      updates: u_i, floating leaves ``[N, ...]``, finite.
      present: ``[N]``, which of them count, n.
      center: v, leaves ``[...]``; also what is returned if n = 0.
      radius: ``[]`` τ ≥ 0; 0: the median of the distances, anew each time.
      iterations: ``[]`` ≥ 0.
    """

    def clipped(_: Array, center: Params) -> Params:
        apart = jax.tree.map(lambda u, v: u - v[None], updates, center)
        length = jax.vmap(optax.tree.norm)(apart)
        middle = jnp.nanmedian(jnp.where(present, length, jnp.nan))
        most = jnp.where(jnp.asarray(radius) > 0, radius, middle)
        factor = jnp.minimum(1.0, most / jnp.where(length > 0, length, 1.0))
        share = jnp.where(present, factor, 0.0) / jnp.maximum(present.sum(), 1)
        return jax.tree.map(jnp.add, center, trees.weighted(apart, share))

    count = jnp.where(present.any(), jnp.asarray(iterations, jnp.int32), 0)
    return lax.fori_loop(0, count, clipped, center)


def combine(
    updates: Params, center: Params, received: Received, hparams: HParams
) -> tuple[Params, Params]:
    """Δ = v, which is also the new state."""
    s, present = hparams.of(CenteredClipping), received.present
    new = clipped_mean(updates, present, center, s.radius, s.iterations)
    return new, new


CENTERED_CLIPPING = Aggregator(
    Mixing(combine=combine),
    server=ServerSide(server_step, lambda w, _: jax.tree.map(jnp.zeros_like, w)),
    sections=(Server, CenteredClipping),
    label="centered clipping",
)
