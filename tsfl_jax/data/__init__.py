"""Data sets as plain NumPy arrays on the host, and which client holds which samples.

Images stay as stored (uint8, mostly); how a model scales them is in ``mean`` and
``std``. NOT done here: augmentation, batches.

To add a data set, write its factory and add it to `builtin.DATASETS`.
"""

import hashlib

import numpy as np
from jaxtyping import Float32, Shaped
from numpy.typing import ArrayLike

from tsfl_jax import rng
from tsfl_jax.data import builtin, in_memory
from tsfl_jax.data.inputs import require
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset


def load(settings: DataConfig, seed: int = 0) -> Dataset:
    """Load the data set of that name.

    A model sees ``(x - mean) / std``. With ``normalize="unit"`` mean is 0 and std
    the largest value of a pixel (255; 16 for digits; 1 for float data). With
    ``"standard"`` they are moments over the training samples, of each channel or
    feature: of each entry of the last axis.

    Args:
      settings: validated; `name` is a key of `builtin.DATASETS`. With a `train_size` or
        `test_size` > 0 a fixed random subset, which does not depend on `seed`.
      seed: ≥ 0, changes synthetic images only.

    Returns:
      A `Dataset`.

    Raises:
      UserError: data missing or malformed, or fewer samples than requested.
    """
    dataset = in_memory.check(builtin.DATASETS[settings.name].make(settings, seed))
    dataset = _subset(dataset, "train", settings.train_size)
    dataset = _subset(dataset, "test", settings.test_size)
    dataset = dataset._replace(source=str(settings))
    if dataset.client is not None and settings.train_size:  # some may have none left
        client, test_client = in_memory.numbered(dataset.client, dataset.test_client)
        dataset = dataset._replace(client=client, test_client=test_client)
    if settings.normalize == "standard":
        require(
            dataset.x_train.dtype != np.int32,
            f"--config.data.normalize=standard: the samples of {dataset.name} are "
            "tokens, which are not scaled; leave it out",
        )
        mean, std = _moments(dataset.x_train)
        dataset = dataset._replace(mean=mean, std=std)
    return dataset


def digest(dataset: Dataset) -> str:
    """Digest of samples and labels, and of targets where there are any."""
    targets = (dataset.target, dataset.test_target)
    return fingerprint(*dataset[1:5], *(a for a in targets if a is not None))


def fingerprint(*arrays: ArrayLike) -> str:
    """16 hex digits of the SHA-256 of type, shape and bytes of the arrays."""
    digest = hashlib.sha256()
    for array in map(np.asarray, arrays):
        # Little-endian everywhere, so that machines agree.
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.dtype.str}{array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _subset(dataset: Dataset, part: str, size: int) -> Dataset:
    """With a random subset of the training or test samples, in order; 0 = all."""
    y = getattr(dataset, f"y_{part}")
    if not size:
        return dataset
    setting, samples = f"--config.data.{part}_size={size}", f"{len(y)} {part} samples"
    require(size <= len(y), f"{setting}: {dataset.name} has only {samples}")
    # Runs with different seeds see the same samples.
    rows = np.sort(rng.generator(0, f"{part} subset").permutation(len(y))[:size])
    prefix = "test_" * (part == "test")
    names = f"x_{part}", f"y_{part}", f"{prefix}client", f"{prefix}target"
    arrays = {name: getattr(dataset, name) for name in names}
    arrays = {name: a[rows] for name, a in arrays.items() if a is not None}
    return dataset._replace(**arrays)


def _moments(
    x: Shaped[np.ndarray, "M ..."],
) -> tuple[Float32[np.ndarray, "..."], Float32[np.ndarray, "..."]]:
    """Mean and std of each channel or feature, which are the last axis.

    Gray images, uint8 ``[M, H, W]``, have neither: moments of all values.
    """
    gray = x.ndim == 3 and x.dtype == np.uint8
    axes = None if gray else tuple(range(x.ndim - 1))
    # In units of the largest value, so that squares cannot overflow.
    largest = np.maximum(x.max(axes).astype(np.float64), -x.min(axes).astype(float))
    scale = np.where(largest > 0, largest, 1.0)
    mean = x.mean(axes, dtype=np.float64)
    # Block by block: no float64 copy of the whole data set.
    blocks = np.array_split(x, max(1, x.size // 2**22))
    squares = sum((((b - mean) / scale) ** 2).sum(axes) for b in blocks)
    std = np.sqrt(squares / (x.size // mean.size))
    # One that never varies is only shifted; below 1e-6 it is rounding.
    std = np.where(std > 1e-6, std * scale, 1)
    return np.asarray(mean, np.float32), np.asarray(std, np.float32)
