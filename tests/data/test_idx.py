"""Folders of IDX files: names, compression, and every mistake in one line."""

import gzip
import pathlib
import socket

import numpy as np
import pytest

from tsfl_jax import data
from tsfl_jax.config import replace
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.experiment import prepare
from tsfl_jax.studies import experiments
from tsfl_jax.types import UserError

NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
DEBIAN = pathlib.Path("/usr/share/datasets/fashion-mnist")  # dataset-fashion-mnist


def encoded(array, magic=None):
    """An IDX file: magic number, lengths of the axes, values."""
    magic = bytes((0, 0, 8, array.ndim)) if magic is None else magic
    return magic + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def samples(train=40, test=10, side=(28, 28)):
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (train, *side), np.uint8),
        "y_train": np.arange(train, dtype=np.uint8) % 10,
        "x_test": rng.integers(0, 256, (test, *side), np.uint8),
        "y_test": np.arange(test, dtype=np.uint8) % 10,
    }


def write(folder, arrays, dots=False, packed=False):
    for key, name in NAMES.items():
        name = name.replace("-idx", ".idx") if dots else name
        content = encoded(arrays[key])
        if packed:
            name, content = f"{name}.gz", gzip.compress(content)
        (folder / name).write_bytes(content)


def load(folder):
    return data.load(DataConfig("idx", str(folder)))


@pytest.mark.parametrize(("dots", "packed"), [(False, False), (True, True)])
def test_all_usual_names_give_the_same_samples(tmp_path, monkeypatch, dots, packed):
    def no_network(*args, **kwargs):
        raise AssertionError("a folder was asked for, not the network")

    monkeypatch.setattr(socket, "create_connection", no_network)
    arrays = samples(side=(28, 20))  # rows and columns must not change places
    write(tmp_path, arrays, dots, packed)
    before = sorted(tmp_path.iterdir())
    dataset = load(tmp_path)
    np.testing.assert_array_equal(dataset.x_train, arrays["x_train"][..., None])
    np.testing.assert_array_equal(dataset.x_test, arrays["x_test"][..., None])
    np.testing.assert_array_equal(dataset.y_train, arrays["y_train"])
    np.testing.assert_array_equal(dataset.y_test, arrays["y_test"])
    assert dataset.num_classes == 10 and dataset.std == 255 and dataset.mean == 0
    assert dataset.y_train.dtype == np.int32 and dataset.x_train.dtype == np.uint8
    assert dataset.name == f"idx({tmp_path.name})"
    assert sorted(tmp_path.iterdir()) == before  # nothing is written


def test_a_plain_file_goes_before_a_compressed_one(tmp_path):
    write(tmp_path, samples(train=20), packed=True)
    write(tmp_path, samples(train=30))
    assert len(load(tmp_path).y_train) == 30


def test_an_experiment_of_the_paper_keeps_its_network(tmp_path):
    write(tmp_path, samples())
    changes = {"data.name": "idx", "data.dir": str(tmp_path), "num_clients": 2}
    changes |= {"num_intervals": 1, "schedule.data_size": 16, "batch_size": 8}
    prepared = prepare.prepare(replace(experiments.paper("mnist_case1"), changes))
    assert prepared.network.name == "mnist_cnn"
    assert prepared.dataset.name == f"idx({tmp_path.name})"


def changed(key, content):
    """The file of an array with another content; None: no file."""

    def change(folder):
        path = folder / NAMES[key]
        path.unlink()
        if content is not None:
            path.write_bytes(content)

    return change


def packed(key, content):
    def change(folder):
        (folder / NAMES[key]).unlink()
        (folder / f"{NAMES[key]}.gz").write_bytes(content)

    return change


ARRAYS = samples()
IMAGES, LABELS = encoded(ARRAYS["x_train"]), encoded(ARRAYS["y_train"])
MISTAKES = [
    (changed("x_test", None), "no t10k-images-idx3-ubyte (or t10k-images-idx3-"),
    (
        changed("x_train", IMAGES[:-1]),
        "shape (40, 28, 28) is 31360 values, not 31359",
    ),
    (changed("x_train", IMAGES[:10]), "buffer is smaller than requested"),
    (
        changed("x_train", LABELS),
        "begins with 00000801, not with 00000803",
    ),
    (
        changed("x_train", encoded(ARRAYS["x_train"], bytes((0, 0, 13, 3)))),
        "expected an IDX file of unsigned bytes with 3 axes",
    ),
    (changed("x_train", IMAGES[:4] + b"\xff" * 12), "values of shape (4294967295,"),
    (
        changed("y_train", encoded(ARRAYS["y_train"][:-1])),
        "y_train has shape (39,); expected [40]",
    ),
    (
        changed("y_test", encoded(ARRAYS["y_test"] + 1)),
        "y_test holds 10 at row 9; expected 0..9",
    ),
    (
        changed("x_test", encoded(ARRAYS["x_test"][:, :20])),
        "samples uint8 (20, 28, 1), x_train uint8 (28, 28, 1)",
    ),
    (packed("x_train", gzip.compress(IMAGES)[:-9]), "end-of-stream"),
    (packed("y_train", gzip.compress(LABELS)[:-8] + bytes(8)), "CRC check failed"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, change, message):
    write(tmp_path, ARRAYS)
    change(tmp_path)
    with pytest.raises(UserError) as error:
        load(tmp_path)
    text = str(error.value)
    assert message in text and str(tmp_path) in text and "\n" not in text


def test_a_wrong_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder, message in (
        ("", "needs --config.data.dir=FOLDER with the files train-images-idx3-ubyte"),
        (file, "Not a directory.*expected a folder with"),
        (tmp_path / "none", "No such file or directory"),
        ("~nobody_of_that_name/x", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        (tmp_path, "it holds file"),
    ):
        with pytest.raises(UserError, match=message) as error:
            load(folder)
        assert "\n" not in str(error.value)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="dataset-fashion-mnist not installed")
def test_what_debian_installs():
    dataset = load(DEBIAN)
    assert dataset.name == "idx(fashion-mnist)" and dataset.num_classes == 10
    assert dataset.x_train.shape == (60000, 28, 28, 1)
    assert dataset.x_test.shape == (10000, 28, 28, 1)
    assert (np.bincount(dataset.y_train) == 6000).all()
    assert (np.bincount(dataset.y_test) == 1000).all()


def write_emnist(folder, part, arrays):
    for key, name in NAMES.items():
        name = f"emnist-{part}-{name.replace('t10k', 'test')}.gz"
        (folder / name).write_bytes(gzip.compress(encoded(arrays[key])))


def test_the_names_of_emnist(tmp_path):
    arrays = samples()
    letters = arrays | {k: arrays[k] + np.uint8(1) for k in ("y_train", "y_test")}
    write_emnist(tmp_path, "letters", letters)
    got = load(tmp_path)
    assert got.name == "idx(emnist-letters)" and got.num_classes == 10
    # Upright, and the first letter is class 0.
    assert (got.x_train[..., 0] == arrays["x_train"].swapaxes(1, 2)).all()
    assert (got.y_test == arrays["y_test"]).all()
    write_emnist(tmp_path, "digits", arrays)
    with pytest.raises(UserError, match="has digits, letters of EMNIST; expected one"):
        load(tmp_path)
    got = data.load(DataConfig("idx", str(tmp_path), "digits"))
    assert (got.y_train == arrays["y_train"]).all()
