"""The paper's networks in Flax, by name, and the adapter for a user's own module.

Modules take images ``[B, H, W, C]`` and return logits ``[B, num_classes]``. Inside,
the convolutional ones work batch-last (see `convolution`). Pooling comes before bias
and ReLU: both are monotone, so the result is the same on a quarter of the elements.

To add a network, write its module and add it to `MODELS`.
"""

import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from tsfl_jax import rng
from tsfl_jax.components import Part, component, setting
from tsfl_jax.data.builtin import DATASETS
from tsfl_jax.models import convolution, pooling, switches, text
from tsfl_jax.models.model import Model, decide_task
from tsfl_jax.models.winograd import Images, Outputs
from tsfl_jax.types import Array as AnyArray
from tsfl_jax.types import Params, PRNGKey, UserError, nearest

__all__ = ["MODELS", "SMALLEST", "Model", "decide_task", "from_flax", "make_model"]

HE = nn.initializers.he_normal()

Logits = Float[Array, "B O"]
Mask = Bool[Array, "B"]  # False: padding of a short last batch


@component("model")
class ModelConfig:
    """The network."""

    name: str = setting("mlp", "network", static=True)
    norm: str = setting(
        "none",
        "vgg11, resnet18: normalization layers",
        ("none", "group", "batch"),
        static=True,
    )
    hidden: int = setting(
        50,
        "width of hidden layers, mlp, mnist_…, lstm; of a transformer, even; 0: none",
        low=0,
        static=True,
    )

    frozen: str = setting(
        "",
        "parameters that are not trained: parts of their paths, comma-separated",
        static=True,
    )
    params: str = setting(
        "", "file or folder of trained parameters to start from", effect=False
    )

    def check(self, config: Any, rule: Any) -> None:
        """Refuse data that are drawn for the clients without their model, and back."""
        del rule
        drawn = DATASETS[config.data.name].make is None
        if drawn != (MODELS[self.name].make is None):
            raise UserError(
                f"--config.model.name={self.name} with "
                f"--config.data.name={config.data.name}: data that are "
                "drawn for the clients and their model go together"
            )


def is_nnx(module: Any) -> bool:
    """Whether it is an nnx module; importing nnx is left to those who use it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(module, nnx.Module)


def _goes_to_nnx(module: Any) -> bool:
    """Whether it is of nnx, or a function that should make such a module.

    Raises:
      UserError: nothing of Flax.
    """
    if isinstance(module, nn.Module):
        return False
    linen_class = isinstance(module, type) and issubclass(module, nn.Module)
    if is_nnx(module) or (callable(module) and not linen_class):
        return True
    raise UserError(
        f"model={' '.join(repr(module).split())[:60]}: expected an instance of a "
        "flax.linen.Module or flax.nnx.Module, a function of nnx.Rngs that makes one, "
        "or a tsfl_jax.Model; config.model.name chooses those of tsfl_jax "
        f"({', '.join(MODELS)}){nearest(module, MODELS)}"
    )


def _masking(mask: AnyArray) -> Any:
    """A context in which normalizations over a mini-batch get its mask."""

    def with_mask(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        norms = nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm
        is_call = context.method_name == "__call__" and args
        if is_call and isinstance(context.module, norms):
            kwargs = switches.with_mask(context.module, args[0], kwargs, mask)
        return call(*args, **kwargs)

    return nn.intercept_methods(with_mask)


def from_flax(module: nn.Module | Any) -> Model:
    """Adapt a Flax module to `Model`.

    Switches between training and tests, by the names of `switches.values`, and
    ``mask=`` ``[B]``, False in the rows of a short batch that are padding, are passed
    if the module's ``__call__`` takes them; fields that are a switch are set. Flax's
    normalizations over the batch get the mask if nothing else is passed to them. All
    collections besides ``params`` (such as batch statistics) are carried and aggregated
    like weights. Training provides a key for random streams of any name.
    A method ``loss(outputs, labels)``, ``[B, O]`` and ``[B]`` to ``[B]``, replaces
    cross-entropy; beside it ``accuracy(outputs, labels)`` counts what is right and of
    how much, ``[B]`` each. With ``classifies = False`` the module is a regression,
    without any other accuracy and with outputs of any width; without that attribute,
    `decide_task` decides by the width of the outputs. An nnx module, or a function of
    `nnx.Rngs` that makes one, goes to `nnx_modules.from_nnx`.

    Raises:
      UserError: not an instance of a Flax module, nor a function that makes one.
    """
    if _goes_to_nnx(module):
        from tsfl_jax.models import nnx_modules

        return nnx_modules.from_nnx(module)
    parameters = inspect.signature(type(module).__call__).parameters
    fields = {n: v for n, v in vars(module).items() if n not in parameters}
    training = module.clone(**switches.in_fields(fields, True))
    testing = module.clone(**switches.in_fields(fields, False))
    arguments = switches.caller(parameters)

    def init(key: PRNGKey, x: AnyArray) -> Params:
        params, dropout = rng.keys(key, "initial parameters", "initial dropout")
        args, named = arguments(False)
        keys = {"params": params, "dropout": dropout}
        return testing.init(keys, x, *args, **named)

    def train(
        variables: Params, x: AnyArray, mask: AnyArray, key: PRNGKey
    ) -> tuple[Any, Params]:
        args, named = arguments(True, mask)
        # Flax takes "params" for streams that have no key of their own.
        rngs = {"dropout": key, "params": rng.fold(key, "initial streams")}
        mutable = [name for name in variables if name != "params"]
        mutable.append(f"mask {id(mask)}")  # keeps `nn.jit` from tracing only once
        with _masking(mask):
            logits, changed = training.apply(
                variables, x, *args, **named, rngs=rngs, mutable=mutable
            )
        return logits, {**variables, **changed}

    def predict(variables: Params, x: AnyArray) -> Any:
        args, named = arguments(False)
        return testing.apply(variables, x, *args, **named)

    classifies = getattr(module, "classifies", None)
    if not callable(getattr(type(module), "loss", None)):
        # One that says that it is a regression has its loss from `simulate`.
        return Model(init, train, predict, classifies=classifies is not False)
    accuracy = getattr(module, "accuracy", None)
    return Model(init, train, predict, module.loss, classifies, accuracy)


class Conv(nn.Module):
    """Convolution without bias on ``[C, H, W, B]``; kernel ``[h, w, C, K]``."""

    filters: int
    kernel: int = 3
    stride: int = 1
    same: bool = True
    form: str = "slices"
    pool: bool = False  # followed by a 2x2 maximum; stride 1 only
    kernel_init: nn.initializers.Initializer = HE

    @nn.compact
    def __call__(self, x: Images) -> Outputs:
        shape = (self.kernel, self.kernel, x.shape[0], self.filters)
        kernel = self.param("kernel", self.kernel_init, shape)
        if self.pool:
            return pooling.conv_pool(x, kernel, self.same, self.form)
        conv = convolution.CONVOLUTIONS[self.form]
        return conv(x, kernel, self.stride, self.same)


class ChannelBias(nn.Module):
    """A number for each channel, added to ``[C, H, W, B]``."""

    bias_init: nn.initializers.Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: Images) -> Outputs:
        bias = self.param("bias", self.bias_init, x.shape[:1])
        return x + bias[:, None, None, None]


class GroupNorm(nn.Module):
    """Group normalization (Wu and He 2018) of ``[C, H, W, B]``, per sample."""

    groups: int = 32
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Images) -> Outputs:
        c, h, w, b = x.shape
        scale = self.param("scale", nn.initializers.ones, (c,))
        bias = self.param("bias", nn.initializers.zeros, (c,))
        grouped = x.reshape(self.groups, -1, b)
        mean = grouped.mean(axis=1, keepdims=True)
        variance = jnp.square(grouped - mean).mean(axis=1, keepdims=True)
        normed = (grouped - mean) * jax.lax.rsqrt(variance + self.epsilon)
        x = normed.reshape(c, h, w, b)
        return x * scale[:, None, None, None] + bias[:, None, None, None]


class Norm(nn.Module):
    """Normalization by name on ``[C, H, W, B]``; "none" is a bias per channel."""

    kind: str = "none"

    @nn.compact
    def __call__(self, x: Images, train: bool, mask: Mask | None) -> Images:
        if self.kind == "none":
            return ChannelBias()(x)
        if self.kind == "group":
            return GroupNorm()(x)
        norm = nn.BatchNorm(use_running_average=not train, axis=0, momentum=0.9)
        return norm(x, mask=None if mask is None else mask[None, None, None, :])


def _uniform(fan_in: int) -> nn.initializers.Initializer:
    """Initial values U(−b, b), b = 1/√fan_in."""
    bound = fan_in**-0.5

    def init(key: PRNGKey, shape: Any, dtype: Any = float) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _flat(x: Images) -> Float[Array, "B features"]:
    return x.reshape(-1, x.shape[-1]).T


def _head(x: Float[Array, "B features"], num_classes: int, hidden: int = 0) -> Logits:
    """Compute logits by dense layers; call in `compact`."""
    if hidden:
        x = nn.relu(nn.Dense(hidden, kernel_init=HE)(x))
    return nn.Dense(num_classes)(x)


class MLP(nn.Module):
    """One hidden layer on flattened samples, for digits and feature vectors."""

    num_classes: int = 10
    hidden: int = 64

    @nn.compact
    def __call__(self, x: Float[Array, "B ..."]) -> Logits:
        return _head(x.reshape(x.shape[0], -1), self.num_classes, self.hidden)


class MnistCNN(nn.Module):
    """The paper's MNIST network: 5x5x10, pool, 5x5x20, pool, 320 → hidden → 10.

    28 → 24 → 12 → 8 → 4, so 20·4·4 = 320 features. The paper says "two fully
    connected layers (320x10)" without the width between them; 50 here.
    """

    num_classes: int = 10
    hidden: int = 50
    form: str = "slices"

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Logits:
        x = x.transpose(3, 1, 2, 0)
        for filters in (10, 20):
            x = Conv(filters, kernel=5, same=False, form=self.form, pool=True)(x)
            x = nn.relu(ChannelBias()(x))
        return _head(_flat(x), self.num_classes, self.hidden)


class MnistDropoutCNN(nn.Module):
    """`MnistCNN` as an often copied PyTorch example has it, with dropout.

    Half of the channels of the second convolution and half of the hidden units are
    dropped in training. Initial kernels and biases are U(−b, b), b = 1/√fan_in, which
    is PyTorch's default (Paszke et al., 2019), instead of He's normal and 0.
    """

    num_classes: int = 10
    hidden: int = 50
    form: str = "slices"

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], train: bool = False) -> Logits:
        x = x.transpose(3, 1, 2, 0)
        for filters in (10, 20):
            init = _uniform(25 * x.shape[0])
            form, pool = self.form, True
            x = Conv(filters, 5, same=False, form=form, pool=pool, kernel_init=init)(x)
            x = nn.relu(ChannelBias(init)(x))
        x = nn.Dropout(0.5, broadcast_dims=(1, 2), deterministic=not train)(x)
        x = _flat(x)
        if self.hidden:
            init = _uniform(x.shape[1])
            x = nn.relu(nn.Dense(self.hidden, kernel_init=init, bias_init=init)(x))
            x = nn.Dropout(0.5, deterministic=not train)(x)
        init = _uniform(x.shape[1])
        return nn.Dense(self.num_classes, kernel_init=init, bias_init=init)(x)


class FashionCNN(nn.Module):
    """The paper's Fashion-MNIST network: six 3x3 convolutions, each ReLU and pool.

    Pooling with ceiling division: 28 → 14 → 7 → 4 → 2 → 1 → 1. The paper gives no
    widths; 16, 32, 64, 64, 128, 128 here.
    """

    num_classes: int = 10
    form: str = "slices"

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Logits:
        x = x.transpose(3, 1, 2, 0)
        for filters in (16, 32, 64, 64, 128, 128):
            x = nn.relu(ChannelBias()(Conv(filters, form=self.form, pool=True)(x)))
        return _head(_flat(x), self.num_classes)


class VGG11(nn.Module):
    """VGG configuration A (Simonyan and Zisserman 2015) in its CIFAR form.

    64, P, 128, P, 256, 256, P, 512, 512, P, 512, 512, P, then one dense layer.
    """

    num_classes: int = 10
    norm: str = "none"
    form: str = "slices"

    @nn.compact
    def __call__(
        self, x: Float[Array, "B H W C"], train: bool = False, mask: Mask | None = None
    ) -> Logits:
        x = x.transpose(3, 1, 2, 0)
        for filters in (64, "P", 128, "P", 256, 256, "P", 512, 512, "P", 512, 512, "P"):
            if filters == "P":
                x = pooling.max_pool(x)
            else:
                x = Conv(filters, form=self.form)(x)
                x = nn.relu(Norm(self.norm)(x, train, mask))
        return _head(_flat(x), self.num_classes)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) in its CIFAR form: 3x3 stem, no initial pooling."""

    num_classes: int = 10
    norm: str = "group"
    form: str = "slices"

    @nn.compact
    def __call__(
        self, x: Float[Array, "B H W C"], train: bool = False, mask: Mask | None = None
    ) -> Logits:
        def conv_norm(
            x: Images, filters: int, kernel: int = 3, stride: int = 1
        ) -> Outputs:
            x = Conv(filters, kernel, stride, form=self.form)(x)
            return Norm(self.norm)(x, train, mask)

        x = nn.relu(conv_norm(x.transpose(3, 1, 2, 0), 64))
        for stage, filters in enumerate((64, 128, 256, 512)):
            for block in range(2):
                stride = 2 if stage and not block else 1
                y = nn.relu(conv_norm(x, filters, stride=stride))
                y = conv_norm(y, filters)
                if y.shape != x.shape:
                    x = conv_norm(x, filters, kernel=1, stride=stride)
                x = nn.relu(x + y)
        return _head(_flat(x.mean(axis=(1, 2), keepdims=True)), self.num_classes)


_HIDDEN, _NORM = ("model.hidden",), ("model.norm",)
# By `ModelConfig.name`: factories of (number of classes, settings, form).
MODELS = {
    "mlp": Part(lambda k, s, form: MLP(k, s.hidden), _HIDDEN),
    "mnist_cnn": Part(lambda k, s, form: MnistCNN(k, s.hidden, form), _HIDDEN),
    "mnist_dropout_cnn": Part(
        lambda k, s, form: MnistDropoutCNN(k, s.hidden, form), _HIDDEN
    ),
    "fashion_cnn": Part(lambda k, s, form: FashionCNN(k, form)),
    "vgg11": Part(lambda k, s, form: VGG11(k, s.norm, form), _NORM),
    "resnet18": Part(lambda k, s, form: ResNet18(k, s.norm, form), _NORM),
    "quadratic": Part(),  # for its data, `data.quadratic.Quadratic`
} | text.MODELS
# Smallest height and width of an image; others take samples of any shape.
SMALLEST = {"mnist_cnn": 16, "mnist_dropout_cnn": 16}
SMALLEST |= dict.fromkeys(("fashion_cnn", "vgg11", "resnet18"), 1)


def make_model(
    settings: ModelConfig,
    num_classes: int,
    sample_shape: tuple[int, ...],
    form: str = "slices",
) -> nn.Module:
    """Make the network of that name.

    Args:
      settings: validated; `name` is a key of `MODELS`.
      num_classes: K ≥ 2, width of the output.
      sample_shape: of one sample; ``(H, W, C)`` for the networks of `SMALLEST`.
      form: a key of `convolution.CONVOLUTIONS`.

    Raises:
      UserError: samples that the network cannot take.
    """
    smallest = SMALLEST.get(settings.name, 0)
    if smallest and (len(sample_shape) != 3 or min(sample_shape[:2]) < smallest):
        raise UserError(
            f"model {settings.name!r} needs images [H, W, C] of at least "
            f"{smallest}x{smallest}, but one sample has shape {tuple(sample_shape)}; "
            "use --config.model.name=mlp, or make_dataset(..., add_channel=True) for "
            "gray images [H, W]"
        )
    return MODELS[settings.name].make(num_classes, settings, form)
