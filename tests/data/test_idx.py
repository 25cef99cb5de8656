"""Folders of IDX files: names, compression, and every mistake in one line."""

import gzip

import numpy as np
import pytest

from tsfl_jax import data
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import UserError

NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def encoded(array, magic=None):
    """An IDX file: magic number, lengths of the axes, values."""
    magic = bytes((0, 0, 8, array.ndim)) if magic is None else magic
    return magic + np.array(array.shape, ">u4").tobytes() + array.tobytes()


RNG = np.random.default_rng(0)
ARRAYS = {  # rows and columns must not change places
    "x_train": RNG.integers(0, 256, (40, 28, 20), np.uint8),
    "y_train": np.arange(40, dtype=np.uint8) % 10,
    "x_test": RNG.integers(0, 256, (10, 28, 20), np.uint8),
    "y_test": np.arange(10, dtype=np.uint8) % 10,
}


def write(folder, arrays=ARRAYS, name=lambda name: name):
    for key, array in arrays.items():
        path = folder / name(NAMES[key])
        content = encoded(array)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def load(folder, part=""):
    return data.load(DataConfig("idx", str(folder), part))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_all_usual_names_give_the_same_samples(tmp_path, ending):
    separator = ".idx" if ending else "-idx"
    write(tmp_path, name=lambda name: name.replace("-idx", separator) + ending)
    if not ending:  # a plain file goes before a compressed one
        write(tmp_path, {"y_test": ARRAYS["y_test"] * 0}, lambda name: f"{name}.gz")
    before = sorted(tmp_path.iterdir())
    dataset = load(tmp_path)
    for key, array in ARRAYS.items():
        pixels = array[..., None] if key[0] == "x" else array
        np.testing.assert_array_equal(getattr(dataset, key), pixels)
    assert dataset.num_classes == 10 and dataset.std == 255 and dataset.mean == 0
    assert dataset.y_train.dtype == np.int32 and dataset.x_train.dtype == np.uint8
    assert dataset.name == f"idx({tmp_path.name})"
    assert sorted(tmp_path.iterdir()) == before  # nothing is written


IMAGES, LABELS = encoded(ARRAYS["x_train"]), encoded(ARRAYS["y_train"])
# Argument, what its file has (None: no file), and words of the answer.
MISTAKES = [
    ("x_test", None, "expected the files train-images-idx3-ubyte, "),
    ("x_train", IMAGES[:-1], "cannot reshape array of size 22399"),
    ("x_train", LABELS, "begins with 00000801, not 00000803"),
    ("y_train", encoded(ARRAYS["y_train"][:-1]), "has shape (39,); expected [40]"),
    ("y_train.gz", gzip.compress(LABELS)[:-8] + bytes(8), "CRC check failed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "content", "message"), MISTAKES, ids=[m[2][:20] for m in MISTAKES]
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, key, content, message):
    write(tmp_path)
    key, dot, ending = key.partition(".")
    (tmp_path / NAMES[key]).unlink()
    if content is not None:
        (tmp_path / f"{NAMES[key]}{dot}{ending}").write_bytes(content)
    with pytest.raises(UserError) as error:
        load(tmp_path)
    text = str(error.value)
    assert message in text and str(tmp_path) in text and "\n" not in text


def test_the_names_of_emnist(tmp_path):
    def name(part):
        return lambda name: f"emnist-{part}-{name.replace('t10k', 'test')}.gz"

    letters = {k: a + np.uint8(k[0] == "y") for k, a in ARRAYS.items()}
    write(tmp_path, letters, name("letters"))
    dataset = load(tmp_path)
    assert dataset.name == "idx(emnist-letters)" and dataset.num_classes == 10
    # Upright, and the first letter is class 0.
    assert (dataset.x_train[..., 0] == ARRAYS["x_train"].swapaxes(1, 2)).all()
    assert (dataset.y_test == ARRAYS["y_test"]).all()
    write(tmp_path, ARRAYS, name("digits"))
    with pytest.raises(UserError, match="--config.data.file names; it holds emnist"):
        load(tmp_path)
    assert (load(tmp_path, "digits").y_train == ARRAYS["y_train"]).all()
