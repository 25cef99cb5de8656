"""The SQLite files of FedJAX, without FedJAX and TensorFlow.

Ro, Suresh and Wu, "FedJAX: Federated learning simulation with JAX" (2021). Two files,
such as federated_emnist_train.sqlite and federated_emnist_test.sqlite, with a table
``federated_data(client_id BLOB, data BLOB, num_examples INTEGER)``. `data` is msgpack
under zlib: a dict of features, each an array as a msgpack extension, 1 for numbers
(shape, dtype, bytes) and 4 for byte strings (shape, list).
"""

import contextlib
import functools
import pathlib
import sqlite3
import zlib
from typing import Any

import numpy as np

from tsfl_jax.data import natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import user_code

_NUMBERS, _BYTES = 1, 4


def _samples(settings: DataConfig, path: pathlib.Path) -> natural.Samples:
    msgpack = natural.package("msgpack", "--config.data.name=fedjax")

    def array(code: int, packed: bytes) -> Any:
        shape, *content = msgpack.unpackb(packed, raw=True)
        if code == _NUMBERS:
            return np.frombuffer(content[1], content[0].decode()).reshape(shape)
        if code == _BYTES:
            return [one.decode() for one in content[0]]
        raise ValueError(f"extension {code}")

    query = "SELECT client_id, data, num_examples FROM federated_data"
    kind = "SELECT type FROM sqlite_master WHERE name = 'federated_data'"
    parts = []
    expected = "expected an SQLite file with FedJAX's table federated_data"
    with user_code(f"{path}: cannot be read", expected):
        file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        with contextlib.closing(file):
            if file.execute(kind).fetchone() != ("table",):
                raise ValueError("no such table")  # a view may be endless
            for user, packed, number in file.execute(f"{query} ORDER BY client_id"):
                features = msgpack.unpackb(zlib.decompress(packed), ext_hook=array)
                sample, label = natural.columns(settings, [*features], path)
                if len(features[sample]) != number:
                    raise ValueError(f"client {user} has not num_examples={number}")
                y = features[label].reshape(-1) if label else None
                parts.append((user, features[sample], y))
        return natural.of_clients(parts, path)


read = functools.partial(natural.read_pair, _samples, ".sqlite")
