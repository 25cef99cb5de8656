"""The files that a run writes between chunks, and when: metrics.jsonl, checkpoints.

Each kind of file takes at most the share `SHARE` of the time of a run: the next write
waits until the last one was so cheap, but no longer than a limit. What a killed run
loses is bounded by that wait and one chunk; a run that ends or is stopped writes all.
A checkpoint is written before the rows of its intervals. Rows may be ahead of the
checkpoint: a resumed run starts metrics.jsonl anew from the history in it.
"""

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tsfl_jax.engine import scan
from tsfl_jax.experiment import assemble, checkpoint
from tsfl_jax.report import files as report

SHARE = 0.02  # of the time, for each kind of file
MOST_SECONDS = 300.0  # between two checkpoints, whatever they cost
_MOST_SECONDS_ROWS = 5.0  # between two writes of rows

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
    history: scan.History  # [T, ...], filled up to the finished intervals
    seconds: np.float64  # time spent in compiled calls so far


class Files(NamedTuple):
    """The workdir of a run, locked by it."""

    folder: pathlib.Path
    check: Callable[[], None]  # raises UserError once the folder was removed
    notice: Callable[[str], None]

    @property
    def metrics(self) -> pathlib.Path:
        """Path of metrics.jsonl."""
        return self.folder / "metrics.jsonl"


class Written(NamedTuple):
    """When a kind of file was last written, and how long that took, in seconds."""

    at: float = -math.inf
    cost: float = 0.0

    def due(self, now: float, most: float) -> bool:
        """Whether a write keeps to its share of the time, or the limit is over."""
        return now - self.at >= min(self.cost / SHARE, most)


class Kept(NamedTuple):
    """What this process has written so far."""

    interval: int  # whose row is the last one in metrics.jsonl
    size: int | None  # of metrics.jsonl, bytes
    rows: Written = Written()
    checkpoint: Written = Written()


def rows_of(
    exp: assemble.Experiment, history: scan.History, first: int, last: int
) -> list[dict[str, Any]]:
    """One plain dict per interval of ``[first, last)``, as in metrics.jsonl."""
    part = slice(first, last)
    columns: dict[str, Sequence] = {"interval": range(first + 1, last + 1)}
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


def begin(exp: assemble.Experiment, files: Files, done: Progress, first: int) -> Kept:
    """Start metrics.jsonl with the rows of the first intervals."""
    report.write_metrics(files.metrics, rows_of(exp, done.history, 0, first))
    return Kept(first, report.size_of(files.metrics))


def due(exp: assemble.Experiment, kept: Kept, now: float) -> bool:
    """Whether a checkpoint is to be written, which needs the state on the host."""
    return bool(exp.checkpoint) and kept.checkpoint.due(now, MOST_SECONDS)


def keep(
    exp: assemble.Experiment,
    files: Files,
    kept: Kept,
    done: Progress,
    finished: int,
    clock: Callable[[], float],
    *,
    save: bool,
    everything: bool,
) -> Kept:
    """Write the checkpoint, then the rows.

    A metrics.jsonl that does not have the size that this process left is written anew.

    Args:
      exp: the experiment.
      files: its folder.
      kept: what was written before.
      done: all so far; its state counts only if `save`.
      finished: intervals that have finished.
      clock: seconds.
      save: whether to write a checkpoint.
      everything: whether to write rows even if they are not due.
    """
    files.check()
    begun = clock()
    if save and exp.checkpoint:
        folder = files.folder / "checkpoints"
        checkpoint.save(folder, finished, done, exp.identity)
        now = clock()
        kept, begun = kept._replace(checkpoint=Written(now, now - begun)), now
    if kept.interval == finished:
        return kept
    if not everything and not kept.rows.due(begun, _MOST_SECONDS_ROWS):
        return kept
    if report.size_of(files.metrics) == kept.size:
        rows = rows_of(exp, done.history, kept.interval, finished)
        report.append_metrics(files.metrics, rows)
    else:
        files.notice(f"{files.metrics} was changed during the run; it is written anew")
        rows = rows_of(exp, done.history, 0, finished)
        report.write_metrics(files.metrics, rows)
    now = clock()
    size = report.size_of(files.metrics)
    return kept._replace(interval=finished, size=size, rows=Written(now, now - begun))
