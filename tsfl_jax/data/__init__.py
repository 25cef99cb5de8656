"""A data set by name, as plain NumPy arrays on the host.

Images stay as stored (uint8, mostly); how a model scales them is in ``mean`` and
``std``. NOT done here: augmentation, validation splits, batches.
"""

import hashlib

import numpy as np

from tsfl_jax import rng
from tsfl_jax.config import TFDS
from tsfl_jax.data import builtin, npz, tfds
from tsfl_jax.types import Dataset, UserError
from tsfl_jax.validate import check

_ALIASES = {"svhn": "svhn_cropped"}


def load(
    name: str,
    *,
    dir: str = "",
    file: str = "",
    download: bool = True,
    normalize: str = "unit",
    shape: tuple[int, ...] = (28, 28, 1),
    num_classes: int = 10,
    train_size: int = 0,
    test_size: int = 0,
    seed: int = 0,
) -> Dataset:
    """The data set of that name.

    A model sees ``(x - mean) / std``. With ``normalize="unit"`` mean is 0 and std
    the largest value of a pixel (255; 16 for digits; 1 for float data), with
    ``"standard"`` they are moments of each channel over the training images.

    Args:
      name: digits, mnist, fashion_mnist, cifar10, svhn_cropped (or svhn), npz or
        synthetic.
      dir: folder of prepared TFDS data; "" is $TFDS_DATA_DIR or
        ~/tensorflow_datasets.
      file: npz only, the file with x_train, y_train, x_test, y_test.
      download: fetch and prepare a TFDS data set that is not in `dir`.
      normalize: "unit" or "standard".
      shape: synthetic only, shape of one sample.
      num_classes: synthetic only, ≥ 2.
      train_size: use so many training samples, a fixed random subset that does not
        depend on `seed`; 0 = all (synthetic: 4096).
      test_size: likewise for the test samples; 0 = all (synthetic: 1024).
      seed: ≥ 0, decides the synthetic images and nothing else.

    Returns:
      A `Dataset`.

    Raises:
      UserError: unknown name, data missing or malformed, more asked for than there
        is; one line with the ways out.
    """
    check("data.name", name)
    check("data.train_size", train_size)
    check("data.test_size", test_size)
    check("data.normalize", normalize)
    name = _ALIASES.get(name, name)
    if name == "synthetic":
        dataset = builtin.synthetic(
            shape, num_classes, train_size or 4096, test_size or 1024, seed
        )
    elif name == "digits":
        dataset = builtin.digits()
    elif name == "npz":
        dataset = npz.read(file)
    elif name in TFDS:
        dataset = tfds.read(name, dir, download)
    else:
        raise UserError(f"--config.data.name={name}: needs its model; call `simulate`")
    x_train, y_train = _subset(dataset, "train", train_size)
    x_test, y_test = _subset(dataset, "test", test_size)
    dataset = dataset._replace(
        x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test
    )
    if normalize == "standard":
        mean, std = _moments(x_train)
        dataset = dataset._replace(mean=mean, std=std)
    return dataset


def fingerprint(*arrays: np.ndarray) -> str:
    """16 hex digits of the SHA-256 of type, shape and bytes of the arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        # Little-endian everywhere, so that machines agree.
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.dtype.str}{array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _subset(dataset: Dataset, part: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = getattr(dataset, f"x_{part}"), getattr(dataset, f"y_{part}")
    if not size:
        return x, y
    if size > len(y):
        raise UserError(
            f"--config.data.{part}_size={size}: {dataset.name} has only {len(y)} "
            f"{part} samples"
        )
    # Runs with different seeds see the same samples.
    order = rng.generator(0, f"{part} subset").permutation(len(y))
    keep = np.sort(order[:size])  # sorted: all of them is the data set itself
    return x[keep], y[keep]


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and std of each channel, or of everything where there are none."""
    axes = tuple(range(x.ndim - 1)) if x.ndim >= 4 else None
    # In units of the largest value, so that squares cannot overflow.
    scale = max(float(x.max()), -float(x.min())) or 1.0
    mean = x.mean(axes, dtype=np.float64)
    # Block by block: no float64 copy of the whole data set.
    blocks = np.array_split(x, max(1, x.size // 2**22))
    squares = sum((((b - mean) / scale) ** 2).sum(axes) for b in blocks)
    std = np.sqrt(squares / (x.size // mean.size))
    # A channel that never varies is only shifted; below 1e-6 it is rounding.
    std = np.where(std > 1e-6, std * scale, 1)
    return np.asarray(mean, np.float32), np.asarray(std, np.float32)
