"""Image sets as four IDX files in a folder: the format of MNIST and Fashion-MNIST.

EMNIST has them too, for each of its parts: emnist-balanced-train-images-idx3-ubyte and
so on, with test in place of t10k. Its images lie on their side, and its letters are
numbered from 1.

A file is a header of big-endian numbers (two zero bytes, the type, the number of axes,
the length of each axis) and the values. NOT read: other types than unsigned bytes.
Nothing is written, and no network is used.
"""

import gzip
import os
import pathlib
import re
from typing import Any

import numpy as np
from jaxtyping import UInt8

from tsfl_jax.data import in_memory, inputs
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError

# Part of EMNIST, split, what it holds, and whether it is compressed.
_NAME = re.compile(
    r"(?:emnist-(\w+)-)?(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?"
)
_FILES = ", ".join(
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)


def read(settings: DataConfig, _seed: int = 0) -> Dataset:
    """Read an image set from the four IDX files of a folder.

    The files are called train-images-idx3-ubyte, train-labels-idx1-ubyte,
    t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte; with a dot before idx as well,
    and each plain or as .gz. A plain file goes before a .gz.

    Args:
      settings: `dir` is the folder; `file` the part of EMNIST, such as balanced, if
        there are several.

    Returns:
      A `Dataset`, uint8 [M, H, W, 1].

    Raises:
      UserError: folder or file, what is wrong and what was expected, in one line.
    """
    folder = inputs.folder(settings, f"the files {_FILES}")
    part, paths = _paths(folder, settings.file)
    arrays: dict[str, Any] = {name: _load(path) for name, path in paths.items()}
    if part:
        first_label = min(arrays["y_train"].min(initial=1), 1)
        for split in ("train", "test"):
            arrays[f"x_{split}"] = arrays[f"x_{split}"].swapaxes(1, 2)
            arrays[f"y_{split}"] = arrays[f"y_{split}"] - first_label
    dataset = in_memory.make_dataset(**arrays, name=str(folder))
    name = f"emnist-{part}" if part else folder.resolve().name
    return dataset._replace(name=f"idx({name})")


def _paths(folder: pathlib.Path, part: str) -> tuple[str, dict[str, pathlib.Path]]:
    """The part of EMNIST, "" for MNIST, and its files by argument of `make_dataset`."""
    names = sorted(os.listdir(folder))
    paths: dict[str, dict[str, pathlib.Path]] = {}
    for match in filter(None, map(_NAME.fullmatch, reversed(names))):  # plain ones last
        axis = {"images": "x", "labels": "y"}[match[3]]
        split = "train" if match[2] == "train" else "test"
        paths.setdefault(match[1] or "", {})[f"{axis}_{split}"] = folder / match[0]
    part = part or "".join(list(paths)[: len(paths) == 1])
    if len(paths.get(part, ())) < 4:
        listing = ", ".join(names[:8]) + ", …" * (len(names) > 8)
        raise UserError(
            f"--config.data.dir={folder}: expected the files {_FILES} (or .gz), or "
            "those of the part of EMNIST that --config.data.file names; it holds "
            f"{listing or 'nothing'}"
        )
    return part, paths[part]


def _load(path: pathlib.Path) -> UInt8[np.ndarray, "..."]:
    """The values of one file; exactly as many as its header announces."""
    axes = 3 if "-images" in path.name else 1
    open_file = gzip.open if path.suffix == ".gz" else open
    expected = f"an IDX file of unsigned bytes with {axes} axes"
    with inputs.reading(path, expected), open_file(path, "rb") as file:
        content, magic = file.read(), bytes((0, 0, 8, axes))
        start = content[:4].hex() or "nothing"
        inputs.check(start == magic.hex(), f"it begins with {start}, not {magic.hex()}")
        shape = np.frombuffer(content, ">u4", axes, 4).tolist()
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
        return values.reshape(shape)
