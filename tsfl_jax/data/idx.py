"""Image sets as four IDX files in a folder: the format of MNIST and Fashion-MNIST.

EMNIST has them too, for each of its parts: emnist-balanced-train-images-idx3-ubyte and
so on, with test in place of t10k. Its images lie on their side, and its letters are
numbered from 1.

A file is a header of big-endian numbers (two zero bytes, the type, the number of axes,
the length of each axis) and the values. NOT read: other types than unsigned bytes.
Nothing is written, and no network is used.
"""

import gzip
import math
import os
import pathlib
import re

import numpy as np
from jaxtyping import UInt8

from tsfl_jax import host_memory
from tsfl_jax.data import in_memory, natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError, user_code

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
      settings: `dir` is the folder; `file` the part of EMNIST, such as balanced, if
        there are several.
      seed: ignored.

    Returns:
      A `Dataset`, uint8 [M, H, W, 1].

    Raises:
      UserError: folder or file, what is wrong and what was expected, in one line.
    """
    del seed
    names = ", ".join(name for name, _ in _FILES.values())
    folder = natural.folder(settings, f"the files {names}")
    held = sorted(os.listdir(folder))
    part = _emnist_part(folder, held, settings.file)
    arrays = {
        key: _array(_find(folder, held, name, part), axes)
        for key, (name, axes) in _FILES.items()
    }
    if part:
        least = arrays["y_train"].min(initial=1)
        for key in ("train", "test"):
            arrays[f"x_{key}"] = arrays[f"x_{key}"].swapaxes(1, 2)
            arrays[f"y_{key}"] = arrays[f"y_{key}"] - min(least, 1)
    dataset = in_memory.make_dataset(**arrays, name=str(folder))
    shown = f"emnist-{part}" if part else folder.resolve().name
    return dataset._replace(name=f"idx({shown})")


def _emnist_part(folder: pathlib.Path, held: list[str], asked: str) -> str:
    """The part of EMNIST in a folder; "" for the files of MNIST."""
    found = [re.match(r"emnist-(\w+)-train-images", name) for name in held]
    parts = sorted({match[1] for match in found if match})
    if asked and asked not in parts or not asked and len(parts) > 1:
        raise UserError(
            f"--config.data.file={asked or repr('')}: {folder} has "
            f"{', '.join(parts) or 'no part'} of EMNIST; expected one of them"
        )
    return asked or "".join(parts)


def _find(folder: pathlib.Path, held: list[str], name: str, part: str) -> pathlib.Path:
    """The file of that name, or of one of its variants; `part` of EMNIST, or ""."""
    name = f"emnist-{part}-{name.replace('t10k', 'test')}" if part else name
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
    with user_code(f"{path}: cannot be read", expected), opened(path, "rb") as file:
        header, magic = file.read(4 + 4 * axes), bytes((0, 0, _UNSIGNED_BYTE, axes))
        if header[:4] != magic:
            begins = header[:4].hex() or "nothing"
            raise ValueError(f"it begins with {begins}, not with {magic.hex()}")
        shape = tuple(map(int, np.frombuffer(header, ">u4", axes, 4)))
        count = math.prod(shape)
        host_memory.require(str(path), count, f"values of shape {shape}")
        values = file.read(count + 1)
        if len(values) != count:
            raise ValueError(f"shape {shape} is {count} values, not {len(values)}")
        return np.frombuffer(values, np.uint8).reshape(shape)
