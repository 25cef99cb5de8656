"""All random streams: their keys and first draws differ, and nothing goes past them."""

import ast
import importlib
import pathlib

import jax
import numpy as np

from tsfl_jax import data, rng
from tsfl_jax.config import Config
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.prepare import prepare
from tsfl_jax.timeline import fleet

PACKAGE = pathlib.Path(rng.__file__).parent
SEEDS = (0, 1, 2, 2**32 - 1)
VARYING = ("iterations", "downloads", "uploads")


def test_first_draws_on_the_host_are_pairwise_different():
    streams = {
        (seed, name): rng.generator(seed, name)
        for seed in SEEDS
        for name in rng.STREAMS
    }
    # What modules spawn from a stream, and seeds that NumPy takes for each other.
    for name in rng.STREAMS.keys() - {"digits test set"}:
        for i, child in enumerate(rng.generator(0, name).spawn(5)):
            streams[name, i] = child
    streams["plain", 1] = np.random.default_rng([0, 1])
    first = {name: stream.integers(2**63) for name, stream in streams.items()}
    assert len(set(first.values())) == len(first)


def test_keys_on_the_devices_are_pairwise_different():
    words = np.asarray(jax.jit(all_keys)())
    assert len(np.unique(words, axis=0)) == len(words) > 4 * len(rng.STREAMS)
    assert (rng.keys(rng.key(1), "rule")[0] == rng.fold(rng.key(1), "rule")).all()


def all_keys():
    """The words of keys for all purposes, as one program."""
    keys = [rng.keys(rng.key(seed), *rng.STREAMS) for seed in SEEDS]
    # Below a stream and an interval: a client's own streams; none is an index's key.
    for stream in ("training", "estimates"):
        interval = jax.random.fold_in(rng.fold(rng.key(0), stream), 3)
        keys.append(jax.random.fold_in(interval, 5)[None])
        keys.append(rng.keys(jax.random.fold_in(interval, 5), *rng.STREAMS))
    # What the theory report splits: a split is a fold by another name.
    keys.append(jax.random.split(rng.fold(rng.key(0), "theory report"), 64))
    return jax.numpy.concatenate([jax.random.key_data(k) for k in keys])


def test_only_one_module_makes_generators_and_keys():
    made = {"np.random.default_rng", "np.random.SeedSequence", "jax.random.key"}
    made |= {"np.random.RandomState", "jax.random.PRNGKey", "np.random.Generator"}
    makers, used = ("generator", "fold", "keys", "hashed", "uniforms"), set()
    for path in (*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "studies").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or path.stem == "rng":
                continue
            name = ast.unparse(node.func)
            assert name not in made or PACKAGE not in path.parents, (path, name)
            if name.split(".")[-1] in makers:
                used |= {getattr(part, "value", None) for part in node.args[1:]}
    # Every stream is used; those whose names are put together are listed here.
    whole = {f"synthetic {p}" for p in ("prototypes", "train samples", "test samples")}
    whole |= {"train subset", "test subset"}
    whole |= {f"client {n}" for n in (*fleet.UNITS, *VARYING)}
    used = {name for name in used if isinstance(name, str)}
    assert used | whole == set(rng.STREAMS)


def test_no_two_draws_of_an_experiment_start_alike(monkeypatch):
    """What two purposes draw has never the same beginning, whatever the module."""
    # Importing it draws numbers that are not the experiment's.
    importlib.import_module("sklearn.datasets")
    started, make = [], np.random.default_rng

    def recorded(*args):
        made = make(*args)
        started.append(str(made.bit_generator.state["state"]))
        return made

    monkeypatch.setattr(np.random, "default_rng", recorded)
    config = Config(seed=2, num_intervals=5, num_clients=4, batch_size=4)
    config.data.name, config.data.shape = "synthetic", (4, 4, 1)
    config.schedule.data_size, config.schedule.free_riders = 10, 1
    config.timeline.framework = "tsfl"
    prepare.prepare(config)
    data.load(DataConfig(train_size=50, test_size=20))
    # Synthetic data 3, sizes, fleet, framework, riders, partition, who is asked in 5
    # intervals; digits and two subsets.
    assert len(started) == len(set(started)) == 16
