"""Aggregation rules: how w^{t+1} is made of the clients' models w_i^t.

Most rules know their weights before training (functions of τ, |D_i|, lag and a key), so
the models never have to be stacked: w^{t+1} = update(Σ_i ρ_i w_i^t, w^t). Whoever did
no iteration (τ_i = 0) gets weight 0 under every rule. Here are the structures and the
rules of the paper; `rules` has the others and the table of all.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax.rules import dms
from tsfl_jax.rules import staleness as local_work
from tsfl_jax.types import (
    Array,
    ClientGradients,
    Constants,
    HParams,
    Params,
    PRNGKey,
)


class Situation(NamedTuple):
    """What a weight rule may look at in interval t; leading axis ``[N]``.

    A client may have done less than it reports; rules see what it reports.
    """

    key: PRNGKey
    client: Array  # [N] int32 ids
    tau: Array  # [N] int32
    size: Array  # [N] int32
    steps: Array  # [N] int32, mini-batch steps
    lag: Array  # [N] int32, global updates since the model it started from
    group: Array  # [] int32, tier that delivers
    constants: Constants
    # Of w^t, for a rule that asks for it.
    gradients: ClientGradients | None = None


class Weights(NamedTuple):
    """A rule's decision in one interval; numbers that do not apply are NaN."""

    rho: Array  # [N] float32, most often Σ ρ = 1, all 0 where nobody took part
    selected: Array  # [N] bool
    threshold: Array  # K of DMS
    coupling: Array  # c of DMS


class Event(NamedTuple):
    """What is known when the models are in."""

    situation: Situation
    rho: Array  # [N] float32
    present: Array  # [N] bool, who took part; for a `combine`, with a finite model
    # [N, ...], what each client had downloaded beside its model (`Aggregator.sent`);
    # None: all of them what the state has now.
    sent: Params | None = None


class Counts(NamedTuple):
    """Numbers that give a rule's state its shape."""

    clients: int  # N
    groups: int  # tiers, at least 1
    size: Array | None = None  # [N] samples that each client holds; None: as many each


class Aggregator(NamedTuple):
    """An aggregation rule of pure functions."""

    weights: Callable[[Situation, HParams], Weights]
    init: Callable[[Params, Counts], Any]
    # (Σ ρ_i w_i, w^t, state, event, hparams) -> (w^{t+1}, state)
    update: Callable[[Params, Params, Any, Event, HParams], tuple[Params, Any]]
    # Whether L, G², σ² matter; `one_of` makes it a function of the hyper-parameters.
    uses_constants: bool | Callable[[HParams], Array] = False
    # Whether every client's own σ_i² and dissimilarity matter; likewise a function.
    uses_gradients: bool | Callable[[HParams], Array] = False
    proximal: bool = False  # whether clients add μ/2‖w − w^t‖² to their loss
    # Whether `update` gets w^t + Σ ρ_i (w_i − base_i) instead, base_i being the model
    # that client i started from; Σ ρ need not be 1.
    deltas: bool = False
    # (w_i − base_i [N, ...], state, event, hparams) -> (Δ, state): where no weights can
    # say how the updates are combined. `update` then gets w^t + Δ. Stacks all models.
    combine: Callable[[Params, Any, Event, HParams], tuple[Params, Any]] | None = None
    # state -> what a client downloads beside the model. Kept with earlier models, so
    # that a client that is not in step uses what there was when it downloaded.
    sent: Callable[[Any], Params] | None = None
    # (state, what it downloaded, client id) -> what that client adds to each gradient.
    correction: Callable[[Any, Params, Array], Params] | None = None


def weights_of(rho: Array, tau: Array) -> Weights:
    """Weights of a rule that knows no threshold and no coupling."""
    missing = jnp.float32(jnp.nan)
    return Weights(rho.astype(jnp.float32), tau > 0, missing, missing)


def normalized(share: Array, tau: Array) -> Array:
    """ρ in proportion to `share` among the clients with τ > 0."""
    share = jnp.where(tau > 0, share.astype(jnp.float32), 0.0)
    total = share.sum()
    return share / jnp.where(total > 0, total, 1.0)


def staleness(situation: Situation, hparams: HParams) -> Array:
    """s(lag) ``[N]`` in (0, 1], 1 where nothing is stale; see `local_work`."""
    return local_work.staleness_factor(
        situation.lag, hparams.staleness, hparams.staleness_a, hparams.staleness_b
    )


def size_weights(situation: Situation, hparams: HParams) -> Weights:
    """ρ_i ∝ |D_i| s(lag_i) over the clients that took part: FedAvg, FedProx.

    With s exponential it is temporally weighted aggregation: Chen, Sun and Jin,
    "Communication-Efficient Federated Deep Learning with Layerwise Asynchronous Model
    Update and Temporally Weighted Aggregation", IEEE TNNLS 2020.
    """
    share = situation.size * staleness(situation, hparams)
    return weights_of(normalized(share, situation.tau), situation.tau)


def stale_uniform_weights(situation: Situation, hparams: HParams) -> Weights:
    """ρ_i = s(lag_i)/N over the N clients that took part: FedAsync, FedBuff.

    What staleness takes away stays with the global model: Σ ρ may be below 1.
    """
    rho = normalized(jnp.ones_like(situation.size), situation.tau)
    return weights_of(rho * staleness(situation, hparams), situation.tau)


def dms_rule(situation: Situation, hparams: HParams) -> Weights:
    """Algorithm 1, equations (6)–(9); the parts are in `dms`."""
    key, tau, constants = situation.key, situation.tau, situation.constants
    selected = dms.select(key, tau, situation.client)
    coupling = dms.coupling(
        tau,
        lr=hparams.lr,
        smoothness=constants.smoothness,
        grad_sq_norm=constants.grad_sq_norm,
        grad_variance=constants.grad_variance,
    )
    # A gradient that overflowed in the estimate must not spoil every weight.
    coupling = jnp.where(jnp.isnan(coupling), 0.0, coupling)
    rho = dms.affine_weights(tau, selected, coupling, hparams.weight_limit)
    rho = rho.astype(jnp.float32)
    return Weights(rho, selected, dms.threshold(tau), coupling)


def no_state(params: Params, counts: Counts) -> tuple:
    """The state of a rule that needs none."""
    del params, counts
    return ()


def replace(mean: Params, params: Params, state: Any, event: Event, hparams: HParams):
    """w^{t+1} = Σ_i ρ_i w_i."""
    del params, event, hparams
    return mean, state


def mix(mean: Params, params: Params, state: Any, event: Event, hparams: HParams):
    """w^{t+1} = w^t + (1 − γ) Σ_i ρ_i (w_i − w^t): FedAsync.

    Without staleness that is γ w^t + (1 − γ) Σ_i ρ_i w_i, the paper's footnote 2. With
    one client at a time it is Xie, Koyejo and Gupta, "Asynchronous Federated
    Optimization", 2019, Algorithm 1, with α = 1 − γ.
    """
    gain = 1 - hparams.gamma
    # Σ ρ = 1 but for rounding where nothing is stale: then the weights are γ, 1 − γ.
    total = event.rho.sum()
    share = jnp.where(jnp.abs(total - 1) < 1e-5, 1.0, total)

    def mixed(w, m):
        inexact = jnp.issubdtype(w.dtype, jnp.inexact)
        return (1 - gain * share).astype(w.dtype) * w + gain * m if inexact else m

    return jax.tree.map(mixed, params, mean), state


def one_of(rules: Sequence[Aggregator]) -> Aggregator:
    """The rule ``rules[hparams.rule]``, so that one program holds them all.

    Args:
      rules: with states of the same structure, the same `deltas` and no `combine`.
    """
    if len(rules) == 1:
        return rules[0]

    def any_of(uses):
        return lambda hparams: jnp.asarray([bool(use) for use in uses])[hparams.rule]

    def weights(situation, hparams):
        branches = [rule.weights for rule in rules]
        return lax.switch(hparams.rule, branches, situation, hparams)

    def update(mean, params, state, event, hparams):
        branches = [rule.update for rule in rules]
        return lax.switch(hparams.rule, branches, mean, params, state, event, hparams)

    return rules[0]._replace(
        weights=weights,
        update=update,
        uses_constants=any_of([rule.uses_constants for rule in rules]),
        uses_gradients=any_of([rule.uses_gradients for rule in rules]),
        proximal=any(rule.proximal for rule in rules),
    )
