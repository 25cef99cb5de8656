"""Assembles an experiment from a `Config`; nobody else reads settings.

Data → partition → schedule → arrays on the device; model, rule and optimizer → one pure
function `run`. `runner` carries it out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import (
    arrays,
    choices,
    compile_cache,
    data,
    devices,
    engine,
    evaluation,
    models,
    optimizers,
    partition,
    schedule,
)
from tsfl_jax import client as local
from tsfl_jax.aggregate import AGGREGATORS, Aggregator
from tsfl_jax.config import WITHOUT_EFFECT, Config, flat
from tsfl_jax.types import Dataset, HParams, PRNGKey, Schedule, UserError
from tsfl_jax.validate import validate

# Purposes of random streams below the seed.
_INIT, _TRAIN = 0, 1
_PARTITION, _SCHEDULE = 0, 1


class Experiment(NamedTuple):
    """All that `runner` needs: a pure function, its arguments, and labels."""

    run: Callable  # (state, key, hparams, problem, inputs[R]) -> (state, history[R])
    start: engine.State
    key: PRNGKey
    hparams: HParams
    problem: engine.Problem
    mesh: Mesh
    inputs: engine.Inputs  # of all intervals, [T, ...] on the host
    chunk: int  # R, intervals of one compiled call; divides T
    interval_seconds: float  # Δ
    checkpoint: bool
    settings: dict  # the config as plain values, for config.json
    identity: dict  # what a checkpoint must agree on
    labels: dict  # algorithm, data, model, fingerprints: for summaries and plots
    notes: tuple[str, ...]  # what a user should know before the run


def hparams_of(config: Config, aggregator: Aggregator) -> HParams:
    """The sweepable scalars; NaN marks a constant to be estimated."""

    def given(value: float) -> float:
        return value if value >= 0 else np.nan

    values = HParams(
        lr=config.lr,
        momentum=config.momentum,
        mu=config.mu if aggregator.proximal else 0.0,
        gamma=config.gamma,
        clip_norm=config.clip_norm or np.inf,
        smoothness=given(config.dms.smoothness),
        grad_sq_norm=given(config.dms.grad_sq_norm),
        grad_variance=given(config.dms.grad_variance),
        weight_limit=config.dms.weight_limit or np.inf,
    )
    return HParams(*(jnp.float32(value) for value in values))


def load_dataset(config: Config) -> Dataset:
    """The data set of a config."""
    d = config.data
    return data.load(
        d.name,
        dir=d.dir,
        file=d.file,
        download=d.download,
        normalize=d.normalize,
        shape=tuple(d.shape),
        num_classes=d.num_classes,
        train_size=d.train_size,
        test_size=d.test_size,
        seed=config.seed,
    )


def _groups(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def draw_schedule(config: Config) -> Schedule:
    """τ and sizes of a config, before training."""
    s = config.schedule
    return schedule.make_schedule(
        s.kind,
        num_intervals=config.num_intervals,
        num_clients=config.num_clients,
        data_size=s.data_size,
        tau=tuple(s.tau),
        tau_groups=_groups(s.tau_groups),
        size_groups=_groups(s.size_groups),
        trace=s.trace,
        upload_above=s.upload_above,
        dropout=s.dropout,
        rng=np.random.default_rng([config.seed, _SCHEDULE]),
    )


def _check_batch(batch_size: int, capacity: np.ndarray) -> None:
    smallest = int(capacity.argmin())
    if batch_size > capacity[smallest]:
        raise UserError(
            f"--config.batch_size={batch_size}: client {smallest} never holds more "
            f"than {capacity[smallest]} samples; use a smaller batch or a larger "
            "--config.schedule.data_size"
        )


def _check_output(model, params, problem: engine.Problem, num_classes: int) -> None:
    def predict(params, samples):
        return model.predict(params, local.scaled(samples, samples.x[:1]))

    logits = jax.eval_shape(predict, params, problem.samples)
    if logits.shape != (1, num_classes):
        raise UserError(
            f"the model makes logits {list(logits.shape)} of one sample; expected "
            f"[1, {num_classes}] for {num_classes} classes"
        )


def _chunk(num_intervals: int, wanted: int) -> int:
    """The largest divisor of T up to `wanted`: every call has the same shape."""
    most = min(wanted, num_intervals)
    return max(r for r in range(1, most + 1) if num_intervals % r == 0)


def build(
    config: Config,
    *,
    model: Any = None,
    dataset: Dataset | None = None,
    optimizer: optimizers.Optimizer | None = None,
    aggregator: Aggregator | None = None,
) -> Experiment:
    """Assembles everything; see `runner.simulate` for the arguments.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    validate(config)
    devices.start(config.devices)
    compile_cache.use(config.compile_cache)
    mesh = devices.make_mesh(config.devices, config.num_clients)
    if aggregator is not None and not isinstance(aggregator, Aggregator):
        raise UserError(f"aggregator={aggregator!r}: expected a tsfl_jax.Aggregator")
    best = choices.choose(
        jax.default_backend(), config.model.name if model is None else "own"
    )
    rule = aggregator or AGGREGATORS[config.algorithm]
    times = draw_schedule(config)
    dataset = load_dataset(config) if dataset is None else arrays.check(dataset)
    capacity = times.size.max(axis=0)
    _check_batch(config.batch_size, capacity)
    dealt = partition.make_partition(
        dataset.y_train,
        capacity,
        kind=config.partition.kind,
        alpha=config.partition.alpha,
        classes_per_client=config.partition.classes_per_client,
        replacement=config.partition.replacement,
        rng=np.random.default_rng([config.seed, _PARTITION]),
    )

    iteration = config.schedule.iteration
    form = config.convolution
    form = best.convolution if form == "auto" else form
    if model is None:
        model = models.make_model(
            config.model.name,
            dataset.num_classes,
            dataset.x_train.shape[1:],
            hidden=config.model.hidden,
            norm=config.model.norm,
            form=form,
        )
        model_name = own_model = config.model.name
    else:
        model_name = type(model).__name__
        own_model = " ".join(repr(model).split())
    if not isinstance(model, models.Model):
        model = models.from_flax(model)

    problem = engine.Problem(
        samples=local.Samples(
            x=dataset.x_train,
            y=dataset.y_train,
            mean=np.asarray(dataset.mean, np.float32),
            inverse_std=np.asarray(1.0 / dataset.std, np.float32),
        ),
        test=evaluation.make_test_set(dataset.x_test, dataset.y_test, mesh.size),
        rows=dealt.indices,
        client=np.arange(config.num_clients, dtype=np.int32),
    )
    problem = devices.place(mesh, problem, engine.PROBLEM_SPEC)
    hparams = hparams_of(config, rule)
    constants = (hparams.smoothness, hparams.grad_sq_norm, hparams.grad_variance)
    name = config.mapping
    name = best.mapping if name == "auto" else name
    work = times.tau * local.steps_per_iteration(
        times.size, config.batch_size, iteration
    )
    run = engine.make_run(
        model,
        rule,
        optimizers.as_factory(optimizer),
        batch_size=config.batch_size,
        iteration=iteration,
        passes=local.most_passes(times.tau, times.size, config.batch_size, iteration),
        mapping_name=name,
        chunk=min(config.client_chunk or config.num_clients, config.num_clients),
        most_steps=int(work.max()),
        estimates=rule.uses_constants and any(np.isnan(c) for c in constants),
        mesh=mesh,
    )

    key = jax.random.key(config.seed)
    start = jax.jit(
        lambda key, samples: engine.init_state(
            model, rule, key, local.scaled(samples, samples.x[:1])
        )
    )(jax.random.fold_in(key, _INIT), problem.samples)

    _check_output(model, start.params, problem, dataset.num_classes)
    intervals = np.arange(config.num_intervals, dtype=np.int32)
    evaluate = (intervals + 1) % config.eval_every == 0
    evaluate[-1] = True
    slot = devices.deal(work, mesh.size)
    inputs = engine.Inputs(intervals, times.tau, times.size, evaluate, slot)
    fingerprints = {
        "data": data.fingerprint(*dataset[1:5]),
        "split": data.fingerprint(dealt.indices, dealt.capacity),
        "schedule": data.fingerprint(times.tau, times.size),
    }
    settings = dataclasses.asdict(config)
    identity = {k: v for k, v in flat(settings).items() if k not in WITHOUT_EFFECT}
    labels = {
        "algorithm": config.algorithm if aggregator is None else "custom",
        "data": dataset.name,
        "model": model_name,
        "num_parameters": sum(a.size for a in jax.tree.leaves(start.params["params"])),
        "mapping": name,
        "convolution": form,
        "num_devices": mesh.size,
        "seed": config.seed,
        "fingerprints": fingerprints,
    }
    return Experiment(
        run=run,
        start=start,
        key=jax.random.fold_in(key, _TRAIN),
        hparams=hparams,
        problem=problem,
        mesh=mesh,
        inputs=inputs,
        chunk=_chunk(config.num_intervals, config.report_every),
        interval_seconds=config.schedule.interval_seconds,
        checkpoint=config.checkpoint,
        settings=settings,
        # A function cannot be compared: whoever passes another one of their own in
        # the same place has to choose another workdir.
        identity=identity
        | fingerprints
        | {"own model": own_model, "own optimizer": optimizer is not None}
        | {"own rule": aggregator.weights.__qualname__ if aggregator else None},
        labels=labels,
        notes=dealt.notes,
    )
