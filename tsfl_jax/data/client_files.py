"""Files that have samples by client, without the libraries that wrote them.

LEAF, Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018): folders train
and test with .json files of `users` and of `user_data` with x and y of each user.
FEMNIST has 784 numbers per sample, Shakespeare 80 characters and the next one, Sent140
a list whose fifth entry is the tweet. NOT read: CelebA, whose samples are names of
files.

TensorFlow Federated: `tff.simulation.datasets` keeps two HDF5 files, such as
fed_emnist_train.h5 and fed_emnist_test.h5, with ``/examples/CLIENT/FEATURE``: pixels
and label of EMNIST, image and label of CIFAR-100, snippets of Shakespeare, tokens of
Stack Overflow.

Ro, Suresh and Wu, "FedJAX: Federated learning simulation with JAX" (2021): two SQLite
files, such as federated_emnist_train.sqlite and federated_emnist_test.sqlite, with a
table ``federated_data(client_id BLOB, data BLOB, num_examples INTEGER)``. `data` is
msgpack under zlib: a dict of features, each an array as a msgpack extension, 1 for
numbers (shape, dtype, bytes) and 4 for byte strings (shape, list).

Hugging Face: `save_to_disk` makes a folder for each of train and test, with Arrow
streams. The Hub has Parquet files, train-00000-of-00001.parquet or, as it converts
them, train/0000.parquet; mostly in a folder, data or the configuration's name. One
column names the client of each sample.
"""

import contextlib
import functools
import io
import json
import pathlib
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tsfl_jax.data import inputs, natural
from tsfl_jax.data.inputs import check, package, require
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset


def _leaf(settings: DataConfig, path: pathlib.Path) -> Iterator[natural.Client]:
    del settings
    content = json.loads(path.read_text(encoding="utf-8"))
    for user in content["users"]:
        x, y = (content["user_data"][user][key] for key in ("x", "y"))
        if len(x):
            yield user, _json_values(x), _json_values(y)


def _json_values(values: list[Any]) -> np.ndarray | list[str]:
    """Texts, labels, or samples as float32; of a row of Sent140 the tweet."""
    first = values[0]
    if isinstance(first, list) and len(first) > 4 and isinstance(first[4], str):
        return [row[4] for row in values]
    if isinstance(first, str):
        return values
    # Numbers as text have no decimal point where they are whole: 0 and 1 of an image.
    array = np.array(values)
    if array.shape[1:] == (784,):
        array = array.reshape(-1, 28, 28, 1)
    return array.astype(np.float32) if array.ndim > 1 else array


def _tff(settings: DataConfig, path: pathlib.Path) -> Iterator[natural.Client]:
    with package("h5py").File(path, "r") as file:
        for client, group in file["examples"].items():
            sample, label = natural.columns(settings, [*group], path)
            y = group[label][()].reshape(-1) if label else None
            yield client, group[sample][()], y


_ROWS = "SELECT client_id, data FROM federated_data ORDER BY client_id"
_NUMBERS, _BYTES = 1, 4  # extensions of msgpack


def _fedjax(settings: DataConfig, path: pathlib.Path) -> Iterator[natural.Client]:
    unpack = package("msgpack").unpackb

    def array(code: int, packed: bytes) -> Any:
        shape, *content = unpack(packed, raw=True)
        if code == _NUMBERS:
            return np.frombuffer(content[1], content[0].decode()).reshape(shape)
        check(code == _BYTES, f"extension {code}")
        return [text.decode() for text in content[0]]

    file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    with contextlib.closing(file):
        for client, packed in file.execute(_ROWS):
            features = unpack(zlib.decompress(packed), ext_hook=array)
            sample, label = natural.columns(settings, [*features], path)
            y = features[label].reshape(-1) if label else None
            yield client, features[sample], y


_SQLITE = "an SQLite file with FedJAX's table federated_data"
_HDF5 = "an HDF5 file with /examples/CLIENT/FEATURE"
_JSON = "LEAF's users and user_data, with lists x and y of one kind and shape"
read_fedjax = functools.partial(natural.read, _fedjax, "*{}.sqlite", _SQLITE)
read_leaf = functools.partial(natural.read, _leaf, "{}/*.json", _JSON)
read_tff = functools.partial(natural.read, _tff, "*{}.h5", _HDF5)

_PARTS = ("train", "test")
# data-00000-of-00001.arrow or dataset.arrow; beside them may be cache-*.arrow.
_LAYOUTS = ("{}/da*.arrow", "{}/*.parquet", "{}*.parquet")
_LAYOUT = "train/da*.arrow of save_to_disk, train*.parquet or train/*.parquet"
# What PIL makes of an image without loss, by its mode; alpha and 16 bits need a choice.
_MODES = {"L": "L", "1": "L", "RGB": "RGB", "P": "RGB"}


def read_hugging_face(settings: DataConfig, _seed: int = 0) -> Dataset:
    """Read a data set of Hugging Face from a folder.

    Args:
      settings: `dir` is the folder; `columns` names samples, labels and clients.

    Returns:
      A `Dataset`; without a part test, a tenth of each client's samples.

    Raises:
      UserError: file, what is wrong and what was expected, in one line.
    """
    folder = inputs.folder(settings, _LAYOUT)
    subfolders = [p for p in sorted(folder.glob("*/")) if p.name not in _PARTS]
    layouts = [
        [sorted(base.glob(pattern.format(part))) for part in _PARTS]
        for base in (folder, *subfolders)
        for pattern in _LAYOUTS
    ]
    layouts = [layout for layout in layouts if any(layout)]
    names = [str(sum(layout, [])[0].relative_to(folder)) for layout in layouts]
    require(
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
        table = package("pyarrow").concat_tables(tables)
    names = natural.columns(settings, table.column_names, first, client=True)
    columns: list[Any] = [_values(first, n, table) if n else None for n in names]
    return natural.ClientSamples(*columns)


def _table(path: pathlib.Path) -> Any:
    pa, parquet = package("pyarrow"), package("pyarrow.parquet")
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
        check(not missing, f"{missing} values are null")
        values = table[name].to_pylist()
        if isinstance(values[0], dict):  # an image: {"bytes": …, "path": …}
            return np.stack([_image(value) for value in values])
        if isinstance(values[0], str | bytes):
            return natural.joined([values], path)
        array = np.asarray(values)
        check(array.dtype.kind not in "OSU", "no numbers")
        # Pixels as lists of whole numbers, of a column of nested lists.
        if array.ndim < 3 or array.dtype.kind != "i" or array.min() < 0:
            return array
        return array.astype(np.uint8) if array.max() <= 255 else array


def _image(value: dict[str, Any]) -> np.ndarray:
    """The pixels of an image, uint8 [H, W] or [H, W, 3]."""
    pil = package("PIL.Image")
    check(value.get("bytes"), "an image without bytes, such as one with a path")
    image = pil.open(io.BytesIO(value["bytes"]))
    transparent = image.mode == "P" and "transparency" in image.info
    lossless = image.mode in _MODES and not transparent
    check(lossless, f"an image of mode {image.mode}; convert it to L or RGB")
    return np.asarray(image.convert(_MODES[image.mode]))
