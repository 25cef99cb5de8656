"""Samples in memory as a checked `Dataset`, every mistake in them told in one line."""

import numbers

import numpy as np

from tsfl_jax.data.builtin import unit
from tsfl_jax.types import Dataset, UserError

_MOST_CLASSES = 1000  # more than that only where there are as many samples


def make_dataset(
    x_train, y_train, x_test, y_test, *, name: str = "arrays", num_classes: int = 0
) -> Dataset:
    """A `Dataset` of arrays in memory.

    Args:
      x_train, x_test: [M, H, W, C], [M, H, W] (gets one channel) or [M, F], uint8
        (full scale 255) or float (taken as scaled already).
      y_train, y_test: [M] whole numbers from 0.
      name: shown in every output.
      num_classes: 0 = the largest training label + 1.

    Returns:
      A `Dataset`.

    Raises:
      UserError: array, value and what was expected, in one line.
    """
    if not isinstance(name, str):
        raise UserError(f"name={name!r}: expected the data set's name as a str")
    whole = isinstance(num_classes, numbers.Integral)
    if not whole or isinstance(num_classes, bool) or num_classes < 0:
        raise UserError(
            f"{name}: num_classes={num_classes!r}: expected a whole number >= 0 "
            "(0 = the largest training label + 1)"
        )
    raw = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    path = name
    raw = {key: _array(path, key, value) for key, value in raw.items()}
    x = {part: _samples(path, f"x_{part}", raw) for part in ("train", "test")}
    if x["test"].shape[1:] != x["train"].shape[1:]:
        raise UserError(
            f"{path}: x_test has samples of shape {x['test'].shape[1:]}, x_train of "
            f"{x['train'].shape[1:]}; expected the same"
        )
    if x["test"].dtype != x["train"].dtype:
        raise UserError(
            f"{path}: x_test is {raw['x_test'].dtype}, x_train is "
            f"{raw['x_train'].dtype}; expected both uint8 or both float"
        )
    y_train = _labels(path, "y_train", raw, len(x["train"]))
    y_test = _labels(path, "y_test", raw, len(x["test"]))
    given, num_classes = num_classes, num_classes or int(y_train.max()) + 1
    if given > max(_MOST_CLASSES, len(y_train)):
        raise UserError(
            f"{path}: num_classes={given}: expected at most "
            f"{max(_MOST_CLASSES, len(y_train))} for {len(y_train)} training samples"
        )
    if num_classes > max(_MOST_CLASSES, len(y_train)):
        raise UserError(
            f"{path}: y_train holds the label {y_train.max()} at row "
            f"{y_train.argmax()}; expected class numbers 0, 1, 2, …"
        )
    for key, y in (("y_train", y_train), ("y_test", y_test)):
        if y.max() >= num_classes:
            raise UserError(
                f"{path}: {key} holds the label {y.max()} at row {y.argmax()}; "
                f"expected 0..{num_classes - 1}"
            )
    full_scale = 255 if x["train"].dtype == np.uint8 else 1
    return unit(name, x["train"], y_train, x["test"], y_test, num_classes, full_scale)


def check(dataset: Dataset) -> Dataset:
    """The data set with NumPy arrays, or what is wrong with it.

    Raises:
      UserError: what `make_dataset` says, labels that num_classes does not cover, or a
        mean and std that do not fit.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"dataset={type(dataset).__name__}: expected a tsfl_jax.Dataset; "
            "tsfl_jax.make_dataset makes one of four arrays"
        )
    checked = make_dataset(
        *dataset[1:5], name=dataset.name, num_classes=dataset.num_classes
    )
    channels = checked.x_train.shape[-1]
    moments = {}
    for key in ("mean", "std"):
        value = np.asarray(getattr(dataset, key), np.float32)
        good = value.shape in ((), (channels,)) and np.isfinite(value).all()
        if not good or (key == "std" and (value <= 0).any()):
            raise UserError(
                f"{dataset.name}: {key}={getattr(dataset, key)}; expected one finite "
                f"number{' > 0' if key == 'std' else ''}, or {channels} of them"
            )
        moments[key] = value
    return checked._replace(**moments)


def _array(path: str, key: str, value) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise UserError(f"{path}: {key} is not an array ({error})") from error


def _samples(path: str, key: str, raw: dict[str, np.ndarray]) -> np.ndarray:
    x = raw[key]
    if x.ndim not in (2, 3, 4):
        raise UserError(
            f"{path}: {key} has shape {x.shape}; expected [M, H, W], [M, H, W, C] or "
            "[M, F]"
        )
    if x.size == 0:
        raise UserError(f"{path}: {key} is empty, shape {x.shape}")
    if x.dtype != np.uint8:
        if x.dtype.kind != "f":
            raise UserError(
                f"{path}: {key} is {x.dtype}; expected uint8 (0..255) or float"
            )
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        bad = ~np.isfinite(x)
        if bad.any():
            where = np.argwhere(bad)[0]
            raise UserError(
                f"{path}: {key} holds {raw[key][tuple(where)]} in sample {where[0]} "
                f"({bad.sum()} such values); expected finite float32 numbers"
            )
    return x[..., None] if x.ndim == 3 else x


def _labels(path: str, key: str, raw: dict[str, np.ndarray], count: int) -> np.ndarray:
    y = raw[key]
    if y.ndim != 1:
        raise UserError(
            f"{path}: {key} has shape {y.shape}; expected [M], one class number a "
            "sample"
        )
    if len(y) != count:
        raise UserError(
            f"{path}: {key} has {len(y)} labels for the {count} samples of "
            f"x{key[1:]}; expected as many"
        )
    if y.dtype.kind not in "iuf":
        raise UserError(f"{path}: {key} is {y.dtype}; expected whole numbers >= 0")
    with np.errstate(invalid="ignore"):
        good = (y >= 0) & (y < 2**31) & (y == np.floor(y))
    if not good.all():
        row = int(np.argmin(good))
        raise UserError(
            f"{path}: {key} holds {y[row]} at row {row}; expected whole numbers >= 0"
        )
    return y.astype(np.int64)
