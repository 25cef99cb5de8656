"""Data sets of TFDS: prepared and decoded once, read without TensorFlow later.

Most tests are slow: TensorFlow is imported and writes the files.
"""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from tsfl_jax import data
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import UserError

SHAPES = {"mnist": (28, 28, 1), "svhn_cropped": (32, 32, 3)}

# Runs in a process of its own because TensorFlow is slow to import and warns. Only
# the download step of TFDS's own builders is replaced, by a few random images.
PREPARE = """
import pathlib, sys
import numpy as np
import tensorflow_datasets as tfds
from tsfl_jax import data
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.data import tfds as tfds_source

root = pathlib.Path(sys.argv[1])
tfds_source._check_connection = lambda url: None

def examples(shape, count, seed):
    rng = np.random.default_rng(seed)
    for i in range(count):
        row = {"image": rng.integers(0, 256, shape, np.uint8), "label": i % 10}
        yield i, row | ({"id": str(i)} if shape[2] == 3 else {})

for name in ("mnist", "svhn_cropped"):
    builder = tfds.builder(name, data_dir=root)
    shape = builder.info.features["image"].shape
    type(builder)._split_generators = lambda self, manager, shape=shape: {
        "train": examples(shape, 50, 0), "test": examples(shape, 20, 1)
    }
    data.load(DataConfig(name, str(root)))
assert "tensorflow" in sys.modules  # else the reading test below proves nothing
"""

READ = """
import sys
import numpy as np
from tsfl_jax import data
from tsfl_jax.data.settings import DataConfig
for name in ("mnist", "svhn", "svhn_cropped"):
    dataset = data.load(DataConfig(name, sys.argv[1], download=False))
    np.savez(f"{sys.argv[2]}/{name}.npz", *dataset[1:5])
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
        dataset = data.load(DataConfig(name, root, download=download == "True"))
        print(data.digest(dataset))
    except UserError as error:
        print(error)
"""


def run_python(code, *args):
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A data folder with two data sets in TFDS's own format."""
    pytest.importorskip("tensorflow_datasets", reason="the extra tfds")
    root = tmp_path_factory.mktemp("tfds")
    run_python(PREPARE, root)
    return root


@pytest.fixture
def mnist(prepared, tmp_path):
    """A copy of the prepared MNIST that a test may damage, without caches."""
    ignore = shutil.ignore_patterns("tsfl_cache*")
    folder = tmp_path / "mnist" / "3.0.1"
    return shutil.copytree(prepared / "mnist" / "3.0.1", folder, ignore=ignore)


def written(shape, count, seed):
    """What `examples` above makes, in its order."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, 256, shape, np.uint8) for _ in range(count)])


def load(name, folder, **settings):
    return data.load(DataConfig(name, str(folder), **settings))


def refused(name, folder, *words, **settings):
    with pytest.raises(UserError) as error:
        load(name, folder, **settings)
    text = str(error.value)
    assert "\n" not in text
    for word in (f"no {name}", str(folder), "--config.data.dir", "digits", *words):
        assert word in text


@pytest.mark.slow
def test_tfds_is_read_without_tensorflow(prepared, tmp_path):
    for name in SHAPES:  # so that files are decoded, not the caches of preparing
        for cache in (prepared / name).glob("*/tsfl_cache_*"):
            cache.unlink()
    run = run_python(READ, prepared, tmp_path)
    assert run.stdout == "" and run.stderr == ""
    for name, shape in SHAPES.items():
        with np.load(tmp_path / f"{name}.npz") as file:
            arrays = [file[k] for k in file.files]
        for x, y, count, seed in ((*arrays[:2], 50, 0), (*arrays[2:], 20, 1)):
            assert x.dtype == np.uint8 and x.shape == (count, *shape)
            # TFDS shuffles; find each image among those that were written.
            truth = written(shape, count, seed)
            same = (x[:, None] == truth[None]).reshape(count, count, -1).all(-1)
            assert (same.sum(1) == 1).all()
            assert y.dtype == np.int32
            np.testing.assert_array_equal(y, same.argmax(1) % 10)
    assert (tmp_path / "svhn.npz").read_bytes()  # the short name is understood


@pytest.mark.slow
def test_a_cache_is_used_while_it_is_whole(mnist):
    root = mnist.parents[1]
    first = load("mnist", root)
    cache = mnist / "tsfl_cache_train.npz"
    assert {p.name for p in mnist.glob("tsfl*")} == {cache.name, "tsfl_cache_test.npz"}
    # A marked cache shows that it is used.
    with np.load(cache) as file:
        arrays = dict(file)
    np.savez(cache, **arrays | {"image": arrays["image"] * 0})
    assert not load("mnist", root).x_train.any()
    # A damaged one is made anew.
    whole = cache.read_bytes()
    middle = len(whole) // 2
    for damaged in (
        whole[:middle],
        whole[:middle] + b"\xff\0\xff" + whole[middle + 3 :],
    ):
        cache.write_bytes(damaged)
        np.testing.assert_array_equal(load("mnist", root).x_train, first.x_train)
        with np.load(cache) as file:
            np.testing.assert_array_equal(file["image"], first.x_train)


@pytest.mark.slow
def test_decoded_data_are_read_without_the_extra(prepared, mnist, tmp_path):
    """A cache is enough; all else names the extra and the other ways."""
    first, svhn = load("mnist", prepared), load("svhn", prepared)
    (tmp_path / "empty").mkdir()
    run = run_python(
        WITHOUT_TFDS,
        f"mnist,{prepared},True",
        f"svhn,{prepared},False",
        f"mnist,{mnist.parents[1]},True",
        f"mnist,{tmp_path / 'empty'},True",
        f"mnist,{tmp_path / 'empty'},False",
    )
    lines = run.stdout.splitlines()
    assert run.stderr == ""
    assert lines[:2] == [data.digest(first), data.digest(svhn)]
    for line in lines[2:]:
        assert "pip install 'tsfl_jax[tfds]'" in line and "IDX files" in line
    assert "download=False" in lines[4] and "No module named" in lines[3]


def test_preparing_without_a_network(tmp_path, monkeypatch, capfd, caplog):
    pytest.importorskip("tensorflow_datasets", reason="the extra tfds")
    import requests

    def get(url, **kwargs):
        assert kwargs["timeout"] <= 10
        raise requests.ConnectionError(url)

    monkeypatch.setattr(requests, "get", get)
    refused("svhn_cropped", tmp_path / "data", "ConnectionError", "npz")
    assert capfd.readouterr() == ("", "") and not caplog.records
    assert not list(tmp_path.iterdir())
    (tmp_path / "cifar10" / "3.0.2").mkdir(parents=True)  # half prepared
    refused("cifar10", tmp_path, "is damaged or has another format, delete it")
