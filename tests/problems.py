"""Small problems that several test files share."""

import doctest
import functools
import inspect
import json
import os
import types

import jax
import jax.numpy as jnp
import numpy as np

import tsfl_jax
from tsfl_jax import components, config
from tsfl_jax.engine import client, evaluation, optimizers, program_spec, scan
from tsfl_jax.models import networks
from tsfl_jax.rules import AGGREGATORS, SECTIONS, base
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.types import Constants, Dataset, HParams, Schedule

# Options of `jax.jit` for what must hold to the bit as users compile it, against the
# plain compiling of conftest.
AS_USERS = {"xla_backend_optimization_level": 3}
if "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
    AS_USERS["xla_cpu_use_fusion_emitters"] = True


# ---- Experiments through the public door ----


def small(hidden=8, **changes) -> config.Config:
    """Four clients on digits, six intervals in calls of two.

    ``schedule__tau`` changes a setting of a section; None leaves one at its default, as
    `hidden` beside a network of one's own.
    """
    settings = {
        "num_intervals": 6,
        "num_clients": 4,
        "lr": 0.02,
        "batch_size": 8,
        "report_every": 2,
        "devices": 1,
        "schedule.data_size": 48,
        "schedule.interval_seconds": 2.5,
        "model.hidden": hidden,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    chosen = {name: value for name, value in settings.items() if value is not None}
    return config.replace(config.Config(), chosen)


def same_history(result, other, intervals=None, **tolerances) -> None:
    """Checks that two runs have one history, to the bit or within tolerances.

    `intervals`: that many of the other, longer run.
    """
    assert result.history.keys() == other.history.keys()
    for name, values in result.history.items():
        expected = other.history[name][:intervals]
        if tolerances and values.dtype.kind == "f":
            np.testing.assert_allclose(values, expected, **tolerances, err_msg=name)
        else:
            np.testing.assert_array_equal(values, expected, err_msg=name)


def same_bits(tree, other) -> None:
    """Checks that two trees of arrays are equal to the bit."""
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def files(folder):
    """What of a run's folder must not depend on where the run was interrupted."""
    arrays = {}
    for name in ("model", "clients", "own"):
        if (path := folder / f"{name}.npz").exists():
            with np.load(path) as stored:
                arrays |= {f"{name}/{key}": value for key, value in stored.items()}
    return (folder / "metrics.jsonl").read_bytes(), arrays


def same(first, second) -> None:
    """Checks that two folders hold the same bits, of what `files` reads."""
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        np.testing.assert_array_equal(value, second[1][name], err_msg=name)


def same_sweep(folder, other) -> None:
    """Checks that the folders of two sweeps agree in all but times."""
    tables, runs = [], []
    for path in (folder, other):
        lines = (path / "results.jsonl").read_text().splitlines()
        tables.append([json.loads(line) | {"train_seconds": 0} for line in lines])
        runs.append({p.name: dict(np.load(p)) for p in (path / "lanes").iterdir()})
    assert tables[0] == tables[1] and len(tables[0]) > 1
    first, second = (path / "history.csv" for path in (folder, other))
    assert first.read_bytes() == second.read_bytes()
    assert runs[0].keys() == runs[1].keys()
    for name, arrays in runs[0].items():
        same_bits(arrays | {"seconds": 0}, runs[1][name] | {"seconds": 0})


def stop(settings, workdir, **custom) -> None:
    """Runs the first call of intervals and ends there, all saved."""
    ended = [lambda record: False]
    result = tsfl_jax.simulate(settings, workdir=workdir, writers=ended, **custom)
    assert any("ended after interval" in note for note in result.summary["notes"])


# ---- Examples, networks, data, schedules ----


def run_examples(module: types.ModuleType) -> doctest.TestResults:
    """`doctest.testmod`, also for functions with checked annotations."""
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    functions = {name: inspect.unwrap(f) for name, f in vars(module).items()}
    own = {n: f for n, f in functions.items() if inspect.getmodule(f) is module}
    for name, value in ({"": module} | own).items():
        for example in finder.find(value, name, globs=dict(vars(module))):
            runner.run(example)
    return runner.summarize()


def hparams(**changes) -> HParams:
    """Plain SGD, constants given, no limits, and the rules' defaults.

    ``staleness__a`` is the setting of a component, ``trim`` that of all which have it.
    """
    values = {"lr": 0.1, "momentum": 0.0, "mu": 0.0, "clip_norm": np.inf}
    known = {"smoothness": 1.0, "grad_sq_norm": 2.0, "grad_variance": 1.0}
    given = HParams(settings={n: components.arrays(k()) for n, k in SECTIONS.items()})
    for name, value in changes.items():
        if name in HParams._fields:
            values[name] = value
        elif name in known:
            known[name] = value
        else:
            given = changed(given, **{name: value})
    constants = Constants(**{k: jnp.float32(v) for k, v in known.items()})
    values = {k: jnp.float32(v) for k, v in values.items()}
    return given._replace(**values, constants=constants)


def numbers_of(hparams: HParams) -> dict[str, float]:
    """Hyper-parameters by name for the reference, such as ``fedasync__gamma``."""
    found = {n: getattr(hparams, n) for n in ("lr", "momentum", "mu", "clip_norm")}
    found |= hparams.constants._asdict()
    for section, own in hparams.settings.items():
        found |= {f"{section}__{name}": value for name, value in vars(own).items()}
    return {name: float(value) for name, value in found.items()}


def changed(hparams: HParams, **changes) -> HParams:
    """Hyper-parameters with other settings of components, as in `hparams`."""
    settings = dict(hparams.settings)
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        owners = [section] if section else []
        owners = owners or [n for n in settings if field in vars(settings[n])]
        assert owners, name
        for owner in owners:
            dtype = getattr(settings[owner], field).dtype
            new = {field: jnp.asarray(value, dtype)}
            settings[owner] = components.changed(settings[owner], **new)
    return hparams._replace(settings=settings)


def dataset(samples=120, features=5, classes=3, seed=0) -> Dataset:
    """Gaussian blobs as plain feature vectors."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(classes, features)) * 2
    y = rng.integers(0, classes, 2 * samples).astype(np.int32)
    x = (centers[y] + rng.normal(size=(2 * samples, features))).astype(np.float32)
    parts = x[:samples], y[:samples], x[samples:], y[samples:]
    return Dataset("blobs", *parts, classes, np.float32(0.3), np.float32(1.7))


def problem(data: Dataset, num_clients: int, capacity: int, seed=1) -> scan.Problem:
    """The data set on the device, every client with random rows."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(data.y_train), (num_clients, capacity), dtype=np.int32)
    arrays = data.x_train, data.y_train, data.mean, 1 / data.std
    return scan.Problem(
        samples=client.Samples(*map(jnp.asarray, arrays)),
        test=evaluation.make_test_set(data.x_test, data.y_test),
        rows=jnp.asarray(rows),
        client=jnp.arange(num_clients, dtype=jnp.int32),
    )


def validated(rule, prob: scan.Problem) -> scan.Problem:
    """With validation samples if the rule uses some: 24 that no client holds."""
    if not rule.mixing.uses_validation:
        return prob
    unused = np.setdiff1d(np.arange(len(prob.samples.y)), np.asarray(prob.rows))
    validation = evaluation.make_held_out(unused[:24])
    return prob._replace(validation=jax.tree.map(jnp.asarray, validation))


def inputs(tau, size) -> scan.Inputs:
    """A chunk of intervals that are all evaluated; tau and size ``[R, N]``."""
    tau, size = np.atleast_2d(tau), np.atleast_2d(size)
    return scheduled(complete(tau.astype(np.int32), size.astype(np.int32)))


def members(ids, tau, size, rows) -> client.Client:
    """Clients in order that start from the newest model in interval 0."""
    zeros = jnp.zeros_like(jnp.asarray(ids))
    return client.Client(ids, tau, size, rows, ids, task=zeros, snapshot=zeros)


@functools.cache
def mlp(hidden=4, classes=3) -> networks.Model:
    """A small network for the blobs."""
    return networks.from_flax(networks.MLP(classes, hidden))


def run(
    algorithm,
    data,
    prob,
    chunk_inputs,
    *,
    batch_size=4,
    iteration="pass",
    mapping="sequential",
    block=1,
    hp=None,
    estimates=False,
    model=None,
    optimizer=optimizers.sgd,
    seed=0,
    limits=None,
    train_all=True,
):
    """Runs a chunk of intervals under jit; returns (start, state, history).

    With `limits`, inputs of the same shape with at least as much work, a program that
    was compiled for them serves for these as well.
    """
    model = model or mlp(classes=data.num_classes)
    rule = AGGREGATORS[algorithm]
    hp = hp or hparams()
    most = limits or chunk_inputs
    tau, size = np.asarray(most.tau), np.asarray(most.size)
    steps = tau * client.steps_per_iteration(size, batch_size, iteration)
    passes = client.most_passes(tau, size, batch_size, iteration)
    shape = {"batch_size": batch_size, "iteration": iteration, "mapping": mapping}
    spec = program_spec.ProgramSpec(
        **shape,
        passes=passes,
        block=block,
        longest=int(steps.max()),
        estimates=_estimates(rule, estimates),
        train_all=train_all,
    )
    compiled = _compiled(model, rule, optimizer, spec)
    key = jax.random.key(seed)
    x = client.scaled(prob.samples, prob.samples.x[:1])
    prob = validated(rule, prob)
    counts = base.Counts(tau.shape[1], 1, jnp.asarray(chunk_inputs.size[0]))
    start = scan.init_state(model, (rule,), key, x, counts)
    state, history = compiled(start, jax.random.fold_in(key, 1), hp, prob, chunk_inputs)
    return start, state, history


@functools.cache
def _compiled(model, rule, optimizer, spec):
    """One for all tests that run the same program: traced and compiled once a shape."""
    return jax.jit(scan.make_run(program_spec.Parts(model, (rule,), optimizer, spec)))


def _estimates(rule, estimates: bool) -> program_spec.Estimates:
    """Those of a program of one rule, with constants to be estimated or not."""
    constants = estimates and rule.mixing.uses_constants
    return program_spec.Estimates((constants,), (rule.mixing.uses_gradients,))


@functools.cache
def _start(rule, features, counts, snapshots, sizes):
    x = jnp.zeros((1, features))
    size = jnp.ones(counts.clients) if sizes is None else jnp.array(sizes)
    counts = counts._replace(size=size)
    return scan.init_state(mlp(), (rule,), jax.random.key(0), x, counts, snapshots)


def scheduled(schedule: Schedule) -> scan.Inputs:
    """All updates of a schedule as one chunk, every one evaluated."""
    intervals, slots = schedule.tau.shape
    inputs = scan.Inputs(
        interval=np.arange(intervals, dtype=np.int32),
        tau=schedule.tau,
        size=schedule.size,
        evaluate=np.ones(intervals, bool),
        assigned=np.tile(np.arange(slots, dtype=np.int32), (intervals, 1)),
        reported=schedule.reported,
        client=schedule.client,
        delivery=schedule.delivery,
        threshold=schedule.threshold.astype(np.float32),
        share=schedule.share,
    )
    return jax.tree.map(jnp.asarray, inputs)


def replayed(
    algorithm,
    prob,
    schedule,
    *,
    hp=None,
    groups=1,
    iteration="pass",
    batch_size=4,
    mapping="sequential",
    block=1,
    passes=5,
    estimates=False,
    sizes=None,
):
    """Runs a schedule under jit, compiled once a shape: (start, state, history).

    `sizes` are those of all clients, where not all of them are in an update.
    """
    rule = AGGREGATORS[algorithm]
    shape = {"batch_size": batch_size, "iteration": iteration, "mapping": mapping}
    shape |= {"passes": passes, "block": block, "snapshots": schedule.snapshots}
    spec = program_spec.ProgramSpec(**shape, estimates=_estimates(rule, estimates))
    compiled = _compiled(mlp(), rule, optimizers.sgd, spec)
    counts = base.Counts(prob.rows.shape[0], groups)
    if sizes is None and schedule.in_order:
        sizes = schedule.size[0].tolist()
    sizes = None if sizes is None else tuple(sizes)
    start = _start(rule, prob.samples.x.shape[1], counts, schedule.snapshots, sizes)
    key = jax.random.fold_in(jax.random.key(0), 1)
    prob = validated(rule, prob)
    state, history = compiled(start, key, hp or hparams(), prob, scheduled(schedule))
    return start, state, history
