"""SCAFFOLD: clients correct their gradients by control variates.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tsfl_jax import trees
from tsfl_jax.rules import base, local_work
from tsfl_jax.rules.averages import BY_SIZE_SECTIONS, Server, server_step, size_weights
from tsfl_jax.types import HParams, Params


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
    """
    _, local, size, idle_size = state
    present, info = received.present, received.info
    work = local_work.of_sgd(info.steps, hparams)
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
