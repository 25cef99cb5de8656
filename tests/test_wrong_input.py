"""One table of wrong inputs: each is answered in one line that names what is wrong.

All in this process, none may start to train. Settings, arguments of Python functions,
and command lines, which end with exit code 2.
"""

import itertools
import pathlib
import sys
import time

import jax
import numpy as np
import optax
import pytest

import tsfl_jax
from tsfl_jax import __main__, config, host_memory, interrupts
from tsfl_jax.experiment import prepare, runner
from tsfl_jax.report import files
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[1]
LONG = "/tmp/" + 300 * "x"  # longer than a file name may be
HUGE = 10**400  # more than a float holds

SYNTHETIC = {"data.name": "synthetic", "data.shape": (4, 4, 1)}
TIMED = {"timeline.framework": "afl", "algorithm": "fedasync"}
LONG_RUN = {"num_intervals": 1000}
SAFA = {"timeline.framework": "safa", "algorithm": "fedavg"}
FEDCS = {"timeline.framework": "fedcs", "algorithm": "fedavg"}
FEDBUFF = {"timeline.framework": "fedbuff", "algorithm": "fedbuff"}
FEDAT = {"timeline.framework": "fedat", "algorithm": "fedat"}
DRAWN = {"schedule.kind": "distribution"}
EXPLICIT = {"schedule.kind": "explicit"}
TRACE = {"schedule.kind": "trace"}
NPZ = {"data.name": "npz"}
MNIST = {"data.name": "mnist", "data.download": False, "data.dir": "/nowhere"}
QUADRATIC = {"data.name": "quadratic", "model.name": "quadratic", "data.shape": (4,)}
QUADRATIC |= {"algorithm": "fedavg", "lr": 0.1}
SHARDS = {"partition.kind": "shards"}
OF_CLIENTS, COSINE = {"partition.kind": "client"}, {"lr_schedule": "cosine"}

# Setting, its value, words that the answer must hold; other settings.
SETTINGS = [
    ("algorithm", "fedprx", "did you mean 'fedprox'", {}),
    ("algorithm", "", "one of: dms", {}),
    ("algorithm", None, "expected str", {}),
    ("seed", -1, ">= 0", {}),
    ("seed", 2**32, "<= 4294967295", {}),
    ("seed", HUGE, "<= 4294967295", {}),
    ("seed", True, "expected int", {}),
    ("seed", 1.5, "expected int", {}),
    ("num_intervals", 0, ">= 1", {}),
    ("num_intervals", 10**6 + 1, "<= 1000000", {}),
    ("num_intervals", "5", "expected int", {}),
    ("num_clients", 0, ">= 1", {}),
    ("num_clients", 10**7 + 1, "<= 10000000", {}),
    ("num_clients", 10**7, "memory", {"num_intervals": 10**6}),
    ("num_clients", 10**7, "memory", TIMED),
    ("num_clients", 1000, "training samples", {}),
    ("lr", 0.0, "> 0", {}),
    ("lr", -0.1, "> 0", {}),
    ("lr", float("nan"), "finite", {}),
    ("lr", float("inf"), "finite", {}),
    ("lr", 1e-50, "float32", {}),
    ("lr", 1e39, "float32", {}),
    ("lr", HUGE, "2147483647", {}),
    ("lr", "0.1", "expected float", {}),
    ("lr", None, "expected float", {}),
    ("lr", [0.1], "expected float", {}),
    ("momentum", 1.0, "[0, 1)", {}),
    ("momentum", float("nan"), "[0, 1)", {}),
    ("fedasync.gamma", -0.1, "[0, 1)", {}),
    ("mu", -1.0, ">= 0", {}),
    ("clip_norm", -1.0, ">= 0", {}),
    ("clip_norm", float("inf"), "finite", {}),
    ("batch_size", 0, ">= 1", {}),
    ("batch_size", 2**31, "<= 2147483647", {}),
    ("eval_every", 0, ">= 1", {}),
    ("eval_every", 99999999999999999999, "<= 2147483647", {}),
    ("report_every", -1, ">= 0", {}),
    ("report_every", 10**30, "<= 2147483647", {}),
    ("checkpoint", "yes", "expected bool", {}),
    ("checkpoint", 1, "expected bool", {}),
    ("devices", -1, ">= 0", {}),
    ("client_block", -1, ">= 0", {}),
    ("mapping", "pmap", "sequential", {}),
    ("convolution", "fft", "slices", {}),
    ("compile_cache", "a\0b", "zero byte", {}),
    ("momentun", 0.9, "did you mean 'momentum'", {}),
    ("measure_clients", True, "in step", TIMED),
    ("data", {"name": "mnist"}, "DataConfig", {}),
    ("data.name", "minst", "did you mean 'mnist'", {}),
    ("data.name", 3, "expected str", {}),
    ("data.nam", "mnist", "did you mean 'data.name'", {}),
    ("data.dir", "/nowhere", "no mnist", MNIST),
    ("data.dir", LONG, "too long", MNIST),
    ("data.dir", "~no-such-user/x", "home", MNIST),
    ("data.dir", "a\0b", "zero byte", MNIST),
    ("data.dir", __file__, "expected a folder", MNIST),
    ("data.file", "gone.npz", "no such file", NPZ),
    ("data.file", LONG, "no such file", NPZ),
    ("data.file", str(ROOT), "Is a directory", NPZ),
    ("data.file", __file__, "cannot be read", NPZ),
    ("data.file", "x.npz", "would be ignored", {}),
    ("data.normalize", "std", "standard", {}),
    ("data.shape", (), "needs sizes > 0", SYNTHETIC),
    ("data.shape", (4, 0, 1), "needs sizes > 0", SYNTHETIC),
    ("data.shape", (4, -1, 1), "needs sizes > 0", SYNTHETIC),
    ("data.shape", ("a", 8), "whole numbers", SYNTHETIC),
    ("data.shape", (2.5, 8), "whole numbers", SYNTHETIC),
    ("data.shape", (100_000, 100_000, 3), "memory", SYNTHETIC),
    ("data.shape", (HUGE, 1, 1), "<= 2147483647", SYNTHETIC),
    ("data.shape", 12 * (2**31 - 1,), "memory", SYNTHETIC),
    ("data.num_classes", 1, ">= 2", SYNTHETIC),
    ("data.num_classes", 2 * 10**9, "memory", SYNTHETIC),
    ("data.num_classes", "a", "expected int", SYNTHETIC),
    ("data.train_size", -1, ">= 0", SYNTHETIC),
    ("data.train_size", 2 * 10**9, "memory", SYNTHETIC | {"data.shape": (64, 64)}),
    ("data.train_size", 2000, "has only 1438", {}),
    ("data.test_size", 2 * 10**9, "memory", SYNTHETIC | {"data.shape": (64, 64)}),
    ("data.test_size", 2000, "has only 359", {}),
    ("quadratic.smoothness", 2.0, "would be ignored", {}),
    ("data.shape", (8,), "it belongs to synthetic or quadratic", {}),
    ("lr_every", 5, "lr_schedule=cosine; it belongs to steps", COSINE),
    ("partition.iid_share", 0.5, "it belongs to iid,", OF_CLIENTS),
    ("quadratic.grad_variance", "gauss(1)", "unknown distribution", QUADRATIC),
    ("quadratic.dissimilarity", "constant(-1)", "expected >= 0", QUADRATIC),
    ("data.shape", (8, 8), "like (8,)", QUADRATIC),
    ("data.shape", (2 * 10**9,), "memory", QUADRATIC),
    ("data.train_size", 5, "would be ignored", QUADRATIC),
    ("model.name", "mlp", "go together", QUADRATIC | {"model.name": "mlp"}),
    ("partition.kind", "dirichlett", "did you mean", {}),
    ("partition.kind", "label", "as many classes as clients", {}),
    ("partition.alpha", 0.0, "> 0", {}),
    ("partition.alpha", float("inf"), "finite", {}),
    ("partition.alpha", float("nan"), "finite", {}),
    ("partition.classes_per_client", 0, ">= 1", SHARDS),
    ("partition.classes_per_client", 11, "10 classes", SHARDS),
    ("partition.classes_per_client", 1, "would be ignored", {}),
    ("partition.alpha", 0.1, "would be ignored", SHARDS),
    ("schedule.kind", "case4", "did you mean", {}),
    ("schedule.data_size", 0, ">= 1", {}),
    ("schedule.data_size", 10**10, "<= 2147483647", {}),
    ("schedule.data_size", 2 * 10**9, "<= 1000000000", {}),
    ("schedule.data_size", 5000, "only 1438", {}),
    ("schedule.tau", (1, 2), "would be ignored", {}),
    ("schedule.tau", (), "needs", EXPLICIT),
    ("schedule.tau", (-1,), ">= 0", EXPLICIT),
    ("schedule.tau", (1, 2, 3), "at most", EXPLICIT),
    ("schedule.tau", (HUGE,), "<= 2147483647", EXPLICIT),
    ("schedule.tau", (True,), "whole numbers", EXPLICIT),
    ("schedule.tau", 4, "whole numbers", EXPLICIT),
    ("schedule.tau_groups", "", "needs", DRAWN),
    ("schedule.tau_groups", "normal(2)", "takes 2 numbers", DRAWN),
    ("schedule.tau_groups", "normal(2,-1)", "std must be >= 0", DRAWN),
    ("schedule.tau_groups", "normal(1e400,1)", "finite", DRAWN),
    ("schedule.tau_groups", "uniform(5,1)", "low must not exceed high", DRAWN),
    ("schedule.tau_groups", "gaus(2,1)", "unknown distribution", DRAWN),
    ("schedule.tau_groups", "lognormal(0,1)", "mean must be > 0", DRAWN),
    ("schedule.tau_groups", "four", "expected NAME", DRAWN),
    ("schedule.tau_groups", "normal(2,1)", "would be ignored", {}),
    ("schedule.size_groups", "constant(x)", "not a number", {}),
    ("schedule.trace", "", "needs", TRACE),
    ("schedule.trace", "gone.csv", "No such file", TRACE),
    ("schedule.trace", LONG, "too long", TRACE),
    ("schedule.trace", str(ROOT), "directory", TRACE),
    ("schedule.trace", __file__, "interval", TRACE),
    ("schedule.iteration", "epoch", "pass", {}),
    ("schedule.upload_above", -1, ">= 0", {}),
    ("schedule.upload_above", 10**9, "upload", {}),
    ("schedule.dropout", 1.0, "[0, 1)", {}),
    ("schedule.interval_seconds", 0.0, ">= 1e-09", TIMED),
    ("schedule.free_riders", 3, "<= 2 = --config.num_clients", {}),
    ("schedule.free_riding", "steal", "claim", {}),
    ("schedule.free_riding", "echo", "free_riders=0; give that another value", {}),
    ("timeline.framework", "fedavg", "one of", {}),
    ("timeline.buffer", 3, "framework=none; it belongs to fedbuff", {}),
    ("timeline.fraction", 0.1, "timeline.framework=afl; it belongs to safa", TIMED),
    ("timeline.speed", "constant(1)", "an empty one", TIMED | {"timeline.speeds": "x"}),
    ("timeline.buffer", 0, ">= 1", FEDBUFF),
    ("timeline.buffer", 10**9, "num_clients", FEDBUFF),
    ("timeline.tiers", 5, "num_clients", FEDAT),
    ("timeline.speed", "", "at least one speed", TIMED),
    ("timeline.speed", "constant(0)", "> 0", TIMED),
    ("timeline.speed", "constant(1e-9)", "tasks and iterations", TIMED),
    ("timeline.speed", "constant(1e-6)", "tasks and iterations", TIMED | LONG_RUN),
    ("timeline.speed", "uniform(1)", "takes 2 numbers", TIMED),
    ("timeline.download", "constant(-1)", ">= 0", TIMED),
    ("timeline.upload", "x", "expected NAME", TIMED),
    ("timeline.jitter", 11.0, "[0, 10]", TIMED),
    ("timeline.local_iterations", 0, ">= 1", TIMED),
    ("timeline.local_iterations", 2**31 - 1, "memory", TIMED),
    ("timeline.local_iterations", 10**12, "<= 2147483647", TIMED),
    ("timeline.deadline", 0.0, ">= 1e-09", FEDCS),
    ("timeline.deadline", 1e-9, "choose a longer one", FEDCS),
    ("timeline.fraction", 0.0, "in (0, 1]", SAFA),
    ("timeline.fraction", 1.1, "in (0, 1]", SAFA),
    ("timeline.lag", -1, ">= 0", SAFA),
    ("schedule.tau", (1,), "afl; it belongs to none", TIMED | EXPLICIT),
    ("server.lr", -1.0, "> 0", {}),
    ("server.lr", 2.0, "fedavg", {"algorithm": "fedavg"}),
    ("fedopt.momentum", 1.0, "[0, 1)", {}),
    ("fedopt.second", -0.5, "[0, 1)", {}),
    ("fedopt.floor", 0.0, "> 0", {}),
    ("krum.trim", 0.5, "[0, 0.5)", {}),
    ("staleness.kind", "poly", "polynomial", {}),
    ("staleness.a", -1.0, ">= 0", {}),
    ("model.name", "vgg", "did you mean 'vgg11'", {}),
    ("model.norm", "layer", "one of", {"model.name": "vgg11"}),
    ("model.norm", "batch", "would be ignored", {}),
    ("model.hidden", -1, ">= 0", {}),
    ("model.hidden", 10**10, "<= 2147483647", {}),
    ("dms.weight_limit", 0.5, "at least 1", {}),
    ("constants.grad_variance", 0.0, "not 0", {}),
    ("constants.smoothness", float("inf"), "finite", {}),
]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """What does not fit is the same everywhere."""
    monkeypatch.setattr(host_memory, "total", lambda: 8 * 10**9)


def changed(values: dict) -> config.Config:
    """A small config with these settings."""
    small = {"num_clients": 2, "num_intervals": 2, "batch_size": 4, "devices": 1}
    small |= {"schedule.data_size": 16, "compile_cache": "off"}
    settings = config.Config()
    for name, value in (small | values).items():
        target = settings
        *path, last = name.split(".")
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return settings


def answer(call) -> str:
    """The one line that a wrong call is answered with."""
    begun = time.monotonic()
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and message.strip() == message
    assert time.monotonic() - begun < 20, "an answer must not wait for work"
    return message


@pytest.mark.parametrize(
    ("name", "value", "words", "others"),
    SETTINGS,
    ids=[f"{n}={str(v)[:20]!r}-{i}" for i, (n, v, *_) in enumerate(SETTINGS)],
)
def test_wrong_settings(name, value, words, others):
    message = answer(lambda: prepare.prepare(changed(others | {name: value})))
    assert words in message
    assert name.split(".")[-1] in message or str(value) in message


X, Y = np.zeros((8, 4, 4, 1), np.uint8), np.arange(8) % 2
FEW = tsfl_jax.make_dataset(X, Y, X, Y)
KEY, TAU = jax.random.key(0), np.array([1, 2])
CONSTANTS = {"lr": 0.1, "smoothness": 1.0, "grad_sq_norm": 1.0, "grad_variance": 1.0}


def run(values=(), **parts):
    """A call of `simulate`."""
    return lambda: tsfl_jax.simulate(changed(dict(values)), **parts)


def swept(axes, values=(), **parts):
    """A call of `sweep`."""
    return lambda: tsfl_jax.sweep(changed(dict(values)), axes, **parts)


def made(x=X, y=Y, x_test=X, y_test=Y, **parts):
    """A call of `make_dataset`."""
    return lambda: tsfl_jax.make_dataset(x, y, x_test, y_test, **parts)


def weighted(key=KEY, tau=TAU, **parts):
    """A call of `dms_weights`."""
    return lambda: tsfl_jax.dms_weights(key, tau, **(CONSTANTS | parts))


def named(**sections):
    """A run of a config that has a name in place of a section."""
    return lambda: tsfl_jax.simulate(tsfl_jax.Config(**sections))


LARGE = {"num_clients": 1000, "num_intervals": 1000}
TOO_WIDE = {"model.hidden": 2 * 10**9}
MANY = {"seed": range(10**5), "lr": [i / 10**6 for i in range(1, 10**5)]}
# A call and words that its answer must hold.
CALLS = [
    (lambda: tsfl_jax.simulate({"lr": 1}), "expected a tsfl_jax.Config, got dict"),
    (run(optimizer=optax.sgd), "optimizer=sgd cannot update the model (TypeError"),
    (run(optimizer=optax.adam), "lambda h: optax.sgd(h.lr)"),
    (run(optimizer=lambda h: 3), "makes 3 of HParams; expected an optax"),
    (run(optimizer=lambda: 3), "expected an optax transformation"),
    (run(optimizer=lambda h: optax.sgd(h.learning_rate)), "learning_rate"),
    (run(optimizer=5), "optimizer=5: expected an optax transformation"),
    (run(optimizer="sgd"), "optimizer='sgd'"),
    (run(optimizer=optax.sgd(0.1), values={"algorithm": "scaffold"}), "scaffold"),
    (run(model=3), "model=3: expected"),
    (run(model="mlp"), "model='mlp': expected"),
    (run(model="resnet"), "config.model.name (mlp, "),
    (run(model="resnet"), "; did you mean 'resnet18'?"),
    (named(model="resnet"), "; did you mean config.model.name = 'resnet18'?"),
    (named(data="mnsit"), "; did you mean config.data.name = 'mnist'?"),
    (named(timeline=3), "config.timeline must be a TimelineConfig, got 3"),
    (run(aggregator="fedavg"), "aggregator='fedavg': expected"),
    (run(dataset=3), "dataset=int: expected a tsfl_jax.Dataset"),
    (run(dataset="mnist"), "config.data.name chooses one by name"),
    (run(dataset=(X, Y, X, Y)), "make_dataset makes one"),
    (run(dataset=FEW._replace(num_classes="a")), "num_classes='a'"),
    (run(dataset=FEW._replace(std=0.0)), "std=0.0"),
    (
        run(dataset=FEW._replace(y_train=Y + 5)),
        "y_train holds 5 at row 0; expected 0..1",
    ),
    (run(workdir=5), "workdir=5: expected the path of a folder"),
    (run(workdir=""), "workdir='': expected"),
    (run(workdir=LONG), "too long"),
    (run(workdir="a\0b"), "null"),
    (run(workdir="~no-such-user/x"), "~no-such-user"),
    (run(TOO_WIDE), "--config.model.hidden=2000000000, model.name=mlp"),
    (run({"devices": 100_000}), "--config.devices=100000: "),
    (run(SYNTHETIC | {"data.shape": (10**5, 10**5)}), "--config.data.shape="),
    (swept(None), "got None"),
    (swept("seed=0:3"), "got 'seed=0:3'"),
    (swept(5), "got 5"),
    (swept({}), "no points"),
    (swept([]), "no points"),
    (swept([{"seed": 1}, {"lrr": 0.1}]), "did you mean 'lr'"),
    (swept([3]), "got 3"),
    (swept({"seed": 5}), "sweep seed: expected a list of values, got 5"),
    (swept({"seed": []}), "sweep seed: no values"),
    (swept({"seed": [1, 1]}), "twice"),
    (swept({"seed": ["a"]}), "--config.seed='a'"),
    (swept({"seed": [[1]]}), "--config.seed=[1]"),
    (swept({"seed": range(10**30)}), "sweep seed: more than 100,000"),
    (swept({"seed": itertools.count()}), "more than 100,000"),
    (swept(MANY), "sweep seed, lr: more than 100,000 runs"),
    (swept({"seed": range(1000)}, LARGE), "schedules and splits of 1,000 runs"),
    (swept({"lr": [None]}), "expected float"),
    (swept({"lr": [0.1, -1.0]}), "run lr=-1.0"),
    (swept({"lrr": [0.1]}), "did you mean 'lr'"),
    (swept({3: [1]}), "sweep 3"),
    (swept({"data.shape": ["a"]}), "run data.shape=a: --config.data.shape='a'"),
    (swept({"seed": [1]}, runs_per_call="x"), "runs_per_call='x'"),
    (swept({"seed": [1]}, runs_per_call=1.5), "runs_per_call=1.5"),
    (swept({"seed": [1]}, runs_per_call=-1), "runs_per_call=-1"),
    (swept({"seed": [1]}, workdir=5), "workdir=5"),
    (swept({"seed": [1]}, TOO_WIDE), "--config.model.hidden=2000000000"),
    (swept({"seed": [1]}, optimizer=optax.sgd), "optimizer=sgd"),
    (lambda: tsfl_jax.sweep(None, {"seed": [1]}), "got NoneType"),
    (made(num_classes="a"), "num_classes='a': expected a whole number"),
    (made(num_classes=2.5), "num_classes=2.5"),
    (made(num_classes=-3), "num_classes=-3"),
    (made(num_classes=1), "holds 1 at row 1; expected 0..0"),
    (made(num_classes=10**9), "num_classes=1000000000: expected at most 1000"),
    (made(x=None), "x_train has shape ()"),
    (made(x="x.npz"), "x_train has shape ()"),
    (made(x=[[1], [1, 2]]), "x_train is not an array"),
    (made(y=Y - 1), "; np.unique(y_train, return_inverse=True)[1] numbers"),
    (made(y=["a"] * 8), "; np.unique(y_train, return_inverse=True)[1] numbers"),
    (made(y=None), "y_train has shape ()"),
    (made(y=Y[:, None]), "y_train[:, 0] of one column"),
    (
        made(y=np.eye(2, dtype=int)[Y]),
        "y_train.argmax(axis=1) of one-hot rows",
    ),
    (
        made(y=np.ones((8, 3), bool)),
        "other targets are float in both y_train and y_test",
    ),
    (made(y=np.ones((8, 2, 2))), "one class number per sample"),
    (made(y=np.where(Y, np.inf, 0.0)), "holds inf at row 1; expected finite float32"),
    (made(y=Y.astype(float), num_classes=2), "y_train.astype(int)"),
    (made(y=Y < 1), "; np.unique(y_train, return_inverse=True)[1] numbers"),
    (made(y=np.full((8, 2), np.nan)), "y_train holds nan at row 0; expected finite"),
    (weighted(tau=None), "tau has shape []: expected [N]"),
    (weighted(lr=0.0), "lr = 0.0: expected 0 < η < ∞"),
    (weighted(weight_limit=0.5), "weight_limit = 0.5"),
]


@pytest.mark.parametrize(
    ("call", "words"), CALLS, ids=[f"{i}-{w[:30]}" for i, (_, w) in enumerate(CALLS)]
)
def test_wrong_calls(call, words):
    assert words in answer(call)


def tsfl(command, arguments, monkeypatch):
    """Runs ``tsfl COMMAND``; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["tsfl", command, *arguments])
    monkeypatch.setattr(interrupts, "release", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    return stopped.value.code


SMALL = ["--config.num_clients=2", "--config.schedule.data_size=16"]
FRAMES = str(ROOT / "configs" / "frameworks")
PAPERS = ROOT / "configs" / "papers.py"
# Command, its arguments, words that the answer must hold. Files are those of `files`.
COMMANDS = [
    ("run", "--config=configs/smok.py", "no such file"),
    ("run", "--config=configs/papers.py:mnist_case4", "no such experiment"),
    ("run", f"--config={PAPERS}:mnist_case4", "you mean 'mnist_case"),
    ("run", f"--config={LONG}", "no such file"),
    ("run", "--config=broken.py", "SyntaxError"),
    ("run", "--config=raises.py", "ZeroDivisionError"),
    ("run", "--config=empty.py", "get_config"),
    ("run", "--config=three.py", "Config"),
    ("run", "--config.momentun=0.9", "did you mean 'momentum'"),
    ("run", "--config.fraction=0.1", "--config.timeline.fraction"),
    ("run", "--lr=0.1", "did you mean --config.lr?"),
    ("run", "--confg.lr=0.1", "did you mean --config.lr?"),
    ("run", "--config.lr=fast", "--config.lr=fast"),
    ("run", "--config.lr=-1", "--config.lr=-1.0: must be finite and > 0"),
    ("run", "--config.lr", "lr"),
    ("run", "--config.seed=99999999999999999999", "<= 4294967295"),
    ("run", "--config.model.hidden=1e10", "model.hidden=1e10"),
    ("run", "--config.model.hidden=10000000000", "<= 2147483647"),
    ("run", "--config.model.hidden=2000000000", "memory"),
    ("run", "--config.eval_every=99999999999999999999", "<= 2147483647"),
    ("run", "--config.checkpoint=maybe", "checkpoint=maybe"),
    ("run", "--config.data.name=minst", "did you mean 'mnist'"),
    ("run", "--config.num_clients=500", "training samples"),
    ("run", "--config.schedule.tau=(1,a)", "whole numbers"),
    ("run", "--workdri=x", "workdir"),
    ("run", "mnist", "unexpected argument 'mnist'"),
    ("run", f"--workdir={LONG}", "too long"),
    ("run", "--workdir=/dev/null/x", "choose another --workdir"),
    ("run", "--workdir=~no-such-user/x", "~no-such-user"),
    ("run", "--explain --config.fedasync.gamma=0.3", "would be ignored with"),
    ("run", "--explain=fast", "--explain: invalid choice: 'fast'"),
    ("run", "--sweep=seed", "expected setting=values"),
    ("run", "--sweep=sed=0:3", "did you mean 'seed'"),
    ("run", "--sweep=seed=3:3", "no values"),
    ("run", "--sweep=seed=0:9:0", "first:end:step"),
    ("run", "--sweep=seed=a:9", "'a' is not a whole number"),
    ("run", "--sweep=seed=0:10000000000", "more than 100,000 runs"),
    ("run", "--sweep=seed=1,1", "twice"),
    ("run", "--sweep=lr=0.1,-1", "run lr=-1.0"),
    ("run", "--sweep=checkpoint=maybe", "neither True nor False"),
    (
        "sweep",
        "--sweep_file=misspelt.yaml",
        "lrr=0.1: there is no such setting; did you",
    ),
    ("sweep", "--sweep_file=misspelt.csv", "sead=1: there is no such setting; did you"),
    ("sweep", "--sweep_file=empty.csv", "--sweep_file=empty.csv: expected a list of"),
    ("sweep", "--sweep_file=heading.csv", "--sweep_file=heading.csv: expected a list"),
    ("sweep", "--sweep_file=none.yaml", "--sweep_file=none.yaml: expected a list of"),
    ("sweep", "--sweep=seed=0:2 --config.cohort.size=9", "cohort.size=9"),
    (
        "sweep",
        "--sweep=seed=0:2 --workdir=new/a --config.cohort.size=9",
        "cohort.size=9",
    ),
    ("sweep", "--sweep=algorithm=oracle,dms --workdir=new/a", "data.validation=0"),
    ("sweep", "--sweep=model.hidden=8,2000000000 --workdir=new/a", "take"),
    (
        "sweep",
        "--sweep=seed=0:2 --shard=0/2 --workdir=new/a --config.timeline.buffer=9 "
        "--config.timeline.framework=fedbuff",
        "buffer=9",
    ),
    ("run", "--workdir=new/a --config.cohort.size=9", "cohort.size=9"),
    ("run", "--workdir=new/a --writer=wandb", "wandb is not installed"),
    (
        "run",
        "--config.evaluation.clients=labels --config.evaluation.number=3",
        "evaluation.number=3: must be a whole number >= 0 and <= 2 = --config.num_",
    ),
    ("run", "--sweep=seed=0:2 --runs_per_call=-1", "runs_per_call=-1"),
    ("sweep", "--sweep=seed=0:2 --shard=0/2", "--shard, --collect, --ray: expected"),
    ("sweep", "--sweep=seed=0:2 --workdir=x --shard=2/2", "--shard=2/2: expected i/n"),
    ("sweep", "--sweep=seed=0:2 --workdir=x --collect --ray", "expected one of them"),
    ("run", "--workdir=x --ray", "expected one of them, with --sweep"),
    ("run", "--runs_per_call=x", "--runs_per_call: invalid int value: 'x'"),
    ("run", "--runs_per_call=2", "--runs_per_call=2: expected"),
    ("run", "--process=1", "--process=1 --coordinator=: say how many"),
    ("run", "--coordinator=here:1", "--coordinator=here:1: say how many"),
    ("run", "--processes=-1", "--processes=-1: expected at least 0"),
    ("run", "--processes=x", "--processes: invalid int value: 'x'"),
    ("run", "--processes=2 --join_timeout=0", "--join_timeout=0.0"),
    ("run", "--processes=2 --process=2", "--process=2: expected 0 to 1"),
    ("run", "--processes=2", "--coordinator=: expected host:port"),
    ("run", "--processes=2 --coordinator=a:99999", "a port from 1 to 65535"),
    ("run", "--processes=2 --explain", "runs in one process"),
    ("run", "--processes=2 --sweep=seed=0:2", "runs in one process"),
    ("compare", "", "required: configs"),
    ("compare", "gone.py", "gone.py: no such file"),
    ("compare", LONG, "no such file"),
    ("compare", "broken.py", "broken.py: cannot be read (SyntaxError"),
    ("compare", "raises.py", "raises.py: cannot be read (ZeroDivisionError"),
    ("compare", "notes.txt", "notes.txt: cannot be read (NameError"),
    ("compare", "three.py", "three.py: get_config() must return a Config"),
    ("compare", f"{ROOT}/configs/smoke.py", "choose a framework"),
    ("compare", f"{FRAMES}/afl.py --seeds 0", "--seeds must be at least 1"),
    ("compare", f"{FRAMES}/afl.py --seeds x", "--seeds"),
    ("compare", f"{FRAMES}/afl.py --target 5", "--target"),
    ("compare", f"{FRAMES}/afl.py --target nan", "--target"),
    ("compare", f"{FRAMES}/afl.py --set lrr=1", "--set=lrr=1"),
    ("compare", f"{FRAMES}/afl.py --set lr=-1", "--config.lr=-1.0"),
    ("compare", f"{FRAMES}/afl.py --data_dir /nope", "--data_dir=/nope"),
    ("compare", f"{FRAMES}/afl.py --out /dev/null/x", "choose another --out"),
    ("reproduce", "tabel1", "invalid choice: 'tabel1'"),
    ("reproduce", "table1 --seeds 0", "--seeds must be at least 1"),
    ("reproduce", "table1 --intervals -1", "--intervals"),
    ("reproduce", "table1 --data minst", "minst"),
    ("reproduce", "table1 --set lrr=1", "--set=lrr=1"),
    ("reproduce", "table1 --set lr=-1", "--config.lr=-1.0"),
    ("reproduce", "table1 --data_dir /nope", "--data_dir=/nope: no such folder"),
    ("reproduce", f"table1 --data_dir {LONG}", "no such folder"),
    ("reproduce", "table1 --data_dir .", "nothing could be run"),
    ("reproduce", "table1 --case 3", "no cell of this --data and --case; see table2"),
    ("reproduce", "table1 --out /dev/null/x", "choose another --out"),
    ("run", "--writer=csv,wanb", "writer 'wanb': unknown; did you mean 'wandb'?"),
    ("run", "--writer=csv --explain", "--writer=csv: follows a single run"),
    ("tensorboard", "", "required: workdirs"),
    ("tensorboard", "--help-me", "required: workdirs"),
    ("tensorboard", "gone", "no run among the folders"),
]
FILES = {
    "empty.py": "",
    "broken.py": "def get_config(:\n",
    "raises.py": "def get_config():\n    return 1 / 0\n",
    "three.py": "def get_config():\n    return 3\n",
    "notes.txt": "get_config\n",
    "misspelt.yaml": "[{lrr: 0.1}]",
    "misspelt.csv": "sead\n1\n",
    "heading.csv": "seed,lr\n",
    "empty.csv": "",
    "none.yaml": "[]",
}


@pytest.mark.parametrize(
    ("command", "line", "words"),
    COMMANDS,
    ids=[f"{c}-{i}-{a[:30]}" for i, (c, a, _) in enumerate(COMMANDS)],
)
def test_wrong_commands(command, line, words, tmp_path, monkeypatch, capsys):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    arguments = line.split()
    monkeypatch.setitem(sys.modules, "wandb", None)
    if command in ("run", "sweep") and "--config=" not in line:
        arguments = [*SMALL, *arguments]
    assert tsfl(command, arguments, monkeypatch) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert words in last and last.startswith(f"tsfl {command}: ")
    assert "Traceback" not in err
    # A table that lists what is missing is written before the answer.
    assert out == "" or "nothing could be run" in words
    left = {path.name for path in tmp_path.rglob("*")} - {"runs", "__pycache__"}
    assert left == {*FILES}


@pytest.mark.parametrize(
    "error", [MemoryError("Unable"), RuntimeError("RESOURCE_EXHAUSTED: Unable")]
)
@pytest.mark.parametrize("command", ["run", "tensorboard"])
def test_what_was_not_foreseen_to_be_too_much(
    command, error, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)

    def full(*arguments, **more):
        raise error

    monkeypatch.setattr(runner, "build", full)
    monkeypatch.setattr(files, "prepare_workdir", full)
    pathlib.Path("a").mkdir()
    pathlib.Path("a/metrics.jsonl").write_text("")
    assert tsfl(command, SMALL if command == "run" else ["a"], monkeypatch) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert command in last and "not enough memory" in last and "Unable" in last
