"""Data sets that need no files: scikit-learn's digits and synthetic images."""

import math

import numpy as np

from tsfl_jax import host_memory, rng
from tsfl_jax.types import Dataset, UserError
from tsfl_jax.validate import check

_BLOCK = 1024  # synthetic samples made at a time


def unit(
    name: str, x_train, y_train, x_test, y_test, num_classes: int, full_scale: float
) -> Dataset:
    """A `Dataset` whose model input is x / full_scale."""
    return Dataset(
        name,
        x_train,
        y_train.astype(np.int32),
        x_test,
        y_test.astype(np.int32),
        int(num_classes),
        np.zeros((), np.float32),
        np.full((), full_scale, np.float32),
    )


def digits() -> Dataset:
    """Scikit-learn's 1,797 handwritten digits, 8×8×1 with values 0..16.

    A fixed fifth of every class (rounded) is the test set; no seed changes it.
    """
    from sklearn import datasets  # slow to import

    raw = datasets.load_digits()
    x, y = raw.images.astype(np.uint8)[..., None], raw.target
    generator = rng.generator(0, "digits test set")
    test = np.zeros(len(y), bool)
    for label in range(10):
        members = generator.permutation(np.flatnonzero(y == label))
        test[members[: round(len(members) / 5)]] = True
    return unit("digits", x[~test], y[~test], x[test], y[test], 10, 16)


def synthetic(
    shape: tuple[int, ...], num_classes: int, train: int, test: int, seed: int
) -> Dataset:
    """Noisy blends of smooth class prototypes: learnable, but not without error.

    ``x = 128 + 45 (s p_y + (1 − s) p_k) + 30 n`` with another class k at random,
    s ~ U(0.45, 1) and white noise n. Samples with s < ½ (9 %) look more like k
    than like their label y, so about 91 % is the best accuracy to be had.

    Args:
      shape: of one sample, any rank ≥ 1; the last of several axes is the channel.
      num_classes: ≥ 2.
      train: samples, ≥ 1.
      test: samples, ≥ 1.
      seed: ≥ 0.

    Returns:
      A `Dataset`, uint8, classes equally frequent, labelled synthetic in its name.
    """
    shape = tuple(shape)
    if not shape or min(shape) < 1:
        raise UserError(
            f"--config.data.shape={shape}: needs positive sizes, as (28,28,1)"
        )
    check("data.num_classes", num_classes)
    _check_memory(shape, num_classes, train, test)
    name = f"synthetic({'x'.join(map(str, shape))}, {num_classes} classes)"
    streams = [
        rng.generator(seed, f"synthetic {part}")
        for part in ("prototypes", "train samples", "test samples")
    ]
    prototypes = _prototypes(shape, num_classes, streams[0])
    x_train, y_train = _blends(prototypes, train, streams[1])
    x_test, y_test = _blends(prototypes, test, streams[2])
    return unit(name, x_train, y_train, x_test, y_test, num_classes, 255)


def _check_memory(shape, num_classes, train, test) -> None:
    """Names the setting that is furthest above what is usual."""
    size = math.prod(map(int, shape))
    # The spectrum of the prototypes and its inverse, the samples, and one block.
    needed = 40 * num_classes * size + (train + test) * size + 32 * train
    needed += 16 * min(_BLOCK, max(train, test)) * size
    usual = {
        f"shape={tuple(shape)}": size / 784,
        f"num_classes={num_classes}": num_classes / 10,
        f"train_size={train}": train / 4096,
        f"test_size={test}": test / 1024,
    }
    setting = max(usual, key=usual.get)
    host_memory.require(f"--config.data.{setting}", needed, "synthetic samples")


def _prototypes(shape, num_classes, generator) -> np.ndarray:
    """[K, ...] float32 random fields of zero mean and unit variance, low-passed."""
    axes = tuple(range(1, max(2, len(shape))))  # all but samples and channels
    noise = generator.standard_normal((num_classes, *shape))
    spectrum = np.fft.fftn(noise, axes=axes)
    for axis in axes:
        cycles = np.fft.fftfreq(noise.shape[axis]) * noise.shape[axis]
        keep = np.exp(-((cycles / 3) ** 2) / 2)  # features about a third of a side
        others = [a for a in range(noise.ndim) if a != axis]
        spectrum *= np.expand_dims(keep, others)
    smooth = np.fft.ifftn(spectrum, axes=axes).real
    inner = tuple(range(1, noise.ndim))
    if noise[0].size > 1:  # the mean of a single number would take all of it away
        smooth -= smooth.mean(inner, keepdims=True)
    smooth /= np.sqrt((smooth**2).mean(inner, keepdims=True))
    return smooth.astype(np.float32)


def _blends(prototypes, count, generator) -> tuple[np.ndarray, np.ndarray]:
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
