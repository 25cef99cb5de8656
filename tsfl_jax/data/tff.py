"""The HDF5 files of TensorFlow Federated, without TensorFlow.

`tff.simulation.datasets` keeps two files, such as fed_emnist_train.h5 and
fed_emnist_test.h5, with ``/examples/CLIENT/FEATURE``: pixels and label of EMNIST, image
and label of CIFAR-100, snippets of Shakespeare, tokens of Stack Overflow.
"""

import pathlib

from tsfl_jax.data import natural
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError


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
    x, y, client, label = [], [], [], ""
    try:
        with h5py.File(path, "r") as file:
            examples = file["examples"]
            for user in examples:
                held = examples[user]
                sample, label = natural.columns(settings, [*held], path)
                x.append(held[sample][()])
                y += [held[label][()].reshape(-1)] if label else []
                client += [user] * len(x[-1])
    except UserError:
        raise
    except (OSError, KeyError, TypeError, AttributeError) as error:
        expected = "an HDF5 file with /examples/CLIENT/FEATURE"
        raise natural.unreadable(path, error, expected) from error
    labels = natural.joined(y, path) if label else None
    return natural.Samples(natural.joined(x, path), labels, client)
