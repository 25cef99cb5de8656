"""Rules with weights that are known before training.

DMS, FedAvg, FedProx and FedAsync as in Shao et al., "Robust Model Aggregation for
Heterogeneous Federated Learning: Analysis and Optimizations"; FedBuff, FedAT, FedNova.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tsfl_jax import trees
from tsfl_jax.rules import dms, local_work
from tsfl_jax.rules.base import (
    Aggregator,
    Counts,
    Event,
    Settings,
    Situation,
    Weights,
    normalized,
    weights_of,
)
from tsfl_jax.rules.staleness import EXPONENTIAL, staleness_factor
from tsfl_jax.types import HParams, Params

_NEVER = np.iinfo(np.int32).max  # a lag that no update has


def _staleness(
    situation: Situation, hparams: HParams, since: Array | int = 0
) -> Float[Array, "N"]:
    """How much late updates count: s(lag − since), 1 where nothing is stale."""
    lag, kind = situation.lag - since, hparams.staleness
    return staleness_factor(lag, kind, hparams.staleness_a, hparams.staleness_b)


def size_weights(situation: Situation, hparams: HParams) -> Weights:
    """Weights by data size, ρ_i ∝ |D_i| s(lag_i): FedAvg, FedProx.

    With ``server.by_size="no"`` it is 1 instead of |D_i|.

    An exponential s is the discount of temporally weighted aggregation, here of the
    models of one update instead of the last ones of all clients: Chen, Sun and Jin,
    "Communication-Efficient Federated Deep Learning with Layerwise Asynchronous Model
    Update and Temporally Weighted Aggregation", IEEE TNNLS 2020.
    """
    # NaN, the rule's own choice, counts as 1.
    sized = jnp.asarray(hparams.by_size) != 0
    # Proportions of an exponential s are of differences of lags alone; from the least
    # one on, as e^(−lag) is 0 in float32 from lags of about 300 on.
    least = jnp.where(situation.tau > 0, situation.lag, _NEVER).min()
    exponential = jnp.asarray(hparams.staleness) == EXPONENTIAL
    since = jnp.where(exponential & (least < _NEVER), least, 0)
    share = jnp.where(sized, situation.size, 1) * _staleness(situation, hparams, since)
    return weights_of(normalized(share, situation.tau), situation.tau)


def stale_uniform_weights(situation: Situation, hparams: HParams) -> Weights:
    """Equal weights less staleness, ρ_i = s(lag_i)/n: FedAsync, FedBuff.

    n is the number of clients with τ > 0. What staleness takes away stays with the
    global model: Σ ρ may be below 1. If a model is lost, the others have
    s(lag_i)/(n − 1): one that is stale does not count for a fresh one.
    """
    share = normalized(jnp.ones_like(situation.size), situation.tau)
    found = weights_of(share * _staleness(situation, hparams), situation.tau)
    return found._replace(shares=share)


def decay_factor(situation: Situation, hparams: HParams) -> Float[Array, ""]:
    """What is left of c and P_i in interval t: 1, e^(−t/T_c) or 1/(1 + t/T_c)."""
    age = jnp.asarray(situation.interval) / hparams.decay_time
    several = jnp.stack([jnp.ones_like(age), jnp.exp(-age), 1 / (1 + age)])
    return several[jnp.asarray(hparams.decay)]


def dms_rule(situation: Situation, hparams: HParams) -> Weights:
    """Weights of DMS: Algorithm 1, equations (6)–(9); the parts are in `dms`.

    The settings ``dms.*`` depart from the paper where it is silent: c as a number, in
    steps, or falling; P_i times a factor; K given; no projection; ρ_i times |D_i|.
    """
    return scaled_dms(situation, hparams, decay_factor(situation, hparams))


def scaled_dms(
    situation: Situation, hparams: HParams, factor: Float[Array, ""]
) -> Weights:
    """Weights of DMS with c and P_i times a factor in [0, 1]; 0: equal weights."""
    key, tau, constants = situation.key, situation.tau, situation.constants
    late = situation.interval >= jnp.asarray(hparams.late)
    drop = jnp.where(late, hparams.drop_late, hparams.drop) * factor
    selected = dms.select(
        key,
        tau,
        situation.client,
        threshold_value=situation.threshold,
        drop=drop,
    )
    work = jnp.where(jnp.asarray(hparams.in_steps) > 0, situation.steps, tau)
    coupling = dms.coupling(work, lr=hparams.lr, **constants._asdict())
    given = jnp.asarray(hparams.coupling)
    coupling = jnp.where(jnp.isnan(given), coupling, given)
    # A gradient that overflowed in the estimate must not spoil every weight.
    coupling = jnp.where(jnp.isnan(coupling), 0.0, coupling)
    coupling = coupling * jnp.where(late, hparams.coupling_late, 1.0) * factor
    raw = jnp.asarray(hparams.raw) > 0
    rho = dms.affine_weights(work, selected, coupling, hparams.weight_limit, raw)
    sized = normalized(rho * situation.size, tau)
    rho = jnp.where(jnp.asarray(hparams.by_size) == 1, sized, rho.astype(jnp.float32))
    threshold = jnp.asarray(situation.threshold, jnp.float32)
    own = jnp.isnan(threshold)
    threshold = jnp.where(own, dms.threshold(tau), threshold).astype(jnp.float32)
    return Weights(rho, selected, threshold, coupling)


def mix(
    mean: Params, params: Params, state: Any, event: Event, hparams: HParams
) -> tuple[Params, Any]:
    """Mix the mean into the global model: FedAsync.

    w^{t+1} = w^t + (1 − γ) Σ_i ρ_i (w_i − w^t). Without staleness that is γ w^t + (1 −
    γ) Σ_i ρ_i w_i, the paper's footnote 2. With one client at a time it is the server's
    step of Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019,
    Algorithm 1, with α = 1 − γ.
    """
    gain = 1 - hparams.gamma
    # Σ ρ = 1 but for rounding where nothing is stale: then the weights are γ, 1 − γ.
    share = trees.settled(event.rho.sum())

    def mixed(m: Array, w: Array) -> Array:
        return (1 - gain * share).astype(w.dtype) * w + gain * m

    return trees.map_inexact(mixed, mean, params), state


def server_step(
    mean: Params, params: Params, state: Any, event: Event, hparams: HParams
) -> tuple[Params, Any]:
    """Step of the server: w^{t+1} = w^t + η_g (m − w^t) with m = w^t + Δ."""
    del event

    def step(m: Array, w: Array) -> Array:
        return w + hparams.server_lr * (m - w)

    return trees.map_inexact(step, mean, params), state


def _tier_models(params: Params, counts: Counts) -> tuple[Params, Float[Array, "G"]]:
    """Each tier's last model, and how often it has delivered."""
    zeros = jnp.zeros(counts.groups, jnp.float32)
    return trees.repeated(params, counts.groups), zeros


def tiered(
    mean: Params, params: Params, state: Any, event: Event, hparams: HParams
) -> tuple[Params, Any]:
    """Give more weight to tiers that deliver less often: FedAT.

    w^{t+1} = Σ_m (T_{M+1−m}/T) w_m. w_m is tier m's last model, T_m how often it has
    delivered, the tiers in order of speed. Chai et al., "FedAT: A High-Performance and
    Communication-Efficient Federated Learning System with Asynchronous Tiers", SC 2021,
    Algorithm 2.
    """
    del params, hparams
    models, delivered = state
    group = event.situation.group
    models = trees.put(models, group, mean)
    delivered = delivered.at[group].add(1)
    share = delivered[::-1] / delivered.sum()

    def mean_of(m: Array, models: Array) -> Array:
        return jnp.tensordot(share.astype(m.dtype), models, 1)

    return trees.map_inexact(mean_of, mean, models), (models, delivered)


Work = Callable[[Int[Array, "N"], HParams], Float[Array, "N"]]


def normalized_by_work(work: Work = local_work.of_sgd) -> Aggregator:
    """A rule that divides updates by their work: FedNova.

    w^{t+1} = w^t + τ_eff Σ_i p_i (w_i − base_i)/‖a_i‖₁, p_i = |D_i|/Σ|D_j|. Wang et
    al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization", NeurIPS 2020. If a model is lost, the others share its p_i; τ_eff is
    that of all who took part.

    Args:
      work: (steps, `HParams`) → ‖a_i‖₁ ≥ 0 up to a common factor.
    """

    def weights(situation: Situation, hparams: HParams) -> Weights:
        share = normalized(situation.size, situation.tau)
        rho = local_work.nova_weights(share, work(situation.steps, hparams))
        return weights_of(rho, situation.tau)._replace(shares=share)

    return Aggregator(weights, deltas=True)


_OTHERS = Settings(("by_size",), "others")

DMS = Aggregator(dms_rule, uses_constants=True, settings=Settings(("by_size",)))
FEDAVG = Aggregator(size_weights, settings=_OTHERS)
FEDPROX = Aggregator(size_weights, proximal=True, settings=_OTHERS)
FEDASYNC = Aggregator(
    stale_uniform_weights, update=mix, settings=Settings(staleness="global")
)
# w^{t+1} = w^t + η_g (1/K) Σ_i s(lag_i)(w_i − base_i): Nguyen et al., "Federated
# Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1.
FEDBUFF = Aggregator(
    stale_uniform_weights,
    update=server_step,
    deltas=True,
    settings=Settings(("lr",), "global"),
)
FEDAT = Aggregator(size_weights, _tier_models, tiered, settings=_OTHERS)
FEDNOVA = normalized_by_work()
