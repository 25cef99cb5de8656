"""FedExP: the mean update is extrapolated where the clients' updates cancel out."""

from typing import Any

import jax.numpy as jnp
import optax

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules.apply import of_present
from tsfl_jax.rules.averages import BY_SIZE, BY_SIZE_SECTIONS
from tsfl_jax.rules.base import Aggregator, Received
from tsfl_jax.types import HParams, Params


@component("fedexp")
class FedExP:
    """How far the server extrapolates."""

    epsilon: float = setting(1e-3, "ε, added to ‖Δ‖² of the mean update", low=0)


def extrapolated_mean(
    updates: Params, state: Any, received: Received, hparams: HParams
) -> tuple[Params, Any]:
    """The mean update, made longer where the clients' updates cancel each other.

    w^{t+1} = w^t + η_g Δ,  Δ = Σ_i ρ_i u_i,
    η_g = max(1, Σ_i ρ_i ‖u_i‖² / (2 (‖Δ‖² + ε)))

    with u_i = w_i − base_i and ρ as in FedAvg, where the paper has 1/M. Equal updates,
    and one client alone, have η_g = 1; M orthogonal ones of the same length M/2, if
    that is above 1 and ε = 0. Simplified: the result is w^T, where the paper takes the
    mean of the last two models.

    Source: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via
    Extrapolation", ICLR 2023, equation 7.
    """
    rho = of_present(received.rho, received.present, received.shares)
    mean, squares = trees.weighted(updates, rho), trees.square_norms(updates)
    length = optax.tree.norm(mean, squared=True) + hparams.of(FedExP).epsilon
    # No update at all: 0/0, and any step is the same.
    ratio = rho @ squares / jnp.where(length > 0, 2 * length, 1.0)
    step = jnp.maximum(ratio, 1.0)
    return trees.map_inexact(lambda u: step.astype(u.dtype) * u, mean), state


FEDEXP = Aggregator(
    BY_SIZE._replace(combine=extrapolated_mean),
    sections=(FedExP, *BY_SIZE_SECTIONS),
    label="FedExP",
)
