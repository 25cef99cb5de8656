"""The HDF5 files of TensorFlow Federated, without TensorFlow.

`tff.simulation.datasets` keeps two files, such as fed_emnist_train.h5 and
fed_emnist_test.h5, with ``/examples/CLIENT/FEATURE``: pixels and label of EMNIST, image
and label of CIFAR-100, snippets of Shakespeare, tokens of Stack Overflow.
"""

import pathlib
from typing import Any

import numpy as np

from tsfl_jax import host_memory
from tsfl_jax.data import natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset


def read(settings: DataConfig, seed: int = 0) -> Dataset:
    """Read the two files *train.h5 and *test.h5 of a folder.

    Args:
      settings: `dir` is the folder, `file` what comes before _train, of several;
        `columns` names the features, if others are wanted.
      seed: ignored.

    Returns:
      A `Dataset`; pixels as stored, in EMNIST 1 is the background.

    Raises:
      UserError: file, what is wrong and what was expected, in one line.
    """
    del seed
    folder = natural.folder(settings, "files *train.h5 and *test.h5")
    train, test = (
        _samples(settings, natural.file_of(settings, folder, part, ".h5"))
        for part in ("train", "test")
    )
    return natural.dataset(settings, folder, train, test)


def _samples(settings: DataConfig, path: pathlib.Path) -> natural.Samples:
    h5py = natural.package("h5py", "--config.data.name=tff")
    expected = "an HDF5 file with /examples/CLIENT/FEATURE"
    with natural.reading(path, expected), h5py.File(path, "r") as file:
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
