"""A user's own data from an .npz file, every mistake in it told in one line."""

import difflib
import os
import zipfile
import zlib

import numpy as np

from tsfl_jax.data.in_memory import make_dataset
from tsfl_jax.types import Dataset, UserError

_KEYS = ("x_train", "y_train", "x_test", "y_test")


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
    dataset = make_dataset(**raw, name=path)
    return dataset._replace(name=f"npz({os.path.basename(path)})")


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
