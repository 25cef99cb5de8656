"""The live line of a sweep: how far it is, the best lane so far, the time left."""

import math
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import numpy as np

from tsfl_jax.experiment.prepare import Prepared
from tsfl_jax.experiment.program import Chunk
from tsfl_jax.report import progress


class Best(NamedTuple):
    """The best lane so far."""

    value: float  # test accuracy in [0, 1]; without any, the negative test loss
    lane: int
    accuracy: bool


class Live(NamedTuple):
    """What a sweep's line needs; only `best` and `spent` change, in place."""

    labels: list[str]  # of each lane, "lr=0.1, seed=0"
    lengths: list[int]  # intervals of each lane
    finished: set[int]
    best: list[Best]  # none or one
    spent: list[float]  # intervals of all lanes, and seconds, of this process


def begin(
    points: list[dict[str, Any]],
    several: list[Prepared],
    rows: dict[int, dict],
    todo: list[int],
) -> Live:
    """The line's state when a sweep begins.

    Args:
      points: of all lanes.
      several: all lanes.
      rows: of finished lanes.
      todo: lanes that are not finished.
    """
    labels = [", ".join(f"{k}={v}" for k, v in point.items()) for point in points]
    lengths = [len(p.steps) for p in several]
    live = Live(labels, lengths, set(range(len(points))) - set(todo), [], [0.0, 0.0])
    for lane, row in rows.items():
        if row["diverged_at"] is None:
            loss = row["final_test_loss"]
            _consider(live, lane, row["best_test_accuracy"], loss)
    return live


def _consider(live: Live, lane: int, accuracy: float, loss: float) -> None:
    """Make a lane the best one if it is."""
    measured = not math.isnan(accuracy)
    value = accuracy if measured else -loss
    if not math.isfinite(value):
        return
    if not live.best or value > live.best[0].value or measured > live.best[0].accuracy:
        live.best[:] = [Best(value, lane, measured)]


def _last(values: np.ndarray) -> float:
    seen = values[np.isfinite(values)]
    return float(seen[-1]) if len(seen) else math.nan


def show(
    live: Live,
    stream: IO[str] | None,
    lanes: list[int],
    doing: Callable[[str], None],
    chunk: Chunk,
) -> None:
    """Print the line after a chunk.

    Args:
      live: from `begin`.
      stream: of the line.
      lanes: of the call.
      doing: from `progress.heartbeat`.
      chunk: what has finished.
    """
    history = chunk.history
    for place, lane in enumerate(lanes):
        lost = np.asarray(history.diverged[place])
        accuracy = np.asarray(history.test_accuracy[place])[~lost]
        loss = np.asarray(history.test_loss[place])[~lost]
        seen = accuracy[np.isfinite(accuracy)]
        best = float(seen.max()) if len(seen) else math.nan
        _consider(live, lane, best, _last(loss))
    total = live.lengths[lanes[0]]
    live.spent[0] += len(lanes) * (chunk.last - chunk.first)
    live.spent[1] += chunk.seconds
    ended = chunk.last == total
    if ended:
        live.finished.update(lanes)
    doing(f"{len(lanes)} lanes, from interval {chunk.last + 1} of {total}")
    progress.update_line(line(live, lanes, chunk.last), stream, last=ended)


def line(live: Live, lanes: list[int], interval: int) -> str:
    """ "4 of 16 lanes, 4 more at interval 10/50, best 93.1 % (lr=0.1), 0:20 left"."""
    running = [lane for lane in lanes if lane not in live.finished]
    parts = [f"{len(live.finished)} of {len(live.labels)} lanes"]
    if running:
        parts.append(
            f"{len(running)} more at interval {interval}/{live.lengths[lanes[0]]}"
        )
    for best in live.best:
        value = f"{100 * best.value:.1f} %" if best.accuracy else f"{-best.value:.4g}"
        what = "best" if best.accuracy else "lowest loss"
        parts.append(f"{what} {value} ({live.labels[best.lane]})")
    left = sum(
        length for lane, length in enumerate(live.lengths) if lane not in live.finished
    )
    left -= interval * len(running)
    units, seconds = live.spent
    if left and units:
        parts.append(f"{progress.clock(left * seconds / units)} left")
    elif not left:
        parts.append("done")
    return ", ".join(parts)
