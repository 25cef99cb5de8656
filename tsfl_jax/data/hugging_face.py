"""Data sets of Hugging Face as files: from save_to_disk, or Parquet as on the Hub.

`save_to_disk` makes a folder for each of train and test, with Arrow streams
(data-00000-of-00001.arrow); the Hub has Parquet files whose names begin with train and
test, mostly in a folder data. One column names the client of each sample.
"""

import io
import pathlib
from typing import Any

import numpy as np

from tsfl_jax.data import natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError

_LAYOUT = "train/*.arrow of save_to_disk, or Parquet files train*.parquet"


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
    folder = natural.folder(settings, _LAYOUT)
    train, test = (_samples(settings, folder, part) for part in ("train", "test"))
    if train is None:
        raise UserError(f"--config.data.dir={folder}: expected {_LAYOUT}")
    return natural.dataset(settings, folder, train, test)


def _samples(
    settings: DataConfig, folder: pathlib.Path, part: str
) -> natural.Samples | None:
    """The samples of a part; None: there is no such part."""
    pa = natural.package("pyarrow", "--config.data.name=hugging_face")
    parquet = natural.package("pyarrow.parquet", "--config.data.name=hugging_face")
    # Parts of save_to_disk, then those of the Hub, below its folder or beside it.
    patterns = (f"{part}/*.arrow", f"{part}*.parquet", f"data/{part}*.parquet")
    files = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    read = []
    for path in files:
        try:
            if path.suffix == ".parquet":
                read.append(parquet.read_table(path))
            else:
                with pa.memory_map(str(path)) as source:
                    read.append(pa.ipc.open_stream(source).read_all())
        except (OSError, pa.ArrowException) as error:
            expected = "an Arrow stream or a Parquet file"
            raise natural.unreadable(path, error, expected) from error
    if not files:
        return None
    names = natural.columns(settings, read[0].column_names, files[0], client=True)
    x, y, client = (
        natural.joined([_values(table[name]) for table in read], files[0])
        if name
        else None
        for name in names
    )
    assert x is not None and client is not None
    return natural.Samples(x, y, client)


def _values(column: Any) -> Any:
    """A column as an array, as texts, or as decoded images."""
    values = column.to_pylist()
    if values and isinstance(values[0], dict):  # an image: {"bytes": …, "path": …}
        image = natural.package("PIL.Image", "--config.data.name=hugging_face")

        return np.stack(
            [np.asarray(image.open(io.BytesIO(v["bytes"]))) for v in values]
        )
    found = values if values and isinstance(values[0], str) else np.asarray(values)
    # Pixels as lists of whole numbers, of a column of nested lists.
    images = (
        isinstance(found, np.ndarray) and found.ndim > 2 and found.dtype.kind == "i"
    )
    return found.astype(np.uint8) if images else found
