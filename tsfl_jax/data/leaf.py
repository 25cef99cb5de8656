"""LEAF's JSON: a folder train/ and a folder test/ with files of users.

Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018). A file has `users`,
`num_samples` (one number per user) and `user_data` with x and y of each user. FEMNIST
has 784 numbers per sample, Shakespeare 80 characters and the next one, Sent140 a list
whose fifth entry is the tweet. NOT read: CelebA, whose samples are names of files.
"""

import json
import pathlib
from typing import Any

import numpy as np

from tsfl_jax.data import natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError, user_code

_LAYOUT = "folders train and test of LEAF's .json files"


def read(settings: DataConfig, seed: int = 0) -> Dataset:
    """Read a data set that LEAF's preprocess.sh has written.

    Args:
      settings: `dir` has the folders train and test.
      seed: ignored.

    Returns:
      A `Dataset`; 784 numbers become an image [28, 28, 1].

    Raises:
      UserError: file, what is wrong and what was expected, in one line.
    """
    del seed
    folder = natural.folder(settings, _LAYOUT)
    train, test = (_samples(folder / part) for part in ("train", "test"))
    return natural.dataset(settings, folder, train, test)


def _samples(folder: pathlib.Path) -> natural.Samples:
    parts = []
    for path in sorted(folder.glob("*.json")):
        expected = "expected LEAF's users, num_samples and user_data"
        with user_code(f"{path}: cannot be read", expected):
            parts += _users(path)
    if not parts:
        raise UserError(f"{folder}: no .json file with samples; expected {_LAYOUT}")
    samples = natural.of_clients(parts, folder)
    if np.shape(samples.x)[1:] == (784,):
        return samples._replace(x=np.reshape(samples.x, (-1, 28, 28, 1)))
    return samples


def _users(path: pathlib.Path) -> list[tuple[str, Any, Any]]:
    """Name, samples and labels of each user of a file who has some."""
    parts, content = [], json.loads(path.read_text(encoding="utf-8"))
    for user, number in zip(content["users"], content["num_samples"], strict=True):
        x, y = (content["user_data"][user].get(key) for key in ("x", "y"))
        if not isinstance(x, list) or not isinstance(y, list):
            raise TypeError(f"no x or y of user {user}, or not a list")
        if not len(x) == len(y) == number:
            raise UserError(
                f"{path}: user {user} has {len(x)} x and {len(y)} y; expected "
                f"{number}, as in num_samples"
            )
        expected = "expected samples of one kind and shape"
        with user_code(f"{path}: user {user}: cannot be read", expected):
            parts += [(user, _values(x), _values(y))] if number else []
    return parts


def _values(values: list[Any]) -> np.ndarray | list[str]:
    """Texts, labels, or samples as float32; of a row of Sent140 the tweet."""
    first = values[0]
    if isinstance(first, list) and len(first) > 4 and isinstance(first[4], str):
        return [row[4] for row in values]
    if isinstance(first, str):
        return values
    # Numbers as text have no decimal point where they are whole: 0 and 1 of an image.
    array = np.array(values)
    return array.astype(np.float32) if array.ndim > 1 else array
