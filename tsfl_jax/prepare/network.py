"""The network of an experiment: ours by its name, or the user's own.

Only traced here, for the shapes of its parameters; nothing is compiled.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Num

from tsfl_jax import trees
from tsfl_jax.config import OWN, Config
from tsfl_jax.data import poison, quadratic, targets
from tsfl_jax.data.quadratic import Quadratic, QuadraticConfig, curvature
from tsfl_jax.models import losses, networks, precision, replay, text, tracing
from tsfl_jax.models.model import with_measures
from tsfl_jax.prepare import backend
from tsfl_jax.prepare.custom_hooks import Custom, input_dtype
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Array, Dataset, HParams, Params, UserError, parts_of
from tsfl_jax.uplink import chain
from tsfl_jax.uplink.chain import Chain


class Network(NamedTuple):
    """A network with what is known of it before training."""

    model: networks.Model
    name: str
    convolution: str  # a key of `convolution.CONVOLUTIONS`
    params: Params  # shapes of its variables
    notes: tuple[str, ...]
    algorithm: lax.DotAlgorithmPreset | None = None  # for the products of one run

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params["params"]))


def curvature_of(
    settings: QuadraticConfig, shape: tuple[int, ...]
) -> Float[np.ndarray, "d"]:
    """λ ``[d]`` of the quadratic model, for samples of a shape."""
    return curvature(int(np.prod(shape)), settings.smoothness, settings.convexity)


def _trace(module: Any, name: str, shape: tuple[int, ...], dtype: Any) -> tuple:
    """A network as a `Model`, and what `tracing.trace` says of it."""
    model = module if isinstance(module, networks.Model) else networks.from_flax(module)
    named = model._replace(name=model.name or name)
    return model, *tracing.trace(named, shape, dtype)


_trace_once = functools.lru_cache(maxsize=8)(_trace)  # ours, for all lanes and calls


def _custom_network(
    module: Any, form: str, dataset: Dataset
) -> tuple[Network, jax.ShapeDtypeStruct]:
    """A user's network with the fast convolutions, and shapes of its outputs."""
    shape, dtype = dataset.x_train.shape[1:], input_dtype(dataset)
    name = getattr(module, "__name__", type(module).__name__)
    name = "own" if name == "<lambda>" else name
    model, params, outputs, notes = _trace(module, name, shape, dtype)
    x = jax.ShapeDtypeStruct((tracing.SAMPLES, *shape), dtype)
    model, replay_notes = replay.replay(model, form, params, x)
    notes += replay_notes
    if dtype == np.int32:
        notes += (
            f"samples are whole numbers ({dataset.x_train.dtype}): tokens, given "
            "to the network as they are",
        )
    return Network(model, name, form, params, notes), outputs


def _named_network(
    config: Config, form: str, dataset: Dataset
) -> tuple[Network, jax.ShapeDtypeStruct]:
    """A network of the table, and shapes of its outputs."""
    shape, dtype = dataset.x_train.shape[1:], input_dtype(dataset)
    name = config.model.name
    if name not in OWN["model.name"]:
        _check_tokens(name, dataset, dtype == np.int32)
    if networks.MODELS[name].make is None:  # the model of drawn data
        module = Quadratic(tuple(curvature_of(config.quadratic, shape).tolist()))
    else:
        module = networks.make_model(
            config.model, targets.outputs(dataset), shape, form
        )
    trace = _trace if name in OWN["model.name"] else _trace_once
    model, params, outputs, notes = trace(module, name, shape, dtype)
    return Network(model, name, form, params, notes), outputs


def _with_measures(
    network: Network, outputs: jax.ShapeDtypeStruct, dataset: Dataset, custom: Custom
) -> Network:
    """The network with the loss and the metrics that fit the data and the user's."""
    model = network.model
    if targets.regresses(dataset):
        loss = model.loss
        loss = losses.squared_error if loss is losses.cross_entropy else loss
        model = model._replace(loss=loss, classifies=False)
    y = targets.of(dataset)[0]
    labels = jax.ShapeDtypeStruct((tracing.SAMPLES, *y.shape[1:]), y.dtype)
    model = with_measures(model, custom.loss, custom.metrics, outputs, labels)
    model, notes = networks.decide_task(model, outputs, dataset.num_classes)
    return network._replace(model=model, notes=network.notes + notes)


def _check_tokens(name: str, dataset: Dataset, tokens: bool) -> None:
    """Raise `UserError` if one of our networks cannot take the samples."""
    takes, x = name in text.MODELS, dataset.x_train
    if tokens != takes:
        raise UserError(
            f"--config.model.name={name}: {dataset.name} has samples "
            f"{list(x.shape[1:])} of {x.dtype}; whole numbers are tokens, which "
            f"{' and '.join(text.MODELS)} take and other networks do not"
        )
    if takes and x.max() >= dataset.num_classes:
        raise UserError(
            f"--config.model.name={name}: predicts tokens, as many as there are classes"
            f"; {dataset.name} has tokens up to {x.max()} and {dataset.num_classes} "
            "classes; give a network of your own as model="
        )


def with_precision(
    network: Network, dataset: Dataset, choice: str, device: Any
) -> Network:
    """The network in a precision, its algorithm on a device, and a note on that."""
    algorithm, notes = backend.algorithm(choice, device), ()
    if algorithm:
        shape = tracing.SAMPLES, *dataset.x_train.shape[1:]
        x = jax.ShapeDtypeStruct(shape, input_dtype(dataset))
        way = f"on tensor cores, {algorithm}, but on FP32 cores for runs side by side"
        if not precision.takes_algorithm(network.model, network.params, x):
            algorithm = None
            way = "on FP32 cores: it has convolutions of lax or products of other types"
        notes = (f"products of the network in float32 are {way}",)
    model = precision.with_precision(network.model, choice)
    return network._replace(
        model=model, algorithm=algorithm, notes=network.notes + notes
    )


def network_of(
    config: Config,
    dataset: Dataset,
    custom: Custom,
    traced: dict[str, Network] | None = None,
) -> Network:
    """The network of the settings, or the user's own, in its precision.

    Args:
      config: which network of the table, and which convolutions.
      dataset: for the shape of a sample and the number of classes.
      custom: the user's network, loss and metrics.
      traced: networks of other experiments with the same `custom`, by what they depend
        on; this one is added, so that a network is traced once.
    """
    traced = {} if traced is None else traced
    backend_name, choice = jax.default_backend(), config.convolution
    _, form = backend.implementation(backend_name, config.mapping, choice)
    x, y = dataset.x_train, targets.of(dataset)[0]
    key = f"{config.model}{config.quadratic}{form}{x.shape[1:]}{x.dtype}"
    key += f"{dataset.num_classes}{y.shape[1:]}{y.dtype}{config.precision}"
    if key not in traced:
        if custom.model is None:
            parts = _named_network(config, form, dataset)
        else:
            parts = _custom_network(custom.model, form, dataset)
        network = _with_measures(*parts, dataset, custom)
        target = config.precision, jax.local_devices()[0]
        traced[key] = with_precision(network, dataset, *target)
    network, notes = traced[key], ()
    if targets.regresses(dataset):
        notes = (
            "labels are real numbers: a regression, without accuracy; "
            "y_train.astype(int) makes them classes",
        )
    if backend_name == "cpu" and config.precision == "bfloat16":
        notes += ("bfloat16 takes 2 to 3 times as long as float32 on a CPU",)
    model, attacks = network.model, poison.success_of(dataset, config.attack)
    model = model._replace(metrics=(*model.metrics, *attacks))
    return network._replace(model=model, notes=network.notes + notes)


def traffic_of(
    uplinks: Chain,
    rule: Aggregator,
    params: Params,
    hparams: HParams,
    num_intervals: int,
    frozen: str = "",
) -> Float[np.ndarray, "2 T"]:
    """Bytes that a delivery takes down and up, in each interval.

    Parameters that are frozen are not sent, since all have them. Control variates come
    on top: float32, of the layers that are sent, and as they are, since compression is
    of the update alone. Single numbers such as losses, and the gradients of estimates,
    do not count.
    """
    params = {"params": trees.without(params["params"], parts_of(frozen))}
    layers = tuple(link for link in uplinks if link.keeps_variables)
    chains = (uplinks, layers) if rule.clients.sends_variates else (uplinks,)
    sent = [chain.traffic(links, params, hparams, num_intervals) for links in chains]
    bits = [(traffic.download, traffic.upload) for traffic in sent]
    return np.array(bits).sum(axis=0) / 8


def delivers(tau: Num[Array, "T N"], rho: Num[Array, "T N"]) -> Bool[np.ndarray, "T N"]:
    """Who delivers: a free rider may have weight without any local iteration."""
    return (np.asarray(tau) > 0) | (np.asarray(rho) > 0)


def exact_of(prepared: Any) -> quadratic.Exact:
    """The true constants of quadratic data, with w⁰ = 0, as these clients hold them."""
    config, x = prepared.config, prepared.dataset.x_train
    curved, split = curvature_of(config.quadratic, x.shape[1:]), prepared.partition
    start, size = np.zeros(len(curved)), config.batch_size
    return quadratic.exact(x, split.indices, split.capacity, curved, size, start)
