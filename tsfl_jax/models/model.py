"""What training needs of a network, and the parts of it that a user may replace."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tsfl_jax.models import losses, tracing
from tsfl_jax.models.tracing import SAMPLES
from tsfl_jax.types import Params, PRNGKey, UserError

Metric = Callable[[Array, Array], Any]


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
    # (outputs [B, O], labels [B]) -> what is right and of how much, whole numbers [B]:
    # accuracy is Σ right / Σ of all. None: the share of samples that it classifies.
    accuracy: Metric | None = None
    # (name, (outputs [B, O], labels [B]) -> [B], or values and weights, [B] each): the
    # mean over the test set, or Σ values / Σ weights, is reported.
    metrics: tuple[tuple[str, Metric], ...] = ()
    # The same network in float32, where this one rounds more; see `precision`.
    exact: "Model | None" = None
    name: str = ""  # of the module, for messages
    layers: tuple[tuple[str, str], ...] = ()  # see `tracing.switched_layers`


def decide_task(
    model: Model, outputs: jax.ShapeDtypeStruct, num_classes: int
) -> tuple[Model, tuple[str, ...]]:
    """Decide whether a model classifies, if it does not declare it.

    Args:
      model: the network.
      outputs: its outputs ``[B, O]``.
      num_classes: K.

    Returns:
      The model, which classifies if it has K ≥ 2 outputs; and notes for the user.

    Raises:
      UserError: it says that it classifies, without an output for each class.
    """
    width = outputs.shape[1:]
    if model.classifies and width != (num_classes,):
        raise UserError(
            f"the model makes logits {[1, *width]} of one sample; expected "
            f"[1, {num_classes}] for {num_classes} classes"
        )
    if model.classifies is not None:
        return model, ()
    if width == (num_classes,) and num_classes > 1:
        return model._replace(classifies=True), ()
    note = (
        f"the network has a loss of its own and outputs of shape {list(width)} for "
        f"{num_classes} classes: taken for a regression, without accuracy; an "
        "attribute classifies = False of the module says so"
    )
    return model._replace(classifies=False), (note,)


def with_measures(
    model: Model,
    loss: Metric | Any,
    metrics: Mapping[str, Metric] | Any,
    outputs: jax.ShapeDtypeStruct,
    labels: jax.ShapeDtypeStruct,
) -> Model:
    """A model with a custom loss and custom metrics.

    Args:
      model: the network.
      loss: (outputs ``[B, O]``, labels ``[B]``) → ``[B]``, whose mean training
        minimizes; None: the model's.
      metrics: functions as `loss` by name; their means over the test set are reported.
        Of one that gives values and weights, a tuple: Σ values / Σ weights.
      outputs: the network's, of `SAMPLES` samples.
      labels: of as many samples, ``[B]``, or targets ``[B, ...]``.

    Raises:
      UserError: no function, or one that does not give a number per sample.
    """
    metrics = {} if metrics is None else metrics
    is_mapping = isinstance(metrics, Mapping)
    if not is_mapping or not all(str(name).isidentifier() for name in metrics):
        raise UserError(
            f"metrics={metrics!r}: expected a dict, {{name: function}}, with "
            "identifiers like 'top_3' as names"
        )
    sample = outputs, labels
    for name, function in metrics.items():
        _check_measure(f"metrics[{name!r}]", function, *sample, "metric")
    if model.accuracy is not None:
        _check_measure("accuracy", model.accuracy, *sample, "accuracy")
    model = model._replace(metrics=tuple(metrics.items()))
    if loss is None and model.loss is losses.cross_entropy:
        return model  # for which `decide_task` knows the outputs
    _check_measure("loss", model.loss if loss is None else loss, *sample, "loss")
    if loss is None:
        return model
    # It stays to be seen whether a network with another loss classifies.
    classifies = False if model.classifies is False else None
    return model._replace(loss=loss, classifies=classifies)


_GIVES = {
    "loss": "float",
    "metric": "number, or a tuple of values and weights, [B] each",
    "accuracy": "tuple of what is right and of how much, whole numbers, [B] each",
}


def _check_measure(
    name: str,
    function: Any,
    outputs: jax.ShapeDtypeStruct,
    labels: jax.ShapeDtypeStruct,
    kind: str,
) -> None:
    """Raise `UserError` unless it gives what `_GIVES` says of its kind, per sample."""
    target = "labels" if jnp.issubdtype(labels.dtype, jnp.integer) else "targets"
    shapes = [str(["B", *a.shape[1:]]).replace("'", "") for a in (outputs, labels)]
    expected = (
        f"expected a function (outputs {shapes[0]}, {target} {shapes[1]}) -> [B], per "
        f"sample a {_GIVES[kind]}"
    )
    _, result = tracing.attempt(f"{name} fails", expected, function, outputs, labels)
    is_pair = kind != "loss" and isinstance(result, tuple) and len(result) == 2
    parts: Any = result if is_pair else (result,)
    fits = all(getattr(part, "shape", None) == (SAMPLES,) for part in parts)
    fits &= is_pair or kind != "accuracy"
    if not fits or kind == "loss" and not jnp.issubdtype(parts[0].dtype, jnp.floating):
        described = ", ".join(map(tracing.described, parts))
        raise UserError(f"{name} gives {described} for {SAMPLES} samples; {expected}")
