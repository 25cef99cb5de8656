"""A rule of the user's own from a function of weights, and any rule in any loop."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from tsfl_jax import rng, trees, types
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
from tsfl_jax.types import ClientGradients, HParams, Params, PRNGKey, UserError


def _with_hparams(weights: Any) -> Callable[[RoundInfo, HParams], Any]:
    """A function of weights that takes `HParams` as well, of one that may not.

    A second argument with a default is a parameter of the user's own, unless it is
    called hparams.

    Raises:
      UserError: not a function of one or two arguments.
    """
    expected = "expected a function of (info) or (info, hparams)"
    if not callable(weights):
        raise UserError(f"rule({weights!r}): {expected}")
    placed = [
        p
        for p in inspect.signature(weights).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    needed = sum(p.default is p.empty for p in placed)
    if not placed or needed > 2:
        raise UserError(f"rule({weights!r}): {expected}; others need a default")
    if needed == 2 or "hparams" in [p.name for p in placed[1:2]]:
        return weights
    return lambda info, hparams: weights(info)


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
        what it raises, or a shape other than ``[N]``.
    """
    function = _with_hparams(weights)
    for name in fields:
        if name not in Aggregator._fields:
            raise UserError(
                f"rule({name}=…): expected a field of tsfl_jax.Aggregator, one of "
                f"{', '.join(Aggregator._fields[1:])}"
            )

    # Not estimated for it: they would be NaN, and so would ρ.
    names = [n for n in ("constants", "gradients") if not fields.get(f"uses_{n}")]
    hidden = dict.fromkeys(names)
    expected = (
        "expected weights of info; info.constants and info.gradients are estimated "
        "for rule(..., uses_constants=True), uses_gradients=True"
    )

    def found(info: RoundInfo, hparams: HParams) -> Weights:
        with types.user_code("the rule's weights fail", expected):
            made = function(info._replace(**hidden), hparams)
        if isinstance(made, Weights):
            return made
        value = jnp.asarray(made, jnp.float32)
        check_weights(value, info)
        if normalize:
            return weights_of(normalized(value, info.tau), info.tau)
        return weights_of(jnp.where(info.tau > 0, value, 0.0), info.tau)

    return Aggregator(found, **fields)


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

    _with_hparams(functools.partial(found.pop("weights"), None))

    def weights(info: RoundInfo, hparams: HParams) -> Any:
        bound = functools.partial(kind.weights, hparams.of(kind))
        return _with_hparams(bound)(info, hparams)

    for name in {"update", "combine", "from_updates"} & set(found):
        found[name] = of_settings(found[name])
    fields: dict[str, Any] = {"sections": (kind,)} | found
    return rule(weights, **fields)


def init_rule(
    rule: Aggregator,
    params: Params,
    num_clients: int,
    groups: int = 1,
    size: Num[Array, "N"] | Any = None,
) -> Any:
    """Make the first state of a rule, for `aggregate`.

    Args:
      rule: such as ``AGGREGATORS["fedadam"]``.
      params: the global model, any tree of arrays.
      num_clients: N, also of clients that deliver later.
      groups: tiers of FedAT.
      size: ``[N]`` samples of each client, by id, for SAFA, SCAFFOLD and ASO-Fed.

    Raises:
      UserError: no `size`, or not of N clients, for a rule whose state has them.
    """
    is_variables = isinstance(params, dict) and "params" in params
    params, _ = trees.parted(params if is_variables else {"params": params})
    params = jax.tree.map(jnp.asarray, params)
    return rule.init(params, Counts(num_clients, groups, size))


def resized(rule: Aggregator, params: Params, state: Any, size: Any) -> Any:
    """A rule's state for N clients, of at most N whose ids stay; the others are new.

    `size`, ``[N]`` samples of each client, replaces the state's field `size`, if any.
    """
    first = init_rule(rule, params, len(size), size=size)

    def leaf(old: Array, new: Array) -> Array:
        return jnp.asarray(new).at[tuple(map(slice, old.shape))].set(old)

    new = jax.tree.map(leaf, state, first)
    return new._replace(size=first.size) if _has_sizes(first) else new


def _has_sizes(state: Any) -> bool:
    return "size" in getattr(state, "_fields", ())


def _of_state(
    rule: Aggregator,
    params: Params,
    state: Any,
    info: RoundInfo,
    by: tuple[Any, Any],
) -> RoundInfo:
    """The info for a state with rows by client; `by` are ids and sizes as given."""
    (client, size), number = by, len(info.tau)
    if size is None and _has_sizes(state):
        info = info._replace(size=state.size[info.client].astype(jnp.int32))
    one, two = (
        jax.eval_shape(lambda n=n: init_rule(rule, params, n, size=np.ones(n)))
        for n in (1, 2)
    )
    leaves = zip(*map(jax.tree.leaves, (one, two, state)), strict=True)
    rows = [w for a, b, w in leaves if (a.shape[:1], b.shape[:1]) == ((1,), (2,))]
    if not rows:
        return info
    is_client = (info.client >= 0) & (info.client < len(rows[0]))
    is_known = not isinstance(is_client, Tracer)
    if number != len(rows[0]) if client is None else is_known and not is_client.all():
        raise UserError(
            f"client={client}: expected an id from 0 to {len(rows[0]) - 1} for each of "
            f"{number} updates, as the state is of {len(rows[0])} clients"
        )
    return info._replace(tau=jnp.where(is_client, info.tau, 0))


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
    client: Int[Array, "N"] | Any = None,
    gradients: ClientGradients | None = None,
    losses: Float[Array, "N"] | Any = None,
    validation: Callable[[Params], Array] | None = None,
    key: PRNGKey | None = None,
    hparams: HParams | None = None,
) -> tuple[Params, Any]:
    """Apply any rule to clients' updates, for a training loop of one's own.

    w^{t+1} = update(w^t + Σ_i ρ_i (w_i − base_i), w^t), or by the rule's `combine`. A
    pure function: it can be jitted, vmapped and differentiated.

    Args:
      rule: such as ``AGGREGATORS["dms"]`` or from `tsfl_jax.rule`.
      updates: w_i − base_i of some or all clients, leaves ``[N, ...]``; one that is not
        finite is left out.
      params: w^t, leaves ``[...]``.
      state: of the rule, from `init_rule`; () for those without one.
      tau: ``[N]`` int32, local iterations ≥ 0; None: 1 each.
      size: ``[N]`` int32, samples ≥ 1; None: those of the state, else 1 each.
      steps: ``[N]`` int32, mini-batch steps; None: τ.
      lag: ``[N]`` int32, global updates since base_i; None: 0 each.
      group: tier that delivers (FedAT).
      client: ``[N]`` int32, ids; None: 0 to N − 1, for a state of N clients. Under jit
        an id that the state does not have is left out, τ = 0.
      gradients: σ_i² and dissimilarities at w^t, for `bound_optimal` only.
      losses: ``[N]``, mean loss of each client's training; None: not known, NaN.
      validation: params → loss on samples of the server, for `oracle` only.
      key: of the rule's random numbers (DMS); None: of seed 0.
      hparams: η and what the rule reads, such as `constants`; None: plain SGD.

    Returns:
      (w^{t+1}, new state).

    Raises:
      UserError: no `gradients`, `validation` or ids that the rule needs, or wrong ids.
    """
    missing = {"gradients": gradients, "validation": validation}
    for name, value in missing.items():
        if value is None and getattr(rule, f"uses_{name}"):
            raise UserError(f"aggregate: expected {name}=, which the rule needs")
    hparams = with_defaults(rule, HParams() if hparams is None else hparams)
    updates, params = jax.tree.map(jnp.asarray, (updates, params))
    counts = (tau, size, steps, lag, group, client)
    info = _info(updates, counts, gradients, key, hparams)
    info = _of_state(rule, params, state, info, (client, size))
    known = jnp.full(len(info.tau), jnp.nan) if losses is None else losses
    measured = jnp.asarray(known, jnp.float32), validation
    return _applied(rule, updates, params, state, info, hparams, measured)


def weights(
    rule: Aggregator,
    *,
    tau: Num[Array, "N"] | Any,
    size: Num[Array, "N"] | Any = None,
    steps: Num[Array, "N"] | Any = None,
    lag: Num[Array, "N"] | Any = None,
    group: int = 0,
    client: Int[Array, "N"] | Any = None,
    gradients: ClientGradients | None = None,
    key: PRNGKey | None = None,
    hparams: HParams | None = None,
) -> Float[np.ndarray, "N"]:
    """The weights ρ of a rule, for a server without JAX: arrays of NumPy in and out.

    Args:
      rule, size, steps, lag, group, client, gradients, key, hparams: as in `aggregate`.
      tau: ``[N]`` whole numbers ≥ 0, local iterations; 0: has not delivered.

    Returns:
      float32 ``[N]``, 0 where τ = 0; the model is w^t + Σ_i ρ_i (w_i − base_i) where
      the rule has no `update` of its own.

    Raises:
      UserError: a rule that is no weighting known before training, or one that needs
        `gradients`, without them.
    """
    if rule.stacks:
        raise UserError(
            "weights: the rule decides when it has all updates; use tsfl_jax.aggregate"
        )
    if rule.uses_gradients and gradients is None:
        raise UserError("weights: expected gradients=, which the rule needs")
    hparams = with_defaults(rule, HParams() if hparams is None else hparams)
    info = _info(
        np.asarray(tau), (tau, size, steps, lag, group, client), gradients, key, hparams
    )
    return np.asarray(decided(rule, info, hparams).rho)


def _info(
    updates: Params,
    counts: tuple[Any, ...],
    gradients: ClientGradients | None,
    key: PRNGKey | None,
    hparams: HParams,
) -> RoundInfo:
    """What a rule may see, of τ, sizes, steps, lags, group and ids, as far as given."""
    tau, size, steps, lag, group, client = counts
    number = len(jax.tree.leaves(updates)[0])

    def column(value: Any, default: Any) -> Array:
        filled = jnp.full(number, default) if value is None else value
        return jnp.asarray(filled, jnp.int32)

    tau = column(tau, 1)
    return RoundInfo(
        key=rng.key(0) if key is None else key,
        client=column(client, jnp.arange(number)),
        tau=tau,
        size=column(size, 1),
        steps=tau if steps is None else column(steps, 0),
        lag=column(lag, 0),
        group=jnp.int32(group),
        constants=hparams.constants,
        gradients=gradients,
    )


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
    if not (isinstance(params, dict) and "params" in params):
        # The tree is the collection "params" of Flax variables: what rules change.
        losses, loss = measured
        measured = losses, loss and (lambda variables: loss(variables["params"]))
        whole = {"params": updates}, {"params": params}
        new, state = _applied(rule, *whole, state, info, hparams, measured)
        return new["params"], state
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
