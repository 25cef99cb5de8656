"""Checked data sets from arrays in memory or from a user's .npz file.

Every mistake in the arrays is one line that names the array, the value and what was
expected. NOT done here: scaling. Samples stay as given, see `Dataset`.
"""

import numbers
import os
from typing import Any

import numpy as np
from jaxtyping import Int, Integer, Shaped

from tsfl_jax.data import targets
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, Numbers, UserError, nearest, user_code

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CLASSES = 1000  # more only if there are as many samples: a number of each


def from_arrays(
    name: str,
    x_train: Shaped[np.ndarray, "M *sample"],
    y_train: Integer[np.ndarray, "M"],
    x_test: Shaped[np.ndarray, "Q *sample"],
    y_test: Integer[np.ndarray, "Q"],
    num_classes: int,
    full_scale: float,
) -> Dataset:
    """Make a `Dataset` of valid arrays whose model input is x / full_scale."""
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


def make_dataset(
    x_train: Numbers,
    y_train: Numbers,
    x_test: Numbers,
    y_test: Numbers,
    *,
    name: str | Any = "arrays",
    num_classes: int | Any = 0,
    client: Numbers | None = None,
    test_client: Numbers | None = None,
    add_channel: bool | Any = None,
) -> Dataset:
    """Make a `Dataset` of arrays in memory.

    Args:
      x_train, x_test: [M, F], or [M, ..., C] with any number of axes, the last one for
        channels or features; uint8 (full scale 255), float (taken as already scaled),
        or other whole numbers [M, S] (tokens, given to the network as int32).
      y_train, y_test: [M] integers ≥ 0, classes; or floats [M] or [M, O], targets,
        even if all are whole: see `tsfl_jax.data.targets`.
      name: shown in every output.
      num_classes: 0 = the largest training label + 1.
      client: [M], which client each training sample belongs to, as numbers or names,
        for ``partition.kind="client"``; clients are numbered in sorted order.
      test_client: [M_test], likewise; those without training samples follow the others.
      add_channel: adds a last axis [..., 1]; None: to uint8 [M, H, W], gray images.

    Returns:
      A `Dataset`.

    Raises:
      UserError: array, value and what was expected, in one line.
    """
    if not isinstance(name, str):
        raise UserError(f"name={name!r}: expected the data set's name as a str")
    if not isinstance(num_classes, numbers.Integral) or num_classes < 0:
        raise UserError(
            f"{name}: num_classes={num_classes!r}: expected a whole number >= 0 "
            "(0 = the largest training label + 1)"
        )
    given = zip(_KEYS, (x_train, y_train, x_test, y_test), strict=True)
    raw = {key: _array(name, key, value) for key, value in given}
    x_train, x_test = (_samples(name, k, raw[k], add_channel) for k in _KEYS[::2])
    if (x_test.shape[1:], x_test.dtype) != (x_train.shape[1:], x_train.dtype):
        raise UserError(
            f"{name}: x_test has samples {raw['x_test'].dtype} {x_test.shape[1:]}, "
            f"x_train {raw['x_train'].dtype} {x_train.shape[1:]}; expected one shape, "
            "and both uint8, both float or both tokens"
        )
    counts = len(x_train), len(x_test)
    y_train, y_test, classes, known = _learned(name, raw, counts, int(num_classes))
    owners = _clients(name, client, test_client, counts)
    full_scale = 255.0 if x_train.dtype == np.uint8 else 1.0
    made = from_arrays(name, x_train, y_train, x_test, y_test, classes, full_scale)
    return made._replace(client=owners[0], test_client=owners[1], **known)


def _learned(
    name: str,
    raw: dict[str, Shaped[np.ndarray, "..."]],
    counts: tuple[int, int],
    num_classes: int,
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "Q"], int, dict[str, Any]]:
    """Classes of training and test samples, their number, and targets if any."""
    if targets.are_targets(raw["y_train"]):
        pair = {key: raw[key] for key in ("y_train", "y_test")}
        learned, labels, classes = targets.read(name, pair, counts)
        if num_classes not in (0, classes):
            raise UserError(
                f"{name}: num_classes={num_classes}: y_train is floats, a regression "
                "or shares of as many classes as columns; use y_train.astype(int)"
            )
        known = {"target": learned[0], "test_target": learned[1]}
        return labels[0], labels[1], classes, known
    y_train = _labels(name, "y_train", raw["y_train"], counts[0])
    y_test = _labels(name, "y_test", raw["y_test"], counts[1])
    return y_train, y_test, _class_count(name, y_train, y_test, num_classes), {}


def check(dataset: Dataset | Any) -> Dataset:
    """Return the data set with NumPy arrays, or raise what is wrong with it.

    Raises:
      UserError: as `make_dataset`, or a mean and std that do not fit.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(
            f"dataset={type(dataset).__name__}: expected a tsfl_jax.Dataset; "
            "tsfl_jax.make_dataset makes one of four arrays, and config.data.name "
            "chooses one by name"
        )
    y_train, y_test = targets.of(dataset)
    checked = make_dataset(
        dataset.x_train,
        y_train,
        dataset.x_test,
        y_test,
        name=dataset.name,
        num_classes=dataset.num_classes,
        client=dataset.client,
        test_client=dataset.test_client,
        add_channel=False,
    )
    x, moments = checked.x_train, {}
    for key, neutral, positive in (("mean", 0, ""), ("std", 1, " > 0")):
        value = np.asarray(getattr(dataset, key), np.float32)
        good = np.isfinite(value) & ((value > 0) if positive else True)
        good &= (value == neutral) | (x.dtype != np.int32)
        if value.shape not in ((), x.shape[-1:]) or not good.all():
            raise UserError(
                f"{dataset.name}: {key}={getattr(dataset, key)}; expected one finite "
                f"number{positive}, or {x.shape[-1]} of them; of tokens {neutral}"
            )
        moments[key] = value
    return checked._replace(**moments)


def notes(dataset: Dataset, classifies: bool | None) -> tuple[str, ...]:
    """What looks like a slip in a data set, for a network that classifies or not."""
    found, x, y = (), dataset.x_train[:1000], dataset.y_train  # few: runs share it
    if targets.regresses(dataset):
        t = np.asarray(dataset.target)
        whole = t.size == len(t) and (t >= 0).all() and (t == np.floor(t)).all()
        cure = "; y_train.astype(int) makes them classes" if whole else ""
        found += (f"labels are real numbers: a regression, without accuracy{cure}",)
    elif classifies and dataset.target is None and y.min() == y.max():
        found += (f"all training labels are {y[0]}: there is nothing to learn",)
    if x.ndim >= 4 and x.shape[1] in (1, 3, 4) and min(x.shape[2:]) > 4:
        found += (
            f"samples {list(x.shape[1:])} look like images with channels first; "
            "expected [H, W, C]: np.moveaxis(x, 1, -1)",
        )
    scaled = x.dtype != np.float32 or dataset.mean.any() or (dataset.std != 1).any()
    if not scaled and x.min() >= 0 and 127 < x.max() <= 255:
        found += (
            f"samples are floats up to {x.max():g}, used as they are; make them uint8 "
            "or divide them by 255",
        )
    return found


def read_npz(settings: DataConfig, seed: int = 0) -> Dataset:
    """Read x_train, y_train, x_test, y_test of an .npz file, as in `make_dataset`.

    Arrays `client` and `test_client` in the file are read, too.

    Args:
      settings: `file` is the path.
      seed: ignored.

    Raises:
      UserError: file, array, value and what was expected, in one line.
    """
    del seed
    if not settings.file:
        raise UserError("--config.data.name=npz needs --config.data.file=FILE.npz")
    path = os.path.expanduser(settings.file)
    dataset = make_dataset(**_read_arrays(path), name=path)
    return dataset._replace(name=f"npz({os.path.basename(path)})")


def _array(name: str, key: str, value: Numbers) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise UserError(f"{name}: {key} is not an array ({error})") from error


def _samples(
    name: str, key: str, raw: Shaped[np.ndarray, "..."], add_channel: bool | None
) -> Shaped[np.ndarray, "M ..."]:
    """The samples as uint8, finite float32 or int32 tokens, images with channels."""
    if raw.ndim < 2 or raw.size == 0:
        raise UserError(
            f"{name}: {key} has shape {raw.shape}; expected samples [M, F], [M, H, W], "
            "[M, H, W, C] or of more axes"
        )
    x, tokens = raw, raw.dtype.kind in "iu" and raw.dtype != np.uint8
    if raw.dtype.kind not in "iuf" or (tokens and raw.ndim != 2):
        raise UserError(
            f"{name}: {key} is {raw.dtype} of shape {raw.shape}; expected uint8 "
            "(0..255), float, or tokens: whole numbers [M, S]"
        )
    if tokens:
        good = (raw >= 0) & (raw < 2**31)
        targets.require(name, key, raw, good, "tokens >= 0 that int32 holds")
        return raw.astype(np.int32)
    if raw.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = raw.astype(np.float32)
        targets.require(name, key, raw, np.isfinite(x), "finite float32 numbers")
    gray = x.dtype == np.uint8 and x.ndim == 3
    return x[..., None] if (gray if add_channel is None else add_channel) else x


def _labels(
    name: str, key: str, y: Shaped[np.ndarray, "..."], count: int
) -> Int[np.ndarray, "M"]:
    """The labels of `count` samples as int64 ≥ 0."""
    if y.shape != (count,):
        raise UserError(
            f"{name}: {key} has shape {y.shape}; expected [{count}], one class number "
            f"per sample of x{key[1:]}{_way_out(key, y)}"
        )
    cure = f"np.unique({key}, return_inverse=True)[1] numbers the classes"
    cure = f"use {key}.astype(int)" if y.dtype.kind == "f" else cure
    if y.dtype.kind not in "iu":
        raise UserError(f"{name}: {key} is {y.dtype}; expected integers >= 0; {cure}")
    good = (y >= 0) & (y < 2**31)
    targets.require(name, key, y, good, f"integers >= 0; {cure}")
    return y.astype(np.int64)


def _way_out(key: str, y: Shaped[np.ndarray, "..."]) -> str:
    """What to do with labels of more than one number per sample."""
    if y.ndim != 2 or not y.size or y.dtype.kind not in "iufb":
        return ""
    if y.shape[1] == 1:
        return f"; use {key}[:, 0]"
    if np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all():
        return f"; these are one-hot: use {key}.argmax(axis=1)"
    return "; for other targets make both float, [M] or [M, O]"


def _clients(
    name: str, client: Numbers | None, tested: Numbers | None, counts: tuple[int, int]
) -> tuple[Int[np.ndarray, "M"] | None, Int[np.ndarray, "M_test"] | None]:
    """Clients numbered from 0, of names or numbers."""
    if client is None and tested is None:
        return None, None
    ids = [_array(name, "client", [] if client is None else client)]
    ids += [] if tested is None else [_array(name, "test_client", tested)]
    kinds = {one.dtype.kind for one in ids}
    fits = all(one.shape == (n,) for one, n in zip(ids, counts, strict=False))
    if not fits or not (kinds <= {"i", "u"} or kinds <= {"U", "S"}):
        what = ", test_client ".join(f"{one.dtype} of shape {one.shape}" for one in ids)
        raise UserError(
            f"{name}: client is {what}; expected one for each of the {counts} training "
            "and test samples, numbers in both, or names"
        )
    if kinds == {"U", "S"}:
        ids = [i if i.dtype.kind == "S" else np.char.encode(i, "utf-8") for i in ids]
    known, inverse = np.unique(ids[0], return_inverse=True)
    numbers = inverse.astype(np.int32)
    if tested is None:
        return numbers, None
    others = np.setdiff1d(ids[1], known)
    place = np.searchsorted(known, ids[1])
    new = len(known) + np.searchsorted(others, ids[1])
    return numbers, np.where(np.isin(ids[1], known), place, new).astype(np.int32)


def _class_count(
    name: str, y_train: Int[np.ndarray, "M"], y_test: Int[np.ndarray, "Q"], given: int
) -> int:
    """The number of classes, given or found, which all labels must be below."""
    most = max(_MOST_CLASSES, len(y_train) + len(y_test))
    classes = given or int(y_train.max()) + 1
    if classes > most:
        raise UserError(
            f"{name}: num_classes={classes}: expected at most {most} for "
            f"{len(y_train) + len(y_test)} samples; the largest label of y_train, at "
            f"row {y_train.argmax()}, is {y_train.max()}"
        )
    for key, y in (("y_train", y_train), ("y_test", y_test)):
        targets.require(name, key, y, y < classes, f"0..{classes - 1}")
    return classes


def _read_arrays(path: str) -> dict[str, np.ndarray]:
    """The four arrays of an .npz file by name, and those of clients if any."""
    expected = f"expected an .npz file with the plain arrays {', '.join(_KEYS)}"
    folder, name = os.path.split(path)
    if os.path.isdir(folder or ".") and not os.path.exists(path):
        near = nearest(name, os.listdir(folder or "."))
        raise UserError(f"--config.data.file={path}: no such file{near}")
    # Opened here: np.load alone leaves a damaged file open.
    with user_code(f"{path}: cannot be read", expected), open(path, "rb") as file:
        held = np.load(file, allow_pickle=False)
        keys = (*_KEYS, *({"client", "test_client"} & set(held.files)))
        return {key: held[key] for key in keys}
