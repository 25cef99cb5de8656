"""Wrong input is answered in one line that names what is wrong, before any work.

All in this process, none may start to train: values outside the declared ranges, tables
of settings, arguments of Python functions, and command lines (exit code 2).
"""

import math
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import optax
import pytest

import tsfl_jax
from tsfl_jax import __main__, config, host_memory
from tsfl_jax.config import validate
from tsfl_jax.prepare import prepare
from tsfl_jax.run import runner
from tsfl_jax.types import INT32_MAX, UserError

ROOT = pathlib.Path(__file__).parents[1]
HUGE = 10**400  # more than a float holds
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """What does not fit is the same everywhere."""
    monkeypatch.setattr(host_memory, "total", lambda: 8 * 10**9)


def changed(values: dict) -> config.Config:
    """A small config with these settings, whatever their type."""
    small = {"num_clients": 2, "num_intervals": 2, "batch_size": 4, "devices": 1}
    small |= {"schedule.data_size": 16, "compile_cache": "off"}
    return config.replace(config.Config(), small | values)


def answer(call) -> str:
    """The one line that a wrong call is answered with."""
    begun = time.monotonic()
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and message.strip() == message
    assert time.monotonic() - begun < 20, "an answer must not wait for work"
    return message


WRONG_TYPES = {
    bool: ["yes", 1, None],
    int: ["5", 1.5, True, None, [1]],
    float: ["0.1", None, [0.1]],
    str: [3, None],
    tuple: [4, (True,), (2.5,), ("a",)],
}


def outside(kind, declaration):
    """Values of the right type just outside of a declared range, or no name at all."""
    if declaration.choices:
        return [f"{[*declaration.choices][0]}x", ""]
    if kind is tuple:
        return [(INT32_MAX + 1,), (HUGE,)]
    low, high, above, below = declaration[2:6]
    if kind is int:
        most = high if high < INF else INT32_MAX
        return [v for v in (low - 1, most + 1, HUGE) if v > -INF]
    if kind is float:
        bounds = [low - 1e-3, high + 1e-3, above, below, *[1e-50] * (above == 0)]
        return [NAN, INF, -INF, 1e39, HUGE, *filter(math.isfinite, bounds)]
    return []


@pytest.mark.parametrize("name", config.SETTINGS)
def test_every_setting_has_its_declared_type_and_range(name):
    kind, declaration = config.SETTINGS[name]
    for value in WRONG_TYPES[kind]:
        message = answer(lambda value=value: validate(changed({name: value})))
        assert name in message and "expected" in message
    for value in outside(kind, declaration):
        message = answer(lambda value=value: validate(changed({name: value})))
        assert message.startswith(f"--config.{name}=")
        words = "unknown name" if declaration.choices else declaration.help
        assert words in message


SYNTHETIC = {"data.name": "synthetic", "data.shape": (4, 4, 1)}
TIMED = {"timeline.framework": "afl", "algorithm": "fedasync"}
DRAWN = {"schedule.kind": "distribution"}
BACKDOOR = {"attack.kind": "backdoor", "attack.share": 0.5}
COLLUDING = {"attack.kind": "alie", "attack.share": 0.5}
MNIST = {"data.name": "mnist", "data.download": False, "data.dir": "/nowhere"}
# Setting, its value, words that the answer must hold; other settings.
SETTINGS = [
    ("algorithm", "fedprx", "did you mean 'fedprox'", {}),
    ("data", {"name": "mnist"}, "DataConfig", {}),
    ("num_clients", 10**7, "memory", {"num_intervals": 10**6}),
    ("data.dir", "/nowhere", "no mnist", MNIST),
    ("data.file", "gone.npz", "No such file", {"data.name": "npz"}),
    ("data.shape", (100_000, 100_000, 3), "memory", SYNTHETIC),
    ("schedule.tau_groups", "gaus(2,1)", "expected normal(mean,std)", DRAWN),
    ("timeline.speed", "constant(1e-9)", "tasks and iterations", TIMED),
    ("attack.pattern", 9, "[8, 8, 1]", BACKDOOR),
    ("attack.target", 10, "10 classes; expected class numbers", BACKDOOR),
    ("train_all", False, "kind=alie needs the updates of all", COLLUDING),
    ("partition.online", True, "needs the same samples", BACKDOOR),
    ("attack.share", 0.5, "would be ignored with --config.attack.kind=none", {}),
]


@pytest.mark.parametrize(("name", "value", "words", "others"), SETTINGS)
def test_wrong_settings(name, value, words, others):
    message = answer(lambda: prepare.prepare(changed(others | {name: value})))
    assert words in message
    assert name.split(".")[-1] in message or str(value) in message


X, Y = np.zeros((8, 4, 4, 1), np.uint8), np.arange(8) % 2
FEW = tsfl_jax.make_dataset(X, Y, X, Y)
CONSTANTS = {"lr": 0.1, "smoothness": 1.0, "grad_sq_norm": 1.0, "grad_variance": 1.0}


def run(values=(), **parts):
    """A call of `simulate`."""
    return lambda: tsfl_jax.simulate(changed(dict(values)), **parts)


def swept(axes, values=(), **parts):
    """A call of `sweep`."""
    return lambda: tsfl_jax.sweep(changed(dict(values)), axes, **parts)


def weighted(**parts):
    """A call of `dms_weights`."""
    given = CONSTANTS | {"key": jax.random.key(0), "tau": np.array([1, 2])} | parts
    return lambda: tsfl_jax.dms_weights(given.pop("key"), given.pop("tau"), **given)


LARGE = {"num_clients": 1000, "num_intervals": 1000}
TOO_WIDE = {"model.hidden": 2 * 10**9}
# A call and words that its answer must hold.
CALLS = [
    (lambda: tsfl_jax.sweep(None, {"seed": [1]}), "got NoneType"),
    (run(optimizer=optax.adam), "lambda h: optax.sgd(h.lr)"),
    (run(aggregator="fedavg"), "expected a Aggregator or a function (info) -> weights"),
    (run(dataset=FEW._replace(y_train=Y + 5)), "y_train holds 5 at row 0"),
    (run(TOO_WIDE), "--config.model.hidden=2000000000, model.name=mlp"),
    (swept([{"seed": 1}, {"lrr": 0.1}]), "did you mean 'lr'"),
    (swept({"seed": range(1000)}, LARGE), "schedules and splits of 1,000 runs"),
    (lambda: tsfl_jax.make_dataset(X, Y[:, None], X, Y), "one class number per sample"),
    (weighted(tau=None), "tau has shape []: expected [N]"),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_wrong_calls(call, words):
    assert words in answer(call)


def tsfl(command, arguments, monkeypatch):
    """Runs ``tsfl COMMAND``; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["tsfl", command, *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    return stopped.value.code


SMALL = ["--config.num_clients=2", "--config.schedule.data_size=16"]
# Command, its arguments, words that the answer must hold. Files are those of `FILES`.
COMMANDS = [
    ("run", "--config=configs/smok.py", "no such file; did you mean 'smoke'"),
    ("run", "--config.momentun=0.9", "did you mean 'momentum'"),
    ("run", "--confg.lr=0.1", "did you mean --config.lr?"),
    ("run", "--config.lr=fast", "--config.lr=fast: 'fast' is not a number"),
    ("run", "--workdir=/dev/null/x", "choose another --workdir"),
    ("run", "--writer=csv,wanb", "writer 'wanb': unknown; did you mean 'wandb'?"),
    ("sweep", "", "which settings? add --sweep"),
    ("sweep", "--sweep_file=misspelt.yaml", "lrr=0.1: there is no such setting; did"),
    ("sweep", "--sweep=seed=0:2 --workdir=x --shard=2/2", "--shard=2/2: expected i/n"),
    ("rnu", "", "unknown command; did you mean 'run'?"),
]
FILES = {
    "misspelt.yaml": "[{lrr: 0.1}]",
}


@pytest.mark.parametrize(("command", "line", "words"), COMMANDS)
def test_wrong_commands(command, line, words, tmp_path, monkeypatch, capsys):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    arguments = line.split()
    if command in ("run", "sweep") and "--config=" not in line:
        arguments = [*SMALL, *arguments]
    assert tsfl(command, arguments, monkeypatch) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert words in last and last.startswith("tsfl") and f"{command}: " in last
    assert out == "" and "Traceback" not in err
    left = {path.name for path in tmp_path.rglob("*")} - {"runs", "__pycache__"}
    assert left == {*FILES}


def test_what_was_not_foreseen_to_be_too_much(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def full(*arguments, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: Unable")

    monkeypatch.setattr(runner, "build", full)
    assert tsfl("run", SMALL, monkeypatch) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "not enough memory" in last and "Unable" in last
