"""Carries out an experiment: compiled chunks, progress, files, checkpoints.

The host sees a chunk of intervals at a time. After each chunk it writes the checkpoint
first and the metrics after it, so that a killed run resumes with the same bits.
"""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from tsfl_jax.config import Config, effective, flat
from tsfl_jax.engine import devices, optimizers, scan
from tsfl_jax.experiment import assemble, checkpoint, results
from tsfl_jax.report import files as report
from tsfl_jax.report import progress
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Dataset, Params, UserError


class Result(NamedTuple):
    """What a run leaves behind."""

    params: Params  # the final global model's Flax variables, on the host
    # Per interval, [T] or [T, N]: engine.History and "virtual_time" in seconds.
    history: dict[str, np.ndarray]
    summary: dict[str, Any]  # as in summary.json


class _Progress(NamedTuple):
    """Everything a checkpoint holds."""

    state: scan.State
    history: scan.History  # [T, ...], filled up to the finished intervals
    seconds: np.ndarray  # float64, time spent in compiled calls so far


def arguments(exp: assemble.Experiment, state: scan.State, first: int) -> tuple:
    """What ``exp.run`` takes for the chunk from interval `first` on, on the devices."""
    inputs = jax.tree.map(lambda a: a[first : first + exp.chunk], exp.inputs)
    return (
        *devices.place(exp.mesh, (state, exp.key, exp.hparams), scan.WHOLE),
        exp.problem,
        devices.place(exp.mesh, inputs, scan.INPUTS_SPEC),
    )


def _empty(exp: assemble.Experiment) -> _Progress:
    _, chunk = jax.eval_shape(exp.run, *arguments(exp, exp.start, 0))
    intervals = len(exp.times.tau)
    history = jax.tree.map(
        lambda a: np.zeros((intervals,) + a.shape[1:], a.dtype), chunk
    )
    return _Progress(jax.device_get(exp.start), history, np.float64(0))


class _Files(NamedTuple):
    """The workdir of a run that holds it."""

    folder: pathlib.Path
    check: Callable[[], None]  # raises UserError once the folder was removed


def _opened(
    exp: assemble.Experiment,
    workdir: str | pathlib.Path,
    done: _Progress,
    stream: IO[str] | None,
    stack: contextlib.ExitStack,
) -> tuple[_Files, int, _Progress]:
    """The locked folder, and where a run in it stands."""
    folder, finished, total = report.prepare_workdir(workdir), 0, len(exp.times.tau)
    notice = progress.warn_to(stream)
    files = _Files(folder, stack.enter_context(report.lock(folder, notice)))
    if (folder / "lanes").is_dir():
        raise UserError(f"{folder} holds a sweep; choose another --workdir")
    refused, found = _other_settings(folder, exp), None
    if exp.checkpoint:
        try:
            found = checkpoint.restore_latest(
                folder / "checkpoints", done, exp.identity, notice
            )
        except UserError as error:
            raise UserError(refused or str(error)) from error
    if found is None and refused:
        raise UserError(refused)
    if found is not None:
        if refused:  # the checkpoint's digest proves what the experiment is
            notice(
                f"{folder / 'config.json'} is missing or changed; it is written anew"
            )
        finished, done = found
        progress.log(stream, f"resuming after interval {finished} of {total}")
    return files, finished, done


def _followed(finished: int, done: _Progress) -> tuple[int, _Progress]:
    """Where the first process stands; its clock stays its own."""
    shared = (np.int32(finished), done.state, done.history)
    finished, state, history = devices.from_first(shared)
    return int(finished), done._replace(state=state, history=history)


def _other_settings(folder: pathlib.Path, exp: assemble.Experiment) -> str:
    """Why the folder is not this experiment's by its config.json; "" if it is."""
    path = folder / "config.json"
    if not path.exists() and not (folder / "metrics.jsonl").exists():
        return ""
    found = report.read_json(path)
    if not found:
        return (
            f"{path} is missing or damaged, so that nothing says which experiment "
            f"{folder} holds; choose another --workdir, or delete that folder to start "
            "afresh"
        )
    old = effective(flat(found))
    new = effective(flat(report.plain(exp.settings)))
    names = dict.fromkeys([*new, *old])
    changed = [
        f"{n}: {old.get(n)} → {new.get(n)}" for n in names if old.get(n) != new.get(n)
    ]
    if not changed:
        return ""
    return (
        f"{folder} holds another experiment ({'; '.join(changed[:3])}); choose "
        "another --workdir, or delete that folder to start afresh"
    )


def _begin(
    exp: assemble.Experiment,
    workdir: str | pathlib.Path | None,
    stream: IO[str] | None,
    stack: contextlib.ExitStack,
) -> tuple[_Files | None, int, _Progress]:
    """Where the run stands, the same in all processes; the first one has the files."""
    done, finished = _empty(exp), 0
    devices.connect(exp.mesh)
    # Of several processes the first one reads and writes; the others follow it.
    files, refused = None, None
    try:
        if workdir is not None and devices.first():
            files, finished, done = _opened(exp, workdir, done, stream, stack)
    except UserError as error:
        refused = error
    if devices.any_process(refused is not None):
        raise refused or UserError("process 0 has stopped and says why")
    finished, done = _followed(finished, done)
    if files is not None:
        report.write_json(files.folder / "config.json", exp.settings)
        rows = results.rows_of(done.history, 0, finished, exp.times.seconds)
        report.write_metrics(files.folder / "metrics.jsonl", rows)
    return files, finished, done


def _keep(
    exp: assemble.Experiment,
    files: _Files,
    done: _Progress,
    first: int,
    finished: int,
    size: int | None,
    notice: Callable[[str], None],
) -> int | None:
    """Writes the checkpoint, then the rows from `first` on; metrics.jsonl's new size.

    A metrics.jsonl that is not as large as it was left is written anew.
    """
    files.check()
    if exp.checkpoint:
        folder = files.folder / "checkpoints"
        checkpoint.save(folder, finished, done, exp.identity)
    path = files.folder / "metrics.jsonl"
    if report.size_of(path) == size:
        rows = results.rows_of(done.history, first, finished, exp.times.seconds)
        report.append_metrics(path, rows)
    else:
        notice(f"{path} was changed during the run; it is written anew")
        rows = results.rows_of(done.history, 0, finished, exp.times.seconds)
        report.write_metrics(path, rows)
    return report.size_of(path)


def run(
    exp: assemble.Experiment,
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
    with contextlib.ExitStack() as stack:
        files, finished, done = _begin(exp, workdir, stream, stack)
        finished, done, compile_seconds = _train(
            exp, files, finished, done, stream, stop
        )
        history = jax.tree.map(lambda a: a[:finished], done.history)
        summary = results.summary(exp, history, float(done.seconds), compile_seconds)
        if files is not None:
            if not compile_seconds:  # finished by an earlier process
                old = report.read_json(files.folder / "summary.json") or {}
                summary |= results.provenance(old)
            results.write(files.folder, exp, history, done.state.params, summary)
            files.check()
    more = {
        "virtual_time": exp.times.seconds[:finished],
        # On the host, where an integer has 64 bits.
        "samples": history.samples.sum(axis=1, dtype=np.int64),
    }
    return Result(done.state.params, history._asdict() | more, summary)


def _train(
    exp: assemble.Experiment,
    files: _Files | None,
    finished: int,
    done: _Progress,
    stream: IO[str] | None,
    stop: Callable[[], bool],
) -> tuple[int, _Progress, float]:
    """Runs the remaining chunks; finished intervals, progress, seconds of compiling."""
    total, notice = len(exp.times.tau), progress.warn_to(stream)
    size = None if files is None else report.size_of(files.folder / "metrics.jsonl")
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
            progress.log(stream, f"compiled in {compile_seconds:.1f} s")
            devices.meet()  # one process may have compiled what another had kept
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
        if files is not None:
            size = _keep(exp, files, done, first, finished, size, notice)
        stopping = finished < total and not lost
        stopping = stopping and devices.any_process(stop())
        line = progress.progress_line(
            finished,
            total,
            results.last(done.history.test_accuracy[:finished]),
            results.last(done.history.train_loss[:finished]),
            time.perf_counter() - begun,
            started_at=started,
        )
        progress.update_line(line, stream, last=finished == total or lost or stopping)
        if stopping:
            raise KeyboardInterrupt
    return finished, done, compile_seconds


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
    if workdir is not None:
        report.folder_of(workdir)  # before the work
    exp = assemble.build(
        config,
        model=model,
        dataset=dataset,
        optimizer=optimizer,
        aggregator=aggregator,
    )
    return run(exp, workdir, sys.stderr if verbose else None)
