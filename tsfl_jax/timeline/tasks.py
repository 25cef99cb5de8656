"""Every task that a client began on a timeline, also those that came to nothing.

A `Trace` has deliveries only. The tasks that were lost, given up or cut off by the end
are found again by the framework's own rule, from the same fleet.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tsfl_jax.timeline.asynchronous import fitting
from tsfl_jax.timeline.fleet import Fleet, finish, online_seconds
from tsfl_jax.timeline.trace import Delivery, Trace, begin

COUNTED, LOST, GIVEN_UP, OPEN = "counted", "lost", "given up", "open"


class Task(NamedTuple):
    """A client's download, work and upload; sorts by client, then time."""

    client: int
    start: float  # seconds, its download begins
    download: float  # online seconds
    iterations: tuple[float, ...]  # online seconds of each, one after the other
    upload: float  # online seconds, the last ones before `end`
    end: float  # seconds, the model arrives; inf: never
    stop: float  # seconds ≤ end: not more of it happened
    fate: str  # COUNTED in an update, LOST on the way, GIVEN_UP; OPEN: was none yet
    fills: bool = False  # works on at an unfinished iteration until the upload


def _task(fleet: Fleet, d: Delivery, fate: str, stop: float = math.inf) -> Task:
    J = fleet.iteration.shape[1]
    places = (d.task * d.iterations + np.arange(d.iterations)) % J
    k = d.task % J
    return Task(
        d.client,
        d.start,
        float(fleet.download[d.client, k]),
        tuple(fleet.iteration[d.client, places].tolist()),
        float(fleet.upload[d.client, k]),
        d.arrival,
        min(d.arrival, stop),
        fate,
    )


def _asynchronous(trace: Trace, fleet: Fleet, counted: dict) -> Iterator[Task]:
    """afl, fedbuff: a client goes on as soon as it has delivered."""
    last, H = trace.time[-1], int(trace.iterations.max())
    for i in range(len(fleet.iteration)):
        now, k = 0.0, 0
        while now < last:
            d = begin(fleet, i, k, version=0, now=now, iterations=H)
            fate = COUNTED if (i, k) in counted else LOST if d.lost else OPEN
            yield _task(fleet, d, fate if d.arrival <= last else OPEN)
            now, k = d.arrival, k + 1


def _rounds(trace: Trace, fleet: Fleet, counted: dict) -> Iterator[Task]:
    """sfl, esync, fedat: a tier goes on when the last of it has delivered."""
    last = trace.time[-1]
    members: dict[int, dict[int, int]] = {}  # tier -> client -> its iterations
    ends = {}  # (tier, task) -> the end of that round
    for (i, k), (row, column) in counted.items():
        tier = int(trace.group[row])
        members.setdefault(tier, {})[i] = int(trace.iterations[row, column])
        ends[tier, k] = float(trace.time[row])
    for tier, work in members.items():
        now, k = 0.0, 0
        while now < last:
            begun = [
                begin(fleet, i, k, version=0, now=now, iterations=H)
                for i, H in work.items()
            ]
            for d in begun:
                # It may have arrived in a round that never ended.
                missing = LOST if d.lost else OPEN
                fate = COUNTED if (d.client, k) in counted else missing
                yield _task(fleet, d, OPEN if d.arrival > last else fate)
            arrivals = [d.arrival for d in begun if d.arrival < math.inf]
            now = ends.get((tier, k), max(arrivals, default=math.inf))
            k += 1


def _lagging(trace: Trace, fleet: Fleet, counted: dict, lag: int) -> Iterator[Task]:
    """safa: idle clients go on when an update happens, late ones are started anew."""
    last, H = trace.time[-1], int(trace.iterations.max())
    # A round in which nothing arrives is in no trace; whoever begins in it is drawn
    # from the update before.
    for i in range(len(fleet.iteration)):
        now, k = 0.0, 0
        while now < last:
            d = begin(fleet, i, k, version=0, now=now, iterations=H)
            if (i, k) in counted:
                row = counted[i, k][0]
                yield _task(fleet, d, COUNTED)
                now = float(trace.time[row])
            else:
                base = int(np.searchsorted(trace.time, now, "right"))
                after = trace.time[trace.time >= d.arrival]
                noticed = float(after[0]) if len(after) else math.inf
                late = base + lag
                limit = float(trace.time[late]) if late < len(trace.time) else math.inf
                stopped = limit < noticed
                fate = GIVEN_UP if stopped else LOST if noticed < math.inf else OPEN
                yield _task(fleet, d, fate, limit if stopped else math.inf)
                now = min(limit, noticed)
            k += 1


def _delivered(trace: Trace, fleet: Fleet, counted: dict) -> Iterator[Task]:
    """fedcs: who was picked and did not deliver is not in the trace, and not here."""
    H = int(trace.iterations.max())
    for (i, k), (row, column) in counted.items():
        d = begin(
            fleet, i, k, version=0, now=float(trace.start[row, column]), iterations=H
        )
        arrival = float(trace.arrival[row, column])  # uploads wait for the channel
        yield _task(fleet, d._replace(arrival=arrival), COUNTED)


def _intervals(
    trace: Trace, fleet: Fleet, counted: dict, carry: bool
) -> Iterator[Task]:
    """tsfl: all work until it is time to upload."""
    N, J = fleet.iteration.shape
    for i in range(N):
        done, spent = 0, 0.0
        for t, end in enumerate(trace.time.tolist()):
            start = float(trace.time[t - 1]) if t else 0.0
            download, upload = fleet.download[i, t % J], fleet.upload[i, t % J]
            available = online_seconds(fleet, i, start, end)
            budget = available - download - upload
            if budget <= 0:
                continue
            count, left = fitting(fleet.iteration[i], done, budget + spent, end)
            seconds = fleet.iteration[i, (done + np.arange(count)) % J].tolist()
            if count:
                seconds[0] -= spent
            done, spent = done + count, left if carry else 0.0
            ready = min(finish(fleet, i, start, available), end)
            if not count:  # there is nothing to upload
                ready, upload = latest(fleet, i, ready, upload), 0.0
            fate = COUNTED if (i, t) in counted else LOST if count else OPEN
            yield Task(
                i,
                finish(fleet, i, start, 0.0),
                float(download),
                tuple(seconds),
                float(upload),
                ready,
                ready,
                fate,
                True,
            )


def tasks_of(
    trace: Trace, fleet: Fleet, framework: str, *, carry: bool = False, lag: int = 0
) -> list[Task]:
    """Every task that was begun before the last update.

    Args:
      trace: R ≥ 1 updates, made by the framework from this fleet.
      fleet: N clients.
      framework: a name of `frameworks.FRAMEWORKS`.
      carry: tsfl's.
      lag: safa's.

    Returns:
      Tasks sorted by client and start. fedcs: only those that were delivered. A client
      of a synchronous framework that never delivered has none.
    """
    row, column = np.nonzero((trace.client >= 0) & (trace.iterations > 0))
    client, task = trace.client[row, column], trace.task[row, column]
    names = zip(client.tolist(), task.tolist(), strict=True)
    places = zip(row.tolist(), column.tolist(), strict=True)
    counted = dict(zip(names, places, strict=True))
    if framework == "tsfl":
        found = _intervals(trace, fleet, counted, carry)
    elif framework == "safa":
        found = _lagging(trace, fleet, counted, lag)
    else:
        rule = {"afl": _asynchronous, "fedbuff": _asynchronous, "fedcs": _delivered}
        found = rule.get(framework, _rounds)(trace, fleet, counted)
    return sorted(task for task in found if task.start < trace.time[-1])


def latest(fleet: Fleet, client: int, end: float, seconds: float) -> float:
    """The latest moment from which on `seconds` of online time end by `end`."""
    windows = fleet.online[client] if fleet.online else ()
    if len(windows) == 0:
        return end - seconds
    for first, last in windows[::-1]:
        last = min(last, end)
        if first < last:
            if seconds <= last - first:
                return float(last - seconds)
            seconds -= last - first
    return 0.0
