"""The paper's networks in Flax, by name, and the adapter for anybody's own module.

Modules take images ``[B, H, W, C]`` and return logits ``[B, num_classes]``. Inside,
the convolutional ones work batch-last (see `convolution`). Pooling comes before bias
and ReLU: both are monotone, so the result is the same on a quarter of the elements.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tsfl_jax import rng
from tsfl_jax.models import convolution, losses, pooling
from tsfl_jax.types import Array, Params, PRNGKey, UserError

HE = nn.initializers.he_normal()


class Model(NamedTuple):
    """What training needs of a network, whatever library wrote it."""

    init: Callable[[PRNGKey, Array], Params]
    # (variables, x [B, ...], mask [B] bool, key) -> (logits [B, K], new variables)
    train: Callable[[Params, Array, Array, PRNGKey], tuple[Array, Params]]
    predict: Callable[[Params, Array], Array]  # (variables, x [B, ...]) -> logits
    # (outputs [B, K], labels [B]) -> [B], what training minimises the mean of
    loss: Callable[[Array, Array], Array] = losses.cross_entropy
    # The largest output is a class; else accuracy is NaN. None: where there is an
    # output for each class.
    classifies: bool | None = True


def from_flax(module: nn.Module) -> Model:
    """Adapts a Flax module to `Model`.

    ``train=``, ``deterministic=`` and ``mask=`` are passed where the module's
    ``__call__`` takes them; a mask ``[B]`` tells batch statistics which rows of a short
    last batch are padding.
    Every collection but ``params`` (batch statistics, say) is carried and aggregated
    like weights. A ``dropout`` key is at hand in training.
    A module with a method ``loss(outputs, labels)``, ``[B, K]`` and ``[B]`` to ``[B]``,
    is trained and tested by it instead of cross-entropy. Where it says
    ``classifies = False`` it is a regression, without accuracy and with outputs of any
    width; where it says neither, `decided` goes by the width of its outputs.

    Raises:
      UserError: not an instance of a Flax (linen) module.
    """
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model={' '.join(repr(module).split())[:60]}: expected an instance of a "
            "flax.linen.Module (see flax.nnx.bridge for nnx) or a tsfl_jax.Model"
        )
    accepted = set(inspect.signature(type(module).__call__).parameters)

    def options(**values):
        values["deterministic"] = not values["train"]
        return {name: value for name, value in values.items() if name in accepted}

    def init(key, x):
        params, dropout = rng.keys(key, "initial parameters", "initial dropout")
        keys = {"params": params, "dropout": dropout}
        return module.init(keys, x, **options(train=False))

    def train(variables, x, mask, key):
        logits, changed = module.apply(
            variables,
            x,
            **options(train=True, mask=mask),
            rngs={"dropout": key},
            mutable=[name for name in variables if name != "params"],
        )
        return logits, {**variables, **changed}

    def predict(variables, x):
        return module.apply(variables, x, **options(train=False))

    if not callable(getattr(type(module), "loss", None)):
        return Model(init, train, predict)
    classifies = getattr(module, "classifies", None)
    return Model(init, train, predict, module.loss, classifies)


def decided(
    model: Model, sample_shape: tuple[int, ...], num_classes: int
) -> tuple[Model, tuple[str, ...]]:
    """The model with `classifies` known, and a note where nobody has said it.

    Args:
      model: the network.
      sample_shape: shape of one sample.
      num_classes: K.

    Returns:
      The model, which classifies if it has K ≥ 2 outputs; and what a user should know.
    """
    if model.classifies is not None:
        return model, ()
    x = jax.ShapeDtypeStruct((1, *sample_shape), jnp.float32)
    variables = jax.eval_shape(lambda x: model.init(rng.key(0), x), x)
    width = jax.eval_shape(model.predict, variables, x).shape[1:]
    if width == (num_classes,) and num_classes > 1:
        return model._replace(classifies=True), ()
    note = (
        f"the network has a loss of its own and outputs of shape {list(width)} for "
        f"{num_classes} classes: taken for a regression, without accuracy; "
        "classifies = False in the module says so"
    )
    return model._replace(classifies=False), (note,)


class Conv(nn.Module):
    """Convolution without bias on ``[C, H, W, B]``; kernel ``[h, w, C, K]``."""

    filters: int
    kernel: int = 3
    stride: int = 1
    same: bool = True
    form: str = "slices"
    pool: bool = False  # 2x2 maximum after it; stride 1 only

    @nn.compact
    def __call__(self, x):
        shape = (self.kernel, self.kernel, x.shape[0], self.filters)
        kernel = self.param("kernel", HE, shape)
        if self.pool:
            return pooling.conv_pool(x, kernel, self.same, self.form)
        conv = convolution.CONVOLUTIONS[self.form]
        return conv(x, kernel, self.stride, self.same)


class ChannelBias(nn.Module):
    """Adds one number per channel to ``[C, H, W, B]``."""

    @nn.compact
    def __call__(self, x):
        bias = self.param("bias", nn.initializers.zeros, x.shape[:1])
        return x + bias[:, None, None, None]


class GroupNorm(nn.Module):
    """Group normalisation (Wu and He 2018) of ``[C, H, W, B]``, per sample."""

    groups: int = 32
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x):
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
    """Normalisation by name on ``[C, H, W, B]``; "none" is a bias per channel."""

    kind: str = "none"

    @nn.compact
    def __call__(self, x, train, mask):
        if self.kind == "none":
            return ChannelBias()(x)
        if self.kind == "group":
            return GroupNorm()(x)
        norm = nn.BatchNorm(use_running_average=not train, axis=0, momentum=0.9)
        return norm(x, mask=None if mask is None else mask[None, None, None, :])


def _head(x: Array, num_classes: int, hidden: int = 0) -> Array:
    """Flattens ``[C, H, W, B]`` to logits ``[B, num_classes]``; call in `compact`."""
    x = x.reshape(-1, x.shape[-1]).T
    if hidden:
        x = nn.relu(nn.Dense(hidden, kernel_init=HE)(x))
    return nn.Dense(num_classes)(x)


class MLP(nn.Module):
    """One hidden layer on flattened samples, for digits and feature vectors."""

    num_classes: int = 10
    hidden: int = 64

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        if self.hidden:
            x = nn.relu(nn.Dense(self.hidden, kernel_init=HE)(x))
        return nn.Dense(self.num_classes)(x)


class MnistCNN(nn.Module):
    """The paper's MNIST network: 5x5x10, pool, 5x5x20, pool, 320 → hidden → 10.

    28 → 24 → 12 → 8 → 4, so 20·4·4 = 320 features. The paper says "two fully
    connected layers (320x10)" without the width between them; 50 here.
    """

    num_classes: int = 10
    hidden: int = 50
    form: str = "slices"

    @nn.compact
    def __call__(self, x):
        x = x.transpose(3, 1, 2, 0)
        for filters in (10, 20):
            x = Conv(filters, kernel=5, same=False, form=self.form, pool=True)(x)
            x = nn.relu(ChannelBias()(x))
        return _head(x, self.num_classes, self.hidden)


class FashionCNN(nn.Module):
    """The paper's Fashion-MNIST network: six 3x3 convolutions, each ReLU and pool.

    Pooling with ceiling division: 28 → 14 → 7 → 4 → 2 → 1 → 1. The paper gives no
    widths; 16, 32, 64, 64, 128, 128 here.
    """

    num_classes: int = 10
    form: str = "slices"

    @nn.compact
    def __call__(self, x):
        x = x.transpose(3, 1, 2, 0)
        for filters in (16, 32, 64, 64, 128, 128):
            x = nn.relu(ChannelBias()(Conv(filters, form=self.form, pool=True)(x)))
        return _head(x, self.num_classes)


class VGG11(nn.Module):
    """VGG configuration A (Simonyan and Zisserman 2015) in its CIFAR form.

    64, P, 128, P, 256, 256, P, 512, 512, P, 512, 512, P, then one dense layer.
    """

    num_classes: int = 10
    norm: str = "none"
    form: str = "slices"

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        x = x.transpose(3, 1, 2, 0)
        for filters in (64, "P", 128, "P", 256, 256, "P", 512, 512, "P", 512, 512, "P"):
            if filters == "P":
                x = pooling.max_pool(x)
            else:
                x = Conv(filters, form=self.form)(x)
                x = nn.relu(Norm(self.norm)(x, train, mask))
        return _head(x, self.num_classes)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) in its CIFAR form: 3x3 stem, no initial pooling."""

    num_classes: int = 10
    norm: str = "group"
    form: str = "slices"

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        def conv_norm(x, filters, kernel=3, stride=1):
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
        return _head(x.mean(axis=(1, 2), keepdims=True), self.num_classes)


MODELS = {
    "mlp": lambda k, hidden, norm, form: MLP(k, hidden),
    "mnist_cnn": lambda k, hidden, norm, form: MnistCNN(k, hidden, form),
    "fashion_cnn": lambda k, hidden, norm, form: FashionCNN(k, form),
    "vgg11": lambda k, hidden, norm, form: VGG11(k, norm, form),
    "resnet18": lambda k, hidden, norm, form: ResNet18(k, norm, form),
}


def make_model(
    name: str,
    num_classes: int,
    sample_shape: tuple[int, ...],
    *,
    hidden: int = 50,
    norm: str = "none",
    form: str = "slices",
) -> nn.Module:
    """The network of that name.

    Args:
      name: a key of `MODELS`.
      num_classes: width of the output.
      sample_shape: shape of one sample; all networks but the MLP need ``(H, W, C)``.
      hidden: width of the hidden layer of ``mlp`` and ``mnist_cnn``; 0 = none.
      norm: "none", "group" or "batch" for ``vgg11`` and ``resnet18``.
      form: a key of `convolution.CONVOLUTIONS`.

    Raises:
      UserError: samples that the network cannot take.
    """
    smallest = {"mlp": 0, "mnist_cnn": 16}.get(name, 1)
    if smallest and (len(sample_shape) != 3 or min(sample_shape[:2]) < smallest):
        raise UserError(
            f"model {name!r} needs images [H, W, C] of at least {smallest}x{smallest}, "
            f"but one sample has shape {tuple(sample_shape)}; "
            "use --config.model.name=mlp"
        )
    return MODELS[name](num_classes, hidden, norm, form)
