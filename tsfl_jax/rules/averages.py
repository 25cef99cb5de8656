"""Rules with weights that are known before training.

FedAvg, FedProx and FedAsync as in Shao et al., "Robust Model Aggregation for
Heterogeneous Federated Learning: Analysis and Optimizations"; FedBuff, FedAT.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules import base
from tsfl_jax.rules.staleness import EXPONENTIAL, Staleness, of_lag
from tsfl_jax.types import HParams, Params

_NEVER = np.iinfo(np.int32).max  # a lag that no update has


@component("fedavg")
class FedAvg:
    """Rules with weights in proportion to |D_i|."""

    by_size: bool = setting(True, "weights ∝ |D_i|; False: equal weights")


@component("fedasync")
class FedAsync:
    """Mixing of the mean into the global model."""

    gamma: float = setting(0.5, "γ, share of the old global model", low=0, below=1)


@component("server")
class Server:
    """The server's step w + η_g (m − w): fedbuff, scaffold and robust means."""

    lr: float = setting(1.0, "η_g", above=0)


def size_weights(info: base.RoundInfo, hparams: HParams) -> base.Weights:
    """Weights by data size, ρ_i ∝ |D_i| s(lag_i): FedAvg, FedProx.

    With ``fedavg.by_size=False`` it is 1 instead of |D_i|.

    An exponential s is the discount of temporally weighted aggregation, here of the
    models of one update instead of the last ones of all clients: Chen, Sun and Jin,
    "Communication-Efficient Federated Deep Learning with Layerwise Asynchronous Model
    Update and Temporally Weighted Aggregation", IEEE TNNLS 2020.
    """
    sized, late = jnp.asarray(hparams.of(FedAvg).by_size) != 0, hparams.of(Staleness)
    # exp(−lag) underflows beyond lag ≈ 300, so subtract the smallest lag: only
    # differences matter.
    least = jnp.where(info.tau > 0, info.lag, _NEVER).min()
    exponential = jnp.asarray(late.kind) == EXPONENTIAL
    since = jnp.where(exponential & (least < _NEVER), least, 0)
    share = jnp.where(sized, info.size, 1) * of_lag(info.lag - since, late)
    return base.weights_of(base.normalized(share, info.tau), info.tau)


def given_weights(info: base.RoundInfo, hparams: HParams) -> base.Weights:
    """The weights that go with how a cohort was sampled, drawn before training."""
    del hparams
    assert info.share is not None
    return base.weights_of(jnp.where(info.tau > 0, info.share, 0.0), info.tau)


def stale_uniform_weights(info: base.RoundInfo, hparams: HParams) -> base.Weights:
    """Equal weights less staleness, ρ_i = s(lag_i)/n: FedAsync, FedBuff.

    n is the number of clients with τ > 0. What staleness takes away stays with the
    global model: Σ ρ may be below 1. If a model is discarded, the others have
    s(lag_i)/(n − 1).
    """
    share = base.normalized(jnp.ones_like(info.size), info.tau)
    late = of_lag(info.lag, hparams.of(Staleness))
    return base.weights_of(share * late, info.tau)._replace(shares=share)


def mix(
    mean: Params, params: Params, state: Any, received: base.Received, hparams: HParams
) -> tuple[Params, Any]:
    """Mix the mean into the global model: FedAsync.

    w^{t+1} = w^t + (1 − γ) Σ_i ρ_i (w_i − w^t). Without staleness that is γ w^t + (1 −
    γ) Σ_i ρ_i w_i, the paper's footnote 2. With one client at a time it is the server's
    step of Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019,
    Algorithm 1, with α = 1 − γ.
    """
    gain = 1 - hparams.of(FedAsync).gamma
    # Σ ρ = 1 but for rounding where nothing is stale: then the weights are γ, 1 − γ.
    share = trees.settled(received.rho.sum())

    def mixed(m: Array, w: Array) -> Array:
        return (1 - gain * share).astype(w.dtype) * w + gain * m

    return trees.map_inexact(mixed, mean, params), state


def server_step(
    mean: Params, params: Params, state: Any, received: base.Received, hparams: HParams
) -> tuple[Params, Any]:
    """Step of the server: w^{t+1} = w^t + η_g (m − w^t) with m = w^t + Δ."""
    del received

    def step(m: Array, w: Array) -> Array:
        return w + hparams.of(Server).lr * (m - w)

    return trees.map_inexact(step, mean, params), state


def _tier_models(
    params: Params, counts: base.Counts
) -> tuple[Params, Float[Array, "G"]]:
    """Each tier's last model, and how often it has delivered."""
    zeros = jnp.zeros(counts.groups, jnp.float32)
    return trees.repeated(params, counts.groups), zeros


def tiered(
    mean: Params, params: Params, state: Any, received: base.Received, hparams: HParams
) -> tuple[Params, Any]:
    """Give more weight to tiers that deliver less often: FedAT.

    w^{t+1} = Σ_m (T_{M+1−m}/T) w_m. w_m is tier m's last model, T_m how often it has
    delivered, the tiers in order of speed. Chai et al., "FedAT: A High-Performance and
    Communication-Efficient Federated Learning System with Asynchronous Tiers", SC 2021,
    Algorithm 2.
    """
    del params, hparams
    models, delivered = state
    group = received.info.group
    models = trees.put(models, group, mean)
    delivered = delivered.at[group].add(1)
    share = delivered[::-1] / delivered.sum()

    def mean_of(m: Array, models: Array) -> Array:
        return jnp.tensordot(share.astype(m.dtype), models, 1)

    return trees.map_inexact(mean_of, mean, models), (models, delivered)


BY_SIZE = base.Mixing(size_weights)
BY_SIZE_SECTIONS = (FedAvg, Staleness)

FEDAVG = base.Aggregator(BY_SIZE, sections=BY_SIZE_SECTIONS, label="FedAvg")
FEDPROX = FEDAVG._replace(clients=base.ClientSide(proximal=True), label="FedProx")
FEDAT = FEDAVG._replace(server=base.ServerSide(tiered, _tier_models), label="FedAT")
FEDASYNC = base.Aggregator(
    base.Mixing(stale_uniform_weights),
    server=base.ServerSide(mix),
    sections=(FedAsync, Staleness),
    label="FedAsync",
)
# w^{t+1} = w^t + η_g (1/K) Σ_i s(lag_i)(w_i − base_i): Nguyen et al., "Federated
# Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1.
FEDBUFF = base.Aggregator(
    base.Mixing(stale_uniform_weights, deltas=True),
    server=base.ServerSide(server_step),
    sections=(Server, Staleness),
    label="FedBuff",
)
