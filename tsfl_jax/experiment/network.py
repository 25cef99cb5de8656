"""The network of an experiment: ours by its name, or the user's own.

Only traced here, for the shapes of its parameters; nothing is compiled.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Num

from tsfl_jax.config import Config
from tsfl_jax.data import in_memory, quadratic, targets
from tsfl_jax.data.quadratic import Quadratic, curvature
from tsfl_jax.experiment import backend
from tsfl_jax.experiment.custom_hooks import Own, input_dtype
from tsfl_jax.models import losses, networks, replay, rows, text, tracing
from tsfl_jax.models.model import with_measures
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Array, Dataset, Params, UserError


class Network(NamedTuple):
    """A network with what is known of it before training."""

    model: networks.Model
    name: str
    convolution: str  # a key of `convolution.CONVOLUTIONS`
    params: Params  # shapes of its variables
    notes: tuple[str, ...]
    short_notes: Callable = tuple  # () → notes, for a schedule with short mini-batches

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params["params"]))


def curvature_of(config: Config, shape: tuple[int, ...]) -> Float[np.ndarray, "d"]:
    """λ ``[d]`` of the quadratic model, for samples of a shape."""
    q = config.quadratic
    return curvature(int(np.prod(shape)), q.smoothness, q.convexity)


@functools.lru_cache(maxsize=8)
def _traced(
    model: Any, name: str, shape: tuple[int, ...], dtype: Any
) -> tuple[Any, ...]:
    """A network, traced; lanes and calls share ours."""
    made = model if isinstance(model, networks.Model) else networks.from_flax(model)
    return made, *tracing.trace(made._replace(name=made.name or name), shape, dtype)


def _known_network(config: Config, own: Own, form: str, dataset: Dataset) -> Network:
    """The network of a config or of the user, with the user's loss and metrics."""
    shape, dtype = dataset.x_train.shape[1:], input_dtype(dataset)
    tokens, notes, short_notes = dtype == np.int32, (), tuple
    name = config.model.name
    module: Any = own.model
    if module is not None:
        name = getattr(own.model, "__name__", type(own.model).__name__)
        name = "own" if name == "<lambda>" else name
        model, params, outputs, found = _traced.__wrapped__(
            own.model, name, shape, dtype
        )
        named = model._replace(name=model.name or name)
        short_notes = functools.cache(lambda: rows.notes(named, params, shape, dtype))
        x = jax.ShapeDtypeStruct((tracing.SAMPLES, *shape), dtype)
        model, notes = replay.replay(model, form, params, x)
        if tokens:
            notes += (
                f"samples are whole numbers ({dataset.x_train.dtype}): tokens, given "
                "to the network as they are",
            )
    else:
        _check_tokens(name, dataset, bool(tokens))
        module = (
            Quadratic(tuple(curvature_of(config, shape).tolist()))
            if networks.MODELS[name].make is None  # the model of drawn data
            else networks.make_model(
                config.model, targets.outputs(dataset), shape, form
            )
        )
        model, params, outputs, found = _traced(module, name, shape, dtype)
    metrics = own.metrics
    if isinstance(module, text.NextToken):  # its accuracy is no other's
        metrics = text.METRICS | dict(metrics or {})
    y = targets.of(dataset)[0]
    learned = jax.ShapeDtypeStruct((tracing.SAMPLES, *y.shape[1:]), y.dtype)
    if targets.regresses(dataset):
        same = model.loss is losses.cross_entropy
        loss = losses.squared_error if same else model.loss
        model = model._replace(loss=loss, classifies=False)
    model = with_measures(model, own.loss, metrics, outputs, learned)
    model, said = networks.decide_task(model, outputs, dataset.num_classes)
    return Network(model, name, form, params, found + said + notes, short_notes)


def _check_tokens(name: str, dataset: Dataset, tokens: bool) -> None:
    """Raise `UserError` if one of our networks cannot take the samples."""
    takes, x = name in text.MODELS, dataset.x_train
    if tokens and not takes:
        raise UserError(
            f"--config.model.name={name}: the samples of {dataset.name} are whole "
            f"numbers ({x.dtype}), taken for tokens; use "
            f"{' or '.join(text.MODELS)}, give a network for them as model=, or make "
            "the samples uint8 or float"
        )
    if takes and not tokens:
        raise UserError(
            f"--config.model.name={name}: takes text; {dataset.name} has samples "
            f"{list(x.shape[1:])} of {x.dtype}"
        )
    if takes and x.max() >= dataset.num_classes:
        raise UserError(
            f"--config.model.name={name}: predicts tokens, as many as there are classes"
            f"; {dataset.name} has tokens up to {x.max()} and {dataset.num_classes} "
            "classes; give a network of your own as model="
        )


def make_network(
    config: Config, dataset: Dataset, own: Own, made: dict[str, Network] | None = None
) -> tuple[Network, str]:
    """The network of a config, or the user's own, and how its clients are mapped.

    Args:
      config: all settings.
      dataset: for the shape of a sample and the number of classes.
      own: the user's own network, loss and metrics.
      made: networks of other experiments with the same `own`, by what they depend on;
        this one is added, so that a network is traced once.

    Returns:
      The network, and "sequential" or "vmap".
    """
    mapping, form = backend.implementation(config, jax.default_backend())
    made = {} if made is None else made
    x = dataset.x_train
    key = f"{config.model}{config.quadratic}{form}{x.shape[1:]}{x.dtype}"
    y = targets.of(dataset)[0]
    key += f"{dataset.num_classes}{y.shape[1:]}{y.dtype}"
    if key not in made:
        made[key] = _known_network(config, own, form, dataset)
    network = made[key]
    slips = in_memory.notes(dataset, network.model.classifies)
    return network._replace(notes=network.notes + slips), mapping


def bytes_per_delivery(parameters: int, rule: Aggregator) -> int:
    """Bytes of a float32 model down and up; twice as many with control variates."""
    return 2 * 4 * parameters * (1 if rule.clients.gradient_correction is None else 2)


def delivers(tau: Num[Array, "T N"], rho: Num[Array, "T N"]) -> Bool[np.ndarray, "T N"]:
    """Who delivers: a free rider may have weight without any local iteration."""
    return (np.asarray(tau) > 0) | (np.asarray(rho) > 0)


def exact_of(prepared: Any) -> quadratic.Exact:
    """The true constants of quadratic data, with w⁰ = 0, as these clients hold them."""
    config, x = prepared.config, prepared.dataset.x_train
    curved, split = curvature_of(config, x.shape[1:]), prepared.partition
    held, start = (split.indices, split.capacity), np.zeros(len(curved))
    return quadratic.exact(x, *held, curved, config.batch_size, start)
