"""FLTrust: clients count as far as they go where the server's own training goes.

    TS_i = max(cos(u_i, u_0), 0)
    w^{t+1} = w^t + η_g Σ_i TS_i (‖u_0‖/‖u_i‖) u_i / Σ_j TS_j

u_0 is the update of the server, which trains from w^t on the validation samples, with
the clients' SGD and as many mini-batch steps as the median client reports. So weights
are ρ_i = TS_i ‖u_0‖/(‖u_i‖ Σ_j TS_j); where no client is trusted the model stays.

Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust Federated Learning via Trust
Bootstrapping", NDSS 2021, Algorithm 2. Simplified: steps as above instead of a setting.
Where clients start from earlier models, u_i is measured against these, and u_0 is
trained from w^t all the same.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from tsfl_jax.rules.averages import Server, server_step
from tsfl_jax.rules.base import (
    Aggregator,
    ClientOutputs,
    Mixing,
    Received,
    ServerSide,
    Weights,
    weights_of,
)
from tsfl_jax.types import HParams, Params


def trust_weights(
    updates: Params, reference: Params, present: Bool[Array, "N"]
) -> Float[Array, "N"]:
    """ρ_i = TS_i ‖u_0‖/(‖u_i‖ Σ_j TS_j).

    Args:
      updates: u_i, leaves ``[N, ...]``, finite.
      reference: u_0, leaves ``[...]``.
      present: ``[N]``, which of them count; all weights are 0 if none is trusted.
    """
    length, norm = jax.vmap(optax.tree.norm)(updates), optax.tree.norm(reference)
    product = jax.vmap(lambda u: optax.tree.vdot(u, reference))(updates)
    is_counted = present & (length > 0) & (norm > 0)
    safe = jnp.where(is_counted, length, 1.0)
    cosine = product / (safe * jnp.where(norm > 0, norm, 1.0))
    score = jnp.where(is_counted, jnp.maximum(cosine, 0.0), 0.0)
    return score * norm / (safe * jnp.where(score.any(), score.sum(), 1.0))


def chosen_weights(
    outputs: ClientOutputs, state: tuple, received: Received, hparams: HParams
) -> tuple[Weights, tuple]:
    """The weights by what the server's training and the clients' gave."""
    del hparams
    assert outputs.server_update is not None, "the rule declares that it uses it"
    rho = trust_weights(outputs.updates, outputs.server_update, received.present)
    return weights_of(rho, received.info.tau), state


FLTRUST = Aggregator(
    Mixing(
        from_updates=chosen_weights,
        deltas=True,
        uses_validation=True,
        trains_server=True,
    ),
    server=ServerSide(server_step),
    sections=(Server,),
    label="FLTrust",
)
