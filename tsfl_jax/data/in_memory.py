"""Checked data sets from arrays in memory or from a user's .npz file.

Every mistake in the arrays is one line that names the array, the value and what was
expected. NOT done here: scaling. Samples stay as given, see `Dataset`.
"""

import os
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from tsfl_jax.data import targets
from tsfl_jax.data.inputs import reading, require, require_values
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import INT32_MAX, Dataset, Numbers, user_code

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CLASSES = 1000  # more only if there are as many samples: a number of each


def make_dataset(
    x_train: Numbers,
    y_train: Numbers,
    x_test: Numbers,
    y_test: Numbers,
    *,
    name: str = "arrays",
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
    is_count = isinstance(num_classes, int | np.integer) and num_classes >= 0
    message = f"{name}: num_classes={num_classes!r}: expected a whole number >= 0"
    require(is_count, message)
    raw = dict(zip(_KEYS, (x_train, y_train, x_test, y_test), strict=True))
    raw = {key: _array(name, key, value) for key, value in raw.items()}
    x_train, x_test = (_samples(name, k, raw[k], add_channel) for k in _KEYS[::2])
    require(
        (x_test.shape[1:], x_test.dtype) == (x_train.shape[1:], x_train.dtype),
        f"{name}: x_test has samples {raw['x_test'].dtype} {x_test.shape[1:]}, x_train "
        f"{raw['x_train'].dtype} {x_train.shape[1:]}; expected one shape, and both "
        "uint8, both float or both tokens",
    )
    for part, x in (("train", x_train), ("test", x_test)):
        shape = raw[f"y_{part}"].shape
        message = f"{name}: y_{part} has shape {shape}; expected [{len(x)}] or as many "
        require(shape[:1] == (len(x),), f"{message}rows")
    learned = _learned(name, raw["y_train"], raw["y_test"], int(num_classes))
    owners = _clients(name, client, test_client, (len(x_train), len(x_test)))
    full_scale = 255.0 if x_train.dtype == np.uint8 else 1.0
    return Dataset(
        *(name, x_train, learned.pop("y_train"), x_test, learned.pop("y_test")),
        mean=np.zeros((), np.float32),
        std=np.full((), full_scale, np.float32),
        client=owners[0],
        test_client=owners[1],
        **learned,
    )


def _learned(
    name: str,
    y_train: Shaped[np.ndarray, "M ..."],
    y_test: Shaped[np.ndarray, "Q ..."],
    num_classes: int,
) -> dict[str, Any]:
    """The fields of a `Dataset` of what is learned: classes, and targets if any."""
    if y_train.dtype.kind != "f" or y_train.ndim > 2 or not y_train.size:
        labels, fields = [y_train, y_test], {}
        classes = _class_count(name, labels, num_classes)
    else:
        pair, labels, classes = targets.read(name, y_train, y_test)
        require(
            num_classes in (0, classes),
            f"{name}: num_classes={num_classes}: y_train is floats, a regression or "
            "shares of as many classes as columns; use y_train.astype(int)",
        )
        fields = {"target": pair[0], "test_target": pair[1]}
    y_train, y_test = (y.astype(np.int32) for y in labels)
    return fields | {"y_train": y_train, "y_test": y_test, "num_classes": classes}


def check(dataset: Dataset | Any) -> Dataset:
    """Return the data set with NumPy arrays, or raise what is wrong with it.

    Raises:
      UserError: as `make_dataset`, or a mean and std that do not fit.
    """
    require(
        isinstance(dataset, Dataset),
        f"dataset={type(dataset).__name__}: expected a tsfl_jax.Dataset; "
        "tsfl_jax.make_dataset makes one of four arrays, and config.data.name chooses "
        "one by name",
    )
    y_train, y_test = targets.of(dataset)
    kept = ("x_train", "x_test", "name", "num_classes", "client", "test_client")
    fields: dict[str, Any] = {name: getattr(dataset, name) for name in kept}
    checked = make_dataset(y_train=y_train, y_test=y_test, add_channel=False, **fields)
    x, tokens = checked.x_train, checked.x_train.dtype == np.int32
    mean, std = (np.asarray(a, np.float32) for a in (dataset.mean, dataset.std))
    require(
        {mean.shape, std.shape} <= {(), x.shape[-1:]}
        and (np.isfinite(mean) & np.isfinite(std) & (std > 0)).all()
        and not (tokens and (mean.any() or (std != 1).any())),
        f"{dataset.name}: mean={dataset.mean}, std={dataset.std}; expected one finite "
        f"number each, or {x.shape[-1]} of them, std > 0; of tokens 0 and 1",
    )
    return checked._replace(mean=mean, std=std)


def read_npz(settings: DataConfig, _seed: int = 0) -> Dataset:
    """Read x_train, y_train, x_test, y_test of an .npz file, as in `make_dataset`.

    Arrays `client` and `test_client` in the file are read, too.

    Args:
      settings: `file` is the path.

    Raises:
      UserError: file, array, value and what was expected, in one line.
    """
    require(settings.file, "--config.data.name=npz needs --config.data.file=FILE.npz")
    path = os.path.expanduser(settings.file)
    # Opened here: np.load alone leaves a damaged file open.
    expected = f"an .npz file with the plain arrays {', '.join(_KEYS)}"
    with reading(path, expected), open(path, "rb") as file:
        content = np.load(file, allow_pickle=False)
        keys = (*_KEYS, *({"client", "test_client"} & set(content.files)))
        arrays = {key: content[key] for key in keys}
    dataset = make_dataset(**arrays, name=path)
    return dataset._replace(name=f"npz({os.path.basename(path)})")


def _array(name: str, key: str, value: Numbers) -> np.ndarray:
    with user_code(f"{name}: {key} is not an array", "expected rows of one length"):
        return np.asarray(value)


def _samples(
    name: str, key: str, raw: Shaped[np.ndarray, "..."], add_channel: bool | None
) -> Shaped[np.ndarray, "M ..."]:
    """The samples as uint8, finite float32 or int32 tokens, images with channels."""
    are_tokens = raw.dtype.kind in "iu" and raw.dtype != np.uint8
    has_axes = raw.ndim == 2 or (raw.ndim > 2 and not are_tokens)
    require(
        has_axes and raw.size and raw.dtype.kind in "iuf",
        f"{name}: {key} is {raw.dtype} of shape {raw.shape}; expected samples uint8 "
        "(0..255) or float [M, F], [M, H, W] or [M, ..., C], or tokens: whole numbers "
        "[M, S]",
    )
    array = f"{name}: {key}"
    if are_tokens:
        good = (raw >= 0) & (raw <= INT32_MAX)
        require_values(array, raw, good, "tokens >= 0 that int32 holds")
        return raw.astype(np.int32)
    if raw.dtype == np.uint8:
        x, is_gray = raw, raw.ndim == 3
    else:
        with np.errstate(over="ignore"):
            x, is_gray = raw.astype(np.float32), False
        require_values(array, raw, np.isfinite(x), "finite float32 numbers")
    return x[..., None] if (is_gray if add_channel is None else add_channel) else x


def _clients(
    name: str,
    client: Numbers | None,
    test_client: Numbers | None,
    counts: tuple[int, int],
) -> tuple[Int[np.ndarray, "M"] | None, Int[np.ndarray, "M_test"] | None]:
    """Clients numbered from 0, of names or numbers."""
    if client is None and test_client is None:
        return None, None
    ids = [_array(name, "client", [] if client is None else client)]
    ids += [] if test_client is None else [_array(name, "test_client", test_client)]
    kinds = {array.dtype.kind for array in ids}
    fits = all(a.shape == (n,) for a, n in zip(ids, counts, strict=False))
    require(
        fits and kinds in ({"U"}, {"S"}, {"i"}, {"u"}, {"i", "u"}),
        f"{name}: client, test_client: expected one for each of the {counts} training "
        "and test samples, numbers in both, or names",
    )
    return numbered(ids[0], ids[1] if len(ids) > 1 else None)


def numbered(
    client: Shaped[np.ndarray, "M"], test_client: Shaped[np.ndarray, "M_test"] | None
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M_test"] | None]:
    """Number clients from 0 in sorted order, those without training samples last.

    Args:
      client: name or number of the client of each training sample.
      test_client: likewise of each test sample; None: not known.

    Returns:
      int32 numbers for both.
    """
    names, indices = np.unique(client, return_inverse=True)
    if test_client is None:
        return indices.astype(np.int32), None
    names = np.concatenate([names, np.setdiff1d(test_client, names)])
    order = np.argsort(names)
    test_indices = order[np.searchsorted(names, test_client, sorter=order)]
    return indices.astype(np.int32), test_indices.astype(np.int32)


def _class_count(
    name: str, labels: list[Shaped[np.ndarray, "M ..."]], num_classes: int
) -> int:
    """The number of classes, which all labels must be below; 0: by the largest one."""
    for key, y in zip(_KEYS[1::2], labels, strict=True):
        require(
            y.ndim == 1 and y.dtype.kind in "iu",
            f"{name}: {key} is {y.dtype} of shape {y.shape}; expected one class number "
            f"per sample: {key}.astype(int), or {key}.argmax(axis=1) of one-hot rows; "
            "other targets are float in both y_train and y_test",
        )
    count, y = sum(map(len, labels)), labels[0]
    most, classes = max(_MOST_CLASSES, count), num_classes or int(y.max()) + 1
    require(
        classes <= most,
        f"{name}: num_classes={classes}: expected at most {most} for {count} samples; "
        f"the largest label of y_train, at row {y.argmax()}, is {y.max()}",
    )
    for key, y in zip(_KEYS[1::2], labels, strict=True):
        good = (y >= 0) & (y < classes)
        require_values(f"{name}: {key}", y, good, f"0..{classes - 1}")
    return classes
