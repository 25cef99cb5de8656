"""All data sets by name, and those that need no files: digits and synthetic images."""

import math

import numpy as np
from jaxtyping import Float32, Int, UInt8

from tsfl_jax import host_memory, rng
from tsfl_jax.components import Part
from tsfl_jax.data import client_files, idx, in_memory, shakespeare, tfds
from tsfl_jax.data.inputs import require
from tsfl_jax.data.natural import ColumnsConfig
from tsfl_jax.data.quadratic import QuadraticConfig
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.data.tokens import TextConfig
from tsfl_jax.types import Dataset

_BLOCK = 1024  # synthetic samples made at a time


def digits(_settings: DataConfig, _seed: int = 0) -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits, 8×8×1 with values 0..16.

    A fixed fifth of every class (rounded) is the test set.
    """
    from sklearn import datasets  # slow to import

    pixels, labels = datasets.load_digits(return_X_y=True)
    y = np.asarray(labels)
    x = pixels.astype(np.uint8).reshape(-1, 8, 8, 1)
    generator = rng.generator(0, "digits test set")
    test = np.zeros(len(y), bool)
    for label in range(10):
        members = generator.permutation(np.flatnonzero(y == label))
        test[members[: round(len(members) / 5)]] = True
    parts = (x[~test], y[~test], x[test], y[test])
    dataset = in_memory.make_dataset(*parts, name="digits")
    return dataset._replace(std=np.full((), 16.0, np.float32))


def synthetic(settings: DataConfig, seed: int = 0) -> Dataset:
    """Make noisy blends of smooth class prototypes: learnable, but not without error.

    ``x = 128 + 45 (s p_y + (1 − s) p_k) + 30 n`` with another class k at random,
    s ~ U(0.45, 1) and white noise n. Samples with s < ½ (9 %) look more like k
    than like their label y, so about 91 % is the best accuracy that can be reached.

    Args:
      settings: `shape` of one sample, of any rank ≥ 1; the last of several axes is the
        channel. `num_classes` ≥ 2. `train_size` and `test_size`; 0: 4096 and 1024.
      seed: ≥ 0.

    Returns:
      A `Dataset`, uint8, classes equally frequent, labeled synthetic in its name.
    """
    shape, num_classes = tuple(settings.shape), settings.num_classes
    message = f"--config.data.shape={shape}: needs sizes > 0, like (28,28,1)"
    require(min(shape, default=0) > 0, message)
    train, test = settings.train_size or 4096, settings.test_size or 1024
    size = math.prod(map(int, shape))
    # The spectrum of the prototypes and its inverse, the samples, and one block.
    needed = 40 * num_classes * size + (train + test) * size + 32 * train
    needed += 16 * min(_BLOCK, max(train, test)) * size
    sizes = f"num_classes={num_classes}, train_size={train}, test_size={test}"
    host_memory.require(f"--config.data.shape={shape}, {sizes}", needed, "samples")
    name = f"synthetic({'x'.join(map(str, shape))}, {num_classes} classes)"
    streams = [
        rng.generator(seed, f"synthetic {part}")
        for part in ("prototypes", "train samples", "test samples")
    ]
    prototypes = _prototypes(shape, num_classes, streams[0])
    x_train, y_train = _blends(prototypes, train, streams[1])
    x_test, y_test = _blends(prototypes, test, streams[2])
    return in_memory.make_dataset(
        *(x_train, y_train, x_test, y_test),
        name=name,
        num_classes=num_classes,
        add_channel=False,
    )


def _prototypes(
    shape: tuple[int, ...], num_classes: int, generator: np.random.Generator
) -> Float32[np.ndarray, "C *sample"]:
    """Random fields of zero mean and unit variance, low-passed, one per class."""
    axes = tuple(range(1, max(2, len(shape))))  # all but samples and channels
    noise = generator.standard_normal((num_classes, *shape))
    spectrum = np.fft.fftn(noise, axes=axes)
    for axis in axes:
        cycles = np.fft.fftfreq(noise.shape[axis]) * noise.shape[axis]
        keep = np.exp(-((cycles / 3) ** 2) / 2)  # features about a third of a side
        other_axes = [a for a in range(noise.ndim) if a != axis]
        spectrum *= np.expand_dims(keep, other_axes)
    smooth = np.fft.ifftn(spectrum, axes=axes).real
    inner = tuple(range(1, noise.ndim))
    if noise[0].size > 1:  # the mean of a single number would take all of it away
        smooth -= smooth.mean(inner, keepdims=True)
    smooth /= np.sqrt((smooth**2).mean(inner, keepdims=True))
    return smooth.astype(np.float32)


def _blends(
    prototypes: Float32[np.ndarray, "C *sample"],
    count: int,
    generator: np.random.Generator,
) -> tuple[UInt8[np.ndarray, "M *sample"], Int[np.ndarray, "M"]]:
    """Blended samples and their labels; classes equally frequent."""
    classes = len(prototypes)
    y = generator.permutation(np.arange(count) % classes)
    other = (y + generator.integers(1, classes, count)) % classes
    share = generator.uniform(0.45, 1, count).astype(np.float32)
    x = np.empty((count, *prototypes.shape[1:]), np.uint8)
    for start in range(0, count, _BLOCK):
        i = slice(start, start + _BLOCK)
        s = share[i].reshape((-1,) + (1,) * (x.ndim - 1))
        field = s * prototypes[y[i]] + (1 - s) * prototypes[other[i]]
        noise = generator.standard_normal(field.shape, np.float32)
        x[i] = np.clip(128 + 45 * field + 30 * noise, 0, 255)
    return x, y


# svhn is short for svhn_cropped.
_TFDS = ("mnist", "fashion_mnist", "cifar10", "svhn_cropped", "svhn")
# What all but data that are drawn for the clients read.
COMMON = (*("data.normalize", "data.train_size", "data.test_size", "data.validation"),)
_FILE, _NATURAL = (*COMMON, "data.file"), (TextConfig, ColumnsConfig)
# By `DataConfig.name`: factories of settings and a seed ≥ 0, to a `Dataset`. Without:
# drawn for the clients, for a model that has no factory, either.
DATASETS = {
    "digits": Part(digits, COMMON),
    **dict.fromkeys(_TFDS, Part(tfds.read, COMMON)),
    "leaf": Part(client_files.read_leaf, COMMON, (TextConfig,)),
    "tff": Part(client_files.read_tff, _FILE, _NATURAL),
    "fedjax": Part(client_files.read_fedjax, _FILE, _NATURAL),
    "shakespeare": Part(shakespeare.read, COMMON, (TextConfig,)),
    "hugging_face": Part(client_files.read_hugging_face, COMMON, _NATURAL),
    "idx": Part(idx.read, _FILE),
    "npz": Part(in_memory.read_npz, _FILE),
    "synthetic": Part(synthetic, (*COMMON, "data.shape", "data.num_classes")),
    "quadratic": Part(reads=("data.shape",), sections=(QuadraticConfig,)),
}
