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
            x.append([_text(one) for one in data["x"]])
            y.append(data["y"])
            if not len(x[-1]) == len(y[-1]) == number:
                raise UserError(
                    f"{path}: user {user} has {len(x[-1])} x and {len(y[-1])} y; "
                    f"expected {number}, as in num_samples"
                )
            client += [user] * number
    if not client:
        raise UserError(f"{folder}: no .json file with samples; expected {_LAYOUT}")
    of_text = isinstance(next(filter(None, x))[0], str)
    samples = natural.joined(x if of_text else _arrays(x), folder)
    if not of_text and np.shape(samples)[1:] == (784,):
        samples = np.reshape(samples, (-1, 28, 28, 1))
    next_one = isinstance(next(filter(None, y))[0], str)
    labels = natural.joined(y if next_one else _arrays(y), folder)
    return natural.Samples(samples, labels, client)


def _users(path: pathlib.Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Name, number of samples and data of each user of a file."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        users, data = held["users"], held["user_data"]
        pairs = zip(users, held["num_samples"], strict=True)
        return [(str(user), int(number), data[user]) for user, number in pairs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "LEAF's users, num_samples and user_data"
        raise natural.unreadable(path, error, expected) from error


def _text(sample: Any) -> Any:
    """The tweet of a row of Sent140; others as they are."""
    row = isinstance(sample, list) and len(sample) > 4
    return sample[4] if row and isinstance(sample[4], str) else sample


def _arrays(parts: list[list[Any]]) -> list[np.ndarray]:
    arrays = [np.array(part) for part in parts if part]
    # Numbers as text have no decimal point where they are whole: 0 and 1 of an image.
    return [a.astype(np.float32) if a.ndim > 1 else a for a in arrays]
