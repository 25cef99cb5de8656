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
"""

import contextlib
import functools
import json
import pathlib
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tsfl_jax.data import natural
from tsfl_jax.data.inputs import check, package
from tsfl_jax.data.settings import DataConfig


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
