"""Image sets as four IDX files in a folder: the format of MNIST and Fashion-MNIST.

A file is a header of big-endian numbers (two zero bytes, the type, the number of axes,
the length of each axis) and the values. NOT read: other types than unsigned bytes.
Nothing is written, and no network is used.
"""

import gzip
import math
import os
import pathlib
import zlib

import numpy as np
from jaxtyping import UInt8

from tsfl_jax import host_memory
from tsfl_jax.data import in_memory
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError, one_line

_UNSIGNED_BYTE = 0x08  # third byte of a file
# Argument of `make_dataset` → name of its file, and number of axes.
_FILES = {
    "x_train": ("train-images-idx3-ubyte", 3),
    "y_train": ("train-labels-idx1-ubyte", 1),
    "x_test": ("t10k-images-idx3-ubyte", 3),
    "y_test": ("t10k-labels-idx1-ubyte", 1),
}


def read(settings: DataConfig, seed: int = 0) -> Dataset:
    """Read an image set from the four IDX files of a folder.

    The files are called train-images-idx3-ubyte, train-labels-idx1-ubyte,
    t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte; with a dot before idx as well,
    and each plain or as .gz. A plain file goes before a .gz.

    Args:
      settings: `dir` is the folder.
      seed: ignored.

    Returns:
      A `Dataset`, uint8 [M, H, W, 1].

    Raises:
      UserError: folder or file, what is wrong and what was expected, in one line.
    """
    del seed
    if not settings.dir:
        raise UserError(
            "--config.data.name=idx needs --config.data.dir=FOLDER with the files "
            + ", ".join(name for name, _ in _FILES.values())
        )
    folder, held = _listing(settings.dir)
    arrays = {
        key: _array(_find(folder, held, name), axes)
        for key, (name, axes) in _FILES.items()
    }
    dataset = in_memory.make_dataset(**arrays, name=str(folder))
    return dataset._replace(name=f"idx({folder.resolve().name})")


def _listing(text: str) -> tuple[pathlib.Path, list[str]]:
    """The folder, and the names of what is in it."""
    flag = f"--config.data.dir={text}"
    try:
        folder = pathlib.Path(text).expanduser()
        return folder, sorted(os.listdir(folder))
    except NotADirectoryError as error:
        raise UserError(f"{flag}: a file; expected a folder of IDX files") from error
    except FileNotFoundError as error:
        raise UserError(f"{flag}: no such folder") from error
    except (OSError, RuntimeError) as error:  # too long a name; an unknown ~user
        raise UserError(f"{flag}: cannot be read ({error})") from error


def _find(folder: pathlib.Path, held: list[str], name: str) -> pathlib.Path:
    """The file of that name, or of one of its variants."""
    known = [name, name.replace("-idx", ".idx")]
    for variant in (*known, *(f"{n}.gz" for n in known)):
        if variant in held:
            return folder / variant
    shown = ", ".join(held[:8]) + ", …" * (len(held) > 8)
    raise UserError(
        f"--config.data.dir={folder}: no {name} (or {name}.gz); it holds "
        f"{shown or 'nothing'}"
    )


def _array(path: pathlib.Path, axes: int) -> UInt8[np.ndarray, "..."]:
    """The values of one file; exactly as many as its header announces."""
    opened = gzip.open if path.suffix == ".gz" else open
    expected = f"expected an IDX file of unsigned bytes with {axes} axes"
    try:
        with opened(path, "rb") as file:
            header = file.read(4 + 4 * axes)
            magic = bytes((0, 0, _UNSIGNED_BYTE, axes))
            if header[:4] != magic:
                raise UserError(
                    f"{path}: begins with {header[:4].hex() or 'nothing'}; {expected}, "
                    f"which begins with {magic.hex()}"
                )
            if len(header) < 4 + 4 * axes:
                raise UserError(f"{path}: ends within its header; {expected}")
            shape = tuple(map(int, np.frombuffer(header, ">u4", axes, 4)))
            count = math.prod(shape)
            host_memory.require(str(path), count, f"values of shape {shape}")
            values = file.read(count + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = one_line(error)
        raise UserError(f"{path}: cannot be read ({reason}); {expected}") from error
    if len(values) != count:
        found = "more" if len(values) > count else f"only {len(values)}"
        raise UserError(
            f"{path}: its header announces {count} values of shape {shape}, but "
            f"{found} follow"
        )
    return np.frombuffer(values, np.uint8).reshape(shape)
