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


def attempt(failure: str, expected: str, function: Callable, *arguments: Any) -> Any:
    """Trace a user's function: its jaxpr, and its results as shapes.

    Raises:
      UserError: the `failure`, what the function raised, what is `expected`.
    """
    with user_code(failure, expected):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return closed.jaxpr, shapes


def used(jaxpr: Any) -> list[bool]:
    """Whether each input of a traced function has a part in its results."""
    live = {id(variable) for variable in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if not live.isdisjoint(map(id, equation.outvars)):
            live.update(map(id, equation.invars))
    return [id(variable) in live for variable in jaxpr.invars]


def described(result: Any) -> str:
    """dtype and shape of an array, else the type's name."""
    is_array = hasattr(result, "shape") and hasattr(result, "dtype")
    return f"{result.dtype}{[*result.shape]}" if is_array else type(result).__name__


_DRAWS, _MOVES = "draws no random numbers", "moves no batch statistics"


def switched_layers(layers: Iterable[Any]) -> dict[str, str]:
    """What training leaves out if it does not switch a layer on → the layer's class."""
    classes = {}
    for layer in layers:
        fields = vars(layer)
        rate = fields.get("rate", fields.get("dropout_rate"))
        if "use_running_average" in fields:
            classes[_MOVES] = type(layer).__name__
        elif "deterministic" in fields and isinstance(rate, float | int) and rate > 0:
            classes[_DRAWS] = type(layer).__name__
    return classes


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
    sample, x = (jax.ShapeDtypeStruct((n, *shape), dtype) for n in (1, SAMPLES))
    mask, name = jax.ShapeDtypeStruct((SAMPLES,), bool), f"model={model.name}"
    key, called = jax.eval_shape(lambda: rng.key(0)), []
    expected = (
        f"expected a module that takes x {['B', *shape]} alone or with train=, "
        "deterministic= or the like, and draws random numbers in training only"
    ).replace("'B'", "B")

    def train(params: Params, frozen: Params, key: Any, x: Any, mask: Any) -> Any:
        def forward(params: Params) -> tuple[Any, Params]:
            before = {**frozen, "params": params}
            outputs, after = model.train(before, x, mask, key)
            _check_outputs(f"{name}: training", outputs, None)
            _check_kinds(f"{name}: training", after, _kinds(before), _KEPT)
            return outputs, {n: v for n, v in after.items() if n != "params"}

        outputs, backward, state = jax.vjp(forward, params, has_aux=True)
        return outputs, state, backward(outputs)

    def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        called.append(context.module)
        return call(*args, **kwargs)

    stage = f"{name}: initialization"
    _, variables = attempt(f"{stage} fails", expected, model.init, key, sample)
    params = variables.get("params") if isinstance(variables, Mapping) else None
    leaves = trees.named(params or {}).items()
    float32 = {path: f"float32{[*leaf.shape]}" for path, leaf in leaves}
    _check_kinds(stage, params, float32 or {"(any)": "float32"}, _FLOAT32)
    frozen = {n: v for n, v in variables.items() if n != "params"}
    stage, inputs = f"{name}: training", (params, frozen, key, x, mask)
    with nn.intercept_methods(watch):
        jaxpr, traced = attempt(f"{stage} fails", expected, train, *inputs)
    _, outputs = attempt(f"{name}: a test fails", expected, model.predict, variables, x)
    _check_outputs(f"{name}: a test", outputs, traced[0].shape)
    layers = switched_layers(called) | dict(model.layers)
    sizes = len(jax.tree.leaves(params)), len(jax.tree.leaves(frozen))
    return variables, outputs, _idle(jaxpr, layers, *sizes)


def _idle(
    jaxpr: Any, layers: dict[str, str], num_params: int, num_frozen: int
) -> tuple[str, ...]:
    """Notes on layers that training does not switch on.

    Its inputs are the parameters, the other variables and a key; its results the
    outputs, the other variables and the gradient.
    """
    old, new = jaxpr.invars[num_params:], jaxpr.outvars[1 : 1 + num_frozen]
    moves = any(a is not b for a, b in zip(old, new, strict=False))
    does = {_MOVES: moves, _DRAWS: used(jaxpr)[num_params + num_frozen]}
    return tuple(
        f"the network holds {layer}, but training {effect}: nothing switches it by a "
        "known name (train, training, is_training, deterministic, use_running_average)"
        for effect, layer in layers.items()
        if not does[effect]
    )


def _check_outputs(stage: str, outputs: Any, shape: tuple[int, ...] | None) -> None:
    """Raise `UserError` unless it is one array with a row for each sample."""
    actual = getattr(outputs, "shape", ())
    numbers = actual[:1] == (SAMPLES,) and jnp.issubdtype(outputs.dtype, jnp.inexact)
    if not numbers or actual != (shape or actual):
        raise UserError(
            f"{stage} gives {described(outputs)} for {SAMPLES} samples; expected one "
            f"array of floating-point numbers {list(shape or [SAMPLES, '...'])}"
        )


_KEPT = (
    "as initialization makes it. What sow collects is in no loss: leave it out, or "
    "return it with the outputs"
)
_FLOAT32 = (
    "as all weights in the collection params: leave out param_dtype (for bfloat16 "
    "there is --config.precision=bfloat16), write complex numbers as two real ones, "
    "keep what is not trained in another collection"
)


def _kinds(variables: Params) -> dict[str, str]:
    """dtype and shape of each variable by its path."""
    return {path: described(leaf) for path, leaf in trees.named(variables).items()}


def _check_kinds(
    stage: str, variables: Params, expected: dict[str, str], reason: str
) -> None:
    """Raise `UserError` unless variables have the dtypes and shapes by path."""
    kinds = _kinds(variables)
    for path, _ in sorted(kinds.items() ^ expected.items()):
        raise UserError(
            f"{stage} makes {kinds.get(path, 'nothing')} of the variable {path}; "
            f"expected {expected.get(path, 'nothing')}, {reason}"
        )
