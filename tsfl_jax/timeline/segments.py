"""Activity of every client at every moment: the bars of a Gantt chart.

NOT done here: which tasks there are, see `asynchronous` and `synchronous`.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import (
    ExactFleet,
    Fleet,
    exact,
    finish,
    latest_start,
    online_in,
    work_of,
)
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import Task

DOWNLOAD, ITERATION, UPLOAD = "download", "iteration", "upload"
UNFINISHED, WAITING, OFFLINE = "unfinished", "waiting", "offline"
IDLE = "idle"  # neither a task nor a delivery: mostly not asked
_MOST = 400  # clients of a cohort that are shown
_AT_ONCE = 1000  # clients that are drawn together
KINDS = (DOWNLOAD, ITERATION, UNFINISHED, UPLOAD, WAITING, IDLE, OFFLINE)


class Segment(NamedTuple):
    """An activity of a client without a break."""

    client: int
    kind: str  # one of KINDS
    start: float  # seconds
    end: float  # seconds, > start


class Piece(NamedTuple):
    """A part of a task that a client does without a break."""

    start: Ticks
    end: Ticks
    kind: str  # one of KINDS
    work: Ticks  # of the whole, of which this is a piece
    until: Ticks  # then the client waits no longer


def _parts(
    fleet: ExactFleet, task: Task, apart: bool
) -> Iterator[tuple[str, Ticks, Ticks, Ticks]]:
    """(kind, start, end, work), also across offline time, and once given up."""
    i, k = task.client, task.number % fleet.draws
    download, upload = (times.item(k) for times in fleet.of(i)[1:3])
    start, arrival = ticks.of(task.start), ticks.of(task.arrival)
    now = finish(fleet, i, start, download)
    yield DOWNLOAD, start, now, download
    count = 1 if apart else task.iterations  # all of them as one
    for h in range(0, task.iterations, count or 1):
        work = work_of(fleet, i, task.first + h, count)
        work -= 0 if h else ticks.of(task.spent)
        start, now = now, finish(fleet, i, now, work)
        yield ITERATION, start, now, work
    if arrival == math.inf:
        return
    upload = upload if task.iterations else 0  # there is nothing to upload
    uploads = max(latest_start(fleet, i, arrival, upload), now)
    if task.fills:
        yield UNFINISHED, now, uploads, uploads - now
    if task.iterations:
        yield UPLOAD, uploads, arrival, upload


def by_client(
    tasks: Iterable[Task],
    fleet: Fleet | Cohorts,
    end: float = math.inf,
    chart: bool = False,
) -> Iterator[tuple[ExactFleet, int, list[Piece]]]:
    """The work of every client, of cohorts of those that ever begin, from 0 to `end`.

    A chart has each iteration by itself, nothing that takes no time, and of cohorts at
    most 400 clients, at even distances.
    """
    is_cohort = isinstance(fleet, Cohorts)
    clients = fleet.fleet if is_cohort else exact(fleet)
    tasks_of: dict[int, list[Task]] = {}
    for task in tasks:
        if task.start < end:
            tasks_of.setdefault(task.client, []).append(task)
    ids = sorted(tasks_of) if is_cohort else range(clients.clients)
    ids = _some(ids) if is_cohort and chart else ids
    for place, i in enumerate(ids):
        if place % _AT_ONCE == 0:
            clients.need(ids[place : place + _AT_ONCE])
        busy: list[Piece] = []
        for task in tasks_of.get(i, ()):
            limit = min(ticks.of(task.stop), ticks.of(end))
            for kind, start, last, work in _parts(clients, task, apart=chart):
                windows = online_in(clients, i, start, min(last, limit))
                windows += [(last, last)] * (not chart and not work and last <= limit)
                until = ticks.of(task.until)
                busy += [Piece(a, b, kind, work, until) for a, b in windows]
        yield clients, i, busy


def segments(
    tasks: Iterable[Task], fleet: Fleet | Cohorts, end: float
) -> Iterator[Segment]:
    """Yield the activities of every client from 0 to `end`, without a gap.

    Args:
      tasks: of a `Simulation`, by client, in time.
      fleet: N clients; or cohorts, of which those that are ever asked are shown, or
        where they are many 400 at even distances.
      end: seconds > 0.

    Yields:
      `Segment`s by client, in time. An iteration that is interrupted by being offline
      has one for each part.
    """
    until = ticks.of(end)
    # Of a float64, which tasks have; less than a tick up to 13 days.
    shortest = until / 2**50
    for clients, i, busy in by_client(tasks, fleet, end, chart=True):
        for kind, a, b in _with_gaps(clients, i, busy, until):
            if b - a > shortest:
                yield Segment(i, kind, ticks.seconds(a), ticks.seconds(b))


def _some(clients: Sequence[int]) -> Sequence[int]:
    """All, or `_MOST` of them at even distances."""
    return clients[:: -(-len(clients) // _MOST) or 1]


def _with_gaps(
    fleet: ExactFleet, client: int, busy: list[Piece], end: Ticks
) -> Iterator[tuple[str, Ticks, Ticks]]:
    """Between two activities a client waits for an update, is idle, or is offline."""
    now, until = 0, 0
    for a, b, kind, _, update in [*busy, (end, end, "", 0, end)]:
        for first, last in online_in(fleet, client, now, a):
            yield OFFLINE, now, first
            idle = min(max(first, until), last)
            yield WAITING, first, idle
            yield IDLE, idle, last
            now = last
        yield OFFLINE, now, a
        yield kind, a, b
        now, until = max(now, b), update


def of_schedule(
    tau: Int[np.ndarray, "T N"], client: Int[np.ndarray, "T N"] | None = None
) -> list[Segment]:
    """Bars of τ, where seconds are unknown: H iterations fill an interval.

    Args:
      tau: ``[T, N]`` int ≥ 0, local iterations.
      client: who does them, of cohorts, shown as in `segments`; None: client i.

    Returns:
      `Segment`s by client, in intervals, not seconds; the rest is WAITING or IDLE.
    """
    clients, H, bars = range(tau.shape[1]), max(int(tau.max(initial=1)), 1), []
    if client is not None:
        clients = _some(np.unique(client[tau > 0]).tolist())
        tau = np.stack([np.where(client == i, tau, 0).max(1) for i in clients], 1)
    for column, i in enumerate(clients):
        for t, work in enumerate(tau[:, column].tolist()):
            edges = [t + h / H for h in range(work + 1)]
            bars += [Segment(i, ITERATION, *ends) for ends in itertools.pairwise(edges)]
            if work < H:
                kind = WAITING if client is None or i in client[t] else IDLE
                bars.append(Segment(i, kind, edges[-1], float(t + 1)))
    return bars


def shares(segments: Iterable[Segment]) -> dict[str, float]:
    """Share in [0, 1] of all clients' time but IDLE that goes to each of KINDS."""
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for segment in segments:
        seconds[segment.kind] += segment.end - segment.start
    total = sum(seconds.values()) - seconds.pop(IDLE)
    return {kind: value / total for kind, value in seconds.items()}
