"""CA²FL: the last update of each client stands for it in a buffer without it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tsfl_jax import trees
from tsfl_jax.rules import base
from tsfl_jax.rules.averages import Server, server_step
from tsfl_jax.rules.client_memory import ByClient, delivered, no_memory
from tsfl_jax.types import HParams, Params


def calibrated_mean(
    updates: Params, state: ByClient, received: base.Received, hparams: HParams
) -> tuple[Params, ByClient]:
    """The mean of all clients' cached updates, corrected by those that arrive.

    v = Σ_j p_j h_j + Σ_{i ∈ S} ρ_i (u_i − h_i),  h_i ← u_i,  w^{t+1} = w^t + η_g v

    with u_i = w_i − base_i, the cached h_i = 0 until client i has delivered, p_i =
    |D_i|/Σ|D_j| over all N clients and ρ_i ∝ |D_i| in the buffer S. Where all are in
    each buffer v is FedAvg's mean update. Of several deliveries of one client all count
    against the h_i of before, and the last becomes h_i, as in the paper.

    Simplified: p and ρ replace the paper's 1/N and 1/|S|, so that F = Σ p_i F_i is what
    is minimized.

    Source: Y. Wang, Y. Cao, J. Wu, R. Chen, J. Chen, "Tackling the Data Heterogeneity
    in Asynchronous Federated Learning with Cached Update Calibration", ICLR 2024.
    """
    del hparams
    where, new = delivered(state, received)
    client, arrived = received.info.places, updates["params"]
    rho = base.normalized(received.info.size, jnp.where(received.present, 1, 0))

    def calibrated(cache: Array, update: Array) -> Array:
        difference = trees.weighted(update - cache[client], rho)
        return trees.weighted(cache, new.shares) + difference

    mean = jax.tree.map(calibrated, state.local, arrived)
    return {"params": mean}, new._replace(local=trees.put(new.local, where, arrived))


CA2FL = base.Aggregator(
    base.Mixing(combine=calibrated_mean),
    server=base.ServerSide(server_step, no_memory),
    sections=(Server,),
    label="CA²FL",
)
