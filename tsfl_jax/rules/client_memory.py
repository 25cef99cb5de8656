"""Rules whose server remembers something of each client: SCAFFOLD, SAFA, ASO-Fed."""

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
    """An entry per client, of cohorts those that ever work; of FedDyn and CA²FL."""

    local: Params  # [N, ...], as the parameters; 0 until client i has delivered
    size: Float[Array, "N"]  # |D_i| of its last delivery
    idle_size: Float[Array, ""]  # |D_j| of all that never work

    @property
    def shares(self) -> Float[Array, "N"]:
        """p_i = |D_i|/Σ_j |D_j|, over all clients."""
        return self.size / (self.size.sum() + self.idle_size)


def no_memory(params: Params, counts: base.Counts) -> ByClient:
    """The state before the first delivery."""
    zeros = jax.tree.map(jnp.zeros_like, params.get("params", {}))
    return ByClient(trees.repeated(zeros, counts.clients), *counts.sizes)


def delivered(
    state: ByClient, received: base.Received
) -> tuple[Int[Array, "N"], ByClient]:
    """Where entries of those that deliver are written, and the state with their |D_i|.

    Of several deliveries of one client the last; what is not present: beyond the end.
    """
    info, count = received.info, state.size.shape[0]
    where = jnp.asarray(trees.last_of(info.places, received.present, count))
    size = state.size.at[where].set(info.size.astype(state.size.dtype), mode="drop")
    return where, state._replace(size=size)


class ControlVariates(NamedTuple):
    """The state of SCAFFOLD."""

    common: Params  # c = Σ_i p_i c_i
    local: Params  # [N, ...] c_i, 0 until client i has delivered
    size: Float[Array, "N"]  # |D_i| of its last delivery; p_i = |D_i|/Σ|D_j|
    idle_size: Float[Array, ""]  # |D_j| of all that never deliver, whose c_j stay 0


def _zero_variates(params: Params, counts: base.Counts) -> ControlVariates:
    zeros = jax.tree.map(jnp.zeros_like, params.get("params", {}))
    many = trees.repeated(zeros, counts.clients)
    return ControlVariates(zeros, many, *counts.sizes)


def _correction(
    state: ControlVariates, broadcast: Params, client: Int[Array, ""] | int
) -> Params:
    """What client i adds to its gradients: c − c_i, with the c of its download.

    c_i needs no memory: nothing but the client's own deliveries changes it. Of two in
    one buffer both read the c_i of before (simplified); the later one writes it.
    """
    return jax.tree.map(lambda c, c_i: c - c_i[client], broadcast, state.local)


def _corrected_mean(
    updates: Params, state: ControlVariates, received: base.Received, hparams: HParams
) -> tuple[Params, ControlVariates]:
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
    _, local, size, idle_size = state
    present, info = received.present, received.info
    work = fednova.of_sgd(info.steps, hparams)
    worked = present & (work > 0)
    scale = jnp.where(worked, 1.0 / (hparams.lr * jnp.where(worked, work, 1.0)), 0.0)
    client, clients = info.places, size.shape[0]
    # An empty slot names client 0; what does not count is written nowhere.
    where = trees.last_of(client, worked, clients)
    broadcast = received.broadcast
    if broadcast is None:
        broadcast = trees.repeated(state.common, 1)

    def renewed(c_i: Array, c: Array, update: Array) -> Array:
        along = scale.reshape((-1,) + (1,) * (update.ndim - 1)).astype(update.dtype)
        fresh = c_i[client] - c - along * update
        return c_i.at[where].set(fresh, mode="drop")

    local = jax.tree.map(renewed, local, broadcast, updates["params"])
    size = size.at[where].set(info.size.astype(size.dtype), mode="drop")
    share = size / (size.sum() + idle_size)
    # Summed again each time: c must not drift from the c_i. In full precision, since
    # an error of c stays in each client's gradients.
    common = trees.weighted(local, share)
    # The share of clients that were lost on the way goes to the others.
    rho = jnp.where(present, received.rho, 0.0)
    rho = rho / jnp.where(rho.sum() > 0, rho.sum(), 1.0)
    return trees.weighted(updates, rho), ControlVariates(common, local, size, idle_size)


SCAFFOLD = base.Aggregator(
    base.Mixing(size_weights, combine=_corrected_mean),
    base.ClientSide(
        gradient_correction=_correction,
        broadcast=lambda state: state.common,
        counts_on_sgd=True,
    ),
    base.ServerSide(server_step, _zero_variates),
    sections=(Server, *BY_SIZE_SECTIONS),
    label="SCAFFOLD",
)


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


SAFA = base.Aggregator(
    base.Mixing(combine=_cache_mean),
    base.ClientSide(broadcast=lambda state: state.current),
    # The mean of the cache is the new model, which clients download.
    base.ServerSide(
        lambda mean, params, state, *_: (mean, state._replace(current=mean)),
        _first_cache,
    ),
    sections=(Safa,),
    label="SAFA",
)


class Delays(NamedTuple):
    """What the server remembers of each of N clients."""

    total: Float[Array, "N"]  # of the delays of its deliveries
    number: Float[Array, "N"]  # of its deliveries
    size: Float[Array, "N"]  # samples that it had at the last one; all at first
    idle_size: Float[Array, ""]  # samples of all clients that never work


def _no_delays(params: Params, counts: base.Counts) -> Delays:
    del params
    zeros = jnp.zeros(counts.clients)
    return Delays(zeros, zeros, *counts.sizes)


def _delayed_sum(
    updates: Params, state: Delays, received: base.Received, hparams: HParams
) -> tuple[Params, Delays]:
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
    count, place = state.size.shape[0], info.places
    # Each delivery counts, also of a client that delivers twice.
    added = jnp.where(present, place, count)
    delay = jnp.where(present, 1.0 + info.lag.astype(jnp.float32), 0.0)
    total = state.total.at[added].add(delay, mode="drop")
    number = state.number.at[added].add(1.0, mode="drop")
    where = trees.last_of(place, present, count)
    size = state.size.at[where].set(info.size.astype(jnp.float32), mode="drop")
    mean = total[place] / jnp.maximum(number[place], 1.0)
    longer = jnp.maximum(1.0, jnp.log(jnp.maximum(mean, 1.0)))
    share = info.size.astype(jnp.float32) / (size.sum() + state.idle_size)
    weight = jnp.where(present, longer * share, 0.0)
    delta = trees.weighted(updates, weight)
    return delta, Delays(total, number, size, state.idle_size)


ASO_FED = base.Aggregator(
    base.Mixing(combine=_delayed_sum),
    base.ClientSide(proximal=True),
    base.ServerSide(server_step, _no_delays),
    sections=(Server,),
    label="ASO-Fed",
)
