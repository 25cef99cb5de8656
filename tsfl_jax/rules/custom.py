"""A rule of the user's own from a function of weights, and any rule in any loop."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Num

from tsfl_jax import rng, trees
from tsfl_jax.rules.base import (
    Aggregator,
    ClientOutputs,
    Counts,
    Objective,
    Received,
    RoundInfo,
    Weights,
    check_weights,
    combined,
    decided,
    model_at,
    normalized,
    of_present,
    others_of,
    weights_of,
    with_defaults,
)
from tsfl_jax.types import (
    ClientGradients,
    HParams,
    Params,
    PRNGKey,
    UserError,
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _NotEstimated:
    """In place of estimates for a rule that does not say that it uses them."""

    what: str  # field of `RoundInfo`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # JAX and copy ask for those
            raise AttributeError(name)
        raise self._error()

    def __iter__(self) -> Any:
        raise self._error()

    def __getitem__(self, index: Any) -> Any:
        raise self._error()

    def _error(self) -> UserError:
        return UserError(
            f"the rule reads info.{self.what}, which are estimated only for rules "
            f"that say so; expected tsfl_jax.rule(..., uses_{self.what}=True)"
        )


def _known(info: RoundInfo, fields: dict[str, Any]) -> RoundInfo:
    """The info without estimates that the rule did not ask for.

    They are not computed for it: they would be NaN, and so would ρ.
    """
    for what in ("constants", "gradients"):
        if not fields.get(f"uses_{what}"):
            info = info._replace(**{what: _NotEstimated(what)})
    return info


def _of_known(function: Callable[..., Any], fields: dict[str, Any]) -> Callable:
    """A rule's `update`, `combine` or `from_updates`, whose `Received` is complete."""

    def called(*arguments: Any) -> Any:
        *first, received, hparams = arguments
        received = received._replace(info=_known(received.info, fields))
        return function(*first, received, hparams)

    return called


def _takes_hparams(weights: Any) -> bool:
    """Whether a function of weights takes `HParams` as well.

    A second argument with a default is a parameter of the user's own, unless it is
    called hparams.

    Raises:
      UserError: not a function of one or two arguments.
    """
    wanted = "expected a function of (info) or (info, hparams)"
    if not callable(weights):
        raise UserError(f"rule({weights!r}): {wanted}")
    try:
        several = inspect.signature(weights).parameters.values()
    except ValueError:  # some compiled functions have none
        return False
    kind = inspect.Parameter
    open_ended = any(p.kind is kind.VAR_POSITIONAL for p in several)
    stars = (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
    named = [p for p in several if p.kind not in stars]
    placed = [p for p in named if p.kind is not kind.KEYWORD_ONLY]
    needed = [p for p in named if p.default is kind.empty]
    unplaced = any(p.kind is kind.KEYWORD_ONLY for p in needed)
    if unplaced or len(needed) > 2 or not (placed or open_ended):
        raise UserError(f"rule({weights!r}): {wanted}; others need a default")
    return open_ended or len(needed) == 2 or "hparams" in [p.name for p in placed[1:2]]


def rule(
    weights: Callable[..., Any] | Any, *, normalize: bool = True, **fields: Any
) -> Aggregator:
    """Make an aggregation rule of a function of weights; all else has defaults.

    ρ_i = v_i / Σ_j v_j over the clients with τ_i > 0, v being what the function
    returns.

    Args:
      weights: (`RoundInfo`) or (`RoundInfo`, `HParams`) → v ≥ 0, ``[N]``, or `Weights`,
        which are used as they are. A pure function of JAX arrays.
      normalize: False: ρ = v, still 0 where τ_i = 0.
      **fields: other fields of `Aggregator`, such as `update` or `deltas`.
        ``uses_constants=True`` for a rule that reads ``info.constants``, and
        ``uses_gradients=True`` for ``info.gradients``.

    Raises:
      UserError: not a function of one or two arguments, or no such field; when it runs,
        a shape other than ``[N]``, or estimates that it did not ask for.
    """
    several = _takes_hparams(weights)
    for name in fields:
        if name not in Aggregator._fields:
            raise UserError(
                f"rule({name}=…): expected a field of tsfl_jax.Aggregator, one of "
                f"{', '.join(Aggregator._fields[1:])}"
            )

    def found(info: RoundInfo, hparams: HParams) -> Weights:
        info = _known(info, fields)
        made = weights(info, hparams) if several else weights(info)
        if isinstance(made, Weights):
            return made
        value = jnp.asarray(made, jnp.float32)
        check_weights(value, info)
        if normalize:
            return weights_of(normalized(value, info.tau), info.tau)
        return weights_of(jnp.where(info.tau > 0, value, 0.0), info.tau)

    own: dict[str, Any] = {
        name: _of_known(fields[name], fields)
        for name in ("update", "combine", "from_updates")
        if fields.get(name) is not None
    }
    return Aggregator(found, **(fields | own))


@functools.lru_cache(maxsize=64)
def rule_of_component(kind: type) -> Aggregator:
    """Make a rule of a `component` whose methods are functions of an `Aggregator`.

    A method gets its settings as they are in the program, then what that function
    gets: ``weights(self, info)`` or ``weights(self, info, hparams)``, and
    ``update(self, mean, params, state, received, hparams)``. Class attributes are the
    other fields, such as ``deltas = True``.

    Raises:
      UserError: no method `weights`.
    """
    found = {n: getattr(kind, n) for n in Aggregator._fields if hasattr(kind, n)}
    if "weights" not in found:
        raise UserError(
            f"aggregator={kind.__name__}(…): expected a component with a method "
            "weights(self, info)"
        )

    def of_settings(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: method(given[-1].of(kind), *given)

    several = _takes_hparams(functools.partial(found.pop("weights"), None))

    def weights(info: RoundInfo, hparams: HParams) -> Any:
        more = (hparams,) if several else ()
        return kind.weights(hparams.of(kind), info, *more)

    for name in {"update", "combine", "from_updates"} & set(found):
        found[name] = of_settings(found[name])
    fields: dict[str, Any] = {"sections": (kind,)} | found
    return rule(weights, **fields)


def init_rule(
    rule: Aggregator, params: Params, num_clients: int, groups: int = 1
) -> Any:
    """Make the first state of a rule, for `aggregate`.

    Args:
      rule: such as ``AGGREGATORS["fedadam"]``.
      params: the global model, any tree of arrays.
      num_clients: N.
      groups: tiers of FedAT.
    """
    params, _ = trees.parted(_variables(params))
    return rule.init(params, Counts(num_clients, groups))


def aggregate(
    rule: Aggregator,
    updates: Params,
    params: Params,
    state: Any = (),
    *,
    tau: Num[Array, "N"] | Any = None,
    size: Num[Array, "N"] | Any = None,
    steps: Num[Array, "N"] | Any = None,
    lag: Num[Array, "N"] | Any = None,
    group: int = 0,
    gradients: ClientGradients | None = None,
    losses: Float[Array, "N"] | Any = None,
    validation: Callable[[Params], Array] | None = None,
    key: PRNGKey | None = None,
    hparams: HParams | None = None,
) -> tuple[Params, Any]:
    """Apply any rule to clients' updates, for a training loop of one's own.

    w^{t+1} = update(w^t + Σ_i ρ_i (w_i − base_i), w^t), or with the rule's `combine`
    for medians, Krum and SCAFFOLD. A pure function: it can be jitted, vmapped and
    differentiated.

    Args:
      rule: such as ``AGGREGATORS["dms"]`` or from `tsfl_jax.rule`.
      updates: w_i − base_i, leaves ``[N, ...]``; a client whose update is not finite is
        left out.
      params: w^t, leaves ``[...]``.
      state: of the rule, from `init_rule`; () for those without one.
      tau: ``[N]`` int32, local iterations ≥ 0; None: 1 each.
      size: ``[N]`` int32, samples ≥ 1; None: 1 each.
      steps: ``[N]`` int32, mini-batch steps; None: τ.
      lag: ``[N]`` int32, global updates since base_i; None: 0 each.
      group: tier that delivers (FedAT).
      gradients: σ_i² and dissimilarities at w^t, for `bound_optimal` only.
      losses: ``[N]``, mean loss of each client's training; None: not known, NaN.
      validation: params → loss on samples of the server, for `oracle` only.
      key: of the rule's random numbers (DMS); None: of seed 0.
      hparams: η and the settings that the rule reads, by default those of its
        sections; DMS needs its `constants`. None: plain SGD.

    Returns:
      (w^{t+1}, new state).

    Raises:
      UserError: a rule that needs `gradients` or `validation`, without them.
    """
    _check_given(rule, gradients, validation)
    hparams = with_defaults(rule, HParams() if hparams is None else hparams)
    number = len(jax.tree.leaves(updates)[0])
    key = rng.key(0) if key is None else key
    columns = _columns(number, tau, size, steps, lag)
    tier, constants = jnp.int32(group), hparams.constants
    info = RoundInfo(key, *columns, tier, constants, gradients)
    bare = not _has_collections(params)
    updates, params = _variables(updates), _variables(params)
    known = jnp.full(number, jnp.nan) if losses is None else jnp.asarray(losses)
    measured = known.astype(jnp.float32), _of_variables(validation, bare)
    new, state = _applied(rule, updates, params, state, info, hparams, measured)
    return (new["params"] if bare else new), state


def _check_given(
    rule: Aggregator, gradients: ClientGradients | None, validation: Any
) -> None:
    """Raise `UserError` for a rule that lacks what its weights depend on."""
    if rule.uses_gradients and gradients is None:
        raise UserError(
            "aggregate: this rule's weights depend on the clients' gradients; expected "
            "gradients=, a tsfl_jax.types.ClientGradients"
        )
    if rule.uses_validation and validation is None:
        raise UserError(
            "aggregate: this rule chooses its weights by a loss on samples of the "
            "server; expected validation=, a function of the parameters"
        )


def _of_variables(
    loss: Callable[[Params], Array] | None, bare: bool
) -> Callable[[Params], Array] | None:
    """The loss as a function of Flax variables; `bare`: it takes the collection."""
    if loss is None or not bare:
        return loss
    return lambda variables: loss(variables["params"])


def _columns(
    number: int, tau: Any, size: Any, steps: Any, lag: Any
) -> tuple[Array, Array, Array, Array, Array]:
    """Ids, τ, sizes, steps and lags ``[N]`` int32, with their defaults."""

    def column(value: Any, default: Any) -> Array:
        return jnp.asarray(default if value is None else value, jnp.int32)

    ones = jnp.ones(number, jnp.int32)
    tau = column(tau, ones)
    ids = jnp.arange(number, dtype=jnp.int32)
    return ids, tau, column(size, ones), column(steps, tau), column(lag, 0 * ones)


def _has_collections(params: Params) -> bool:
    return isinstance(params, dict) and "params" in params


def _variables(params: Params) -> Params:
    """The tree as Flax variables, whose collection "params" is what rules optimize."""
    return params if _has_collections(params) else {"params": params}


@trees.arithmetic()
def _applied(
    rule: Aggregator,
    updates: Params,
    params: Params,
    state: Any,
    info: RoundInfo,
    hparams: HParams,
    measured: tuple[Array, Callable[[Params], Array] | None],
) -> tuple[Params, Any]:
    """w^{t+1} and the rule's state; `measured` are the clients' losses and F_val."""
    weights, present = decided(rule, info, hparams), info.tau > 0
    rho = weights.rho
    present &= _finite(updates)
    counts, before = present.any(), state
    updates = _with_values(updates, params)
    updates = jax.tree.map(
        lambda u: jnp.where(_column(present, u), u, jnp.zeros_like(u)), updates
    )
    received = Received(info, rho, present, shares=weights.shares)
    if rule.from_updates is not None:
        outputs = ClientOutputs(measured[0], _objective(updates, params, measured[1]))
        weights, state = rule.from_updates(outputs, state, received, hparams)
        rho = weights.rho
        received = received._replace(rho=rho, shares=weights.shares)
    total, (old, others) = jnp.float32(1.0), trees.parted(params)
    update = None
    if rule.combine is not None:
        update, state = combined(rule, updates, state, received, hparams)
        moved = trees.parted(update)[0]
    else:
        shares = of_present(rho, present, weights.shares)
        moved = trees.weighted(trees.parted(updates)[0], shares)
        if rule.from_updates is None:
            counts = jnp.where(present, rho, 0.0).sum() > 0
            total = total if rule.deltas else trees.settled(rho.sum())
    mean = trees.map_inexact(lambda w, m: total.astype(w.dtype) * w + m, old, moved)
    new, state = rule.update(mean, old, state, received, hparams)
    if others:
        new = {**new, **others_of(others, updates, update, rho, present)}
    # Where no model counts, the global model and the state stay, as in a simulation.
    return optax.tree.where(counts, (new, state), (params, before))


def _with_values(updates: Params, params: Params) -> Params:
    """The parameters' updates, and as "others" the values of other collections."""
    moved, rest = trees.parted(updates)
    if not rest:
        return updates
    own = jax.tree.map(lambda w, u: w[None] + u, trees.parted(params)[1], rest)
    return {**moved, "others": trees.values(own)}


def _objective(
    updates: Params, params: Params, loss: Callable[[Params], Array] | None
) -> Objective | None:
    """ρ → (F_val(w^t + Σ_i ρ_i u_i), its derivatives)."""
    if loss is None:
        return None
    updates, params = lax.stop_gradient((updates, params))

    def at(rho: Float[Array, "N"]) -> Array:
        return jnp.asarray(loss(model_at(params, updates, rho)), jnp.float32)

    return jax.value_and_grad(at)


def _column(values: Array, leaf: Array) -> Array:
    return values.reshape(values.shape + (1,) * (leaf.ndim - 1))


def _finite(updates: Params) -> Array:
    """Which clients' updates have no NaN and no infinity, ``[N]``."""
    leaves = jax.tree.leaves(updates)
    each = [jnp.isfinite(u.reshape(len(u), -1)).all(axis=1) for u in leaves]
    return jnp.stack(each).all(axis=0)
