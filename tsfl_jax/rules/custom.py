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
from tsfl_jax.components import check_arguments
from tsfl_jax.models.losses import all_finite
from tsfl_jax.rules.apply import apply, check_weights, decide, mix_stacked, model_at
from tsfl_jax.rules.base import (
    Aggregator,
    ClientOutputs,
    ClientSide,
    Counts,
    Mixing,
    Objective,
    Received,
    RoundInfo,
    ServerSide,
    Weights,
    equal_weights,
    normalized,
    weights_of,
    with_defaults,
)
from tsfl_jax.types import ClientGradients, HParams, Params, PRNGKey, UserError

_PARTS = {"mixing": Mixing, "clients": ClientSide, "server": ServerSide}
FIELDS = (*(n for kind in _PARTS.values() for n in kind._fields), "sections", "label")


def _with_hparams(weights: Any) -> Callable[[RoundInfo, HParams], Any]:
    """A function of weights that takes `HParams` as well, of one that may not."""
    # A second argument with a default is the user's own, unless it is called hparams.
    expected = "expected a function of (info) or (info, hparams); others need a default"
    with types.user_code(f"rule({weights!r})", expected):
        signature = inspect.signature(weights)
        needed = [p for p in signature.parameters.values() if p.default is p.empty]
        takes_hparams = len(needed) > 1 or "hparams" in signature.parameters
        signature.bind(*["info", "hparams"][: 1 + takes_hparams])
    return weights if takes_hparams else lambda info, hparams: weights(info)


def rule(
    weights: Callable[..., Any] | Any = equal_weights,
    *,
    normalize: bool = True,
    **fields: Any,
) -> Aggregator:
    """Make an aggregation rule of a function of weights; all else has defaults.

    ρ_i = v_i / Σ_j v_j over the clients with τ_i > 0, v being what the function
    returns.

    Args:
      weights: (`RoundInfo`) or (`RoundInfo`, `HParams`) → v ≥ 0, ``[N]``, or `Weights`,
        which are used as they are. A pure function of JAX arrays.
      normalize: False: ρ = v, still 0 where τ_i = 0.
      **fields: of the parts of `Aggregator`, such as `update` or `deltas`.
        ``uses_constants=True`` for a rule that reads ``info.constants``, and
        ``uses_gradients=True`` for ``info.gradients``.

    Raises:
      UserError: not a function of one or two arguments, or no such field; when it runs,
        what it raises, or a shape other than ``[N]``.
    """
    function = _with_hparams(weights)
    for name in fields.keys() - {*FIELDS}:
        raise UserError(f"rule({name}=…): expected one of {', '.join(FIELDS[1:])}")
    # Not estimated for it: they would be NaN, and so would ρ.
    names = [n for n in ("constants", "gradients") if not fields.get(f"uses_{n}")]
    hidden = dict.fromkeys(names)
    expected = (
        "expected weights of info; info.constants and info.gradients are estimated "
        "for rule(..., uses_constants=True), uses_gradients=True"
    )

    def custom_weights(info: RoundInfo, hparams: HParams) -> Weights:
        with types.user_code("the rule's weights fail", expected):
            values = function(info._replace(**hidden), hparams)
        if isinstance(values, Weights):
            return values
        values = jnp.asarray(values, jnp.float32)
        check_weights(values, info)
        if normalize:
            return weights_of(normalized(values, info.tau), info.tau)
        return weights_of(jnp.where(info.tau > 0, values, 0.0), info.tau)

    fields["weights"] = custom_weights
    parts = {
        part: kind(**{n: fields.pop(n) for n in kind._fields if n in fields})
        for part, kind in _PARTS.items()
    }
    for part in parts.values():
        check_arguments(f"rule({getattr(weights, '__qualname__', weights)}, …)", part)
    return Aggregator(**parts, **fields)


@functools.lru_cache(maxsize=64)
def rule_of_component(kind: type) -> Aggregator:
    """Make a rule of a `component` whose methods are functions of an `Aggregator`.

    A method gets its settings as they are in the program, then what that function
    gets: ``weights(self, info)`` or ``weights(self, info, hparams)``, and
    ``update(self, mean, params, state, received, hparams)``. Class attributes are the
    other fields, such as ``deltas = True``.

    Raises:
      UserError: no method `weights`, or one of other arguments; those that get no
        hyper-parameters, such as `init`, are static methods.
    """
    fields: dict[str, Any] = {"sections": (kind,)}
    fields |= {n: getattr(kind, n) for n in FIELDS if hasattr(kind, n)}
    if "weights" not in fields:
        raise UserError(
            f"aggregator={kind.__name__}(…): expected a component with a method "
            "weights(self, info)"
        )

    def of_settings(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(functools.partial(method, None))  # without self
        def function(*inputs: Any) -> Any:
            return method(inputs[-1].of(kind), *inputs)

        return function

    _with_hparams(functools.partial(fields.pop("weights"), None))

    def weights(info: RoundInfo, hparams: HParams) -> Any:
        bound = functools.partial(kind.weights, hparams.of(kind))
        return _with_hparams(bound)(info, hparams)

    weights.__qualname__ = kind.__name__
    for name in {"update", "combine", "from_updates"} & fields.keys():
        fields[name] = of_settings(fields[name])
    return rule(weights, **fields)


def _is_variables(params: Params) -> bool:
    """Whether a tree has collections as Flax's variables, or is all parameters."""
    return isinstance(params, dict) and "params" in params


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
    params, _ = trees.parted(params if _is_variables(params) else {"params": params})
    params = jax.tree.map(jnp.asarray, params)
    return rule.server.init(params, Counts(num_clients, groups, size))


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


def _of_state(state: Any, info: RoundInfo, client: Any, size: Any) -> RoundInfo:
    """The info for a state of clients with sizes; ids and sizes are those given."""
    if not _has_sizes(state):
        return info
    if size is None:
        info = info._replace(size=state.size[info.client].astype(jnp.int32))
    count = len(state.size)
    is_client = (info.client >= 0) & (info.client < count)
    is_known = len(info.tau) == count
    if client is not None:
        is_known = isinstance(is_client, Tracer) or is_client.all()
    if not is_known:
        raise UserError(
            f"client={client}: expected an id from 0 to {count - 1} for each of "
            f"{len(info.tau)} updates, as the state is of {count} clients"
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
    server_update: Params | None = None,
    key: PRNGKey | None = None,
    hparams: HParams | None = None,
) -> tuple[Params, Any]:
    """Apply any rule to clients' updates, for a training loop of one's own.

    w^{t+1} = update(w^t + Σ_i ρ_i (w_i − base_i), w^t), or by the rule's `combine`. A
    pure function: it can be jitted, vmapped and differentiated. Without an update that
    counts, or where the new model is not finite, model and state stay.

    Args:
      rule: such as ``AGGREGATORS["dms"]`` or from `tsfl_jax.rule`.
      updates: w_i − base_i of some or all clients, ``[N, ...]``; not finite: left out.
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
      server_update: of the server's own training, for `fltrust` only.
      key: of the rule's random numbers (DMS); None: of seed 0.
      hparams: η and what the rule reads, such as `constants`; None: plain SGD.

    Returns:
      (w^{t+1}, new state).

    Raises:
      UserError: wrong ids, or no `gradients`, `losses`, … that the rule needs.
    """
    outputs = {"losses": losses, "validation": validation}
    outputs["server_update"] = server_update
    _check_needed(rule, **outputs)
    updates, params = jax.tree.map(jnp.asarray, (updates, params))
    number = len(jax.tree.leaves(updates)[0])
    counts = {"tau": tau, "size": size, "steps": steps, "lag": lag, "client": client}
    info, hparams = _info(rule, number, hparams, gradients, group, key, **counts)
    info = _of_state(state, info, client, size)
    return _applied(rule, updates, params, state, info, hparams, **outputs)


def _check_needed(rule: Aggregator, **values: Any) -> None:
    """Raise `UserError` for a value that the rule needs and that is None."""
    mixing = rule.mixing
    is_needed = {
        "gradients": mixing.uses_gradients,
        "losses": mixing.uses_losses,
        "validation": mixing.uses_validation and not mixing.trains_server,
        "server_update": mixing.trains_server,
    }
    for name, value in values.items():
        if is_needed[name] and value is None:
            raise UserError(f"expected {name}=, which the rule needs")


@trees.arithmetic()
def _applied(
    rule: Aggregator,
    updates: Params,
    params: Params,
    state: Any,
    info: RoundInfo,
    hparams: HParams,
    losses: Float[Array, "N"] | Any,
    validation: Callable[[Params], Array] | Any,
    server_update: Params | None,
) -> tuple[Params, Any]:
    """w^{t+1} and the rule's state."""
    if not _is_variables(params):
        inner = validation and (lambda variables: validation(variables["params"]))
        updates, params = {"params": updates}, {"params": params}
        if server_update is not None:
            server_update = {"params": server_update}
        server = losses, inner, server_update
        new, state = _applied(rule, updates, params, state, info, hparams, *server)
        return new["params"], state
    weights, present = decide((rule,), info, hparams), info.tau > 0
    present &= jax.vmap(all_finite)(updates)
    updates = _with_values(updates, params)
    zeros = jax.tree.map(jnp.zeros_like, updates)
    updates = jax.vmap(optax.tree.where)(present, updates, zeros)
    objective = _objective(updates, params, validation)
    losses = jnp.full(len(info.tau), jnp.nan) if losses is None else losses
    losses, moved = jnp.asarray(losses, jnp.float32), trees.parted(updates)[0]
    outputs = ClientOutputs(losses, objective, moved, server_update)
    received = Received(info, weights.rho, present, shares=weights.shares)
    mixed = mix_stacked(
        rule, updates, params, weights, received, state, outputs, hparams
    )
    new, state, _ = apply((rule,), mixed, params, state, hparams)
    return new, state


def weights(
    rule: Aggregator,
    *,
    tau: Num[Array, "N"] | Any,
    hparams: HParams | None = None,
    gradients: ClientGradients | None = None,
    **counts: Any,
) -> Float[np.ndarray, "N"]:
    """The weights ρ of a rule, for a server without JAX: arrays of NumPy in and out.

    Args:
      rule, hparams, gradients: as in `aggregate`.
      tau: ``[N]`` whole numbers ≥ 0, local iterations; 0: has not delivered.
      **counts: size, steps, lag, group, client and key, as in `aggregate`.

    Returns:
      float32 ``[N]``, 0 where τ = 0; the model is w^t + Σ_i ρ_i (w_i − base_i) where
      the rule has no `update` of its own.

    Raises:
      UserError: a rule that is no weighting known before training, or no `gradients`.
    """
    if rule.stacks:
        raise UserError(
            "weights: the rule decides when it has all updates; use tsfl_jax.aggregate"
        )
    number = len(np.asarray(tau))
    info, hparams = _info(rule, number, hparams, gradients, tau=tau, **counts)
    return np.asarray(decide((rule,), info, hparams).rho)


def _info(
    rule: Aggregator,
    number: int,
    hparams: HParams | None,
    gradients: ClientGradients | None,
    group: int = 0,
    key: PRNGKey | None = None,
    **columns: Any,
) -> tuple[RoundInfo, HParams]:
    """What a rule may see of `number` clients, with defaults for what is None."""
    _check_needed(rule, gradients=gradients)
    hparams = with_defaults(rule, HParams() if hparams is None else hparams)
    tau = columns["tau"] if columns.get("tau") is not None else jnp.ones(number)
    defaults = {"client": jnp.arange(number), "tau": tau, "size": jnp.ones(number)}
    defaults |= {"steps": tau, "lag": jnp.zeros(number)}
    columns = defaults | {n: value for n, value in columns.items() if value is not None}
    columns = {n: jnp.asarray(value, jnp.int32) for n, value in columns.items()}
    key = rng.key(0) if key is None else key
    counts = {"group": jnp.int32(group), "constants": hparams.constants}
    return RoundInfo(key, **columns, **counts, gradients=gradients), hparams


def _with_values(updates: Params, variables: Params) -> Params:
    """The parameters' updates, and as "others" the values of other collections."""
    moved, collections = trees.parted(updates)
    if not collections:
        return updates
    old = trees.parted(variables)[1]
    new = jax.tree.map(lambda w, u: w[None] + u, old, collections)
    return {**moved, "others": trees.values(new)}


def _objective(
    updates: Params, variables: Params, loss: Callable[[Params], Array] | None
) -> Objective | None:
    """ρ → (F_val(w^t + Σ_i ρ_i u_i), its derivatives)."""
    if loss is None:
        return None
    updates, variables = lax.stop_gradient((updates, variables))

    def at(rho: Float[Array, "N"]) -> Array:
        return jnp.asarray(loss(model_at(variables, updates, rho)), jnp.float32)

    return jax.value_and_grad(at)
