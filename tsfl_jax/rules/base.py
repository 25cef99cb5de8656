"""The structures of aggregation rules: how w^{t+1} is made of the clients' w_i^t.

Most rules know their weights before training (functions of τ, |D_i|, lag and a key), so
the models never have to be stacked: w^{t+1} = update(Σ_i ρ_i w_i^t, w^t). A client that
did no iteration (τ_i = 0) gets weight 0 under every rule. The rules are in the other
modules of this folder, and the table of all in `rules` itself.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from tsfl_jax import trees, types
from tsfl_jax.components import arrays, declared, section_of
from tsfl_jax.sections import ConstantsConfig
from tsfl_jax.types import ClientGradients, Constants, HParams, Params, PRNGKey


class RoundInfo(NamedTuple):
    """What a rule's weights may depend on in an interval.

    A client may have done less than it reports; rules see what it reports.
    """

    key: PRNGKey
    client: Int[Array, "N"]  # ids, which name random streams
    tau: Int[Array, "N"]
    size: Int[Array, "N"]  # samples
    steps: Int[Array, "N"]  # mini-batch steps
    lag: Int[Array, "N"]  # global updates since the model it started from
    group: Int[Array, ""]  # tier that delivers
    constants: Constants
    gradients: ClientGradients | None = None  # of w^t, for a rule that uses them
    interval: Int[Array, ""] | int = 0  # t
    threshold: Float[Array, ""] | float = math.nan  # K of DMS; NaN: the mean of τ
    # Of each in a state of all clients, in [0, Counts.clients); None: the ids.
    place: Int[Array, "N"] | None = None
    # ρ that go with how a cohort was sampled.
    share: Float[types.Array, "N"] | None = None

    @property
    def places(self) -> Int[Array, "N"]:
        """Where a rule's state has each client."""
        return self.client if self.place is None else self.place


class Weights(NamedTuple):
    """A rule's decision in an interval; numbers that do not apply are NaN."""

    rho: Float[Array, "N"]  # float32; all 0 if no client takes part
    selected: Bool[Array, "N"]
    threshold: Float[Array, ""]  # K of DMS
    coupling: Float[Array, ""]  # c of DMS
    # Base shares p_i before factors such as staleness; renormalized when a client's
    # model is discarded. None: ρ.
    shares: Float[Array, "N"] | None = None


class Received(NamedTuple):
    """What is known when the models have arrived."""

    info: RoundInfo
    rho: Float[Array, "N"]
    present: Bool[Array, "N"]  # takes part; for a `combine`, with a finite model
    # [N, ...], downloaded with the model (`Aggregator.broadcast`); None:
    # what the state holds now, for all of them.
    broadcast: Params | None = None
    shares: Float[Array, "N"] | None = None  # as in `Weights`


# ρ [N] -> (F_val(w(ρ)), its derivatives ∂F_val/∂ρ_i [N]) with the interval's updates
# u_i, w(ρ) = w^t + Σ_i ρ_i u_i. NaN or infinite where that model has no finite loss.
Objective = Callable[
    [Float[types.Array, "N"]], tuple[Float[types.Array, ""], Float[types.Array, "N"]]
]


class ClientOutputs(NamedTuple):
    """What training gave, for weights that are chosen after it."""

    # Mean sample loss of each client's training; NaN: absent.
    loss: Float[types.Array, "N"]
    validation: Objective | None  # loss on the validation samples; None: there are none


class Counts(NamedTuple):
    """Numbers that give a rule's state its shape."""

    clients: int  # N, of cohorts those that ever work
    groups: int  # tiers, at least 1
    size: Num[Array, "N"] | None = None  # samples per client; None: not known
    others: types.Scalar = 0.0  # samples of all clients that never work

    @property
    def held(self) -> tuple[Float[Array, "N"], Float[Array, ""]]:
        """`size` and `others` as float32 arrays, for a state with a field `size`."""
        if self.size is None or np.shape(self.size) != (self.clients,):
            raise types.UserError(
                f"size={self.size}: expected the samples of each of {self.clients} "
                "clients, which the rule's state has; give init_rule(…, size=…)"
            )
        others = jnp.asarray(self.others, jnp.float32)
        return jnp.asarray(self.size, jnp.float32), others


def no_state(params: Params, counts: Counts) -> tuple:
    """The state of a rule that needs none."""
    del params, counts
    return ()


def replace(
    mean: Params, params: Params, state: Any, received: Received, hparams: HParams
) -> tuple[Params, Any]:
    """Replace the global model: w^{t+1} = Σ_i ρ_i w_i."""
    del params, received, hparams
    return mean, state


class Aggregator(NamedTuple):
    """An aggregation rule of pure functions of the parameters, {"params": …}.

    Other collections of a model, such as batch statistics, do not pass through it.
    """

    weights: Callable[[RoundInfo, HParams], Weights]
    init: Callable[[Params, Counts], Any] = no_state
    # (Σ ρ_i w_i, w^t, state, received, hparams) -> (w^{t+1}, state)
    update: Callable[[Params, Params, Any, Received, HParams], tuple[Params, Any]] = (
        replace
    )
    uses_constants: bool = False  # whether the weights depend on L, G², σ²
    uses_gradients: bool = False  # likewise on each client's σ_i² and dissimilarity
    proximal: bool = False  # whether clients add μ/2‖w − w^t‖² to their loss
    # Whether `update` gets w^t + Σ ρ_i (w_i − base_i) instead, base_i being the model
    # that client i started from; Σ ρ need not be 1. A tuple: of each rule of `one_of`.
    deltas: bool | tuple[bool, ...] = False
    # (w_i − base_i [N, ...], state, received, hparams) -> (Δ, state): if no weights can
    # say how the updates are combined. `update` then gets w^t + Δ. Stacks all models.
    combine: Callable[[Params, Any, Received, HParams], tuple[Params, Any]] | None = (
        None
    )
    # Whether `combine` also gets "others", the clients' own values [N, ...] of other
    # collections, and gives what these become; else they become `mean_values`.
    combines_others: bool = False
    # (outputs, state, received, hparams) -> (weights, state): they count instead of
    # `weights`, chosen after training; 0 where not present. Stacks all models.
    from_updates: (
        Callable[[ClientOutputs, Any, Received, HParams], tuple[Weights, Any]] | None
    ) = None
    # Whether `from_updates` reads `ClientOutputs.validation`.
    uses_validation: bool = False
    # state -> what a client downloads with the model. Kept with earlier models, so that
    # a client that is not in step uses what there was when it downloaded.
    broadcast: Callable[[Any], Params] | None = None
    # (state, what it downloaded, its place in it) -> added to each of its gradients.
    gradient_correction: Callable[[Any, Params, Array], Params] | None = None
    # Components whose settings its functions read, `HParams.of`.
    sections: tuple[type, ...] = ()
    label: str = ""  # its name in figures and tables; "": that of its table
    # Whether staleness lets weight go to the global model, Σ ρ < 1; else to the other
    # clients of the update.
    discounts: bool = False
    # hyper-parameters -> whether no L, G², σ² are needed, although `uses_constants`.
    needs_none: Callable[[HParams], bool] = lambda hparams: False
    # Whether it counts on the steps of the package's own SGD: no `optimizer=` and
    # `client_step=` then.
    counts_on_sgd: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The settings that it reads besides those of its sections."""
        return tuple(declared(ConstantsConfig)) if self.uses_constants else ()

    @property
    def stacks(self) -> bool:
        """Whether it needs all updates at once; then it has a program of its own."""
        return self.combine is not None or self.from_updates is not None


def with_defaults(rule: Aggregator, hparams: HParams) -> HParams:
    """The hyper-parameters with the defaults of settings that are not given."""
    found = {section_of(kind): arrays(kind()) for kind in rule.sections}
    return hparams._replace(settings=found | dict(hparams.settings))


def check_weights(rho: types.Array, info: RoundInfo) -> None:
    """Raise `UserError` unless ρ is a number per client; costs nothing under jit."""
    if jnp.shape(rho) != info.tau.shape:
        raise types.UserError(
            f"the rule's weights have shape {list(jnp.shape(rho))}; expected "
            f"{list(info.tau.shape)}, a number per client"
        )


def decided(rule: Aggregator, info: RoundInfo, hparams: HParams) -> Weights:
    """A rule's weights, checked."""
    found = rule.weights(info, hparams)
    check_weights(found.rho, info)
    return found


def weights_of(rho: Float[Array, "N"], tau: Int[Array, "N"]) -> Weights:
    """The weights of a rule without a threshold and a coupling."""
    missing = jnp.float32(jnp.nan)
    return Weights(rho.astype(jnp.float32), tau > 0, missing, missing)


def normalized(share: Num[Array, "N"], tau: Int[Array, "N"]) -> Float[Array, "N"]:
    """Weights ρ in proportion to `share` among the clients with τ > 0."""
    share = jnp.where(tau > 0, share.astype(jnp.float32), 0.0)
    total = share.sum()
    return share / jnp.where(total > 0, total, 1.0)


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


def model_at(
    params: Params,
    updates: Params,
    rho: Float[types.Array, "N"],
    more: tuple[Float[types.Array, ""], Params] | None = None,
) -> Params:
    """The variables w^t + Σ_i ρ_i u_i; other collections are the mean by ρ.

    Args:
      params: w^t.
      updates: u_i, leaves ``[N, ...]``; as "others" the values of other collections.
      rho: weights.
      more: a share and what `combined` made, added as one more update.
    """
    (old, others), (moved, rest) = trees.parted(params), trees.parted(updates)
    values, weights = rest.get("others", []), jnp.asarray(rho)
    if more is not None:
        share, (delta, extra) = more[0], trees.parted(more[1])
        old = trees.map_inexact(lambda w, d: w + share * d, old, delta)
        weights = jnp.append(weights, share)
        pairs = zip(values, extra.get("others", []), strict=True)
        values = [jnp.concatenate([v, jnp.asarray(new)[None]]) for v, new in pairs]
    model = trees.map_inexact(jnp.add, old, trees.weighted(moved, rho))
    if not values:
        return model
    mean = mean_values(values, weights, jnp.ones(len(weights), bool))
    return {**model, **trees.with_values(others, mean)}


def combined(
    rule: Any, updates: Params, state: Any, received: "Received", hparams: HParams
) -> tuple[Params, Any]:
    """A rule's `combine`: Δ of the parameters, "others" beside it, and the state."""
    moved, rest = trees.parted(updates)
    if rule.combines_others or not rest:
        delta, state = rule.combine(updates, state, received, hparams)
        _check_update(delta, updates)
        return delta, state
    delta, state = rule.combine(moved, state, received, hparams)
    _check_update(delta, moved)
    values = mean_values(rest["others"], received.rho, received.present)
    return {**delta, "others": values}, state


def _check_update(delta: Params, updates: Params) -> None:
    """Raise `UserError` unless Δ has the leaves of one client's update."""
    one = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), updates)
    what = "combine gives another tree or other shapes than one client's update"
    with types.user_code(what, "expected leaves without the axis of the clients"):
        chex.assert_trees_all_equal_shapes(delta, one)


def others_of(
    others: Params,
    updates: Params,
    update: Params | None,
    rho: Float[Array, "N"],
    present: Bool[Array, "N"],
) -> Params:
    """What other collections than parameters become.

    Args:
      others: those of w^t.
      updates: the clients', with "others" the values of other collections, if any.
      update: what `combined` made of them; None: a mean by weights, `mean_values`.
      rho: weights.
      present: whose models are there.
    """
    if not (rest := trees.parted(updates)[1]):
        return others
    if update is not None:
        return trees.with_values(others, update["others"])
    return trees.with_values(others, mean_values(rest["others"], rho, present))


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


def equal_weights(info: RoundInfo, hparams: HParams) -> Weights:
    """1/n for each of the n clients that take part.

    Also what a rule with `from_updates` has until it has chosen its own, and one whose
    `combine` is no weighted mean.
    """
    del hparams
    rho = normalized(jnp.ones_like(info.size), info.tau)
    return weights_of(rho, info.tau)


def one_of(rules: Sequence[Aggregator]) -> Aggregator:
    """The rule ``rules[hparams.rule]``, so that one program holds them all.

    Rules with different `init` have all their states side by side; each update changes
    that of its rule.

    Args:
      rules: rules that only have weights, if there is more than one.
    """
    if len(rules) == 1:
        return rules[0]
    inits = list(dict.fromkeys(rule.init for rule in rules))

    def init(params: Params, counts: Counts) -> tuple:
        return tuple(make(params, counts) for make in inits)

    def weights(info: RoundInfo, hparams: HParams) -> Weights:
        branches = [functools.partial(_with_shares, rule) for rule in rules]
        return lax.switch(hparams.rule, branches, info, hparams)

    def update(*inputs: Any) -> tuple[Params, tuple]:
        places = [inits.index(rule.init) for rule in rules]
        pairs = zip(rules, places, strict=True)
        branches = [functools.partial(_on_its_state, *pair) for pair in pairs]
        return lax.switch(inputs[-1].rule, branches, *inputs)

    deltas = tuple(rule.deltas for rule in rules)
    return rules[0]._replace(
        weights=weights,
        init=init,
        update=update,
        uses_constants=any(rule.uses_constants for rule in rules),
        uses_gradients=any(rule.uses_gradients for rule in rules),
        proximal=any(rule.proximal for rule in rules),
        deltas=deltas if len(set(deltas)) > 1 else deltas[0],
    )


def _with_shares(rule: Aggregator, info: RoundInfo, hparams: HParams) -> Weights:
    """Weights with the shares filled in, so that all have the same structure."""
    found = rule.weights(info, hparams)
    return found._replace(shares=found.rho if found.shares is None else found.shares)


def _on_its_state(rule: Aggregator, place: int, *inputs: Any) -> tuple[Params, tuple]:
    """The rule's `update` where its state is one of several."""
    mean, params, states, *received = inputs
    new, state = rule.update(mean, params, states[place], *received)
    return new, (*states[:place], state, *states[place + 1 :])


def total_weight(
    rule: Aggregator, asked: Float[types.Array, ""], hparams: HParams
) -> Float[types.Array, ""]:
    """Factor of w^t in Σ_i ρ_i w_i: Σ ρ (`asked`), or 1 for a rule of `deltas`."""
    if isinstance(rule.deltas, tuple):
        return jnp.where(jnp.asarray(rule.deltas)[hparams.rule], 1.0, asked)
    return jnp.float32(1.0) if rule.deltas else asked
