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
from tsfl_jax.types import Dataset, UserError

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
    x, y, client = [], [], []
    for path in sorted(folder.glob("*.json")):
        for user, number, data in _users(path):
            pair = data["x"], data["y"]
            if not len(pair[0]) == len(pair[1]) == number:
                raise UserError(
                    f"{path}: user {user} has {len(pair[0])} x and {len(pair[1])} y; "
                    f"expected {number}, as in num_samples"
                )
            if not number:
                continue
            try:
                x.append(_values(pair[0]))
                y.append(_values(pair[1]))
            except (ValueError, TypeError, IndexError) as error:
                raise UserError(
                    f"{path}: the samples of user {user} differ ({error})"
                ) from error
            client += [user] * number
    if not client:
        raise UserError(f"{folder}: no .json file with samples; expected {_LAYOUT}")
    samples, labels = natural.joined(x, folder), natural.joined(y, folder)
    if np.shape(samples)[1:] == (784,):
        samples = np.reshape(samples, (-1, 28, 28, 1))
    return natural.Samples(samples, labels, client)


def _users(path: pathlib.Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Name, number of samples and data of each user of a file."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        users, data = held["users"], held["user_data"]
        pairs = zip(users, held["num_samples"], strict=True)
        found = [(str(user), int(number), data[user]) for user, number in pairs]
        if not all({"x", "y"} <= {*of_user} for _, _, of_user in found):
            raise KeyError("no x or y")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "LEAF's users, num_samples and user_data"
        raise natural.unreadable(path, error, expected) from error


def _values(values: list[Any]) -> np.ndarray | list[str]:
    """Texts, labels, or samples as float32; of a row of Sent140 the tweet."""
    first = values[0]
    if isinstance(first, list) and len(first) > 4 and isinstance(first[4], str):
        return [row[4] for row in values]
    if isinstance(first, str):
        return values
    # Numbers as text have no decimal point where they are whole: 0 and 1 of an image.
    found = np.array(values)
    return found.astype(np.float32) if found.ndim > 1 else found
