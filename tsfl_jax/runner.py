"""Carries out an experiment: compiled chunks, progress, files, checkpoints.

The host sees a chunk of intervals at a time. After each chunk it writes the checkpoint
first and the metrics after it, so that a killed run resumes with the same bits.
"""

import pathlib
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import (
    checkpoint,
    devices,
    engine,
    experiment,
    optimizers,
    progress,
    report,
    results,
)
from tsfl_jax.aggregate import Aggregator
from tsfl_jax.config import Config, effective, flat
from tsfl_jax.types import Dataset, Params, UserError


class Result(NamedTuple):
    """What a run leaves behind."""

    params: Params  # the final global model's Flax variables, on the host
    # Per interval, [T] or [T, N]: engine.History and "virtual_time" in seconds.
    history: dict[str, np.ndarray]
    summary: dict[str, Any]  # as in summary.json


class _Progress(NamedTuple):
    """Everything a checkpoint holds."""

    state: engine.State
    history: engine.History  # [T, ...], filled up to the finished intervals
    seconds: np.ndarray  # float64, time spent in compiled calls so far


def arguments(exp: experiment.Experiment, state: engine.State, first: int) -> tuple:
    """What ``exp.run`` takes for the chunk from interval `first` on, on the devices."""
    inputs = jax.tree.map(lambda a: a[first : first + exp.chunk], exp.inputs)
    return (
        *devices.place(exp.mesh, (state, exp.key, exp.hparams), engine.WHOLE),
        exp.problem,
        devices.place(exp.mesh, inputs, engine.INPUTS_SPEC),
    )


def _empty(exp: experiment.Experiment) -> _Progress:
    _, chunk = jax.eval_shape(exp.run, *arguments(exp, exp.start, 0))
    intervals = len(exp.times.tau)
    history = jax.tree.map(
        lambda a: np.zeros((intervals,) + a.shape[1:], a.dtype), chunk
    )
    return _Progress(jax.device_get(exp.start), history, np.float64(0))


def _opened(exp, workdir, done: _Progress, stream) -> tuple:
    """The folder, and where a run in it stands."""
    folder, finished, total = report.prepare_workdir(workdir), 0, len(exp.times.tau)
    _check_same_settings(folder, exp)
    if exp.checkpoint:
        found = checkpoint.restore_latest(
            folder / "checkpoints", done, exp.identity, progress.notice(stream)
        )
        if found is not None:
            finished, done = found
            progress.tell(stream, f"resuming after interval {finished} of {total}")
    return folder, finished, done


def _followed(finished: int, done: _Progress) -> tuple[int, _Progress]:
    """Where the first process stands; its clock stays its own."""
    shared = (np.int32(finished), done.state, done.history)
    finished, state, history = devices.from_first(shared)
    return int(finished), done._replace(state=state, history=history)


def _check_same_settings(folder: pathlib.Path, exp: experiment.Experiment) -> None:
    """Refuses a folder in which another experiment has left its settings."""
    old = effective(flat(report.read_json(folder / "config.json") or {}))
    new = effective(flat(report.plain(exp.settings)))
    names = dict.fromkeys([*new, *old])
    changed = [
        f"{n}: {old.get(n)} → {new.get(n)}" for n in names if old.get(n) != new.get(n)
    ]
    if old and changed:
        raise UserError(
            f"{folder} holds another experiment ({'; '.join(changed[:3])}); choose "
            "another --workdir, or delete that folder to start afresh"
        )


def run(
    exp: experiment.Experiment,
    workdir: str | pathlib.Path | None = None,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Runs or resumes an experiment.

    Args:
      exp: from `experiment.build`.
      workdir: folder for files and checkpoints; None keeps everything in memory.
      stream: where progress is told, None for silence.
      stop: asked after every chunk; True ends the run there with KeyboardInterrupt.

    Returns:
      `Result`. Where no client's model is finite any more, the run stops there with the
      last good model and ``summary["diverged_at"]`` says in which interval.

    Raises:
      UserError: the folder cannot be used, or holds another experiment's checkpoint.
    """
    total = len(exp.times.tau)
    done, finished = _empty(exp), 0
    # Of several processes the first one reads and writes; the others follow it.
    folder = None
    try:
        if workdir is not None and devices.first():
            folder, finished, done = _opened(exp, workdir, done, stream)
        refused = None
    except UserError as error:
        refused = error
    if devices.any_process(refused is not None):
        raise refused or UserError("process 0 has stopped and says why")
    saves = folder is not None and exp.checkpoint
    finished, done = _followed(finished, done)
    if folder is not None:
        report.write_json(folder / "config.json", exp.settings)
        rows = results.rows_of(done.history, 0, finished, exp.times.seconds)
        report.write_metrics(folder / "metrics.jsonl", rows)

    compiled, compile_seconds = None, 0.0
    started, begun = finished, None
    lost = bool(done.state.diverged)
    state = done.state
    while finished < total and not lost:
        current = arguments(exp, state, finished)
        if compiled is None:
            begun = time.perf_counter()
            compiled = jax.jit(exp.run).lower(*current).compile()
            compile_seconds = time.perf_counter() - begun
            progress.tell(stream, f"compiled in {compile_seconds:.1f} s")
            begun = time.perf_counter()
        tick = time.perf_counter()
        state, chunk = jax.block_until_ready(compiled(*current))
        seconds = done.seconds + (time.perf_counter() - tick)
        chunk = jax.device_get(chunk)
        lost = bool(chunk.diverged[-1])
        # After a total loss nothing more happens: forget the empty intervals.
        length = int(np.argmax(chunk.diverged)) + 1 if lost else exp.chunk
        length = min(length, total - finished)
        for whole, part in zip(done.history, chunk, strict=True):
            whole[finished : finished + length] = part[:length]
        first, finished = finished, finished + length
        done = done._replace(state=jax.device_get(state), seconds=np.float64(seconds))
        if saves:
            checkpoint.save(folder / "checkpoints", finished, done, exp.identity)
        if folder is not None:
            rows = results.rows_of(done.history, first, finished, exp.times.seconds)
            report.append_metrics(folder / "metrics.jsonl", rows)
        stopping = finished < total and not lost
        stopping = stopping and devices.any_process(stop())
        progress.show(
            progress.progress_line(
                finished,
                total,
                results.last(done.history.test_accuracy[:finished]),
                results.last(done.history.train_loss[:finished]),
                time.perf_counter() - begun,
                started_at=started,
            ),
            stream,
            last=finished == total or lost or stopping,
        )

        if stopping:
            raise KeyboardInterrupt

    history = jax.tree.map(lambda a: a[:finished], done.history)
    summary = None
    if folder is not None and compiled is None:  # a finished run is not made anew
        summary = report.read_json(folder / "summary.json")
    if summary is None:
        summary = results.summary(exp, history, float(done.seconds), compile_seconds)
    if folder is not None:
        results.write(folder, exp, history, done.state.params, summary)
    times = {"virtual_time": exp.times.seconds[:finished]}
    return Result(done.state.params, history._asdict() | times, summary)


def simulate(
    config: Config,
    *,
    model: Any = None,
    dataset: Dataset | None = None,
    optimizer: optimizers.Optimizer | None = None,
    aggregator: Aggregator | None = None,
    workdir: str | pathlib.Path | None = None,
    verbose: bool = False,
) -> Result:
    """Runs one experiment from Python.

    Args:
      config: all settings.
      model: a Flax module (images ``[B, H, W, C]`` → logits) or a `models.Model`,
        instead of ``config.model``.
      dataset: samples in memory, instead of ``config.data``.
      optimizer: an optax transformation for the clients, or a function that makes one
        of `HParams`, instead of SGD with momentum.
      aggregator: a rule of your own, instead of ``config.algorithm``.
      workdir: where to write files and checkpoints; None: nowhere.
      verbose: tell progress on stderr.

    Returns:
      `Result`: the final parameters, the history per interval, the summary.

    Raises:
      UserError: an input that cannot work, in one line.
    """
    exp = experiment.build(
        config,
        model=model,
        dataset=dataset,
        optimizer=optimizer,
        aggregator=aggregator,
    )
    return run(exp, workdir, sys.stderr if verbose else None)
