"""FedDyn: each client's loss is moved so that all end at the minimum of their sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tsfl_jax import trees
from tsfl_jax.rules import apply, base
from tsfl_jax.rules.averages import BY_SIZE_SECTIONS, size_weights
from tsfl_jax.rules.client_memory import ByClient, delivered, no_memory
from tsfl_jax.types import HParams, Params


def dynamic_mean(
    updates: Params, state: ByClient, received: base.Received, hparams: HParams
) -> tuple[Params, ByClient]:
    """The mean update and the clients' mean linear term, FedDyn.

    Client i minimizes F_i(w) + ⟨λ_i, w⟩ + μ/2‖w − base_i‖², so that with u_i = w_i −
    base_i its gradient ends at ∇F_i(w_i) = −λ_i − μ u_i. The server takes

    λ_i ← λ_i + μ u_i,  w^{t+1} = w^t + Σ_i ρ_i u_i + (1/μ) Σ_i p_i λ_i

    with p_i = |D_i|/Σ|D_j| over all N clients. In the paper's symbols μ = α, λ_i =
    −∇L_i(θ_i) and Σ p_i λ_i = −h; it has 1/N and 1/|S| for p and ρ.

    With μ = 0 it is FedAvg: 0/0 counts as 0. For μ → 0 it is not: (1/μ) λ_i is the sum
    of all updates of client i so far. Simplified: clients make τ_i iterations of SGD
    and do not minimize exactly. Of several deliveries of one client in an update the
    last decides λ_i; all were trained with that of before.

    Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR
    2021, Algorithm 1.
    """
    where, state = delivered(state, received)
    client, mu = received.info.places, jnp.asarray(hparams.mu)

    def moved(linear: Array, update: Array) -> Array:
        fresh = linear[client] + mu.astype(update.dtype) * update
        return linear.at[where].set(fresh, mode="drop")

    state = state._replace(local=jax.tree.map(moved, state.local, updates["params"]))
    scale = jnp.where(mu > 0, 1 / jnp.where(mu > 0, mu, 1.0), 0.0)
    rho = apply.of_present(received.rho, received.present, received.shares)
    linear = trees.weighted({"params": state.local}, scale * state.shares)
    return jax.tree.map(jnp.add, trees.weighted(updates, rho), linear), state


FEDDYN = base.Aggregator(
    base.Mixing(size_weights, combine=dynamic_mean),
    base.ClientSide(
        proximal=True,
        gradient_correction=lambda state, _, place: trees.take(state.local, place),
    ),
    base.ServerSide(init=no_memory),
    sections=BY_SIZE_SECTIONS,
    label="FedDyn",
)
