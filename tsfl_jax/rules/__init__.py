"""The table of all aggregation rules, and those the field compares with.

Server optimizers, FedNova, SCAFFOLD, FedBuff, FedAT and robust means. The paper's own
are in `aggregate`, robust means as plain functions in `robust`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tsfl_jax.rules import robust, staleness
from tsfl_jax.rules.base import (
    Aggregator,
    Counts,
    Event,
    Situation,
    Weights,
    dms_rule,
    mix,
    no_state,
    normalized,
    replace,
    size_weights,
    stale_uniform_weights,
    weights_of,
)
from tsfl_jax.rules.bound_optimal import bound_optimal
from tsfl_jax.types import Array, HParams, Params


def _inexact(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


# Server optimizers: Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
# Algorithm 2, and for momentum Hsu, Qi and Brown, "Measuring the Effects of
# Non-Identical Data Distribution for Federated Visual Classification", 2019.


def _momentum(hparams: HParams) -> optax.GradientTransformation:
    return optax.sgd(hparams.server_lr, momentum=hparams.server_momentum)


def _adaptive(make) -> Any:
    def transformation(hparams):
        return make(
            hparams.server_lr,
            b1=hparams.server_momentum,
            b2=hparams.server_second,
            eps=hparams.server_floor,
        )

    return transformation


def server_optimizer(make) -> Aggregator:
    """A rule w^{t+1} = w^t + optimizer(Δ), Δ = Σ_i ρ_i (w_i − base_i), ρ as in FedAvg.

    The pseudo-gradient is −Δ. Batch statistics are averaged as in FedAvg. optax's
    Adam and Yogi correct their moments' bias, which Algorithm 2 of Reddi et al. leaves
    out.

    Args:
      make: `HParams` → optax transformation; they do not decide its state's shape.
    """

    def init(params, counts):
        del counts
        return make(HParams(*[0.1] * len(HParams._fields))).init(params.get("params"))

    def update(mean, params, state, event, hparams):
        del event
        old = params["params"]
        pseudo = jax.tree.map(jnp.subtract, old, mean["params"])
        change, state = make(hparams).update(pseudo, state, old)
        return {**mean, "params": optax.apply_updates(old, change)}, state

    return Aggregator(size_weights, init, update, deltas=True)


def _work(steps: Array, hparams: HParams) -> Array:
    """‖a_i‖₁ of the clients' own SGD."""
    alpha = hparams.lr * hparams.mu
    return staleness.accumulation(steps, hparams.momentum, alpha)


def normalized_by_work(work: Callable[[Array, HParams], Array] = _work) -> Aggregator:
    """w^{t+1} = w^t + τ_eff Σ_i p_i (w_i − base_i)/‖a_i‖₁, p_i = |D_i|/Σ|D_j|: FedNova.

    Updates are divided by their work. Wang et al., "Tackling the Objective
    Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020.

    Args:
      work: (steps ``[N]``, `HParams`) → ‖a_i‖₁ ``[N]`` ≥ 0 up to a common factor.
    """

    def weights(situation: Situation, hparams: HParams) -> Weights:
        share = normalized(situation.size, situation.tau)
        rho = staleness.nova_weights(share, work(situation.steps, hparams))
        return weights_of(rho, situation.tau)

    return Aggregator(weights, no_state, replace, deltas=True)


def buffered(mean: Params, params: Params, state: Any, event: Event, hparams: HParams):
    """w^{t+1} = w^t + η_g (1/K) Σ_i s(lag_i)(w_i − base_i): FedBuff.

    Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS
    2022, Algorithm 1.
    """
    del event

    def moved(w, m):
        return w + hparams.server_lr * (m - w) if _inexact(w) else m

    return jax.tree.map(moved, params, mean), state


def _tier_models(params: Params, counts: Counts) -> Any:
    """Every tier's last model, and how often it has delivered."""
    models = jax.tree.map(lambda w: jnp.repeat(w[None], counts.groups, 0), params)
    return models, jnp.zeros(counts.groups, jnp.float32)


def tiered(mean: Params, params: Params, state: Any, event: Event, hparams: HParams):
    """w^{t+1} = Σ_m (T_{M+1−m}/T) w_m: tiers that deliver seldom count more. FedAT.

    w_m is tier m's last model, T_m how often it has delivered, the tiers in order of
    speed. Chai et al., "FedAT: A High-Performance and Communication-Efficient Federated
    Learning System with Asynchronous Tiers", SC 2021, Algorithm 2.
    """
    del params, hparams
    models, delivered = state
    group = event.situation.group
    models = jax.tree.map(lambda old, m: old.at[group].set(m), models, mean)
    delivered = delivered.at[group].add(1)
    share = delivered[::-1] / delivered.sum()

    def mean_of(leaf):
        return jnp.tensordot(share.astype(leaf.dtype), leaf, 1)

    new = jax.tree.map(lambda w, m: mean_of(w) if _inexact(w) else m, models, mean)
    return new, (models, delivered)


class ControlVariates(NamedTuple):
    """The state of SCAFFOLD."""

    common: Params  # c = Σ_i p_i c_i
    own: Params  # [N, ...] c_i, 0 until client i has delivered
    size: Array  # [N] float32, |D_i| of its last delivery; p_i = |D_i|/Σ|D_j|


def _control_variates(params: Params, counts: Counts) -> ControlVariates:
    zeros = jax.tree.map(jnp.zeros_like, params.get("params", {}))
    many = jax.tree.map(lambda a: jnp.repeat(a[None], counts.clients, 0), zeros)
    size = jnp.ones(counts.clients) if counts.size is None else counts.size
    return ControlVariates(zeros, many, jnp.asarray(size, jnp.float32))


def scaffold_correction(state: ControlVariates, sent: Params, client: Array) -> Params:
    """c − c_i, added to client i's gradients; c is that of its download.

    c_i needs no memory: nothing but the client's own deliveries changes it.
    """
    return jax.tree.map(lambda c, each: c - each[client], sent, state.own)


def scaffold(updates: Params, state: ControlVariates, event: Event, hparams: HParams):
    """Δ = Σ_i ρ_i (w_i − base_i), and new control variates: SCAFFOLD.

    c_i⁺ = c_i − c − (w_i − base_i)/(η‖a_i‖₁) with the c of the client's download, then
    c = Σ_i p_i c_i over all N. ‖a_i‖₁ is the number of steps, or with momentum or a
    proximal term how often gradients count in the update, so that c_i is a mean
    gradient. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for
    Federated Learning", ICML 2020, Algorithm 1, option II, with p_i = |D_i|/Σ|D_j|
    instead of 1/N for both models and control variates, so that F = Σ p_i F_i is what
    is minimized.

    Of several deliveries of one client, which are in the order of its tasks, the last
    decides c_i: one after another they would leave the same. All of them were trained
    with the c_i of before this update.
    """
    _, own, size = state
    present, situation = event.present, event.situation
    work = _work(situation.steps, hparams)
    worked = present & (work > 0)
    scale = jnp.where(worked, 1.0 / (hparams.lr * jnp.where(worked, work, 1.0)), 0.0)
    client, clients = situation.client, size.shape[0]
    turn = jnp.arange(client.shape[0])
    latest = jnp.full(clients, -1).at[client].max(jnp.where(worked, turn, -1))
    # An empty place names client 0; what does not count is written nowhere.
    where = jnp.where(worked & (latest[client] == turn), client, clients)
    sent = event.sent
    if sent is None:
        sent = jax.tree.map(lambda c: c[None], state.common)

    def renewed(each, c, update):
        along = scale.reshape((-1,) + (1,) * (update.ndim - 1)).astype(update.dtype)
        fresh = each[client] - c - along * update
        return each.at[where].set(fresh, mode="drop")

    own = jax.tree.map(renewed, own, sent, updates["params"])
    size = size.at[where].set(situation.size.astype(size.dtype), mode="drop")
    share = size / size.sum()
    # Summed anew each time: c must not drift from the c_i. In full precision, since
    # what c is off by stays in every client's gradient.
    common = jax.tree.map(lambda each: _weighted_sum(share, each), own)
    # The share of whoever was lost on the way goes to the others.
    rho = jnp.where(present, event.rho, 0.0)
    rho = rho / jnp.where(rho.sum() > 0, rho.sum(), 1.0)
    delta = jax.tree.map(lambda u: _weighted_sum(rho, u), updates)
    return delta, ControlVariates(common, own, size)


def _weighted_sum(weights: Array, stacked: Array) -> Array:
    """Σ_i v_i x_i of ``[N]`` and ``[N, ...]``."""
    weights = weights.astype(stacked.dtype)
    return jnp.tensordot(weights, stacked, 1, precision=lax.Precision.HIGHEST)


def present_weights(situation: Situation, hparams: HParams) -> Weights:
    """1/N over the clients that took part; the rule itself is no weighted mean."""
    del hparams
    rho = normalized(jnp.ones_like(situation.size), situation.tau)
    return weights_of(rho, situation.tau)


def robust_mean(mean) -> Aggregator:
    """A rule w^{t+1} = w^t + η_g·mean of the updates, `mean` as in `robust`.

    Args:
      mean: (updates ``[N, ...]``, present ``[N]``, share that may be wrong) → update.
    """

    def combine(updates, state, event, hparams):
        leaves, tree = jax.tree.flatten(updates)
        # Whole numbers, such as counters, have no mean; their update is 0.
        found = mean([u for u in leaves if _inexact(u)], event.present, hparams.trim)
        found = iter(found)
        leaves = [next(found) if _inexact(u) else u[0] for u in leaves]
        return jax.tree.unflatten(tree, leaves), state

    return Aggregator(present_weights, no_state, buffered, combine=combine)


def _geometric(updates, present, trim):
    del trim
    return robust.geometric_median(updates, present)


def _median(updates, present, trim):
    del trim
    return robust.coordinate_median(updates, present)


AGGREGATORS: dict[str, Aggregator] = {
    "dms": Aggregator(dms_rule, no_state, replace, uses_constants=True),
    "bound_optimal": Aggregator(
        bound_optimal, no_state, replace, uses_constants=True, uses_gradients=True
    ),
    "fedavg": Aggregator(size_weights, no_state, replace),
    "fedprox": Aggregator(size_weights, no_state, replace, proximal=True),
    "fedasync": Aggregator(stale_uniform_weights, no_state, mix),
    "fedbuff": Aggregator(stale_uniform_weights, no_state, buffered, deltas=True),
    "fedat": Aggregator(size_weights, _tier_models, tiered),
    "fednova": normalized_by_work(),
    "scaffold": Aggregator(
        size_weights,
        _control_variates,
        buffered,
        combine=scaffold,
        sent=lambda state: state.common,
        correction=scaffold_correction,
    ),
    "fedavgm": server_optimizer(_momentum),
    "fedadam": server_optimizer(_adaptive(optax.adam)),
    "fedyogi": server_optimizer(_adaptive(optax.yogi)),
    "median": robust_mean(_median),
    "trimmed_mean": robust_mean(robust.trimmed_mean),
    "geometric_median": robust_mean(_geometric),
    "krum": robust_mean(robust.krum),
    "multi_krum": robust_mean(robust.multi_krum),
}
