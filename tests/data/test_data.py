"""Data sets: digits, synthetic, npz, arrays in memory, and every mistake."""

import pathlib

import numpy as np
import pytest

from tsfl_jax import data
from tsfl_jax.data import in_memory
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import UserError


def load(name, seed=0, **settings):
    return data.load(DataConfig(name, **settings), seed)


def test_digits():
    dataset = load("digits", seed=3)
    assert dataset.name == "digits" and dataset.num_classes == 10
    assert dataset.x_train.shape == (1438, 8, 8, 1)
    assert dataset.x_test.shape == (359, 8, 8, 1)
    assert dataset.x_train.dtype == np.uint8 and dataset.x_train.max() == 16
    assert dataset.mean == 0 and dataset.std == 16
    # Stratified: a fifth of every class, and nothing in both parts.
    counts = [np.bincount(y, minlength=10) for y in (dataset.y_train, dataset.y_test)]
    np.testing.assert_allclose(counts[1] / (counts[0] + counts[1]), 0.2, atol=0.003)
    train = {x.tobytes() for x in dataset.x_train}
    assert not train & {x.tobytes() for x in dataset.x_test}
    other = load("digits", seed=4)
    np.testing.assert_array_equal(other.x_test, dataset.x_test)


@pytest.mark.parametrize("shape", [(28, 28, 1), (5,)])
def test_synthetic(shape):
    make = lambda **kw: load("synthetic", shape=shape, num_classes=3, **kw)  # noqa: E731
    dataset = make()
    assert dataset.name == f"synthetic({'x'.join(map(str, shape))}, 3 classes)"
    assert dataset.x_train.shape == (4096, *shape) and dataset.x_train.dtype == np.uint8
    assert dataset.x_test.shape == (1024, *shape)
    assert np.bincount(dataset.y_train).tolist() == [1366, 1365, 1365]
    np.testing.assert_array_equal(make().x_train, dataset.x_train)
    assert (make(seed=1).x_train != dataset.x_train).any()
    small = make(train_size=7, test_size=2)
    assert len(small.y_train) == 7 and len(small.y_test) == 2


def test_subsets_are_nested_mixed_and_independent_of_the_seed(tmp_path):
    whole = load("digits")
    small, large = (load("digits", train_size=k, seed=k) for k in (200, 600))
    rows = lambda d: {x.tobytes() for x in d.x_train}  # noqa: E731
    assert len(rows(small)) == 200 and rows(small) < rows(large) < rows(whole)
    mixed = load(
        "npz", file=write(tmp_path, y_train=np.arange(50) // 10), train_size=25
    )
    # 5 of each class expected
    assert np.bincount(mixed.y_train, minlength=5).min() >= 2
    np.testing.assert_array_equal(
        load("digits", train_size=1438).x_train, whole.x_train
    )


def test_standard_normalization(tmp_path):
    dataset = load("synthetic", shape=(9, 7, 3), normalize="standard")
    assert dataset.mean.shape == dataset.std.shape == (3,)
    assert dataset.mean.dtype == dataset.std.dtype == np.float32
    seen = (dataset.x_train - dataset.mean) / dataset.std
    np.testing.assert_allclose(seen.mean((0, 1, 2), dtype=float), 0, atol=1e-4)
    np.testing.assert_allclose(seen.std((0, 1, 2), dtype=float), 1, atol=1e-4)
    # Features have a scale each; what is constant is only shifted; squares of large
    # numbers do not overflow, small ones are not lost.
    rng = np.random.default_rng(0)
    for x, shape in (
        (rng.normal(3, 2, (50, 4)), (4,)),
        (rng.normal(3, 2, (50, 4)) * [1e-9, 1, 1e3, 1e9], (4,)),
        (rng.normal(3, 2, (50, 4, 3)), (3,)),  # rows of three features
        (rng.integers(0, 99, (50, 4, 3), np.uint8), (1,)),  # gray images
        (np.full((50, 4, 4, 2), 0.1, np.float32), (2,)),
    ):
        path = write(tmp_path, x_train=x, x_test=x[:5])
        dataset = load("npz", file=path, normalize="standard")
        assert dataset.mean.shape == dataset.std.shape == shape
        x = x.astype(np.float32)
        axes = tuple(range(x.ndim - 1)) if x.shape[-1:] == shape else None
        np.testing.assert_allclose(dataset.mean, x.mean(axes, dtype=float), rtol=1e-5)
        spread, varies = x.astype(float).std(axes), x.min() < x.max()
        np.testing.assert_allclose(dataset.std, spread if varies else 1, rtol=1e-5)


def test_fingerprint():
    x, y = np.arange(6, dtype=np.int32), np.arange(3.0)
    base = data.fingerprint(x, y)
    # Fixed for good: outputs of different versions are compared by it.
    assert base == "08aa429818ea5c2f"
    assert base == data.fingerprint(x.astype(">i4"), y)
    assert base == data.fingerprint(np.repeat(x, 2)[::2], y)  # not contiguous
    others = [(y, x), (x.reshape(2, 3), y), (x.astype(np.int64), y), (x + 1, y), (x,)]
    assert base not in {data.fingerprint(*other) for other in others}


def write(folder, **changes):
    """An npz file of 50 + 5 samples, with changes; None leaves a key out."""
    rng = np.random.default_rng(1)
    arrays = {
        "x_train": rng.integers(0, 256, (50, 6, 6, 3), np.uint8),
        "y_train": np.arange(50) % 4,
        "x_test": rng.integers(0, 256, (5, 6, 6, 3), np.uint8),
        "y_test": np.arange(5) % 4,
    }
    arrays |= changes
    path = folder / "mine.npz"
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


def test_each_sample_may_have_a_number_of_its_own():
    """Rows of a table of targets, which a loss looks up; test samples count as well."""
    x, row = np.zeros((1800, 1), np.float32), np.arange(1800)
    halves = x[:1500], row[:1500], x[1500:], row[1500:]
    dataset = in_memory.make_dataset(*halves, num_classes=1800)
    assert dataset.num_classes == 1800 and dataset.y_test[-1] == 1799
    with pytest.raises(UserError, match="expected at most 1800 for 1800 samples"):
        in_memory.make_dataset(*halves, num_classes=1801)


@pytest.mark.parametrize(
    ("shape", "kind", "add_channel", "seen"),
    [
        ((6, 5), np.float32, None, (6, 5)),  # five features of six moments
        ((6, 5), np.uint8, None, (6, 5, 1)),  # gray images
        ((6, 5), np.uint8, False, (6, 5)),
        ((6, 5), np.float32, True, (6, 5, 1)),
        ((4, 6, 5, 2), np.float32, None, (4, 6, 5, 2)),  # volumes
    ],
)
def test_axes_follow_from_the_dtype_or_are_given(shape, kind, add_channel, seen):
    x, y = np.ones((6, *shape), kind), np.arange(6) % 3
    dataset = in_memory.make_dataset(
        x, y, x[:2], y[:2], name="mine", add_channel=add_channel
    )
    assert dataset.x_train.shape == (6, *seen) and dataset.x_test.shape == (2, *seen)
    axes = ", ".join(map(str, seen))
    told = f"mine: 6 training and 2 test samples {np.dtype(kind)} [{axes}], 3 classes; "
    told += f"a network sees float32 [B, {axes}]"
    assert repr(dataset) == repr(in_memory.check(dataset)) == told


def test_npz(tmp_path):
    dataset = load("npz", file=write(tmp_path))
    assert dataset.name == "npz(mine.npz)" and dataset.num_classes == 4
    assert dataset.x_train.dtype == np.uint8
    assert (dataset.mean, dataset.std) == (0, 255)
    np.testing.assert_array_equal(dataset.y_train, np.arange(50) % 4)
    # Floats stay as stored, gray images of uint8 get a channel.
    for shape, kind in (((7, 5), float), ((9,), float), ((7, 5), np.uint8)):
        x = np.random.default_rng(0).normal(9, size=(50, *shape)).astype(kind)
        y_test = np.array([0, 3, 0, 3, 1], np.uint8)
        path = write(tmp_path, x_train=x, x_test=x[:5], y_test=y_test)
        dataset = load("npz", file=path)
        gray = (1,) if kind == np.uint8 else ()
        assert dataset.x_train.shape == (50, *shape, *gray)
        assert dataset.std == (255 if gray else 1)
        np.testing.assert_array_equal(
            dataset.x_train.reshape(x.shape), x.astype(np.float32)
        )
        assert dataset.y_test.tolist() == [0, 3, 0, 3, 1]
        assert dataset.y_test.dtype == np.int32


BAD = np.ones((50, 4))
BAD[7, 2] = np.nan
X, Y = np.ones((50, 4)), np.arange(50) % 4


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("y_test", None, "y_test is not a file in the archive.*; expected"),
        ("x_train", X, r"x_test has samples uint8 .*, x_train float64 \(4,\)"),
        ("x_train", -np.ones((50, 4), int), "holds -1 at row 0; expected tokens"),
        ("x_train", BAD, r"x_train holds nan at row 7; expected"),
        ("x_train", np.array([{}] * 50), "Object arrays .*plain arrays x_train"),
        ("y_train", Y[:49], r"y_train has shape \(49,\); expected \[50\]"),
        ("y_test", np.arange(5), "y_test holds 4 at row 4; expected 0"),
    ],
)
def test_malformed_npz(tmp_path, key, array, message):
    path = write(tmp_path, **{key: array})
    with pytest.raises(UserError, match=message) as error:
        load("npz", file=path)
    assert path in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_npz(tmp_path):
    path = pathlib.Path(write(tmp_path))
    whole = path.read_bytes()
    middle = len(whole) // 3
    flipped = whole[:middle] + b"\xff\x00\xff" + whole[middle + 3 :]
    for content in (whole[:middle], flipped, b"hello"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read .* plain arrays") as error:
            load("npz", file=str(path))
        assert str(path) in str(error.value) and "\n" not in str(error.value)
