"""Data sets: TFDS without TensorFlow, npz, digits, synthetic, and every mistake."""

import http.server
import os
import pathlib
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from tsfl_jax import data
from tsfl_jax.components import Part
from tsfl_jax.data import builtin, in_memory, tfds, tfds_cache
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import UserError

SHAPES = {
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
    "svhn_cropped": (32, 32, 3),
}

# Runs in a process of its own because TensorFlow is slow to import and warns. Only
# the download step of TFDS's own builders is replaced, by a few random images.
PREPARE = """
import pathlib, sys
import numpy as np
import tensorflow_datasets as tfds
from tsfl_jax import data
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.data import tfds as tfds_source
from tsfl_jax.types import UserError

root = pathlib.Path(sys.argv[1])
tfds_source._unreachable = lambda url: ""

def broken(self, urls):
    for folder in (self._download_dir, self._download_dir / "mnist"):
        (folder / "a.tmp.1").mkdir(parents=True)
        (folder / "a.tmp.1" / "half").write_text("half a file")
    raise ConnectionError("the line\\nbroke")

download = tfds.download.DownloadManager.download_and_extract
tfds.download.DownloadManager.download_and_extract = broken
try:
    data.load(DataConfig("mnist", str(root / "new" / "folder")))
except UserError as error:
    (root / "failed.txt").write_text(str(error))
tfds.download.DownloadManager.download_and_extract = download

def examples(shape, count, seed):
    rng = np.random.default_rng(seed)
    for i in range(count):
        row = {"image": rng.integers(0, 256, shape, np.uint8), "label": i % 10}
        if shape[2] == 3:
            row["id"] = str(i)
        yield i, row

for name in ("mnist", "fashion_mnist", "cifar10", "svhn_cropped"):
    builder = tfds.builder(name, data_dir=root)
    shape = builder.info.features["image"].shape
    type(builder)._split_generators = lambda self, manager, shape=shape: {
        "train": examples(shape, 50, 0), "test": examples(shape, 20, 1)
    }
    held = data.load(DataConfig(name, str(root)))
    np.savez(root / f"{name}.npz", *held[1:5])
assert "tensorflow" in sys.modules  # else the reading test below proves nothing
tfds.builder("mnist", data_dir=root / "other").download_and_prepare()
"""

READ = """
import sys
import numpy as np
from tsfl_jax import data
from tsfl_jax.data.settings import DataConfig
for name in ("mnist", "fashion_mnist", "cifar10", "svhn", "svhn_cropped"):
    held = data.load(DataConfig(name, sys.argv[1], download=False))
    np.savez(f"{sys.argv[2]}/{name}.npz", *held[1:5])
assert "tensorflow" not in sys.modules
"""


# A process in which the extra is not installed.
WITHOUT_TFDS = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("tensorflow_datasets", "tensorflow", "array_record",
                                  "importlib_resources", "requests"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Refuse())
from tsfl_jax import data
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import UserError
for line in sys.argv[1:]:
    name, root, download = line.split(",")
    try:
        held = data.load(DataConfig(name, root, download=download == "True"))
        print(data.fingerprint(*held[1:5]))
    except UserError as error:
        print(error)
"""


def run_python(code, *args):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A data folder with all four data sets in TFDS's own format.

    Slow, as are the tests that use it: TensorFlow is imported and writes them.
    """
    pytest.importorskip("tensorflow_datasets", reason="the extra tfds")
    root = tmp_path_factory.mktemp("tfds")
    run_python(PREPARE, root)
    return root


@pytest.fixture
def mnist(prepared, tmp_path):
    """A copy of the prepared MNIST that a test may damage, without caches."""
    source = prepared / "mnist" / "3.0.1"
    folder = tmp_path / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if not file.name.startswith("tsfl_cache"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def expected(shape, count, seed):
    """What `examples` above makes, in its order."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, 256, shape, np.uint8) for _ in range(count)])


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def load(name, seed=0, **settings):
    return data.load(DataConfig(name, **settings), seed)


@pytest.mark.slow
def test_tfds_is_read_without_tensorflow(prepared, tmp_path):
    for name in SHAPES:  # so that files are decoded, not the caches of preparing
        for cache in (prepared / name).glob("*/tsfl_cache_*"):
            cache.unlink()
    done = run_python(READ, prepared, tmp_path)
    assert done.stdout == "" and done.stderr == ""
    for name, shape in SHAPES.items():
        with np.load(tmp_path / f"{name}.npz") as held:
            read = [held[k] for k in held.files]
        for x, y, count, seed in ((*read[:2], 50, 0), (*read[2:], 20, 1)):
            assert x.dtype == np.uint8 and x.shape == (count, *shape)
            # TFDS shuffles; find each image among those that were written.
            truth = expected(shape, count, seed)
            same = (x[:, None] == truth[None]).reshape(count, count, -1).all(-1)
            assert (same.sum(1) == 1).all()
            assert y.dtype == np.int32
            np.testing.assert_array_equal(y, same.argmax(1) % 10)
    assert (tmp_path / "svhn.npz").read_bytes()  # the short name is understood


@pytest.mark.slow
def test_failed_preparing_leaves_nothing(prepared):
    text = (prepared / "failed.txt").read_text()
    assert "the line broke" in text and "\n" not in text
    assert str(prepared / "new" / "folder") in text and "digits" in text
    assert not (prepared / "new").exists()


@pytest.mark.slow
def test_other_file_format(prepared):
    with pytest.raises(UserError, match="as tfrecord") as error:
        load("mnist", dir=str(prepared / "other"))
    assert str(prepared / "other" / "mnist" / "3.0.1") in one_line(error)


@pytest.mark.slow
def test_cache(mnist):
    root = str(mnist.parents[1])
    first = load("mnist", dir=root)
    cache = mnist / "tsfl_cache_train.npz"
    assert sorted(p.name for p in mnist.glob("tsfl*")) == [
        "tsfl_cache_test.npz",
        "tsfl_cache_train.npz",
    ]
    # A marked cache shows when it is used, ...
    marked = np.zeros_like(first.x_train)
    forge(cache, marked, first.y_train)
    np.testing.assert_array_equal(load("mnist", dir=root).x_train, marked)
    # ... also where the files were copied, ...
    file = next(mnist.glob("mnist-train*"))
    file.touch()
    np.testing.assert_array_equal(load("mnist", dir=root).x_train, marked)
    # ... and that it is not once their content has changed, at the same size and time.
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1  # after the last record
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = load("mnist", dir=root)
    np.testing.assert_array_equal(again.x_train, first.x_train)
    np.testing.assert_array_equal(again.y_train, first.y_train)


@pytest.mark.slow
def test_decoded_data_are_read_without_the_extra(prepared, mnist, tmp_path):
    """A cache is enough; all else names the extra and the other ways."""
    first = load("mnist", dir=str(prepared))
    svhn = load("svhn", dir=str(prepared))
    whole, other = prepared, mnist.parents[1]
    (tmp_path / "empty").mkdir()
    lines = [
        f"mnist,{whole},True",
        f"svhn,{whole},False",
        f"mnist,{other},True",
        f"mnist,{tmp_path / 'empty'},True",
        f"mnist,{tmp_path / 'empty'},False",
    ]
    done = run_python(WITHOUT_TFDS, *lines)
    shown = done.stdout.splitlines()
    assert done.stderr == ""
    assert shown[0] == data.fingerprint(*first[1:5])
    assert shown[1] == data.fingerprint(*svhn[1:5])
    install = "pip install 'tsfl_jax[tfds]'"
    assert str(mnist) in shown[2] and "not decoded" in shown[2] and install in shown[2]
    assert f"no mnist in {tmp_path / 'empty'}" in shown[3] and install in shown[3]
    assert "digits" in shown[3] and "--config.data.dir" in shown[3]
    assert "download=False" in shown[4] and install not in shown[4]
    # A cache that does not fit to the files counts as none.
    load("mnist", dir=str(other))
    assert tfds_cache.load(mnist, "mnist") is not None
    file = next(mnist.glob("mnist-test*"))
    file.write_bytes(file.read_bytes() + b"more")
    assert tfds_cache.load(mnist, "mnist") is None
    (mnist / "features.json").write_text("{}")
    assert tfds_cache.load(mnist, "mnist") is None


def test_preparing_without_tensorflow_names_the_extra(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="the extra tfds")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UserError, match=r"pip install 'tsfl_jax\[tfds\]'") as error:
        load("mnist", dir=str(tmp_path))
    assert f"no mnist in {tmp_path}" in one_line(error)
    assert not list(tmp_path.iterdir())


def test_the_newest_prepared_version_is_found(tmp_path):
    assert tfds_cache.find(tmp_path / "missing", "mnist") is None
    for version in ("3.0.1", "3.0.10", "3.0.2", "3.0.11.incomplete", "downloads"):
        folder = tmp_path / "mnist" / version
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").touch()
    (tmp_path / "mnist" / "4.0.0").mkdir()  # half prepared
    assert tfds_cache.find(tmp_path, "mnist") == tmp_path / "mnist" / "3.0.10"


def forge(cache, image, label, **more):
    """Another content with the digest of the files."""
    with np.load(cache) as held:
        origin = held["origin"]
    np.savez(cache, **({"image": image, "label": label, "origin": origin} | more))


IMAGES, LABELS = np.zeros((50, 28, 28, 1), np.uint8), np.zeros(50, np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "forged",
    [
        {"image": IMAGES[:5], "label": LABELS},
        {"label": LABELS + 77},
        {"image": IMAGES[..., 0]},
        {"origin": np.array("train:5:1")},
    ],
)
def test_a_forged_cache_is_rebuilt(mnist, forged):
    root = str(mnist.parents[1])
    first = load("mnist", dir=root)
    cache = mnist / "tsfl_cache_train.npz"
    forge(cache, **({"image": IMAGES, "label": LABELS} | forged))
    again = load("mnist", dir=root)
    np.testing.assert_array_equal(again.x_train, first.x_train)
    np.testing.assert_array_equal(again.y_train, first.y_train)
    with np.load(cache) as held:
        np.testing.assert_array_equal(held["label"], first.y_train)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_cache_is_rebuilt(mnist, damage):
    root = str(mnist.parents[1])
    first = load("mnist", dir=root)
    cache = mnist / "tsfl_cache_train.npz"
    whole = cache.read_bytes()
    middle = len(whole) // 2
    cache.write_bytes(
        {
            "truncate": whole[:middle],
            "flip": whole[:middle] + b"\xff\x00\xff" + whole[middle + 3 :],
        }[damage]
    )
    again = load("mnist", dir=root)
    np.testing.assert_array_equal(again.x_train, first.x_train)
    with np.load(cache) as held:
        np.testing.assert_array_equal(held["image"], first.x_train)


@pytest.mark.slow
def test_read_only_folder_is_not_cached(mnist, monkeypatch):
    def refuse(**kwargs):
        raise PermissionError(kwargs)

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert len(load("mnist", dir=str(mnist.parents[1])).y_test) == 20
    assert not list(mnist.glob("tsfl*"))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["mnist-test", "dataset_info.json"])
def test_damaged_tfds_files(mnist, file):
    path = next(mnist.glob(f"{file}*"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read") as error:
        load("mnist", dir=str(mnist.parents[1]))
    assert str(mnist.parent) in one_line(error)


def test_half_prepared_folder(tmp_path):
    pytest.importorskip("tensorflow_datasets", reason="the extra tfds")
    folder = tmp_path / "cifar10" / "3.0.2"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match="not a complete cifar10"):
        load("cifar10", dir=str(tmp_path))


def test_offline(tmp_path, monkeypatch, capfd, caplog):
    pytest.importorskip("tensorflow_datasets", reason="the extra tfds")
    import requests

    def get(url, **kwargs):
        assert kwargs["timeout"] <= 10
        raise requests.ConnectionError(url)

    monkeypatch.setattr(requests, "get", get)
    root = tmp_path / "data"
    with pytest.raises(UserError) as error:
        load("svhn", dir=str(root))
    text = one_line(error)
    for part in (str(root), "no connection", "--config.data.dir", "digits", "npz"):
        assert part in text
    assert not root.exists()
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_download_forbidden(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "default"))
    with pytest.raises(UserError, match="download=False") as error:
        load("mnist", download=False)
    assert str(tmp_path / "default") in one_line(error)


def test_data_dir_that_cannot_be_written(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="the extra tfds")
    monkeypatch.setattr(tfds, "_unreachable", lambda url: "")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="a file; expected a folder"):
        load("mnist", dir=str(file))
    with pytest.raises(UserError, match="nothing can be written") as error:
        load("mnist", dir=str(file / "below"))
    assert str(file / "below") in one_line(error)


@pytest.mark.parametrize(("status", "answer"), [(200, ""), (403, "answers HTTP 403")])
def test_unreachable(monkeypatch, status, answer):
    pytest.importorskip("requests", reason="the extra tfds")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            del args

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/file"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            found = tfds._unreachable(url)
        finally:
            server.shutdown()
            thread.join()
    assert found.endswith(answer) and bool(found) == bool(answer)
    assert "no connection to 127.0.0.1" in tfds._unreachable(url)  # now shut


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


@pytest.mark.parametrize("shape", [(28, 28, 1), (5,), (4, 6)])
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


def test_synthetic_can_be_learned_but_not_perfectly():
    dataset = load("synthetic", seed=5)
    x_train = dataset.x_train.reshape(4096, -1) / 255.0
    x_test = dataset.x_test.reshape(1024, -1) / 255.0
    means = np.stack([x_train[dataset.y_train == k].mean(0) for k in range(10)])
    distance = ((x_test[:, None] - means) ** 2).sum(-1)
    accuracy = (distance.argmin(1) == dataset.y_test).mean()
    assert 0.8 < accuracy < 0.97


def test_a_new_data_set_is_a_factory_and_a_name(monkeypatch):
    """The worked example of docs/architecture.md."""

    def blobs(settings, seed):
        generator = np.random.default_rng(seed)
        y = np.arange(60) % settings.num_classes
        x = y[:, None] + generator.normal(size=(60, 2))
        return in_memory.make_dataset(x[:50], y[:50], x[50:], y[50:], name="blobs")

    monkeypatch.setitem(builtin.DATASETS, "blobs", Part(blobs))
    found = load("blobs", num_classes=3, train_size=20, normalize="standard")
    assert found.name == "blobs" and found.num_classes == 3
    assert found.x_train.shape == (20, 2) and found.x_test.shape == (10, 2)
    np.testing.assert_allclose(found.mean, found.x_train.mean(axis=0), rtol=1e-5)


def test_subsets_are_nested_mixed_and_independent_of_the_seed(tmp_path):
    whole = load("digits")
    small, large = (load("digits", train_size=k, seed=k) for k in (200, 600))
    rows = lambda d: {x.tobytes() for x in d.x_train}  # noqa: E731
    assert len(rows(small)) == 200 and rows(small) < rows(large) < rows(whole)
    by_class = write(tmp_path, y_train=np.arange(50) // 10)
    mixed = load("npz", file=by_class, train_size=25)
    assert (
        np.bincount(mixed.y_train, minlength=5).min() >= 2
    )  # 5 of each class expected
    full = load("digits", train_size=1438)
    np.testing.assert_array_equal(full.x_train, whole.x_train)
    np.testing.assert_array_equal(full.y_train, whole.y_train)


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
        (rng.normal(3, 2, (50, 4)) * 1e37, (4,)),
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


X, Y = np.random.default_rng(0).uniform(size=(20, 8, 8, 3)), np.arange(20) % 3
FIRST = np.ones((20, 3, 8, 8))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, 0 * Y + 2, "all training labels are 2"),
        (255 * X, Y, "floats up to 25"),
        (255 * X.reshape(20, -1), Y, "floats up to 25"),
        (FIRST, Y, "[3, 8, 8] look like images with channels first"),
        (np.uint8(FIRST[:, :1]), Y, "[1, 8, 8] look like images with channels first"),
        (X, Y, ""),
        (X - 0.5, Y, ""),
        (np.uint8(255 * X), Y, ""),
        (255 * (X - 0.5), Y, ""),
        (1000 * X, Y, ""),
        (np.ones((20, 3, 3, 8)), Y, ""),
    ],
)
def test_slips_in_valid_data_are_noted(x, y, words):
    made = in_memory.make_dataset(x, y, x, y, num_classes=3)
    notes = in_memory.notes(made, True)
    assert len(notes) == bool(words) and words in "".join(notes)
    assert in_memory.notes(made, False) == (() if "labels" in words else notes)
    scaled = made._replace(std=np.float32(255))
    assert in_memory.notes(scaled, True) == (() if "floats" in words else notes)


@pytest.mark.parametrize(
    ("shape", "kind", "options", "seen"),
    [
        ((6, 5), np.float32, {}, (6, 5)),  # five features of six moments
        ((6, 5), np.uint8, {}, (6, 5, 1)),  # gray images
        ((6, 5), np.uint8, {"add_channel": False}, (6, 5)),
        ((6, 5), np.float32, {"add_channel": True}, (6, 5, 1)),
        ((4, 6, 5, 2), np.float32, {}, (4, 6, 5, 2)),  # volumes
        ((4, 6, 5), np.uint8, {"add_channel": True}, (4, 6, 5, 1)),
    ],
)
def test_axes_follow_from_the_dtype_or_are_given(shape, kind, options, seen):
    x, y = np.ones((6, *shape), kind), np.arange(6) % 3
    made = in_memory.make_dataset(x, y, x[:2], y[:2], name="mine", **options)
    assert made.x_train.shape == (6, *seen) and made.x_test.shape == (2, *seen)
    checked = in_memory.check(in_memory.check(made))
    assert checked.x_train.shape == made.x_train.shape
    assert repr(made) == repr(checked)
    sees = ", ".join(map(str, seen))
    assert repr(made) == (
        f"mine: 6 training and 2 test samples {np.dtype(kind)} [{sees}], 3 classes; "
        f"a network sees float32 [B, {sees}]"
    )


def test_data_of_tokens_and_targets_say_so():
    x = np.ones((6, 4), int)
    made = in_memory.make_dataset(x, np.ones((6, 3)) / 9, x, np.ones((6, 3)))
    assert str(made).endswith(
        "int32 [4], targets [3] of a regression; a network sees int32 [B, 4]"
    )


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
X = np.ones((50, 4))
Y = np.arange(50) % 4


def with_label(value):
    y = Y.astype(type(value))
    y[3] = value
    return y


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "y_test is not a file in the archive.*; expected"),
        ({"x_train": np.ones(50)}, r"x_train has shape \(50,\)"),
        ({"y_test": np.zeros(5)}, r"y_test is float64; .*; use y_test.astype\(int\)"),
        ({"x_train": np.ones((50, 0))}, r"x_train has shape \(50, 0\)"),
        (
            {"x_train": X},
            r"x_test has .*, x_train float64 \(4,\)",
        ),
        (
            {"x_train": np.ones((50, 6, 6, 3))},
            "x_test has .* uint8 .*, x_train float64",
        ),
        ({"x_train": -np.ones((50, 4), int)}, "holds -1 at row 0; expected tokens"),
        ({"x_train": np.ones((50, 4), bool)}, "x_train is bool of .*; expected uint8"),
        ({"x_train": BAD}, r"x_train holds nan at row 7; expected"),
        (
            {"x_train": np.array([{}] * 50)},
            "Object arrays .*plain arrays x_train",
        ),
        ({"y_train": Y[:49]}, r"y_train has shape \(49,\); expected \[50\]"),
        ({"y_train": np.eye(4, dtype=int)[Y]}, r"y_train has shape \(50, 4\)"),
        ({"y_train": with_label(-1)}, "y_train holds -1 at row 3"),
        ({"y_train": with_label(np.inf)}, "y_train holds inf at row 3"),
        ({"y_train": with_label(10**6)}, "label of y_train, at row 3, is 1000000"),
        ({"y_train": np.array(["a"] * 50)}, "y_train is <U1"),
        (
            {"y_test": np.array([0, 1, 2, 3, 4])},
            "y_test holds 4 at row 4; expected 0",
        ),
    ],
)
def test_malformed_npz(tmp_path, changes, message):
    path = write(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        load("npz", file=path)
    assert path in one_line(error)


def test_files_that_are_no_npz(tmp_path):
    path = pathlib.Path(write(tmp_path))
    with pytest.raises(UserError, match=r"no such file; did you mean 'mine\.npz'"):
        load("npz", file=str(tmp_path / "mien.npz"))
    with pytest.raises(UserError, match="No such file or directory"):
        load("npz", file=str(tmp_path / "none" / "mine.npz"))
    whole = path.read_bytes()
    middle = len(whole) // 3
    damaged = {
        "truncated": whole[:middle],
        "flipped": whole[:middle] + b"\xff\x00\xff" + whole[middle + 3 :],
        "text": b"hello",
        "empty": b"",
    }
    for content in damaged.values():
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read .* plain arrays") as error:
            load("npz", file=str(path))
        assert str(path) in one_line(error)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "no array")
    with pytest.raises(UserError, match="x_train is not a file in the archive"):
        load("npz", file=str(path))
    with open(path, "wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(UserError, match="expected an .npz file"):
        load("npz", file=str(path))
