"""Rules with weights that are known before training.

FedAvg, FedProx and FedAsync as in Shao et al., "Robust Model Aggregation for
Heterogeneous Federated Learning: Analysis and Optimizations"; FedBuff, FedAT, flexible
participation; and how much a late update still counts in them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules import base
from tsfl_jax.types import HParams, Params

_NEVER = np.iinfo(np.int32).max  # a lag that no update has
KINDS = ("constant", "polynomial", "hinge", "exponential")
EXPONENTIAL = 3  # the kind (e/2)^−l


@component("staleness")
class Staleness:
    """Factor s(lag) on updates of an earlier global model."""

    kind: str = setting("constant", "factor s(lag) on stale updates", KINDS)
    a: float = setting(
        0.5, "a of polynomial and hinge", low=0, used_by=("kind", KINDS[1:3])
    )
    b: float = setting(
        4.0, "b of hinge, in updates", low=0, used_by=("kind", KINDS[2:3])
    )


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


def staleness_factor(
    lag: Int[ArrayLike, "*N"], kind: ArrayLike, a: ArrayLike, b: ArrayLike
) -> Float[Array, "*N"]:
    """How much an update counts that is l global updates late.

    s(l) = 1, (l + 1)^−a, 1 if l ≤ b else 1/(a(l − b) + 1), or (e/2)^−l, by `kind`. The
    first three are from section 5 of Xie, Koyejo, Gupta, "Asynchronous Federated
    Optimization", 2019; the last is from Chen, Sun, Jin, "Communication-Efficient
    Federated Deep Learning with Layerwise Asynchronous Model Update and Temporally
    Weighted Aggregation", IEEE Transactions on Neural Networks and Learning Systems,
    2020.

    >>> print(staleness_factor(jnp.array([0, 2, 6]), 2, 0.5, 4))
    [1.  1.  0.5]

    Args:
      lag: l ≥ 0, global updates since the client's base model.
      kind: ``[]`` integer, index into `KINDS`.
      a: ``[]`` ≥ 0 of "polynomial" and "hinge"; not read, so it may be NaN, by others.
      b: ``[]`` ≥ 0, updates, of "hinge"; likewise.

    Returns:
      s in [0, 1].
    """
    kind = jnp.asarray(kind, jnp.int32)
    dtype = jnp.result_type(float, a, b)
    lag = jnp.asarray(lag, dtype)
    # Parameters that do not apply are replaced before use: NaN·0 would reach gradients.
    exponent, slope, free = (
        jnp.where(kind == owner, jnp.asarray(x, dtype), 0)
        for owner, x in ((1, a), (2, a), (2, b))
    )
    late = jnp.where(lag > free, lag - free, 0)
    factors = (
        jnp.ones_like(lag),
        jnp.exp(-exponent * jnp.log1p(lag)),
        1 / (slope * late + 1),
        jnp.exp(-lag * (1 - jnp.log(jnp.asarray(2, dtype)))),
    )
    return lax.select_n(kind, *factors)


def of_lag(lag: Int[ArrayLike, "*N"], settings: Any) -> Float[Array, "*N"]:
    """`staleness_factor` with the `Staleness` of a program."""
    return staleness_factor(lag, settings.kind, settings.a, settings.b)


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


def flexible_weights(info: base.RoundInfo, hparams: HParams) -> base.Weights:
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

    Source: Ruan, Zhang, Liang, Joe-Wong, "Towards Flexible Device Participation in
    Federated Learning", AISTATS 2021.
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
    return base.weights_of(jnp.where(present, rho, 0.0), info.tau)


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
FLEXIBLE = base.Aggregator(
    base.Mixing(flexible_weights, deltas=True), sections=(Flexible,), label="flexible"
)
