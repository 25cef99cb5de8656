"""Single runs: build an experiment, train it call by call, write its files."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import command
from tsfl_jax.config import Config, flat, own_parts
from tsfl_jax.prepare import backend, prepare
from tsfl_jax.report import files as report
from tsfl_jax.report import progress as bars
from tsfl_jax.report import runs, table
from tsfl_jax.report import writers as reporting
from tsfl_jax.run import calls, checkpoint, lanes, memory
from tsfl_jax.run import summary as summaries
from tsfl_jax.run.calls import Progress
from tsfl_jax.run.identity import depends_on_devices, identity_of, labels_of
from tsfl_jax.run.program import Arrays, Chunk, Program
from tsfl_jax.types import Params, UserError

# What only the process knew that finished the run; all results are recomputed.
_PROVENANCE = {"compile_seconds": (int, float), "versions": dict}
_PROVENANCE |= dict.fromkeys(("device", "backend", "processor", "command"), str)


class Experiment(NamedTuple):
    """All that a run needs."""

    prepared: prepare.Prepared
    program: Program
    arrays: Arrays  # of one run, L = 1
    identity: dict[str, Any]  # what a checkpoint must agree on
    labels: dict[str, Any]  # algorithm, data, model, fingerprints: for summaries


def build(config: Config, **custom: Any) -> Experiment:
    """Make everything of an experiment; `custom` are fields of `Custom`."""
    config, parts = prepare.accepted(config, **custom)
    mesh = backend.start_jax(config)
    prepared = prepare.prepare_validated(config, parts)
    memory.check(prepared, mesh.size)
    identity = identity_of(prepared)
    if depends_on_devices(prepared):
        identity["devices that share the clients"] = mesh.size
    program, arrays = lanes.single(prepared, mesh)
    return Experiment(
        prepared=prepared,
        program=program,
        arrays=arrays,
        identity=identity,
        labels=labels_of(prepared) | {"num_devices": mesh.size},
    )


class Result(NamedTuple):
    """What a run leaves behind."""

    params: Params  # the final global model's Flax variables, on the host
    # Per interval, [T] or [T, N]: `scan.History`, but "samples" as the sum over the
    # clients, [T] int64, which a sweep has by client; and "virtual_time" in seconds.
    # Of cohorts and deliveries N are slots, and "client" [T, N] says whose they are.
    history: dict[str, np.ndarray]
    summary: dict[str, Any]  # as in summary.json
    # Layers that stay with the clients by path, [U, ...], of the clients "client" [U].
    own: dict[str, np.ndarray] | None = None

    def __repr__(self) -> str:
        """What the command line prints at its end, and what one can do with it."""
        names = ".summary .history .params .module() .to_xarray() .to_pandas() .plot()"
        return f"{bars.summary_text(self.summary)}\n{names}"

    def to_xarray(self) -> Any:
        """The history as an `xarray.Dataset`; see `report.table`."""
        return table.of_run(self.history, self.summary)

    def to_pandas(self) -> Any:
        """A data frame with one line per interval."""
        return table.to_pandas(self.to_xarray())

    def module(self, model: Any) -> Any:
        """The trained nnx module; `model` is that of `simulate`."""
        from tsfl_jax.models import nnx_modules  # importing nnx takes a second

        return nnx_modules.module_of(model, self.params)

    def plot(self) -> Any:
        """A Matplotlib figure of accuracy and losses against the interval."""
        return runs.curves(self.history, self.summary)


def run(
    exp: Experiment,
    workdir: str | pathlib.Path | None = None,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = command.was_stopped,
    writers: Sequence[reporting.Choice] = (),
) -> Result:
    """Run or resume an experiment.

    Args:
      exp: from `build`.
      workdir: folder for files and checkpoints; None keeps everything in memory.
      stream: where progress is printed; None: nowhere.
      stop: called after every chunk; True ends the run there, all saved, with
        KeyboardInterrupt.
      writers: as of `simulate`.

    Returns:
      `Result`. Where no client's model is finite any more, the run stops there with the
      last good model and ``summary["diverged_at"]`` says in which interval.

    Raises:
      UserError: the folder cannot be used, or holds another experiment's checkpoint.
    """
    with contextlib.ExitStack() as locks:
        folder = None if workdir is None else report.folder_of(workdir)
        # Before the folder, which is not made if a writer is refused.
        opened = reporting.Open([reporting.writer_of(w, folder) for w in writers])
        progress = calls.at_start(exp.program, exp.arrays)
        if folder:
            progress = _opened(exp, folder, progress, stream, locks)
        settings = flat(report.plain(dataclasses.asdict(exp.prepared.config)))
        opened.start(settings, int(progress.finished))
        progress, compile_seconds = _train(exp, folder, progress, stream, stop, opened)
        result = _finish(exp, folder, progress, compile_seconds)
        opened.end(report.plain(result.summary), folder)
    return result


def _opened(
    exp: Experiment,
    folder: pathlib.Path,
    progress: Progress,
    stream: IO[str] | None,
    locks: contextlib.ExitStack,
) -> Progress:
    """Where a run in a folder stands, which is made and locked."""
    report.prepare_workdir(folder)
    locks.enter_context(report.lock(folder))
    if (folder / "lanes").is_dir():
        raise UserError(f"{folder} holds a sweep; choose another --workdir")
    store = _store(exp, folder)
    if (folder / "metrics.jsonl").exists() and not store.folder.exists():
        raise UserError(
            f"{folder} holds a run without checkpoints; {checkpoint.AFRESH}"
        )
    if exp.prepared.config.checkpoint:
        adapt = functools.partial(_adapt, exp, progress)
        progress = store.restored(progress, bars.warn_to(stream), adapt)
    if progress.finished:
        total = exp.program.intervals
        bars.log(stream, f"resuming after interval {progress.finished} of {total}")
        _write_metrics(exp, folder, progress)
    report.write_json(folder / "config.json", dataclasses.asdict(exp.prepared.config))
    return progress


def _adapt(
    exp: Experiment, progress: Progress, saved: dict, shapes: dict[str, list[int]]
) -> tuple[Progress, dict]:
    """What a checkpoint of this run looks like if it was begun with a smaller T.

    Its intervals must be those of the longer run: a schedule that begins otherwise has
    another digest, and nothing in their training may depend on T.
    """
    config, times = exp.prepared.config, exp.prepared.workload.schedule
    intervals = saved.get("num_intervals", config.num_intervals)
    if intervals >= config.num_intervals:
        return progress, exp.identity
    custom = exp.prepared.custom
    parts = [n for n in own_parts(config) if n.startswith(("algorithm=", "lr_"))]
    is_custom = any((custom.aggregator, custom.client_step, custom.optimizer, parts))
    if is_custom or config.lr_schedule == "cosine" or config.algorithm == "learned":
        raise UserError(
            f"--config.num_intervals={config.num_intervals}: the run was begun with "
            f"{intervals}, which lr_schedule=cosine, algorithm=learned and a rule, "
            "schedule, optimizer or client_step of yours reads; choose a new --workdir"
        )
    updates = shapes[".history.diverged"][1]
    first = jax.tree.map(lambda a: a[:updates] if np.ndim(a) else a, times)
    digests = prepare.schedule_fingerprints(first, config.timeline)
    shorter = jax.tree.map(lambda a: a[:, :updates], progress.history)
    identity = exp.identity | {"num_intervals": intervals} | digests
    return progress._replace(history=shorter), identity


def _store(exp: Experiment, folder: pathlib.Path) -> calls.Store:
    return calls.Store(folder / "checkpoints", exp.identity)


def _train(
    exp: Experiment,
    folder: pathlib.Path | None,
    progress: Progress,
    stream: IO[str] | None,
    stop: Callable[[], bool],
    writers: reporting.Open,
) -> tuple[Progress, float]:
    """Run the remaining chunks; the progress, and seconds of compiling."""
    total, first = exp.program.intervals, int(progress.finished)
    if first >= total or progress.state.diverged[0] or _is_reached(exp, progress):
        return progress, 0.0
    compiled = exp.program.compile(exp.arrays, stream)
    save = folder and functools.partial(_save, exp, folder)
    bar = bars.bar(stream, total, first)

    def show(chunk: Chunk, progress: Progress) -> bool:
        history = progress.of_run()
        series = history.test_accuracy, history.train_loss
        scores = map(summaries.last_measured, series)
        calls.advance(bar, chunk, 1, bars.results_text(*scores))
        is_ended = False
        if writers.writers:
            rows = summaries.rows_of(exp.prepared, history, chunk.first)
            seconds = float(progress.seconds)
            is_ended = writers.report([r | {"wall_time": seconds} for r in rows])
        return is_ended or _is_reached(exp, progress)

    progress = calls.train(
        compiled, exp.arrays, progress, show=show, stop=stop, save=save
    )
    progress = progress._replace(state=jax.device_get(progress.state))
    if save:
        save(progress)
    return progress, compiled.seconds


def _is_reached(exp: Experiment, progress: Progress) -> bool:
    """Whether the run ends here by its settings."""
    history = progress.of_run()
    scores = np.asarray(history.test_accuracy), np.asarray(history.test_loss)
    return exp.prepared.config.stop.is_reached(*scores)


def _save(exp: Experiment, folder: pathlib.Path, progress: Progress) -> None:
    """Write the checkpoint, then metrics.jsonl, which is never ahead of it."""
    if exp.prepared.config.checkpoint:
        _store(exp, folder).save(progress)
    _write_metrics(exp, folder, progress)


def _write_metrics(exp: Experiment, folder: pathlib.Path, progress: Progress) -> None:
    rows = summaries.rows_of(exp.prepared, progress.of_run())
    report.write_metrics(folder / "metrics.jsonl", rows)


def _finish(
    exp: Experiment,
    folder: pathlib.Path | None,
    progress: Progress,
    compile_seconds: float,
) -> Result:
    """The result of a run that has ended, and its files."""
    prepared, history = exp.prepared, progress.of_run()
    state = jax.tree.map(lambda a: a[0], jax.device_get(progress.state))
    named, seconds = summaries.named_of(prepared, history), float(progress.seconds)
    summary = summaries.summarize(prepared, exp.labels, named, seconds, compile_seconds)
    finished, total = int(progress.finished), exp.program.intervals
    if finished < total and not history.diverged[-1]:
        summary["notes"].append(
            f"ended after interval {finished} of {total}, as stop.* or a writer asked"
        )
    local_layers = summaries.local_layers(prepared, state)
    if folder:
        if not compile_seconds:  # an earlier process has finished the run
            before = report.read_json(folder / "summary.json", _PROVENANCE) or {}
            summary |= {name: before[name] for name in _PROVENANCE if name in before}
        summaries.write_results(folder, prepared, history, state.params, summary)
        if local_layers:
            report.write_arrays(folder / "own.npz", local_layers)
    del named["tau"]
    # The sum over clients on the host, where an integer has 64 bits.
    named["samples"] = named["samples"].sum(axis=1, dtype=np.int64)
    return Result(state.params, named, summary, local_layers)
