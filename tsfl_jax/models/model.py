"""What training needs of a network, and the parts of it that a user may replace."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tsfl_jax import rng
from tsfl_jax.models import losses
from tsfl_jax.types import Params, PRNGKey, UserError

Metric = Callable[[Array, Array], Array]


class Model(NamedTuple):
    """What training needs of a network, from any library."""

    init: Callable[[PRNGKey, Array], Params]  # (key, x [B, ...]) -> variables
    # (variables, x [B, ...], mask [B] bool, key) -> (logits [B, O], new variables)
    train: Callable[[Params, Array, Array, PRNGKey], tuple[Array, Params]]
    predict: Callable[[Params, Array], Array]  # (variables, x [B, ...]) -> logits
    # (outputs [B, O], labels [B]) -> [B], whose mean training minimizes
    loss: Callable[[Array, Array], Array] = losses.cross_entropy
    # True: the largest output is the class. False: a regression, accuracy is NaN.
    # None: see `decide_task`.
    classifies: bool | None = True
    # (name, (outputs [B, O], labels [B]) -> [B]): means over the test set are reported.
    metrics: tuple[tuple[str, Metric], ...] = ()
    # The same network in float32, where this one rounds more; see `precision`.
    exact: "Model | None" = None


def outputs_of(
    model: Model, sample_shape: tuple[int, ...], dtype: Any, number: int = 1
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the outputs for a number of samples."""
    x = jax.ShapeDtypeStruct((number, *sample_shape), dtype)
    variables = jax.eval_shape(lambda x: model.init(rng.key(0), x), x)
    return jax.eval_shape(model.predict, variables, x)


def decide_task(
    model: Model,
    sample_shape: tuple[int, ...],
    num_classes: int,
    dtype: Any = jnp.float32,
) -> tuple[Model, tuple[str, ...]]:
    """Decide whether a model classifies, if it does not declare it.

    Args:
      model: the network.
      sample_shape: shape of one sample.
      num_classes: K.
      dtype: of the network's input: float32, or int32 for tokens.

    Returns:
      The model, which classifies if it has K ≥ 2 outputs; and notes for the user.
    """
    if model.classifies is not None:
        return model, ()
    width = outputs_of(model, sample_shape, dtype).shape[1:]
    if width == (num_classes,) and num_classes > 1:
        return model._replace(classifies=True), ()
    note = (
        f"the network has a loss of its own and outputs of shape {list(width)} for "
        f"{num_classes} classes: taken for a regression, without accuracy; an "
        "attribute classifies = False of the module says so"
    )
    return model._replace(classifies=False), (note,)


_SAMPLES = 3  # of a trial batch, a number that no sum or mean would give


def with_measures(
    model: Model,
    loss: Metric | Any,
    metrics: Mapping[str, Metric] | Any,
    sample_shape: tuple[int, ...],
    dtype: Any,
) -> Model:
    """A model with a loss and metrics of the user's own.

    Args:
      model: the network.
      loss: (outputs ``[B, O]``, labels ``[B]``) → ``[B]``, whose mean training
        minimizes; None: the model's.
      metrics: functions as `loss` by name; their means over the test set are reported.
      sample_shape: shape of one sample.
      dtype: of the network's input.

    Raises:
      UserError: no function, or one that does not give a number per sample.
    """
    given = {} if metrics is None else metrics
    if not isinstance(given, Mapping):
        raise UserError(f"metrics={given!r}: expected a dict, {{name: function}}")
    if loss is None and not given:
        return model
    outputs = outputs_of(model, sample_shape, dtype, _SAMPLES)
    for name, function in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(f"metrics: {name!r} is no identifier; use one like 'top_3'")
        _check_measure(f"metrics[{name!r}]", function, outputs)
    model = model._replace(metrics=tuple(given.items()))
    if loss is None:
        return model
    _check_measure("loss", loss, outputs)
    # It stays to be seen whether a network with another loss classifies.
    known = False if model.classifies is False else None
    return model._replace(loss=loss, classifies=known)


def _check_measure(name: str, function: Any, outputs: jax.ShapeDtypeStruct) -> None:
    expected = (
        f"expected a function (outputs {list(('B', *outputs.shape[1:]))}, labels [B]) "
        "-> [B], a number per sample".replace("'", "")
    )
    if not callable(function):
        raise UserError(f"{name}={function!r}: {expected}")
    labels = jax.ShapeDtypeStruct((len_of(outputs),), jnp.int32)
    try:
        found = jax.eval_shape(function, outputs, labels)
    except Exception as error:  # a user's function may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{name} fails ({type(error).__name__}: {first}); {expected}"
        ) from error
    if getattr(found, "shape", None) != labels.shape:
        shape = list(getattr(found, "shape", ["no array"]))
        raise UserError(f"{name} gives {shape} for 3 samples; {expected}")


def len_of(outputs: jax.ShapeDtypeStruct) -> int:
    """Samples in a batch of outputs."""
    return outputs.shape[0]
