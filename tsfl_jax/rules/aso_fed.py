"""ASO-Fed: asynchronous online learning, with longer steps of slow clients."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from tsfl_jax import trees
from tsfl_jax.rules import base
from tsfl_jax.rules.averages import Server, server_step
from tsfl_jax.types import HParams, Params


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

    Args:
      updates: w_i − base_i, leaves ``[K, ...]``.
      state: of `_no_delays`.
      received: who is there, sizes and lags.
      hparams: not read.

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
