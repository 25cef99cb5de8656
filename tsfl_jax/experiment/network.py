"""The network of an experiment: ours by its name, or the user's own.

Only traced here, for the shapes of its parameters; nothing is compiled.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tsfl_jax import rng
from tsfl_jax.config import Config, ModelConfig
from tsfl_jax.data.quadratic import Quadratic, curvature
from tsfl_jax.experiment import backend
from tsfl_jax.experiment.own_hooks import Own, input_dtype
from tsfl_jax.models import networks
from tsfl_jax.models.model import with_measures
from tsfl_jax.types import Dataset, Params, UserError


class Network(NamedTuple):
    """A network with what is known of it before training."""

    model: networks.Model
    name: str
    convolution: str  # a key of `convolution.CONVOLUTIONS`
    params: Params  # shapes of its variables
    notes: tuple[str, ...]


def curvature_of(config: Config, shape: tuple[int, ...]) -> Float[np.ndarray, "d"]:
    """λ ``[d]`` of the quadratic model, for samples of a shape."""
    q = config.quadratic
    return curvature(int(np.prod(shape)), q.smoothness, q.convexity)


@functools.lru_cache(maxsize=8)
def _our_network(
    name: str, num_classes: int, sample_shape: tuple[int, ...], form: str, **settings
) -> Network:
    """One of our networks; the lanes of a sweep share it."""
    if name == "quadratic":
        module = Quadratic(settings["curvature"])
    else:
        chosen = ModelConfig(name, **settings)
        module = networks.make_model(chosen, num_classes, sample_shape, form)
    return _known_network(module, name, form, sample_shape, num_classes)


def _known_network(
    model: Any,
    name: str,
    form: str,
    sample_shape: tuple[int, ...],
    num_classes: int,
    dtype: Any = np.float32,
    measures: tuple[Any, Any] = (None, None),
) -> Network:
    """A network; `measures` are the user's own loss and metrics."""
    if not isinstance(model, networks.Model):
        model = networks.from_flax(model)
    model = with_measures(model, *measures, sample_shape, dtype)
    model, notes = networks.decide_task(model, sample_shape, num_classes, dtype)
    x = jax.ShapeDtypeStruct((1, *sample_shape), dtype)
    params = jax.eval_shape(lambda x: model.init(rng.key(0), x), x)
    _check_precision(params.get("params", {}))
    return Network(model, name, form, params, notes)


def _check_precision(params: Params) -> None:
    """Raise `UserError` for weights that are floating-point numbers but no float32."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float32:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(
                f"the model's parameter {name} is {leaf.dtype}; expected float32 "
                "weights: leave out param_dtype, and for arithmetic in bfloat16 use "
                "--config.precision=bfloat16"
            )


def _own_network(own: Own, form: str, dataset: Dataset) -> Network:
    """The user's own network, with a note where its samples are tokens."""
    kind = getattr(own.model, "__name__", type(own.model).__name__)
    kind = "own" if kind == "<lambda>" else kind
    shape, dtype = dataset.x_train.shape[1:], input_dtype(dataset)
    measures = own.loss, own.metrics
    classes = dataset.num_classes
    network = _known_network(own.model, kind, form, shape, classes, dtype, measures)
    if dtype != np.int32:
        return network
    note = (
        f"samples are whole numbers ({dataset.x_train.dtype}): tokens, given "
        "to the network as they are"
    )
    return network._replace(notes=(*network.notes, note))


def _named_network(config: Config, own: Own, form: str, dataset: Dataset) -> Network:
    """The network that a config names, with the user's own loss and metrics if any."""
    name, shape = config.model.name, dataset.x_train.shape[1:]
    dtype = input_dtype(dataset)
    if dtype == np.int32:
        raise UserError(
            f"--config.model.name={name}: the samples of {dataset.name} are whole "
            f"numbers ({dataset.x_train.dtype}), taken for tokens; give a network for "
            "them as model=, or make the samples uint8 or float"
        )
    if name == "quadratic":
        settings = {"curvature": tuple(curvature_of(config, shape).tolist())}
    else:
        settings = {k: v for k, v in vars(config.model).items() if k != "name"}
    classes = dataset.num_classes
    network = _our_network(name, classes, shape, form, **settings)
    if own.loss is None and not own.metrics:
        return network
    measures = own.loss, own.metrics
    return _known_network(network.model, name, form, shape, classes, dtype, measures)


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

    Raises:
      UserError: no network for samples of this kind.
    """
    mapping, form = backend.formulation(config, jax.default_backend())
    made = {} if made is None else made
    x = dataset.x_train
    key = f"{config.model}{config.quadratic}{form}{x.shape[1:]}{x.dtype}"
    key += f"{dataset.num_classes}"
    if key not in made:
        made[key] = (
            _named_network(config, own, form, dataset)
            if own.model is None
            else _own_network(own, form, dataset)
        )
    return made[key], mapping
