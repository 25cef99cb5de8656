"""What a run writes between chunks: metrics.jsonl and checkpoints.

Both are written together and whole. A write waits until the last one has cost at most
2 % of the wall time, but no longer than five minutes (`checkpoint.Written`); what a
killed run loses is bounded by that wait and one chunk. The first chunk, the last one
and the one after which a run is stopped are written in any case.
"""

import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tsfl_jax.engine import devices, scan
from tsfl_jax.experiment import assemble, checkpoint
from tsfl_jax.experiment.program import Arrays, Chunk, Compiled
from tsfl_jax.report import files as report

# Columns of metrics.jsonl beside the interval and its virtual time.
_COLUMNS = (
    "test_accuracy",
    "test_loss",
    "train_loss",
    "threshold",
    "num_selected",
    "weight_entropy",
    "smoothness",
    "grad_sq_norm",
    "grad_variance",
    "grad_square",
    "coupling",
    "num_dropped",
)
# And those that are there only if asked for.
_ASKED = ("validation_loss", "regret", "gap")


class Progress(NamedTuple):
    """All that a checkpoint holds."""

    state: scan.State
    history: scan.History  # [T, ...], lanes [L, T, ...]; filled up to those finished
    seconds: np.float64  # time spent in compiled calls so far


def nothing(start: scan.State, chunk: Any, intervals: int, axis: int = 0) -> Progress:
    """The progress before the first of T intervals.

    `chunk` has shapes and types of the history of one call, its intervals on `axis`.
    """
    history = jax.tree.map(
        lambda a: np.zeros((*a.shape[:axis], intervals, *a.shape[axis + 1 :]), a.dtype),
        chunk,
    )
    return Progress(jax.device_get(start), history, np.float64(0))


def added(done: Progress, chunk: Chunk, last: int, axis: int = 0) -> Progress:
    """Add a chunk's history, in place, until interval `last`; the state stays."""
    before = (slice(None),) * axis
    new = (*before, slice(chunk.first, last))
    length = (*before, slice(last - chunk.first))
    parts = map(jax.tree.leaves, (done.history, chunk.history))
    for whole, part in zip(*parts, strict=True):
        whole[new] = part[length]
    return done._replace(seconds=done.seconds + chunk.seconds)


def train(
    compiled: Compiled,
    arrays: Arrays,
    done: Progress,
    finished: int,
    show: Callable[[Chunk, int, Progress], None],
    stop: Callable[[], bool],
    save: Callable[[int, Progress], None] | None,
    written: checkpoint.Written,
    clock: Callable[[], float] = time.perf_counter,
    axis: int = 0,
) -> tuple[int, Progress]:
    """Run the remaining chunks of a run or of a call of lanes.

    Args:
      compiled: the program.
      arrays: what it runs on.
      done: the progress until interval `finished`.
      finished: see there.
      show: called after each chunk with the intervals that have finished.
      stop: called after each chunk but the last; True saves and raises.
      save: called where it is due, not at the end; None: nothing is kept.
      written: when the last save was.
      clock: seconds; it decides when a save is due.
      axis: of the intervals: 1 where lanes come first.

    Returns:
      Finished intervals and the progress, its state on the devices.

    Raises:
      KeyboardInterrupt: `stop` was true.
    """
    for chunk in compiled.chunks(arrays, done.state, finished):
        finished, diverged = chunk.last, chunk.history.diverged
        lost = axis == 0 and bool(diverged[-1])
        if lost:  # nothing more happens: forget the empty intervals
            finished = chunk.first + int(np.argmax(diverged)) + 1
        done = added(done, chunk, finished, axis)
        ended = lost or finished == compiled.program.intervals
        stopping = not ended and devices.any_process(stop())
        if save and not ended and (stopping or written.due(clock())):
            since = clock()
            done = done._replace(state=jax.device_get(chunk.state))
            save(finished, done)
            written = checkpoint.Written(clock(), clock() - since)
        show(chunk, finished, done)
        if stopping:
            raise KeyboardInterrupt
        if ended:
            return finished, done._replace(state=chunk.state)
    return finished, done


def rows_of(
    exp: assemble.Experiment, history: scan.History, finished: int
) -> list[dict[str, Any]]:
    """One plain dict per finished interval, as in metrics.jsonl."""
    part = slice(finished)
    columns: dict[str, Sequence] = {"interval": range(1, finished + 1)}
    columns["virtual_time"] = exp.workload.seconds[part].tolist()
    asked = [n for n in _ASKED if getattr(history, n) is not None]
    for name in (*_COLUMNS, *asked):
        columns[name] = _plain(getattr(history, name)[part])
    named = history.named(exp.metrics)
    columns |= {name: _plain(named[name][part]) for name in exp.metrics}
    names = list(columns)
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def _plain(values: np.ndarray) -> list:
    """Numbers as JSON has them: None for NaN and ±inf."""
    plain = values.tolist()
    if np.isfinite(values).all():
        return plain
    return [v if math.isfinite(v) else None for v in plain]


def write(
    exp: assemble.Experiment, folder: pathlib.Path, finished: int, done: Progress
) -> None:
    """Write the checkpoint, then metrics.jsonl, which is never ahead of it."""
    if exp.checkpoint:
        checkpoint.save(folder / "checkpoints", finished, done, exp.identity)
    rows = rows_of(exp, done.history, finished)
    report.write_metrics(folder / "metrics.jsonl", rows)
