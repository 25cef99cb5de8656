"""The border to a user's functions, which may raise or return anything.

A network is traced once, before all else. One that passes has float32 parameters, one
array of outputs, and variables of constant shapes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tsfl_jax import rng, trees
from tsfl_jax.types import Params, UserError, user_code

SAMPLES = 3  # of a trial batch, a number that no sum or mean would give


def attempt(what: str, expected: str, function: Callable, *given: Any) -> Any:
    """Trace a user's function: its jaxpr, and its results as shapes.

    Raises:
      UserError: `what` is wrong, what the function raised, what is `expected`.
    """
    with user_code(what, expected):
        found, shapes = jax.make_jaxpr(function, return_shape=True)(*given)
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
    model: Any, shape: tuple[int, ...], dtype: Any
) -> tuple[Params, jax.ShapeDtypeStruct, tuple[str, ...]]:
    """Trace initialization, training with its gradient, and a test of a network.

    Args:
      model: a `Model` with a name.
      shape: of one sample.
      dtype: of the network's input.

    Returns:
      Shapes of its variables and of `SAMPLES` outputs, and notes for the user.

    Raises:
      UserError: it cannot be called, or returns what cannot be trained.
    """
    one, x = (jax.ShapeDtypeStruct((n, *shape), dtype) for n in (1, SAMPLES))
    mask, name = jax.ShapeDtypeStruct((SAMPLES,), bool), f"model={model.name}"
    key, called = jax.eval_shape(lambda: rng.key(0)), []
    expected = (
        f"expected a module that takes x {['B', *shape]} alone or with train=, "
        "deterministic= or the like, and draws random numbers in training only"
    ).replace("'B'", "B")

    def train(params: Params, rest: Params, key: Any, x: Any, mask: Any) -> Any:
        def outputs(params: Params) -> tuple[Any, Params]:
            before = {**rest, "params": params}
            made, changed = model.train(before, x, mask, key)
            _check_outputs(f"{name}: training", made, None)
            _check_variables(name, before, changed)
            return made, {n: v for n, v in changed.items() if n != "params"}

        made, back, others = jax.vjp(outputs, params, has_aux=True)
        return made, others, back(made)

    def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        called.append(context.module)
        return call(*args, **kwargs)

    what = f"{name}: initialization fails"
    _, variables = attempt(what, expected, model.init, key, one)
    _check_params(name, variables)
    params = variables["params"]
    rest = {n: v for n, v in variables.items() if n != "params"}
    given = params, rest, key, x, mask
    with nn.intercept_methods(watch):
        jaxpr, traced = attempt(f"{name}: training fails", expected, train, *given)
    _, made = attempt(f"{name}: a test fails", expected, model.predict, variables, x)
    _check_outputs(f"{name}: a test", made, traced[0].shape)
    layers = switched_layers(called) | dict(model.layers)
    first, others = len(jax.tree.leaves(params)), len(jax.tree.leaves(rest))
    return variables, made, _idle(jaxpr, layers, first, others)


def _idle(
    jaxpr: Any, layers: dict[str, str], first: int, others: int
) -> tuple[str, ...]:
    """Notes on layers that training does not switch on.

    Its inputs are `first` parameters, `others` variables and a key; its results the
    outputs, the other variables and the gradient.
    """
    pairs = zip(jaxpr.invars[first:], jaxpr.outvars[1 : 1 + others], strict=False)
    moves = any(old is not new for old, new in pairs)
    does = {_MOVES: moves, _DRAWS: used(jaxpr)[first + others]}
    return tuple(
        f"the network holds {layer}, but training {what}: nothing switches it by a "
        "known name (train, training, is_training, deterministic, use_running_average)"
        for what, layer in layers.items()
        if not does[what]
    )


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
    leaves = trees.named(variables).items()
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_variables(name: str, before: Params, changed: Params) -> None:
    """Raise `UserError` unless training keeps the variables of initialization."""
    old, new = _kinds(before), _kinds(changed)
    for path, _ in sorted(old.items() ^ new.items()):
        raise UserError(
            f"{name}: training makes {new.get(path, 'nothing')} of the variable {path}"
            f", initialization {old.get(path, 'nothing')}; expected the same. What sow "
            "collects is in no loss: leave it out, or return it with the outputs"
        )


def _check_params(name: str, variables: Params) -> None:
    """Raise `UserError` unless there are parameters, all of them float32."""
    held = variables if isinstance(variables, Mapping) else {}
    kinds = _kinds(held.get("params", {})) or {"(any)": "missing"}
    for path, kind in kinds.items():
        dtype = kind.split("[")[0]
        if dtype != "float32":
            raise UserError(
                f"{name}: the model's parameter {path} is {dtype}; expected float32 "
                "weights in the collection params: leave out param_dtype (for bfloat16 "
                "there is --config.precision=bfloat16), write complex numbers as two "
                "real ones, keep what is not trained in another collection"
            )
