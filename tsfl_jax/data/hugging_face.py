"""Data sets of Hugging Face as files: from save_to_disk, or Parquet as on the Hub.

`save_to_disk` makes a folder for each of train and test, with Arrow streams. The Hub
has Parquet files, train-00000-of-00001.parquet or, as it converts them,
train/0000.parquet; mostly in a folder, data or the configuration's name. One column
names the client of each sample.
"""

import io
import pathlib
from typing import Any

import numpy as np

from tsfl_jax.data import inputs, natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset

_PARTS = ("train", "test")
# data-00000-of-00001.arrow or dataset.arrow; beside them may be cache-*.arrow.
_LAYOUTS = ("{}/da*.arrow", "{}/*.parquet", "{}*.parquet")
_LAYOUT = "train/da*.arrow of save_to_disk, train*.parquet or train/*.parquet"
# What PIL makes of an image without loss, by its mode; alpha and 16 bits need a choice.
_MODES = {"L": "L", "1": "L", "RGB": "RGB", "P": "RGB"}


def read(settings: DataConfig, seed: int = 0) -> Dataset:
    """Read a data set of Hugging Face from a folder.

    Args:
      settings: `dir` is the folder; `columns` names samples, labels and clients.
      seed: ignored.

    Returns:
      A `Dataset`; without a part test, a tenth of each client's samples.

    Raises:
      UserError: file, what is wrong and what was expected, in one line.
    """
    del seed
    folder = inputs.folder(settings, _LAYOUT)
    subfolders = [p for p in sorted(folder.glob("*/")) if p.name not in _PARTS]
    layouts = [
        [sorted(base.glob(pattern.format(part))) for part in _PARTS]
        for base in (folder, *subfolders)
        for pattern in _LAYOUTS
    ]
    layouts = [layout for layout in layouts if any(layout)]
    names = [str(sum(layout, [])[0].relative_to(folder)) for layout in layouts]
    inputs.require(
        len(layouts) == 1 and layouts[0][0],
        f"--config.data.dir={folder}: expected one of {_LAYOUT}, got "
        f"{', '.join(names) or 'none'}; of several, name the subfolder of one",
    )
    train, test = layouts[0]
    test_samples = _samples(settings, test) if test else None
    train_samples = _samples(settings, train)
    return natural.from_samples(settings, folder, train_samples, test_samples)


def _samples(settings: DataConfig, paths: list[pathlib.Path]) -> natural.ClientSamples:
    tables, first = [_table(path) for path in paths], paths[0]
    with inputs.reading(first, "files with the same columns"):
        table = inputs.package("pyarrow").concat_tables(tables)
    names = natural.columns(settings, table.column_names, first, client=True)
    columns: list[Any] = [_values(first, n, table) if n else None for n in names]
    return natural.ClientSamples(*columns)


def _table(path: pathlib.Path) -> Any:
    pa, parquet = inputs.package("pyarrow"), inputs.package("pyarrow.parquet")
    with inputs.reading(path, "Arrow streams or Parquet"):
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_stream(source).read_all()
        table.validate(full=True)  # damaged offsets would end the process
        return table


def _values(path: pathlib.Path, name: str, table: Any) -> Any:
    """A column as an array, as texts, or as decoded images."""
    expected = "values of one shape without null; images of one size and mode"
    with inputs.reading(f"{path}: column {name}", expected):
        missing = table[name].null_count
        inputs.check(not missing, f"{missing} values are null")
        values = table[name].to_pylist()
        if isinstance(values[0], dict):  # an image: {"bytes": …, "path": …}
            return np.stack([_image(value) for value in values])
        if isinstance(values[0], str | bytes):
            return natural.joined([values], path)
        array = np.asarray(values)
        inputs.check(array.dtype.kind not in "OSU", "no numbers")
        # Pixels as lists of whole numbers, of a column of nested lists.
        if array.ndim < 3 or array.dtype.kind != "i" or array.min() < 0:
            return array
        return array.astype(np.uint8) if array.max() <= 255 else array


def _image(value: dict[str, Any]) -> np.ndarray:
    """The pixels of an image, uint8 [H, W] or [H, W, 3]."""
    pil = inputs.package("PIL.Image")
    inputs.check(value.get("bytes"), "an image without bytes, such as one with a path")
    image = pil.open(io.BytesIO(value["bytes"]))
    transparent = image.mode == "P" and "transparency" in image.info
    lossless = image.mode in _MODES and not transparent
    inputs.check(lossless, f"an image of mode {image.mode}; convert it to L or RGB")
    return np.asarray(image.convert(_MODES[image.mode]))
