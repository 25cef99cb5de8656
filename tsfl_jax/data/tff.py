"""The HDF5 files of TensorFlow Federated, without TensorFlow.

`tff.simulation.datasets` keeps two files, such as fed_emnist_train.h5 and
fed_emnist_test.h5, with ``/examples/CLIENT/FEATURE``: pixels and label of EMNIST, image
and label of CIFAR-100, snippets of Shakespeare, tokens of Stack Overflow.
"""

import functools
import pathlib
from typing import Any

import numpy as np

from tsfl_jax import host_memory
from tsfl_jax.data import natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import user_code


def _samples(settings: DataConfig, path: pathlib.Path) -> natural.Samples:
    h5py = natural.package("h5py", "--config.data.name=tff")
    expected = "expected an HDF5 file with /examples/CLIENT/FEATURE"
    with user_code(f"{path}: cannot be read", expected), h5py.File(path, "r") as file:
        parts = []
        for user, group in file["examples"].items():
            sample, label = natural.columns(settings, [*group], path)
            y = _values(file, group[label]).reshape(-1) if label else None
            parts.append((user, _values(file, group[sample]), y))
        return natural.of_clients(parts, path)


def _values(file: Any, feature: Any) -> np.ndarray:
    """The values of a feature, which are all in this file."""
    if feature.external or feature.is_virtual or feature.file.filename != file.filename:
        raise ValueError(f"{feature.name} is in another file")
    host_memory.require(file.filename, feature.nbytes, f"shape {feature.shape}")
    return feature[()]


read = functools.partial(natural.read_pair, _samples, ".h5")
