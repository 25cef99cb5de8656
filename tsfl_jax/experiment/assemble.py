"""Assembles an experiment: what `prepare` drew, on the devices, around one function.

`runner` carries it out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import rng
from tsfl_jax.config import Config
from tsfl_jax.data import quadratic
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, evaluation, optimizers, scan
from tsfl_jax.engine.recipe import Probes, Recipe
from tsfl_jax.experiment import compile_cache, memory
from tsfl_jax.experiment.identity import identity_of, labels_of
from tsfl_jax.experiment.prepare import (
    Prepared,
    chunk_of,
    counts_of,
    curvature_of,
    evaluated,
    prepare,
)
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Dataset, HParams, PRNGKey, Schedule, UserError
from tsfl_jax.validate import validate


class Experiment(NamedTuple):
    """All that `runner` needs: a pure function, its arguments, and labels."""

    run: Callable  # (state, key, hparams, problem, inputs[R]) -> (state, history[R])
    start: scan.State
    key: PRNGKey
    hparams: HParams
    problem: scan.Problem
    mesh: Mesh
    inputs: scan.Inputs  # on the host, [T, ...]; filled up to whole chunks
    chunk: int  # R, intervals of one compiled call
    times: Schedule  # what the inputs are made of, T intervals or updates
    checkpoint: bool
    settings: dict  # the config as plain values, for config.json
    identity: dict  # what a checkpoint must agree on
    labels: dict  # algorithm, data, model, fingerprints: for summaries and plots
    notes: tuple[str, ...]  # what a user should know before the run


def start_jax(config: Config) -> Mesh:
    """Devices and compilation cache as a config wants them, and the mesh."""
    devices.start(config.devices)
    compile_cache.use(config.compile_cache)
    return devices.make_mesh(config.devices, config.num_clients)


def check_output(model, params, problem: scan.Problem, num_classes: int) -> None:
    """Raises UserError unless a network that classifies has a logit for each class."""
    if not model.classifies:
        return

    def predict(params, samples):
        return model.predict(params, local.scaled(samples, samples.x[:1]))

    logits = jax.eval_shape(predict, params, problem.samples)
    if logits.shape != (1, num_classes):
        raise UserError(
            f"the model makes logits {list(logits.shape)} of one sample; expected "
            f"[1, {num_classes}] for {num_classes} classes"
        )


def make_problem(prepared: Prepared, mesh: Mesh) -> scan.Problem:
    """Samples, test set and index table on the devices."""
    dataset = prepared.dataset
    problem = scan.Problem(
        samples=local.Samples(
            x=dataset.x_train,
            y=dataset.y_train,
            mean=np.asarray(dataset.mean, np.float32),
            inverse_std=np.asarray(1.0 / dataset.std, np.float32),
        ),
        test=evaluation.make_test_set(dataset.x_test, dataset.y_test, mesh.size),
        rows=prepared.dealt.indices,
        client=np.arange(prepared.config.num_clients, dtype=np.int32),
    )
    return devices.place(mesh, problem, scan.PROBLEM_SPEC)


def make_inputs(prepared: Prepared, num_devices: int) -> scan.Inputs:
    """What every interval is told, ``[T, ...]`` on the host; up to a whole chunk."""
    times = prepared.times
    inputs = scan.Inputs(
        interval=np.arange(len(times.tau), dtype=np.int32),
        tau=times.tau,
        size=times.size,
        evaluate=evaluated(prepared),
        assigned=devices.deal(prepared.steps, num_devices),
        reported=times.reported,
        delivery=times.delivery,
    )
    missing = -len(times.tau) % chunk_of(prepared)
    if not missing:
        return inputs
    # Nobody delivers in what fills up, nothing is tested, and no model kept.
    filled = jax.tree.map(
        lambda a: np.concatenate([a, a[-1:].repeat(missing, 0)]), inputs
    )
    end = len(times.tau)
    filled.tau[end:], filled.evaluate[end:] = 0, False
    if times.reported is not None:
        filled.reported[end:] = 0
    if times.delivery is not None:
        filled.delivery.keep[end:] = times.places
    return filled


def recipe_of(
    several: list[Prepared], rules: tuple[Aggregator, ...], lanes: str = ""
) -> Recipe:
    """What shapes the program of experiments that differ in arrays only."""
    first, config = several[0], several[0].config
    size, iteration = config.batch_size, config.schedule.iteration
    return Recipe(
        batch_size=size,
        iteration=iteration,
        passes=max(
            local.most_passes(p.times.tau, p.times.size, size, iteration)
            for p in several
        ),
        mapping=first.mapping,
        block=min(config.client_chunk or config.num_clients, config.num_clients),
        longest=max(int(p.steps.max()) for p in several),
        probes=Probes(
            tuple(any(p.estimates for p in several if p.rule == r) for r in rules),
            tuple(r.uses_gradients or config.measure_clients for r in rules),
        ),
        lanes=lanes,
    )


def make_run(
    several: list[Prepared], rules: tuple[Aggregator, ...], mesh: Mesh, lanes: str = ""
) -> Callable:
    """The function to compile; of experiments that differ in arrays only.

    Args:
      several: the experiments that it has to be able to run; most often one.
      rules: theirs.
      mesh: the devices.
      lanes: see `Recipe`.
    """
    recipe = recipe_of(several, rules, lanes)
    return scan.make_run(several[0].model, rules, several[0].optimizer, recipe, mesh)


def keys_of(prepared: Prepared) -> tuple[PRNGKey, PRNGKey]:
    """(of the initial model, of the seed, which the run folds its streams from)."""
    key = rng.key(prepared.config.seed)
    return rng.fold(key, "initial model"), key


def make_start(prepared: Prepared, samples: local.Samples) -> scan.State:
    """w^0 and the rule's state."""

    def start(key, samples):
        x = local.scaled(samples, samples.x[:1])
        counts, places = counts_of(prepared), prepared.times.places
        return scan.init_state(
            prepared.model,
            prepared.rule,
            key,
            x,
            counts,
            places,
            prepared.dealt.capacity.astype(np.float32),
        )

    return jax.jit(start)(keys_of(prepared)[0], samples)


def exact_of(prepared: Prepared) -> quadratic.Exact:
    """The true constants of quadratic data, with w⁰ = 0, as these clients hold them.

    Raises:
      UserError: another model, or clients that hold more samples now and then.
    """
    dataset, times = prepared.dataset, prepared.times
    if prepared.model_name != "quadratic":
        raise UserError(
            f"model {prepared.model_name!r}: exact constants are known of "
            "--config.model.name=quadratic only"
        )
    client = slice(None) if times.delivery is None else times.delivery.client
    sizes = prepared.dealt.capacity
    if ((times.size != sizes[client]) & (times.tau > 0)).any():
        raise UserError(
            "the clients' data sizes vary in time, so that there are no exact "
            "constants; use another --config.schedule.kind or size_groups"
        )
    curvature = curvature_of(prepared.config, dataset.x_train.shape[1:])
    return quadratic.exact(
        dataset.x_train,
        prepared.dealt.indices,
        sizes,
        curvature,
        prepared.config.batch_size,
        np.zeros(len(curvature)),
    )


def compiled_memory(prepared: Prepared, mesh: Mesh) -> dict[str, int]:
    """Bytes on every device by what the compiler says; takes as long as to compile."""
    problem = make_problem(prepared, mesh)
    start = make_start(prepared, problem.samples)
    inputs = make_inputs(prepared, mesh.size)
    inputs = jax.tree.map(lambda a: a[: chunk_of(prepared)], inputs)
    whole = (start, keys_of(prepared)[1], prepared.hparams)
    run = make_run([prepared], (prepared.rule,), mesh)
    found = (
        jax.jit(run)
        .lower(
            *devices.place(mesh, whole, scan.WHOLE),
            problem,
            devices.place(mesh, inputs, scan.INPUTS_SPEC),
        )
        .compile()
        .memory_analysis()
    )
    return {
        "arguments": found.argument_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        "results": found.output_size_in_bytes,
    }


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
    mesh = start_jax(config)
    prepared = prepare(
        config,
        model=model,
        dataset=dataset,
        optimizer=optimizer,
        aggregator=aggregator,
    )
    memory.check(prepared, mesh.size)
    problem = make_problem(prepared, mesh)
    start = make_start(prepared, problem.samples)
    num_classes = prepared.dataset.num_classes
    check_output(prepared.model, start.params, problem, num_classes)
    sizes = [a.size for a in jax.tree.leaves(start.params["params"])]
    return Experiment(
        run=make_run([prepared], (prepared.rule,), mesh),
        start=start,
        key=keys_of(prepared)[1],
        hparams=prepared.hparams,
        problem=problem,
        mesh=mesh,
        inputs=make_inputs(prepared, mesh.size),
        chunk=chunk_of(prepared),
        times=prepared.times,
        checkpoint=config.checkpoint,
        settings=dataclasses.asdict(config),
        identity=identity_of(prepared),
        labels=labels_of(prepared)
        | {"num_parameters": sum(sizes), "num_devices": mesh.size},
        notes=prepared.notes,
    )
