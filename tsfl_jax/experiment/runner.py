"""Run or resume an experiment: chunks of intervals, progress, files, checkpoints."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import trees
from tsfl_jax.engine import devices, scan
from tsfl_jax.experiment import assemble, checkpoint, saves
from tsfl_jax.experiment.network import delivers
from tsfl_jax.experiment.program import Chunk
from tsfl_jax.report import files as report
from tsfl_jax.report import progress, results, runs, table
from tsfl_jax.timeline import replay
from tsfl_jax.types import Array, Params, UserError

_PROVENANCE = ("compile_seconds", "device", "backend", "processor", "versions")


class Result(NamedTuple):
    """What a run leaves behind."""

    params: Params  # the final global model's Flax variables, on the host
    # Per interval, [T] or [T, N]: `scan.History`, but "samples" as the sum over the
    # clients, [T] int64, which a sweep has by client; and "virtual_time" in seconds.
    history: dict[str, np.ndarray]
    summary: dict[str, Any]  # as in summary.json
    # [T, K], the client of each delivery; None: the second axis is the client.
    client: np.ndarray | None = None

    def __repr__(self) -> str:
        """Three lines: what it is, what came out, what one can do with it."""
        return results.run_text(self.summary)

    def _repr_html_(self) -> str:
        """The results as a table, for notebooks."""
        return results.run_html(self.summary)

    def to_xarray(self) -> Any:
        """The history as an `xarray.Dataset`; see `report.table`."""
        return table.of_run(self.history, self.client, self.summary)

    def to_pandas(self) -> Any:
        """A data frame with one line per interval."""
        return table.to_pandas(self.to_xarray())

    def plot(self) -> Any:
        """A Matplotlib figure of accuracy and losses against the interval."""
        return results.run_figure(self.history, self.summary)


def _opened(
    exp: assemble.Experiment,
    workdir: str | pathlib.Path,
    done: saves.Progress,
    stream: IO[str] | None,
    stack: contextlib.ExitStack,
) -> tuple[pathlib.Path, int, saves.Progress]:
    """The locked folder, and where a run in it stands."""
    folder, finished = report.prepare_workdir(workdir), 0
    stack.enter_context(report.lock(folder))
    if (folder / "lanes").is_dir():
        raise UserError(f"{folder} holds a sweep; choose another --workdir")
    _check_settings(folder, exp)
    if exp.checkpoint:
        notice, saved = progress.warn_to(stream), folder / "checkpoints"
        found = checkpoint.restore_latest(saved, done, exp.identity, notice)
        finished, done = found or (0, done)
    if finished:
        total = exp.program.intervals
        progress.log(stream, f"resuming after interval {finished} of {total}")
    return folder, finished, done


def _check_settings(folder: pathlib.Path, exp: assemble.Experiment) -> None:
    """Refuse a folder whose config.json is another experiment's, missing or damaged."""
    path = folder / "config.json"
    if not path.exists() and not (folder / "metrics.jsonl").exists():
        return
    found = report.read_json(path)
    if not found:
        raise UserError(
            f"{path} is missing or damaged, so that nothing says which experiment "
            f"{folder} holds; {checkpoint.AFRESH}"
        )
    changed = [
        text
        for name, text in checkpoint.changed(found, report.plain(exp.settings)).items()
        if name not in exp.unread
    ]
    if changed:
        raise UserError(
            f"{folder} holds another experiment ({checkpoint.shown(changed)}); "
            f"{checkpoint.AFRESH}"
        )


def _begin(
    exp: assemble.Experiment,
    workdir: str | pathlib.Path | None,
    stream: IO[str] | None,
    stack: contextlib.ExitStack,
) -> tuple[pathlib.Path | None, int, saves.Progress]:
    """Where the run stands, the same in all processes; the first one has the folder."""
    made, finished = exp.program, 0
    given = made.arguments(exp.arrays, exp.arrays.start, 0)
    _, chunk = jax.eval_shape(made.run, *given)
    done = saves.nothing(exp.arrays.start, chunk, made.intervals)
    devices.connect(made.mesh)
    # Of several processes the first one reads and writes; the others follow it.
    folder, refused = None, None
    try:
        if workdir is not None and devices.first():
            folder, finished, done = _opened(exp, workdir, done, stream, stack)
    except UserError as error:
        refused = error
    if devices.any_process(refused is not None):
        raise refused or UserError("process 0 has stopped and says why")
    shared = (np.int32(finished), done.state, done.history)
    first, state, history = devices.from_first(shared)
    if folder is not None:
        report.write_json(folder / "config.json", exp.settings)
    return folder, int(first), done._replace(state=state, history=history)


def run(
    exp: assemble.Experiment,
    workdir: str | pathlib.Path | None = None,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Run or resume an experiment.

    Args:
      exp: from `assemble.build`.
      workdir: folder for files and checkpoints; None keeps everything in memory.
      stream: where progress is printed; None: nowhere.
      stop: called after every chunk; True ends the run there, all saved, with
        KeyboardInterrupt.
      clock: seconds; it decides when files are due.

    Returns:
      `Result`. Where no client's model is finite any more, the run stops there with the
      last good model and ``summary["diverged_at"]`` says in which interval.

    Raises:
      UserError: the folder cannot be used, or holds another experiment's checkpoint.
    """
    with contextlib.ExitStack() as stack:
        folder, finished, done = _begin(exp, workdir, stream, stack)
        finished, done, compile_seconds = _train(
            exp, folder, finished, done, stream, stop, clock
        )
        history = jax.tree.map(lambda a: a[:finished], done.history)
        summary = summarize(exp, history, float(done.seconds), compile_seconds)
        summary["notes"] += negative_variances(done.state.params)
        if folder is not None:
            if not compile_seconds:  # finished by an earlier process
                # What only that process knew; all results are of the history.
                old = report.read_json(folder / "summary.json") or {}
                summary |= {n: old[n] for n in _PROVENANCE if n in old}
            write_results(folder, exp, history, done.state.params, summary)
    more = {
        "virtual_time": exp.workload.seconds[:finished],
        # On the host, where an integer has 64 bits.
        "samples": history.samples.sum(axis=1, dtype=np.int64),
    }
    delivery = exp.workload.schedule.delivery
    client = None if delivery is None else np.asarray(delivery.client)[:finished]
    history = history.named(exp.metrics) | more
    return Result(done.state.params, history, summary, client)


def _train(
    exp: assemble.Experiment,
    folder: pathlib.Path | None,
    finished: int,
    done: saves.Progress,
    stream: IO[str] | None,
    stop: Callable[[], bool],
    clock: Callable[[], float],
) -> tuple[int, saves.Progress, float]:
    """Run the remaining chunks; finished intervals, progress, seconds of compiling."""
    total = exp.program.intervals
    if folder is not None:
        rows = saves.rows_of(exp, done.history, finished)
        report.write_metrics(folder / "metrics.jsonl", rows)
    if finished >= total or done.state.diverged:
        return finished, done, 0.0
    compiled = exp.program.compile(exp.arrays, done.state, stream)
    save = None if folder is None else functools.partial(saves.write, exp, folder)
    with progress.bar(stream, total, finished) as advance:

        def show(chunk: Chunk, finished: int, done: saves.Progress) -> None:
            history = jax.tree.map(lambda a: a[:finished], done.history)
            samples = int(history.samples[chunk.first :].sum(dtype=np.int64))
            words = progress.results_text(
                last_measured(history.test_accuracy), last_measured(history.train_loss)
            )
            advance(finished - chunk.first, samples, chunk.seconds, words)

        given = compiled, exp.arrays, done, finished, show, stop, save
        finished, done = saves.train(*given, checkpoint.Written(), clock)
    done = done._replace(state=jax.device_get(done.state))
    if save is not None:
        save(finished, done)
    return finished, done, compiled.seconds


def last_measured(values: Array | np.ndarray) -> float:
    """The last value that is not NaN; NaN if there is none."""
    values = np.asarray(values)
    measured = values[~np.isnan(values)]
    return float(measured[-1]) if len(measured) else float("nan")


def summarize(
    exp: assemble.Experiment,
    history: scan.History,
    seconds: float,
    compile_seconds: float,
) -> dict[str, Any]:
    """The content of summary.json; `history` has the finished intervals only."""
    samples = int(history.samples.sum(dtype=np.int64))
    tau = exp.workload.schedule.tau[: len(history.diverged)]
    deliveries = int(delivers(tau, history.rho).sum())
    return (
        exp.labels
        | {"num_intervals": len(history.diverged)}
        | scores_of(history._asdict())
        | regret_of(history._asdict())
        | {
            "compile_seconds": compile_seconds,
            "train_seconds": seconds,
            "samples_trained": samples,
            "samples_per_second": samples / seconds if seconds else float("nan"),
            "bytes_moved": exp.labels["bytes_per_delivery"] * deliveries,
            "num_dropped": int(history.num_dropped.sum()),
            "notes": [*exp.notes, *history_notes(history._asdict())],
            "device": jax.devices()[0].device_kind,
            "backend": jax.default_backend(),
            "processor": report.processor(),
            "versions": report.versions(),
        }
    )


def scores_of(history: dict[str, Any]) -> dict[str, Any]:
    """Best and last accuracy, last loss and the interval of a total loss, if any."""
    accuracy, lost = history["test_accuracy"], np.flatnonzero(history["diverged"])
    measured = accuracy[~np.isnan(accuracy)]
    return {
        "best_test_accuracy": float(measured.max()) if len(measured) else float("nan"),
        "final_test_accuracy": last_measured(accuracy),
        "final_test_loss": last_measured(history["test_loss"]),
        "diverged_at": int(lost[0]) + 1 if len(lost) else None,
    }


def regret_of(history: dict[str, Any]) -> dict[str, float]:
    """Means over the measured intervals of a `hindsight.Regret`; {}: there is none."""
    found = {}
    for name in ("regret", "gap"):
        values = history.get(name)
        if values is None:
            continue
        known = np.asarray(values, np.float64)[~np.isnan(values)]
        found[f"mean_{name}"] = float(known.mean()) if len(known) else float("nan")
    return found


def history_notes(history: dict[str, Any]) -> tuple[str, ...]:
    """Notes on what a run's numbers alone do not say."""
    return (*_loss_notes(history), *_weights_notes(history))


def _loss_notes(history: dict[str, Any]) -> tuple[str, ...]:
    """A note where the model had a test loss that is no number."""
    endless = np.isinf(np.asarray(history["test_loss"]))
    if not endless.any():
        return ()
    return (
        f"the test loss was infinite or NaN in {endless.sum()} tested intervals, first "
        f"in interval {np.argmax(endless) + 1}, although the weights were finite",
    )


def negative_variances(variables: Params) -> list[str]:
    """A note where a running variance of the model is negative, infinite or NaN."""
    _, others = trees.parted(variables)
    wrong = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree.leaves_with_path(others)
        if "var" in jax.tree_util.keystr(path[-1:])
        and not ((np.asarray(leaf) >= 0) & np.isfinite(leaf)).all()
    ]
    if not wrong:
        return []
    return [f"negative or infinite at the end of the run: {', '.join(wrong)}"]


def _weights_notes(history: dict[str, Any]) -> tuple[str, ...]:
    """A note where clients worked and the rule's weights could not be used."""
    lost = np.asarray(history["diverged"])
    worked = (np.asarray(history["samples"]) > 0).any(axis=1) & ~lost
    total = np.asarray(history["rho"], np.float64).sum(axis=1)
    count = int((worked & ~(total > 0)).sum())  # NaN is not > 0
    if not count:
        return ()
    return (
        f"in {count} of {len(worked)} intervals the rule's weights were NaN or their "
        "sum was not positive, so that the model stayed as it was",
    )


def write_results(
    folder: pathlib.Path,
    exp: assemble.Experiment,
    history: scan.History,
    params: Params,
    summary: dict[str, Any],
) -> None:
    """Write all files but the metrics; `history` has the finished intervals only."""
    finished, times = len(history.rho), exp.workload.schedule
    clients = len(exp.arrays.problem.client)
    sizes = replay.dense(times.size[:finished], times, clients, np.maximum)
    tau, rho, selected = (
        replay.dense(np.asarray(a)[:finished], times, clients)
        for a in (times.tau, history.rho, history.selected)
    )
    arrays = {"tau": tau, "size": sizes, "rho": rho, "selected": selected}
    if times.delivery is not None:  # one cell above may be of several deliveries
        there = delivers(times.tau[:finished], history.rho).astype(np.int32)
        arrays["deliveries"] = replay.dense(there, times, clients)
    if times.delivery is None and not np.isnan(history.grad_square).all():
        arrays |= {
            "variance": np.asarray(history.client_variance),
            "dissimilarity": np.asarray(history.client_dissimilarity),
        }
    if history.slope is not None:
        known = np.nan_to_num(np.asarray(history.slope))  # 0: not present
        arrays["slope"] = replay.dense(known, times, clients)
    report.write_arrays(folder / "clients.npz", arrays, compress=True)
    report.write_arrays(folder / "model.npz", named_arrays(params))
    report.write_json(folder / "summary.json", summary)
    runs.plot_curves(folder)
    runs.plot_participation(folder)


def named_arrays(params: Params) -> dict[str, np.ndarray]:
    """Flax variables as one flat dict, ``{"params/Dense_0/kernel": array}``."""
    leaves = jax.tree.leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }
