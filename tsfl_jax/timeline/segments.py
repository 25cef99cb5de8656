"""Activity of every client at every moment: the bars of a Gantt chart.

NOT done here: which tasks there are, see `asynchronous` and `synchronous`.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from tsfl_jax.timeline.fleet import Fleet, finish, latest_start, windows_of
from tsfl_jax.timeline.trace import Task

DOWNLOAD, ITERATION, UPLOAD = "download", "iteration", "upload"
UNFINISHED, WAITING, OFFLINE = "unfinished", "waiting", "offline"
KINDS = (DOWNLOAD, ITERATION, UNFINISHED, UPLOAD, WAITING, OFFLINE)


class Segment(NamedTuple):
    """An activity of a client without a break."""

    client: int
    kind: str  # one of KINDS
    start: float  # seconds
    end: float  # seconds, > start


def _online(
    fleet: Fleet, client: int, start: float, end: float
) -> Iterator[tuple[float, float]]:
    """The client's online time from start to end, window by window."""
    for first, last in windows_of(fleet, client).tolist():
        first, last = max(first, start), min(last, end)
        if first < last:
            yield first, last


def _parts(fleet: Fleet, task: Task) -> Iterator[tuple[str, float, float]]:
    """(kind, start, end), also across time that is spent offline."""
    i, J = task.client, fleet.iteration.shape[1]
    draws = (task.first + np.arange(task.iterations)) % J
    seconds = fleet.iteration[i, draws].tolist()
    if seconds:
        seconds[0] -= task.spent
    now = finish(fleet, i, task.start, float(fleet.download[i, task.number % J]))
    yield DOWNLOAD, task.start, now
    for iteration in seconds:
        end = finish(fleet, i, now, iteration)
        yield ITERATION, now, end
        now = end
    if task.arrival == math.inf:
        return
    # Without an iteration there is nothing to upload. The start of the upload is by
    # turns exact and a rounding error early or late.
    upload = float(fleet.upload[i, task.number % J]) if seconds else 0.0
    uploads = max(latest_start(fleet, i, task.arrival, upload), now)
    if task.fills:
        yield UNFINISHED, now, uploads
    yield UPLOAD, uploads, task.arrival


def segments(tasks: Iterable[Task], fleet: Fleet, end: float) -> Iterator[Segment]:
    """Yield the activities of every client from 0 to `end`, without a gap.

    Args:
      tasks: of a `Simulation`, by client, in time.
      fleet: N clients.
      end: seconds > 0.

    Yields:
      `Segment`s by client, in time. An iteration that is interrupted by being offline
      has one for each part.
    """
    shortest = 1e-9 * end  # rounding errors are no segments
    tasks_of: dict[int, list[Task]] = {}
    for task in tasks:
        if task.start < end:
            tasks_of.setdefault(task.client, []).append(task)
    for i in range(len(fleet.iteration)):
        busy = [
            (a, b, kind)
            for task in tasks_of.get(i, ())
            for kind, start, last in _parts(fleet, task)
            for a, b in _online(fleet, i, start, min(last, task.stop, end))
            if b - a > shortest
        ]
        busy.append((end, end, ""))
        now = 0.0
        for a, b, kind in busy:
            # Between two activities: online it waits.
            for first, last in _online(fleet, i, now, a):
                if first - now > shortest:
                    yield Segment(i, OFFLINE, now, first)
                if last - first > shortest:
                    yield Segment(i, WAITING, max(now, first), last)
                now = max(now, last)
            if a - now > shortest:
                yield Segment(i, OFFLINE, now, a)
            if kind:
                yield Segment(i, kind, a, b)
            now = max(now, b)


def of_schedule(tau: Int[np.ndarray, "T N"]) -> list[Segment]:
    """Bars of τ, where seconds are unknown: H iterations fill an interval.

    Args:
      tau: ``[T, N]`` int ≥ 0, local iterations.

    Returns:
      `Segment`s by client, in intervals instead of seconds; the rest is WAITING.
    """
    intervals, clients = tau.shape
    H, found = max(int(tau.max(initial=1)), 1), []
    for i in range(clients):
        for t in range(intervals):
            work = int(tau[t, i])
            edges = [t + h / H for h in range(work + 1)]
            pairs = zip(edges[:-1], edges[1:], strict=True)
            found += [Segment(i, ITERATION, a, b) for a, b in pairs]
            if work < H:
                found.append(Segment(i, WAITING, edges[-1], float(t + 1)))
    return found


def shares(segments: Iterable[Segment]) -> dict[str, float]:
    """Share in [0, 1] of all clients' time that goes to each of KINDS."""
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for segment in segments:
        seconds[segment.kind] += segment.end - segment.start
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items()}
