"""Rules applied: from the clients' updates to w^{t+1} and the rule's new state.

The engine and `custom.aggregate` do the same: `decide` gives the weights, the updates
become one by a sum that the caller streams or by `mix_stacked`, and `apply` is the
server's step. A program may hold several rules, ``rules[hparams.rule]`` counts.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float

from tsfl_jax import trees, types
from tsfl_jax.models.losses import all_finite
from tsfl_jax.rules.base import (
    Aggregator,
    ClientOutputs,
    Counts,
    Received,
    RoundInfo,
    Weights,
)
from tsfl_jax.types import HParams, Params


class Mixed(NamedTuple):
    """The clients' updates as one, and what the server's step needs besides."""

    # Σ_i ρ_i (w_i − base_i) of the finite models, or Δ of `combine`; of the parameters.
    update: Params
    collections: Params  # what other collections than parameters become
    kept: Float[types.Array, ""]  # part of Σ ρ with finite models; 0: w^t stays
    total: Float[types.Array, ""]  # Σ ρ
    weights: Weights  # those that count
    received: Received  # likewise, and who is there
    state: Any  # of the rule, after `combine` or `from_updates`


def _states_of(rules: Sequence[Aggregator]) -> list[Callable[[Params, Counts], Any]]:
    """The functions that make the states, each once."""
    return list(dict.fromkeys(rule.server.init for rule in rules))


def init_state(rules: Sequence[Aggregator], params: Params, counts: Counts) -> Any:
    """The first state of a rule, or those of several side by side."""
    if len(rules) == 1:
        return rules[0].server.init(params, counts)
    return tuple(init(params, counts) for init in _states_of(rules))


def decide(rules: Sequence[Aggregator], info: RoundInfo, hparams: HParams) -> Weights:
    """The weights of the rule that counts, known before training.

    Raises:
      UserError: they are not a number per client.
    """

    def with_shares(rule: Aggregator, info: RoundInfo, hparams: HParams) -> Weights:
        weights = rule.mixing.weights(info, hparams)
        shares = weights.rho if weights.shares is None else weights.shares
        return weights._replace(shares=shares)

    if len(rules) == 1:
        weights = rules[0].mixing.weights(info, hparams)
    else:  # all have the same structure
        branches = [functools.partial(with_shares, rule) for rule in rules]
        weights = lax.switch(hparams.rule, branches, info, hparams)
    check_weights(weights.rho, info)
    return weights


def check_weights(rho: types.Array, info: RoundInfo) -> None:
    """Raise `UserError` unless ρ is a number per client; costs nothing under jit."""
    if jnp.shape(rho) != info.tau.shape:
        raise types.UserError(
            f"the rule's weights have shape {list(jnp.shape(rho))}; expected "
            f"{list(info.tau.shape)}, a number per client"
        )


def mean_values(
    values: Sequence[Float[types.Array, "N ..."]],
    rho: Float[Array, "N"],
    present: Bool[Array, "N"],
) -> list[types.Array]:
    """What other collections than parameters become: Σ p_i s_i of the clients' values.

    p_i = max(ρ_i, 0)/Σ_j max(ρ_j, 0) over the clients whose models are there: p ≥ 0 and
    Σ p = 1 for every rule, so that a mean variance is one. `engine.mapping` has it for
    sums over devices.

    Args:
      values: of each leaf, ``[N, ...]`` float32, finite; see `trees.values`.
      rho: weights of any sign and sum.
      present: whose models are there.

    Returns:
      A mean ``[...]`` for each; of equal weights where no weight is positive.
    """
    positive = jnp.where(present & (rho > 0), rho, 0.0)
    positive = jnp.where(positive.any(), positive, present)
    total = positive.sum()
    return trees.weighted(list(values), positive / jnp.where(total > 0, total, 1.0))


def of_present(
    rho: Float[Array, "N"],
    present: Bool[Array, "N"],
    shares: Float[Array, "N"] | None = None,
) -> Float[Array, "N"]:
    """Weights renormalized by their base shares where models were discarded.

    ρ_i Σ_j p_j/Σ_{j present} p_j, and 0 where not present; as they are where those that
    are present have no positive sum. `engine.mapping` has it for sums over devices.

    Args:
      rho: weights.
      present: whose models are there.
      shares: p; None: ρ.
    """
    kept, shares = jnp.where(present, rho, 0.0), rho if shares is None else shares
    total = jnp.where(present, shares, 0.0).sum()
    scale = shares.sum() / jnp.where(total > 0, total, 1.0)
    return kept * jnp.where(total > 0, scale, 1.0)


def model_at(
    variables: Params,
    updates: Params,
    rho: Float[types.Array, "N"],
    combined: tuple[Float[types.Array, ""], Params] | None = None,
) -> Params:
    """The variables w^t + Σ_i ρ_i u_i; other collections are the mean by ρ.

    Args:
      variables: w^t.
      updates: u_i, leaves ``[N, ...]``; as "others" the values of other collections.
      rho: weights.
      combined: a share and Δ of a rule's `combine`, added as one more update.
    """
    (params, collections), (moved, _) = map(trees.parted, (variables, updates))
    values, weights = updates.get("others", []), jnp.asarray(rho)
    if combined is not None:
        share, (delta, _) = combined[0], trees.parted(combined[1])
        params = trees.map_inexact(lambda w, d: w + share * d, params, delta)
        weights = jnp.append(weights, share)
        pairs = zip(values, combined[1].get("others", []), strict=True)
        values = [jnp.concatenate([v, jnp.asarray(new)[None]]) for v, new in pairs]
    model = trees.map_inexact(jnp.add, params, trees.weighted(moved, rho))
    if not values:
        return model
    mean = mean_values(values, weights, jnp.ones(len(weights), bool))
    return {**model, **trees.with_values(collections, mean)}


def mix_stacked(
    rule: Aggregator,
    updates: Params,
    variables: Params,
    weights: Weights,
    received: Received,
    state: Any,
    outputs: ClientOutputs,
    hparams: HParams,
) -> Mixed:
    """All clients' updates as one, by weights or as the rule's `combine` has it.

    Args:
      rule: one with `combine`, `from_updates` or weights alone.
      updates: w_i − base_i, leaves ``[N, ...]``, 0 where not present; as "others" the
        values of other collections, if there are any.
      variables, state: w^t and the rule's, before this interval.
      weights: of `decide`; `from_updates` gives others.
      received: who is present, with a finite model.
      outputs, hparams: what the rule's functions see.
    """
    mixing, (moved, values), means = rule.mixing, trees.parted(updates), None
    if mixing.combine is not None:
        stack = updates if mixing.combines_others else moved
        delta, state = mixing.combine(stack, state, received, hparams)
        _check_update(delta, stack)
        update, means = trees.parted(delta)[0], delta.get("others")
    elif mixing.from_updates is not None:
        weights, state = mixing.from_updates(outputs, state, received, hparams)
        received = received._replace(rho=weights.rho, shares=weights.shares)
        update = trees.weighted(moved, weights.rho)
    else:
        rho = of_present(weights.rho, received.present, weights.shares)
        update = trees.weighted(moved, rho)
    collections, present = trees.parted(variables)[1], received.present
    if values:
        means = means or mean_values(values["others"], received.rho, present)
        collections = trees.with_values(collections, means)
    kept, total = present.sum(), jnp.float32(1.0)
    if not rule.stacks:
        kept, total = jnp.where(present, received.rho, 0.0).sum(), received.rho.sum()
    return Mixed(update, collections, kept, total, weights, received, state)


def _check_update(delta: Params, updates: Params) -> None:
    """Raise `UserError` unless Δ has the leaves of one client's update."""
    one = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), updates)
    failure = "combine gives another tree or other shapes than one client's update"
    with types.user_code(failure, "expected leaves without the axis of the clients"):
        chex.assert_trees_all_equal_shapes(delta, one)


def apply(
    rules: Sequence[Aggregator],
    mixed: Mixed,
    variables: Params,
    state: Any,
    hparams: HParams,
    is_open: Bool[Array, ""] | bool = True,
) -> tuple[Params, Any, Bool[Array, ""]]:
    """The server's step: w^{t+1} = update((Σ ρ) w^t + Σ_i ρ_i (w_i − w^t), w^t).

    With the rule's `deltas` it is of w^t + Σ_i ρ_i (w_i − base_i). A rule can make a
    model that is not finite of finite ones: that is not taken.

    Args:
      rules: of the program; those of several have their states side by side.
      mixed: the clients' updates as one.
      variables, state: w^t and the rules', before this interval.
      hparams: what the rules read.
      is_open: False: nothing is taken any more.

    Returns:
      The new variables, the state, and whether what the rule made is finite. Where it
      is not, or no model counts, variables and state stay.
    """
    params, _ = trees.parted(variables)

    def step(rule: Aggregator, state: Any) -> tuple[Params, Any]:
        # Σ ρ = 1 but for rounding if nothing is stale: then w^t must not drift.
        total = jnp.float32(1.0) if rule.mixing.deltas else trees.settled(mixed.total)
        mean = trees.map_inexact(
            lambda w, moved: total.astype(w.dtype) * w + moved, params, mixed.update
        )
        return rule.server.update(mean, params, state, mixed.received, hparams)

    def on_its_state(rule: Aggregator, states: tuple) -> tuple[Params, tuple]:
        place = _states_of(rules).index(rule.server.init)
        new, state = step(rule, states[place])
        return new, (*states[:place], state, *states[place + 1 :])

    if len(rules) == 1:
        new, new_state = step(rules[0], mixed.state)
    else:
        branches = [functools.partial(on_its_state, rule) for rule in rules]
        new, new_state = lax.switch(hparams.rule, branches, mixed.state)
    new = {**new, **mixed.collections}
    is_finite = all_finite(new)
    is_taken = (mixed.kept > 0) & is_finite & is_open
    new, state = optax.tree.where(is_taken, (new, new_state), (variables, state))
    return new, state, is_finite
