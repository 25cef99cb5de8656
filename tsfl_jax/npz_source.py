"""A user's own data from an .npz file, every mistake in it told in one line."""

import difflib
import os
import zipfile
import zlib

import numpy as np

from tsfl_jax.sources import unit
from tsfl_jax.types import Dataset, UserError

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CLASSES = 1000  # more than that only where there are as many samples


def read(file: str) -> Dataset:
    """The user's own data: x_train, y_train, x_test, y_test in an .npz file.

    x is [M, H, W, C], [M, H, W] (gets one channel) or [M, F], uint8 (full scale 255)
    or float (taken as scaled already); y is [M], whole numbers from 0.

    Args:
      file: path.

    Returns:
      A `Dataset`; num_classes is the largest training label + 1.

    Raises:
      UserError: file, key, value and what was expected, in one line.
    """
    if not file:
        raise UserError("--config.data.name=npz needs --config.data.file=FILE.npz")
    path = os.path.expanduser(file)
    raw = _open_npz(path)
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
    num_classes = int(y_train.max()) + 1
    if num_classes > max(_MOST_CLASSES, len(y_train)):
        raise UserError(
            f"{path}: y_train holds the label {num_classes - 1} at row "
            f"{y_train.argmax()}; expected class numbers 0, 1, 2, …"
        )
    if y_test.max() >= num_classes:
        raise UserError(
            f"{path}: y_test holds the label {y_test.max()} at row "
            f"{y_test.argmax()}; expected 0..{num_classes - 1}, as in y_train"
        )
    full_scale = 255 if x["train"].dtype == np.uint8 else 1
    name = f"npz({os.path.basename(path)})"
    return unit(name, x["train"], y_train, x["test"], y_test, num_classes, full_scale)


def _open_npz(path: str) -> dict[str, np.ndarray]:
    """The four arrays of the file."""
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        others = os.listdir(folder) if os.path.isdir(folder) else []
        others = [o for o in others if o.endswith(".npz")]
        near = difflib.get_close_matches(os.path.basename(path), others, n=3)
        raise UserError(
            f"--config.data.file={path}: no such file"
            + (f"; {folder} has {', '.join(near)}" if near else "")
        )
    key = ""
    try:
        # Opened here: np.load alone leaves a damaged file open.
        with open(path, "rb") as file:
            held = np.load(file, allow_pickle=False)
            if not isinstance(held, np.lib.npyio.NpzFile):
                raise UserError(
                    f"{path}: a single array (.npy); expected an .npz file with "
                    f"{', '.join(_KEYS)}"
                )
            missing = [k for k in _KEYS if k not in held.files]
            if missing:
                raise UserError(
                    f"{path}: no {', '.join(missing)}; it holds "
                    f"{', '.join(held.files) or 'nothing'}; expected {', '.join(_KEYS)}"
                )
            arrays = {}
            for key in _KEYS:
                arrays[key] = held[key]
            return arrays
    except UserError:
        raise
    # NumPy opens a stranger's bytes here; what it raises depends on the damage.
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        where = f"{path}: {key}" if key else path
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{where} cannot be read as plain arrays of an .npz file; is it "
            f"truncated, or are these Python objects? ({reason})"
        ) from error


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
