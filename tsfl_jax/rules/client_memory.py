"""Rules whose server remembers something of each client.

SCAFFOLD, SAFA and ASO-Fed, with the state that `feddyn` and `ca2fl` have as well; the
functions that make the first states say what these hold.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules import base, fednova
from tsfl_jax.rules.averages import BY_SIZE_SECTIONS, Server, server_step, size_weights
from tsfl_jax.types import HParams, Params


class ByClient(NamedTuple):
    """An entry per client, of cohorts those that ever work."""

    local: Params  # of the rule, leaves [N, ...]
    size: Float[Array, "N"]  # |D_i| of its last delivery; all at first
    idle_size: Float[Array, ""]  # |D_j| of all that never work
    common: Params = ()  # of the rule, what clients download with the model

    @property
    def shares(self) -> Float[Array, "N"]:
        """p_i = |D_i|/Σ_j |D_j|, over all clients."""
        return self.size / (self.size.sum() + self.idle_size)


def no_memory(params: Params, counts: base.Counts) -> ByClient:
    """`local` as the parameters, 0 until client i has delivered."""
    zeros = jax.tree.map(jnp.zeros_like, params.get("params", {}))
    return ByClient(trees.repeated(zeros, counts.clients), *counts.sizes)


def delivered(
    state: ByClient, received: base.Received
) -> tuple[Int[Array, "N"], ByClient]:
    """Where entries of those that deliver are written, and the state with their |D_i|.

    Of several deliveries of one client the last; what is not present: beyond the end,
    also an empty slot, which names client 0.
    """
    info, count = received.info, state.size.shape[0]
    where = jnp.asarray(trees.last_of(info.places, received.present, count))
    size = state.size.at[where].set(info.size.astype(state.size.dtype), mode="drop")
    return where, state._replace(size=size)


def _no_variates(params: Params, counts: base.Counts) -> ByClient:
    """`local` are the c_i, `common` is c = Σ_i p_i c_i."""
    common = jax.tree.map(jnp.zeros_like, params.get("params", {}))
    return no_memory(params, counts)._replace(common=common)


def _correction(
    state: ByClient, broadcast: Params, client: Int[Array, ""] | int
) -> Params:
    """What client i adds to its gradients: c − c_i, with the c of its download.

    c_i needs no memory: nothing but the client's own deliveries changes it. Of two in
    one buffer both read the c_i of before (simplified); the later one writes it.
    """
    return jax.tree.map(lambda c, c_i: c - c_i[client], broadcast, state.local)


def _corrected_mean(
    updates: Params, state: ByClient, received: base.Received, hparams: HParams
) -> tuple[Params, ByClient]:
    """The mean update Δ and the new control variates: Algorithm 1, option II.

    Δ = Σ_i ρ_i (w_i − base_i). c_i⁺ = c_i − c − (w_i − base_i)/(η‖a_i‖₁) with the c of
    the client's download, then c = Σ_i p_i c_i over all N. ‖a_i‖₁ is the number of
    steps, or with momentum or a proximal term how often gradients count in the update,
    so that c_i is a mean gradient. p_i = |D_i|/Σ|D_j| replaces the paper's 1/N for both
    models and control variates, so that F = Σ p_i F_i is what is minimized.

    Of several deliveries of one client, which are in the order of its tasks, the last
    decides c_i: one after another they would leave the same. All of them were trained
    with the c_i of before this update.

    Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning", ICML 2020.
    """
    present, info = received.present, received.info
    work = fednova.of_sgd(info.steps, hparams)
    worked = present & (work > 0)
    scale = jnp.where(worked, 1.0 / (hparams.lr * jnp.where(worked, work, 1.0)), 0.0)
    where, state = delivered(state, received._replace(present=worked))
    broadcast = received.broadcast
    if broadcast is None:
        broadcast = trees.repeated(state.common, 1)

    def renewed(c_i: Array, c: Array, update: Array) -> Array:
        along = scale.reshape((-1,) + (1,) * (update.ndim - 1)).astype(update.dtype)
        fresh = c_i[info.places] - c - along * update
        return c_i.at[where].set(fresh, mode="drop")

    local = jax.tree.map(renewed, state.local, broadcast, updates["params"])
    # Summed again each time: c must not drift from the c_i. In full precision, since
    # an error of c stays in each client's gradients.
    common = trees.weighted(local, state.shares)
    # The share of clients that were lost on the way goes to the others.
    rho = base.normalized(received.rho, jnp.where(present, 1, 0))
    return trees.weighted(updates, rho), state._replace(local=local, common=common)


SCAFFOLD = base.Aggregator(
    base.Mixing(size_weights, combine=_corrected_mean),
    base.ClientSide(
        gradient_correction=_correction,
        broadcast=lambda state: state.common,
        counts_on_sgd=True,
    ),
    base.ServerSide(server_step, _no_variates),
    sections=(Server, *BY_SIZE_SECTIONS),
    label="SCAFFOLD",
)


@component("safa")
class Safa:
    """When a cached model is too old."""

    lag: int = setting(
        5, "updates for which a cached model is kept; as timeline.lag", low=0
    )


def _first_cache(params: Params, counts: base.Counts) -> ByClient:
    """`local`: each one's last model, w^0 at first, and its age in updates.

    `common` is w^t.
    """
    models = trees.repeated(params, counts.clients)
    age = jnp.zeros(counts.clients, jnp.int32)
    return ByClient((models, age), *counts.sizes, params)


def _cache_mean(
    updates: Params, state: ByClient, received: base.Received, hparams: HParams
) -> tuple[Params, ByClient]:
    """w^t + Δ = Σ_N p_i v_i over the cache v, after what arrived was written into it.

    v_i = w_i of a client that delivers; w^t where the entry is older than `Safa.lag`
    updates; else what it was. Σ p_i (v_i − w^t) is summed, so that clients of whom
    nothing is cached count as w^t. With the framework `safa` what was bypassed arrives
    with the next update, which is the paper's order: it enters after an aggregation.

    Source: W. Wu et al., "SAFA: A Semi-Asynchronous Protocol for Fast Federated
    Learning with Low Overhead", IEEE TC 2021, equations 6 to 8.
    """
    settings: Any = hparams.of(Safa)
    (models, age), current = state.local, state.common
    where, _ = delivered(state, received)
    start = received.broadcast
    start = trees.repeated(current, 1) if start is None else start
    age = (age + 1).at[where].set(0, mode="drop")
    old = age > settings.lag

    def written(cached: Array, start: Array, update: Array, now: Array) -> Array:
        fresh = cached.at[where].set(start + update, mode="drop")
        stale = old.reshape((-1,) + (1,) * now.ndim)
        return jnp.where(stale, now[None], fresh)

    models = jax.tree.map(written, models, start, updates, current)

    moved = jax.tree.map(lambda v, now: v - now[None], models, current)
    state = state._replace(local=(models, jnp.where(old, 0, age)))
    return trees.weighted(moved, state.shares), state


SAFA = base.Aggregator(
    base.Mixing(combine=_cache_mean),
    base.ClientSide(broadcast=lambda state: state.common),
    # The mean of the cache is the new model, which clients download.
    base.ServerSide(
        lambda mean, params, state, *_: (mean, state._replace(common=mean)),
        _first_cache,
    ),
    sections=(Safa,),
    label="SAFA",
)


def _no_delays(params: Params, counts: base.Counts) -> ByClient:
    """`local`: the sum of the delays of its deliveries, and their number."""
    del params
    zeros = jnp.zeros(counts.clients)
    return ByClient((zeros, zeros), *counts.sizes)


def _delayed_sum(
    updates: Params, state: ByClient, received: base.Received, hparams: HParams
) -> tuple[Params, ByClient]:
    """Δ = Σ_i r_i (n_i/n) (w_i − base_i) with r_i = max(1, ln d̄_i).

    n_i are the samples that client i has now, n those of all clients by what is known
    of them, and d̄_i is the mean delay of its deliveries so far: 1 + lag updates, where
    the paper has seconds.

    Simplified: the paper multiplies the client's learning rate by r_i, here it is the
    update, the same for one step and to first order in η for more. Its decayed former
    gradients, and the server's rescaling of the first layer, are left out. The proximal
    term is μ/2‖w − w^t‖², with `mu` as of FedProx; data that arrive during training are
    `schedule.arrive_from`.

    Source: Y. Chen, Y. Ning, M. Slawski, H. Rangwala, "Asynchronous Online Federated
    Learning for Edge Devices with Non-IID Data", IEEE Big Data 2020.
    """
    del hparams
    info, present = received.info, received.present
    (total, number), place = state.local, info.places
    # Each delivery counts, also of a client that delivers twice.
    added = jnp.where(present, place, len(total))
    delay = jnp.where(present, 1.0 + info.lag.astype(jnp.float32), 0.0)
    total = total.at[added].add(delay, mode="drop")
    number = number.at[added].add(1.0, mode="drop")
    _, state = delivered(state, received)
    mean = total[place] / jnp.maximum(number[place], 1.0)
    longer = jnp.maximum(1.0, jnp.log(jnp.maximum(mean, 1.0)))
    share = info.size.astype(jnp.float32) / (state.size.sum() + state.idle_size)
    weight = jnp.where(present, longer * share, 0.0)
    return trees.weighted(updates, weight), state._replace(local=(total, number))


ASO_FED = base.Aggregator(
    base.Mixing(combine=_delayed_sum),
    base.ClientSide(proximal=True),
    base.ServerSide(server_step, _no_delays),
    sections=(Server,),
    label="ASO-Fed",
)
