"""Histories of ten experiments, pinned: a change of structure changes no number.

``PIN=1 python -m pytest -n 0 tests/test_pinned.py`` pins them anew. Numbers are
compared on every machine, bits only where XLA compiles for the same processor.
"""

import functools
import hashlib
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.config import Config, replace
from tsfl_jax.run import runner

PATH = pathlib.Path(__file__).with_name("pinned.json")
SMALL = {
    "num_intervals": 4,
    "num_clients": 6,
    "batch_size": 8,
    "lr": 0.05,
    "report_every": 2,
    "schedule.data_size": 24,
    "model.hidden": 8,
    "devices": 1,
}
CLOCK = {"num_intervals": 10, "timeline.upload": "uniform(0,0.5)"}


def _config(**changes) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return replace(Config(), SMALL | named)


def _images() -> tsfl_jax.Dataset:
    """Samples in the shape of MNIST."""
    rng = np.random.default_rng(0)
    labels = np.arange(240) % 10
    images = rng.integers(0, 256, (240, 28, 28, 1)).astype(np.uint8)
    images[np.arange(240), labels] = 255
    cut = 160
    return tsfl_jax.make_dataset(images[:cut], labels[:cut], images[cut:], labels[cut:])


# With XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 its test loss differs by 4.1e-4 (pools' maxima
# turn last bits into other gradients), what the other experiments have by under 2e-6.
RTOL = {"mnist_shape": 1e-3}


def _run(config: Config, **options) -> dict[str, np.ndarray]:
    return tsfl_jax.simulate(config, **options).history


def _mnist_shape() -> dict[str, np.ndarray]:
    return _run(_config(model__name="mnist_cnn", num_clients=4), dataset=_images())


def _framework(name: str, **changes) -> Callable[[], dict[str, np.ndarray]]:
    settings = {n.replace(".", "__"): v for n, v in CLOCK.items()} | changes
    return lambda: _run(_config(timeline__framework=name, **settings))


def _sweep() -> dict[str, np.ndarray]:
    swept = {"algorithm": ["dms", "fedavg"], "seed": [0, 1], "lr": [0.02, 0.1]}
    return tsfl_jax.sweep(_config(), swept).history


def _resumed() -> dict[str, np.ndarray]:
    """Ended by a signal after the first call of two intervals, and resumed."""
    exp = runner.build(_config())
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(KeyboardInterrupt):
            runner.run(exp, pathlib.Path(folder), stop=lambda: True)
        return runner.run(exp, pathlib.Path(folder)).history


def _custom_rule() -> dict[str, np.ndarray]:
    rule = tsfl_jax.rule(lambda situation: jnp.sqrt(situation.tau))
    return _run(_config(), aggregator=rule)


EXPERIMENTS: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "digits": lambda: _run(_config()),
    "mnist_shape": _mnist_shape,
    "afl": _framework("afl", algorithm="fedasync"),
    "fedat": _framework("fedat", algorithm="fedavg", timeline__tiers=2),
    "scaffold": lambda: _run(_config(algorithm="scaffold", momentum=0.0)),
    "sweep": _sweep,
    "resumed": _resumed,
    "two_devices": lambda: _run(_config(devices=2)),
    "custom_rule": _custom_rule,
    "robust": lambda: _run(_config(algorithm="krum", partition__kind="iid")),
}


def processor() -> str:
    """What XLA compiles for: the instructions that the processor knows."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    known = [line for line in lines if line.startswith(("model name", "flags"))][:2]
    digest = hashlib.sha256("".join(known).encode()).hexdigest()[:16]
    return f"{platform.machine()} {digest}, jax {jax.__version__}"


def _kept(history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What has no wall time in it, by name."""
    return {n: v for n, v in sorted(history.items()) if "wall" not in n}


@functools.cache
def measured(name: str) -> dict[str, dict]:
    """Sums and digests of the arrays of an experiment."""
    found = {}
    for key, values in _kept(EXPERIMENTS[name]()).items():
        finite = np.nan_to_num(np.asarray(values, np.float64), posinf=0, neginf=0)
        digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
        found[key] = {
            "sum": float(finite.sum()),
            "shape": list(np.shape(values)),
            "bits": digest[:16],
        }
    return found


@pytest.fixture(scope="module")
def pinned():
    """What is pinned; with PIN=1 in the environment it is pinned anew."""
    found = json.loads(PATH.read_text())
    yield found
    if os.environ.get("PIN"):
        found["processor"] = processor()
        PATH.write_text(json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n == "mnist_shape"))
        for n in EXPERIMENTS
    ],
)
def test_nothing_changed(name, pinned):
    found = measured(name)
    if os.environ.get("PIN"):
        pinned["experiments"][name] = found
        return
    if name in ("resumed", "two_devices"):  # on any processor
        assert found == measured("digits")
    wanted = pinned["experiments"][name]
    assert found.keys() - {"client"} == wanted.keys()  # whose the slots are: drawn
    same_bits = pinned["processor"] == processor()
    for key, value in wanted.items():
        assert found[key]["shape"] == value["shape"], key
        np.testing.assert_allclose(
            found[key]["sum"],
            value["sum"],
            rtol=RTOL.get(name, 1e-4),
            atol=1e-6,
            err_msg=key,
        )
        if same_bits:
            assert found[key]["bits"] == value["bits"], key
