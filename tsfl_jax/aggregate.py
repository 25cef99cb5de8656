"""Aggregation rules: how w^{t+1} is made of the clients' models w_i^t.

A rule knows its weights before training (functions of τ, |D_i| and a key), so the
models never have to be stacked: ``w^{t+1} = update(Σ_i ρ_i w_i^t, w^t)``. Whoever did
no iteration (τ_i = 0) gets weight 0 under every rule.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax import dms
from tsfl_jax.types import Array, Constants, HParams, Params, PRNGKey


class Situation(NamedTuple):
    """What a weight rule may look at in interval t; leading axis ``[N]``."""

    key: PRNGKey
    client: Array  # [N] int32 ids
    tau: Array  # [N] int32
    size: Array  # [N] int32
    constants: Constants


class Weights(NamedTuple):
    """A rule's decision in one interval; numbers that do not apply are NaN."""

    rho: Array  # [N] float32, Σ ρ = 1, all 0 where nobody took part
    selected: Array  # [N] bool
    threshold: Array  # K of DMS
    coupling: Array  # c of DMS


class Aggregator(NamedTuple):
    """An aggregation rule of pure functions."""

    weights: Callable[[Situation, HParams], Weights]
    init: Callable[[Params], Any]
    # (Σ ρ_i w_i, w^t, state, hparams) -> (w^{t+1}, state)
    update: Callable[[Params, Params, Any, HParams], tuple[Params, Any]]
    # Whether L, G², σ² matter; `one_of` makes it a function of the hyper-parameters.
    uses_constants: bool | Callable[[HParams], Array] = False
    proximal: bool = False  # whether clients add μ/2‖w − w^t‖² to their loss


def _normalized(share: Array, tau: Array) -> Weights:
    """Weights in proportion to `share` among the clients with τ > 0."""
    share = jnp.where(tau > 0, share.astype(jnp.float32), 0.0)
    total = share.sum()
    rho = share / jnp.where(total > 0, total, 1.0)
    missing = jnp.float32(jnp.nan)
    return Weights(rho, tau > 0, missing, missing)


def size_weights(situation: Situation, hparams: HParams) -> Weights:
    """ρ_i = |D_i| / Σ_j |D_j| over the clients that took part: FedAvg, FedProx."""
    del hparams
    return _normalized(situation.size, situation.tau)


def uniform_weights(situation: Situation, hparams: HParams) -> Weights:
    """ρ_i = 1/N over the clients that took part: FedAsync in the paper's form."""
    del hparams
    return _normalized(jnp.ones_like(situation.size), situation.tau)


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


def _no_state(params: Params) -> tuple:
    del params
    return ()


def _replace(mean: Params, params: Params, state: Any, hparams: HParams):
    """w^{t+1} = Σ_i ρ_i w_i."""
    del params, hparams
    return mean, state


def _mix(mean: Params, params: Params, state: Any, hparams: HParams):
    """w^{t+1} = γ w^t + (1 − γ) Σ_i ρ_i w_i, the paper's footnote 2."""
    gamma = hparams.gamma

    def mix(w, m):
        inexact = jnp.issubdtype(w.dtype, jnp.inexact)
        return gamma * w + (1 - gamma) * m if inexact else m

    return jax.tree.map(mix, params, mean), state


def one_of(rules: Sequence[Aggregator]) -> Aggregator:
    """The rule ``rules[hparams.rule]``, so that one program holds them all.

    Args:
      rules: with states of the same structure.
    """
    if len(rules) == 1:
        return rules[0]
    uses = [bool(rule.uses_constants) for rule in rules]

    def weights(situation, hparams):
        branches = [rule.weights for rule in rules]
        return lax.switch(hparams.rule, branches, situation, hparams)

    def update(mean, params, state, hparams):
        branches = [rule.update for rule in rules]
        return lax.switch(hparams.rule, branches, mean, params, state, hparams)

    return Aggregator(
        weights,
        rules[0].init,
        update,
        uses_constants=lambda hparams: jnp.asarray(uses)[hparams.rule],
        proximal=any(rule.proximal for rule in rules),
    )


AGGREGATORS: dict[str, Aggregator] = {
    "dms": Aggregator(dms_rule, _no_state, _replace, uses_constants=True),
    "fedavg": Aggregator(size_weights, _no_state, _replace),
    "fedprox": Aggregator(size_weights, _no_state, _replace, proximal=True),
    "fedasync": Aggregator(uniform_weights, _no_state, _mix),
}
