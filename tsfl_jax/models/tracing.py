"""The border to a user's functions, which may raise or return anything.

A network is traced once, before all else. One that passes has float32 parameters, one
array of outputs, and variables of constant shapes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tsfl_jax import rng
from tsfl_jax.types import Params, UserError

SAMPLES = 3  # of a trial batch, a number that no sum or mean would give


class Traced(NamedTuple):
    """What is known of a network before training."""

    variables: Params  # their shapes
    outputs: jax.ShapeDtypeStruct  # of `SAMPLES` samples
    notes: tuple[str, ...]


def attempt(what: str, expected: str, function: Callable, *given: Any) -> Any:
    """Trace a user's function: its jaxpr, and its results as shapes.

    Raises:
      UserError: `what` is wrong, what the function raised, what is `expected`.
    """
    try:
        found, shapes = jax.make_jaxpr(function, return_shape=True)(*given)
    except UserError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise UserError(
            f"{what} ({type(error).__name__}: {first}); {expected}"
        ) from error
    return found.jaxpr, shapes


def used(jaxpr: Any) -> list[bool]:
    """Whether each input of a traced function has a part in its results."""
    live = {id(variable) for variable in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if not live.isdisjoint(map(id, equation.outvars)):
            live.update(map(id, equation.invars))
    return [id(variable) in live for variable in jaxpr.invars]


_DRAWS, _MOVES = "draws no random numbers", "moves no batch statistics"


def switched_layers(layers: Iterable[Any]) -> dict[str, str]:
    """What training leaves out if it does not switch a layer on → the layer's class."""
    found = {}
    for layer in layers:
        own = vars(layer)
        rate = own.get("rate", own.get("dropout_rate"))
        if "use_running_average" in own:
            found[_MOVES] = type(layer).__name__
        elif "deterministic" in own and isinstance(rate, float | int) and rate > 0:
            found[_DRAWS] = type(layer).__name__
    return found


def trace(
    model: Any, name: str, shape: tuple[int, ...], dtype: Any, layers: dict[str, str]
) -> Traced:
    """Trace initialization, training with its gradient, and a test of a network.

    Args:
      model: a `Model`.
      name: of the network, for messages.
      shape: of one sample.
      dtype: of the network's input.
      layers: from `switched_layers`; those of linen are found here.

    Returns:
      Shapes, and notes on layers that training does not switch on.

    Raises:
      UserError: it cannot be called, or returns what cannot be trained.
    """
    one, x = (jax.ShapeDtypeStruct((n, *shape), dtype) for n in (1, SAMPLES))
    mask = jax.ShapeDtypeStruct((SAMPLES,), bool)
    key = jax.eval_shape(lambda: rng.key(0))
    name, called = f"model={name}", []
    expected = (
        f"expected a module that takes x [B{''.join(f', {n}' for n in shape)}] alone "
        "or with train=, deterministic= or the like, and draws random numbers in "
        "training only"
    )

    def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        called.append(context.module)
        return call(*args, **kwargs)

    def train(params: Params, rest: Params, key: Any, x: Any, mask: Any) -> Any:
        def outputs(params: Params) -> tuple[Any, Params]:
            before = {**rest, "params": params}
            made, changed = model.train(before, x, mask, key)
            _check_outputs(f"{name}: training", made, None)
            _check_variables(name, before, changed)
            return made, {n: v for n, v in changed.items() if n != "params"}

        made, back, others = jax.vjp(outputs, params, has_aux=True)
        return made, others, back(made)

    _, variables = attempt(
        f"{name}: initialization fails", expected, model.init, key, one
    )
    _check_params(name, variables)
    params = variables["params"]
    rest = {n: v for n, v in variables.items() if n != "params"}
    with nn.intercept_methods(watch):
        given = params, rest, key, x, mask
        jaxpr, traced = attempt(f"{name}: training fails", expected, train, *given)
    _, made = attempt(f"{name}: a test fails", expected, model.predict, variables, x)
    _check_outputs(f"{name}: a test", made, traced[0].shape)
    first, others = len(jax.tree.leaves(params)), len(jax.tree.leaves(rest))
    pairs = zip(jaxpr.invars[first:], jaxpr.outvars[1 : 1 + others], strict=False)
    moves = any(old is not new for old, new in pairs)
    does = {_MOVES: moves, _DRAWS: used(jaxpr)[first + others]}
    notes = tuple(
        f"the network holds {layer}, but training {what}: nothing switches it by a "
        "known name (train, training, is_training, deterministic, use_running_average)"
        for what, layer in (switched_layers(called) | layers).items()
        if not does[what]
    )
    return Traced(variables, made, notes)


def _check_outputs(what: str, made: Any, expected: tuple[int, ...] | None) -> None:
    """Raise `UserError` unless it is one array with a row for each sample."""
    shape = getattr(made, "shape", ())
    numbers = shape[:1] == (SAMPLES,) and jnp.issubdtype(made.dtype, jnp.inexact)
    if not numbers or shape != (expected or shape):
        found = f"{made.dtype}{list(shape)}" if shape else type(made).__name__
        raise UserError(
            f"{what} gives {found} for {SAMPLES} samples; expected one array of "
            f"floating-point numbers {list(expected or [SAMPLES, '...'])}"
        )


def _kinds(variables: Params) -> dict[str, str]:
    """dtype and shape of each variable by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree.leaves_with_path(variables)
    }


def _check_variables(name: str, before: Params, changed: Params) -> None:
    """Raise `UserError` unless training keeps the variables of initialization."""
    old, new = _kinds(before), _kinds(changed)
    if jax.tree.structure(before) != jax.tree.structure(changed) or old != new:
        path = min((n for n, _ in old.items() ^ new.items()), default="params")
        raise UserError(
            f"{name}: training makes {new.get(path, 'nothing')} of the variable {path}"
            f", initialization {old.get(path, 'nothing')}; expected the same. What sow "
            "collects is in no loss: leave it out, or return it with the outputs"
        )


def _check_params(name: str, variables: Params) -> None:
    """Raise `UserError` unless there are parameters, all of them float32."""
    held = variables if isinstance(variables, Mapping) else {}
    kinds = _kinds(held.get("params", {}))
    if not kinds:
        raise UserError(
            f"{name}: no parameters to train (initialization makes {list(held)}); "
            'expected {"params": …} with float32 arrays'
        )
    for path, kind in kinds.items():
        if not kind.startswith("float32["):
            raise UserError(
                f"{name}: the model's parameter {path} is {kind.split('[')[0]}; "
                "expected float32 weights: leave out param_dtype (for arithmetic in "
                "bfloat16 there is --config.precision=bfloat16), write complex numbers "
                "as two real ones, keep what is not trained in another collection"
            )
