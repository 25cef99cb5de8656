"""Flexible participation: clients deliver incomplete work, or none.

Ruan, Zhang, Liang, Joe-Wong, "Towards Flexible Device Participation in Federated
Learning", AISTATS 2021.
"""

from typing import Any

import jax.numpy as jnp

from tsfl_jax.components import component, setting
from tsfl_jax.rules.base import Aggregator, Mixing, RoundInfo, Weights, weights_of
from tsfl_jax.types import HParams

SCHEMES = ("complete", "kept", "scaled")  # the paper's A, B and C


@component("flexible")
class Flexible:
    """What becomes of the update of a client with s < E local iterations."""

    scheme: str = setting(
        "scaled", "updates of s < E iterations: left out, as they are, or E/s", SCHEMES
    )
    target: int = setting(
        0, "E, local iterations of complete work; 0: the most of the interval", low=0
    )


def flexible_weights(info: RoundInfo, hparams: HParams) -> Weights:
    """Weights of updates by how complete they are.

    w^{t+1} = w^t + Σ_i ρ_i (w_i − w^t) with p_i = |D_i|/Σ_N |D_j| over all N clients,
    those that deliver nothing included, so that Σ ρ need not be 1:

    - complete (scheme A): ρ_i = (N/K) p_i of the K clients with s_i ≥ E;
    - kept (B): ρ_i = p_i;
    - scaled (C): ρ_i = p_i E/s_i, which makes it FedAvg in the mean, whatever the
      distribution of s_i: the least work has the largest weight.

    Simplified: s_i are local iterations, τ_i, which in the paper are steps. A client
    with s_i > E has E/s_i < 1. Of cohorts and deliveries N are the slots. The share of
    a model that is not finite goes to the others, as under every rule.

    Args:
      info: τ and sizes of the clients, 0 and whatever it holds of an absent one.
      hparams: with `Flexible`.
    """
    settings: Any = hparams.of(Flexible)
    size, tau = jnp.asarray(info.size, jnp.float32), jnp.asarray(info.tau, jnp.float32)
    present = tau > 0
    share = size / size.sum()
    target = jnp.where(settings.target > 0, settings.target, tau.max())
    complete = present & (tau >= target)
    count = jnp.maximum(complete.sum(), 1)
    by_scheme = (
        jnp.where(complete, size.shape[0] / count * share, 0.0),
        share,
        share * target / jnp.where(present, tau, 1.0),
    )
    rho = jnp.stack(by_scheme)[settings.scheme]
    return weights_of(jnp.where(present, rho, 0.0), info.tau)


FLEXIBLE = Aggregator(
    Mixing(flexible_weights, deltas=True), sections=(Flexible,), label="flexible"
)
