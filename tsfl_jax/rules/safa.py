"""SAFA's aggregation: the mean of a cache with one model of every client."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules import base
from tsfl_jax.types import HParams, Params


@component("safa")
class Safa:
    """When a cached model is too old."""

    lag: int = setting(
        5, "updates for which a cached model is kept; as timeline.lag", low=0
    )


class Cache(NamedTuple):
    """The server's memory; N clients, of cohorts those that ever work."""

    models: Params  # [N, ...], the last one of each client; w^0 at first
    current: Params  # w^t, which clients download
    age: Int[Array, "N"]  # updates since the entry was written
    size: Float[Array, "N"]  # |D_i|; p_i = |D_i|/Σ_j |D_j|, over all clients
    idle_size: Float[Array, ""]  # |D_j| of all that never work


def _first_cache(params: Params, counts: base.Counts) -> Cache:
    age = jnp.zeros(counts.clients, jnp.int32)
    models = trees.repeated(params, counts.clients)
    return Cache(models, params, age, *counts.sizes)


def _cache_mean(
    updates: Params, state: Cache, received: base.Received, hparams: HParams
) -> tuple[Params, Cache]:
    """w^t + Δ = Σ_N p_i v_i over the cache v, after what arrived was written into it.

    v_i = w_i of a client that delivers; w^t where the entry is older than `Safa.lag`
    updates; else what it was. Σ p_i (v_i − w^t) is summed, so that clients of whom
    nothing is cached count as w^t. With the framework `safa` what was bypassed arrives
    with the next update, which is the paper's order: it enters after an aggregation.

    Args:
      updates: w_i − base_i, leaves ``[K, ...]``.
      state: of `_first_cache`.
      received: who is there, and the models they had downloaded.
      hparams: with `Safa`.

    Source: W. Wu et al., "SAFA: A Semi-Asynchronous Protocol for Fast Federated
    Learning with Low Overhead", IEEE TC 2021, equations 6 to 8.
    """
    settings: Any = hparams.of(Safa)
    info, count = received.info, state.size.shape[0]
    share = state.size / (state.size.sum() + state.idle_size)
    where = trees.last_of(info.places, received.present, count)
    start = received.broadcast
    start = trees.repeated(state.current, 1) if start is None else start
    age = (state.age + 1).at[where].set(0, mode="drop")
    old = age > settings.lag

    def written(cached: Array, start: Array, update: Array, now: Array) -> Array:
        fresh = cached.at[where].set(start + update, mode="drop")
        stale = old.reshape((-1,) + (1,) * now.ndim)
        return jnp.where(stale, now[None], fresh)

    models = jax.tree.map(written, state.models, start, updates, state.current)

    moved = jax.tree.map(lambda v, now: v - now[None], models, state.current)
    state = state._replace(models=models, age=jnp.where(old, 0, age))
    return trees.weighted(moved, share), state


def _keep_current(
    mean: Params,
    params: Params,
    state: Cache,
    received: base.Received,
    hparams: HParams,
) -> tuple[Params, Cache]:
    """The mean of the cache is the new model, which clients download."""
    del params, received, hparams
    return mean, state._replace(current=mean)


SAFA = base.Aggregator(
    base.Mixing(combine=_cache_mean),
    base.ClientSide(broadcast=lambda state: state.current),
    base.ServerSide(_keep_current, _first_cache),
    sections=(Safa,),
    label="SAFA",
)
