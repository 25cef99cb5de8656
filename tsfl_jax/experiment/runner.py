"""One run: build its program and arrays, train it call by call, write its files."""

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import interrupts, stopping
from tsfl_jax.config import Config, flat
from tsfl_jax.engine import devices, optimizers
from tsfl_jax.experiment import backend, checkpoint, longer, memory, summary
from tsfl_jax.experiment.checkpoint import Progress, Written
from tsfl_jax.experiment.identity import depends_on_devices, identity_of, labels_of
from tsfl_jax.experiment.prepare import Prepared, accepted, prepare_validated
from tsfl_jax.experiment.program import (
    Arrays,
    Chunk,
    Compiled,
    Program,
    make_arrays,
    make_program,
)
from tsfl_jax.report import files as report
from tsfl_jax.report import progress, runs, table
from tsfl_jax.report import writers as reporting
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Array, Dataset, Params, UserError

_PROVENANCE = {"compile_seconds": (int, float), "versions": dict}
_PROVENANCE |= dict.fromkeys(("device", "backend", "processor"), str)


class Experiment(NamedTuple):
    """All that a run needs."""

    prepared: Prepared
    program: Program
    arrays: Arrays
    identity: dict[str, Any]  # what a checkpoint must agree on
    labels: dict[str, Any]  # algorithm, data, model, fingerprints: for summaries


def build(config: Config, **own: Any) -> Experiment:
    """Make everything of an experiment; `own` are fields of `custom_hooks.Own`."""
    config, parts = accepted(config, **own)
    mesh = backend.start_jax(config)
    prepared = prepare_validated(config, parts)
    memory.check(prepared, mesh.size)
    identity = identity_of(prepared)
    if depends_on_devices(prepared):
        identity["devices that share the clients"] = mesh.size
    return Experiment(
        prepared=prepared,
        program=make_program([prepared], mesh),
        arrays=make_arrays(prepared, mesh),
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
        methods = ".summary .history .params .to_xarray() .to_pandas() .plot()"
        return f"{progress.summary_text(self.summary)}\n{methods}"

    def to_xarray(self) -> Any:
        """The history as an `xarray.Dataset`; see `report.table`."""
        return table.of_run(self.history, self.summary)

    def to_pandas(self) -> Any:
        """A data frame with one line per interval."""
        return table.to_pandas(self.to_xarray())

    def plot(self) -> Any:
        """A Matplotlib figure of accuracy and losses against the interval."""
        return runs.curves(self.history, self.summary)


def simulate(
    config: Config,
    *,
    model: Any = None,
    dataset: Dataset | None = None,
    optimizer: optimizers.Optimizer | None = None,
    aggregator: Aggregator | None = None,
    loss: Callable[[Array, Array], Array] | None = None,
    metrics: Mapping[str, Callable[[Array, Array], Any]] | None = None,
    augment: Callable[..., Any] | None = None,
    client_step: Callable[..., Any] | None = None,
    partition: Any = None,
    sampler: Callable[..., Any] | None = None,
    params: Params | None = None,
    workdir: str | pathlib.Path | None = None,
    writers: Sequence[reporting.Given] = (),
    verbose: bool = False,
) -> Result:
    """Run one experiment from Python; docs/custom.md has an example of each argument.

    Args:
      config: all settings.
      model: a Flax module, linen or nnx (``[B, H, W, C]`` → logits), a function of
        `nnx.Rngs` that makes one, or a `Model`.
      dataset: samples in memory, instead of ``config.data``.
      optimizer: an optax transformation, or a function `HParams` → transformation.
      aggregator: a rule of the user's own, instead of ``config.algorithm``.
      loss: (outputs ``[B, O]``, labels ``[B]``) → ``[B]``, instead of cross-entropy.
      metrics: like `loss`, or to (values, weights); test means are in the history.
      augment: (key, x ``[B, ...]``, y ``[B, ...]``) → (x, y), in training.
      client_step: `Step` → `Stepped`, instead of a step of the optimizer.
      partition: N lists of indices into the training samples, instead of a drawn split.
      sampler: `timeline.cohort.Draw` → ids of the clients that are asked.
      params: Flax variables to start from, such as `Result.params`.
      workdir: where to write files and checkpoints; None: nowhere.
      writers: names of --writer, `Writer`s, or functions of each interval's record.
      verbose: print progress on stderr.

    Returns:
      `Result`: the final parameters, the history per interval, the summary.

    Raises:
      UserError: an input that cannot work, in one line.
    """
    _check_outputs(workdir, writers)
    exp = build(
        config,
        model=model,
        dataset=dataset,
        optimizer=optimizer,
        aggregator=aggregator,
        loss=loss,
        metrics=metrics,
        augment=augment,
        client_step=client_step,
        partition=partition,
        sampler=sampler,
        params=params,
    )
    return run(exp, workdir, sys.stderr if verbose else None, writers=writers)


def _check_outputs(
    workdir: str | pathlib.Path | None, writers: Sequence[reporting.Given]
) -> None:
    """Refuse what cannot be written to, before the work."""
    if workdir is not None:
        report.folder_of(workdir)
    reporting.check(writers)


def run(
    exp: Experiment,
    workdir: str | pathlib.Path | None = None,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = interrupts.was_asked,
    writers: Sequence[reporting.Given] = (),
) -> Result:
    """Run or resume an experiment.

    Args:
      exp: from `build`.
      workdir: folder for files and checkpoints; None keeps everything in memory.
      stream: where progress is printed; None: nowhere.
      stop: called after every chunk; True ends the run there, all saved, with
        KeyboardInterrupt.
      writers: as of `simulate`; of several processes the first one has them.

    Returns:
      `Result`. Where no client's model is finite any more, the run stops there with the
      last good model and ``summary["diverged_at"]`` says in which interval.

    Raises:
      UserError: the folder cannot be used, or holds another experiment's checkpoint.
    """
    with contextlib.ExitStack() as stack:
        path = None if workdir is None else report.folder_of(workdir)
        asked = writers if devices.first() else ()
        given = [reporting.writer_of(each, path) for each in asked]  # or no folder
        folder, done = _begin(exp, workdir, stream, stack)
        settings = flat(report.plain(dataclasses.asdict(exp.prepared.config)))
        opened = reporting.opened(given, folder, settings, int(done.finished))
        done, compile_seconds = _train(exp, folder, done, stream, stop, opened)
        history, times = done.known(), (float(done.seconds), compile_seconds)
        found = summary.summarize(exp.prepared, exp.labels, history, *times)
        found["notes"] += summary.negative_variances(jax.device_get(done.state.params))
        if len(history.rho) < exp.program.intervals and not history.diverged[-1]:
            last = f"ended after interval {len(history.rho)} of {exp.program.intervals}"
            found["notes"].append(f"{last}, as stop.* or a writer asked")
        if folder is not None:
            found = _written(
                exp, folder, done, found, finished_before=not compile_seconds
            )
        opened.end(report.plain(found), folder)
    workload, finished = exp.prepared.workload, len(history.rho)
    times = summary.done_of(exp.prepared, history)
    who = {} if times.in_order else {"client": times.client}
    return Result(
        done.state.params,
        summary.named_of(exp.prepared, history)
        | {
            "virtual_time": workload.seconds[:finished],
            # On the host, where an integer has 64 bits.
            "samples": history.samples.sum(axis=1, dtype=np.int64),
        }
        | who,
        found,
        summary.own_layers(exp.prepared, done.state),
    )


def _written(
    exp: Experiment,
    folder: pathlib.Path,
    done: Progress,
    found: dict[str, Any],
    finished_before: bool,
) -> dict[str, Any]:
    """The summary as it was written into the folder, with the other results."""
    if finished_before:  # by an earlier process
        # What only that process knew; all results are of the history.
        old = report.read_json(folder / "summary.json", _PROVENANCE) or {}
        found = found | {n: old[n] for n in _PROVENANCE if n in old}
    history, params = done.known(), done.state.params
    summary.write_results(folder, exp.prepared, history, params, found)
    if (own := summary.own_layers(exp.prepared, done.state)) is not None:
        report.write_arrays(folder / "own.npz", own)
    return found


def _begin(
    exp: Experiment,
    workdir: str | pathlib.Path | None,
    stream: IO[str] | None,
    stack: contextlib.ExitStack,
) -> tuple[pathlib.Path | None, Progress]:
    """Where the run stands, the same in all processes; the first one has the folder."""
    made, start = exp.program, exp.arrays.start
    _, chunk = jax.eval_shape(made.run, *made.arguments(exp.arrays, start, 0))
    done = checkpoint.nothing(start, chunk, made.intervals)
    devices.connect(made.mesh)
    # Of several processes the first one reads and writes; the others follow it.
    folder, refused = None, None
    try:
        if workdir is not None and devices.first():
            folder, done = _opened(exp, workdir, done, stream, stack)
    except UserError as error:
        refused = error
    if devices.any_process(refused is not None):
        raise refused or UserError("process 0 has stopped and says why")
    done = devices.from_first(done)
    seconds, finished = np.float64(done.seconds), np.int64(done.finished)
    return folder, done._replace(seconds=seconds, finished=finished)


def _opened(
    exp: Experiment,
    workdir: str | pathlib.Path,
    done: Progress,
    stream: IO[str] | None,
    stack: contextlib.ExitStack,
) -> tuple[pathlib.Path, Progress]:
    """The locked folder, and where a run in it stands."""
    folder = report.prepare_workdir(workdir)
    saved = folder / "checkpoints"
    stack.enter_context(report.lock(folder))
    if (folder / "lanes").is_dir():
        raise UserError(f"{folder} holds a sweep; choose another --workdir")
    if (folder / "metrics.jsonl").exists() and not saved.exists():
        raise UserError(
            f"{folder} holds a run without checkpoints; {checkpoint.AFRESH}"
        )
    if exp.prepared.config.checkpoint:
        notice = progress.warn_to(stream)
        done = _restored(exp, saved, done, notice)
    if done.finished:
        total = exp.program.intervals
        progress.log(stream, f"resuming after interval {done.finished} of {total}")
        rows = summary.rows_of(exp.prepared, done.known())
        report.write_metrics(folder / "metrics.jsonl", rows)
    report.write_json(folder / "config.json", dataclasses.asdict(exp.prepared.config))
    return folder, done


def _restored(
    exp: Experiment, saved: pathlib.Path, done: Progress, notice: Callable[[str], None]
) -> Progress:
    """The progress of the newest checkpoint, which may be that of a smaller T."""
    identity, like, total = exp.identity, done, exp.prepared.config.num_intervals
    about = checkpoint.newest(saved) or {"identity": {}}
    before = about["identity"].get("num_intervals", total)
    if before < total:
        updates = checkpoint.length_of(about)
        parts = exp.prepared, exp.program, exp.arrays
        identity = identity | longer.earlier(*parts, before, updates)
        like = done._replace(history=jax.tree.map(lambda a: a[:updates], done.history))
    found = checkpoint.restore_latest(saved, like, identity, notice)
    if not found:
        return done
    pairs = zip(*map(jax.tree.leaves, (done.history, found[1].history)), strict=True)
    for whole, part in pairs:
        whole[: len(part)] = part
    return found[1]._replace(history=done.history)


def _train(
    exp: Experiment,
    folder: pathlib.Path | None,
    done: Progress,
    stream: IO[str] | None,
    stop: Callable[[], bool],
    writers: reporting.Open,
) -> tuple[Progress, float]:
    """Run the remaining chunks; the progress, and seconds of compiling."""
    total, first = exp.program.intervals, int(done.finished)
    if first >= total or done.state.diverged or _reached(exp, done):
        return done, 0.0
    compiled = exp.program.compile(exp.arrays, done.state, stream)
    save = None if folder is None else functools.partial(_save, exp, folder)
    with progress.bar(stream, total, first) as advance:

        def show(chunk: Chunk, done: Progress) -> bool:
            history = done.known()
            samples = int(history.samples[chunk.first :].sum(dtype=np.int64))
            words = progress.results_text(
                summary.last_measured(history.test_accuracy),
                summary.last_measured(history.train_loss),
            )
            count = int(done.finished) - chunk.first
            advance(count, samples, chunk.seconds, words)
            rows = _records(exp, chunk, done) if writers.several else ()
            said = devices.any_process(writers.report(rows))
            return said or _reached(exp, done)

        done = train(compiled, exp.arrays, done, show, stop, save)
    done = done._replace(state=jax.device_get(done.state))
    if save is not None:
        save(done)
    return done, compiled.seconds


def _reached(exp: Experiment, done: Progress) -> bool:
    """Whether the run ends here by its settings."""
    history = done.known()
    scores = np.asarray(history.test_accuracy), np.asarray(history.test_loss)
    return stopping.reached(exp.prepared.config.stop, *scores)


def _records(exp: Experiment, chunk: Chunk, done: Progress) -> list[dict[str, Any]]:
    """What writers get of a call's intervals."""
    rows = summary.rows_of(exp.prepared, done.known(), chunk.first)
    return [row | {"wall_time": float(done.seconds)} for row in rows]


def _save(exp: Experiment, folder: pathlib.Path, done: Progress) -> None:
    """Write the checkpoint, then metrics.jsonl, which is never ahead of it."""
    if exp.prepared.config.checkpoint:
        saved = folder / "checkpoints"
        checkpoint.save(saved, int(done.finished), done, exp.identity)
    rows = summary.rows_of(exp.prepared, done.known())
    report.write_metrics(folder / "metrics.jsonl", rows)


def train(
    compiled: Compiled,
    arrays: Arrays,
    done: Progress,
    show: Callable[[Chunk, Progress], bool | None],
    stop: Callable[[], bool],
    save: Callable[[Progress], None] | None,
    written: Written | None = None,
    axis: int = 0,
) -> Progress:
    """Run the remaining chunks of a run or of a call of lanes.

    Args:
      compiled: the program.
      arrays: what it runs on.
      done: the progress so far.
      show: called after each chunk; True ends the run there.
      stop: called after each chunk but the last; True saves and raises.
      save: called where it is due, not at the end; None: nothing is kept.
      written: when the last save was; None: never.
      axis: of the intervals: 1 where lanes come first.

    Returns:
      The progress, its state on the devices.

    Raises:
      KeyboardInterrupt: `stop` was true.
    """
    written = written or Written()
    for chunk in compiled.chunks(arrays, done.state, int(done.finished)):
        last, diverged = chunk.last, chunk.history.diverged
        lost = axis == 0 and bool(diverged[-1])
        if lost:  # nothing more happens: forget the empty intervals
            last = chunk.first + int(np.argmax(diverged)) + 1
        done = done.added(chunk, last, axis)
        ended = lost or last == compiled.program.intervals
        stopping = not ended and devices.any_process(stop())
        since = checkpoint.now()
        if save and not ended and (stopping or written.due(since)):
            save(done._replace(state=jax.device_get(chunk.state)))
            written = Written(checkpoint.now(), checkpoint.now() - since)
        if show(chunk, done) or ended:
            break
        if stopping:
            raise KeyboardInterrupt
    return done
