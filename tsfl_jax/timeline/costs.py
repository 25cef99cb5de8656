"""What a timeline costs its clients: bytes, seconds and joules, from its tasks alone.

    joules = P_compute · compute + P_transfer · transfer + P_idle · idle

A transfer counts by the share of its time that has passed: in full where it has ended,
also of an upload that is lost or comes too late for an update; in part where it was
given up or the run ends. Idle is all other time online; offline costs nothing. Free
riders cost what they claim to do.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.timeline import segments, ticks
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, exact, online_in
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import Task

_COMPUTE, _DOWN, _UP, _ONLINE = range(4)
_KINDS = {
    segments.DOWNLOAD: _DOWN,
    segments.ITERATION: _COMPUTE,
    segments.UNFINISHED: _COMPUTE,
    segments.UPLOAD: _UP,
}
_AT_ONCE = 1000  # clients that are drawn together


class Costs(NamedTuple):
    """What each of U clients has spent."""

    client: Int[np.ndarray, "U"]  # ids: all, of cohorts those who ever work
    bytes_down: Float[np.ndarray, "U"]
    bytes_up: Float[np.ndarray, "U"]
    compute: Float[np.ndarray, "U"]  # seconds; NaN: without a clock
    transfer: Float[np.ndarray, "U"]  # likewise
    idle: Float[np.ndarray, "U"]  # likewise, online without one of these
    offline: Float[np.ndarray, "U"]  # likewise
    joules: Float[np.ndarray, "U"]  # NaN: without `timeline.power`

    @property
    def totals(self) -> dict[str, float]:
        """Bytes and joules of all clients by name; joules only where they are known."""
        spent = self.bytes_down, self.bytes_up, self.joules
        down, up, joules = (float(values.sum()) for values in spent)
        sums: dict[str, float] = {"bytes_down": round(down), "bytes_up": round(up)}
        return sums if np.isnan(joules) else sums | {"energy_joules": joules}


class Activities(NamedTuple):
    """Times online, and in them the work of the tasks, without a break each."""

    place: Int[np.ndarray, "P"]  # of its client in `client`
    kind: Int[np.ndarray, "P"]
    start: Float[np.ndarray, "P"]  # seconds
    end: Float[np.ndarray, "P"]  # seconds, ≥ start
    share: Float[np.ndarray, "P"]  # in [0, 1], of a whole transfer
    client: Int[np.ndarray, "U"]
    horizon: float  # seconds


def activities(tasks: Iterable[Task], fleet: Fleet | Cohorts, end: float) -> Activities:
    """What clients do until a moment, by client.

    Args:
      tasks: of a `Simulation`.
      fleet: N clients; or cohorts, of which those who ever work count.
      end: seconds ≥ 0.
    """
    is_cohort = isinstance(fleet, Cohorts)
    clients = fleet.fleet if is_cohort else exact(fleet)
    until, tasks_of = ticks.of(end), dict[int, list[Task]]()
    for task in tasks:
        if task.start < end:
            tasks_of.setdefault(task.client, []).append(task)
    ids = sorted(tasks_of) if is_cohort else range(clients.clients)
    rows = [np.zeros((0, 5))]  # of each client, as arrays: there may be many
    for place, i in enumerate(ids):
        if place % _AT_ONCE == 0:
            clients.need(ids[place : place + _AT_ONCE])
        lines = [(place, _ONLINE, *s) for s in _pieces(clients, i, 0, until)]
        for task in tasks_of.get(i, ()):
            limit = min(ticks.of(task.stop), until)
            lines += [(place, *row) for row in _of_task(clients, task, limit)]
        rows.append(np.array(lines, float).reshape(-1, 5))
    place, kind, start, stop, share = np.concatenate(rows).T
    numbers = place.astype(int), kind.astype(int)
    return Activities(*numbers, start, stop, share, np.array(ids, int), end)


def _of_task(
    clients: ExactFleet, task: Task, limit: Ticks
) -> Iterable[tuple[int, float, float, float]]:
    """(kind, start, end, share) of what a client has done for a task by a moment."""
    times, k = clients.of(task.client), task.number % clients.draws
    whole = {_DOWN: times.download.item(k), _UP: times.upload.item(k)}
    for name, first, last in segments.parts(clients, task, apart=False):
        kind, stop = _KINDS[name], min(last, limit)
        if kind == _UP and not task.iterations:
            continue  # there is nothing to upload
        ticks_of_all = whole.get(kind, -1)
        for piece in _pieces(clients, task.client, first, stop, max(ticks_of_all, 0)):
            yield kind, *piece
        if not ticks_of_all and last <= limit:
            yield kind, ticks.seconds(last), ticks.seconds(last), 1.0


def _pieces(
    clients: ExactFleet, client: int, start: Ticks, end: Ticks, work: Ticks = 0
) -> Sequence[tuple[float, float, float]]:
    """Start and end of a client's time online, in seconds, and their share of work."""
    return [
        (ticks.seconds(a), ticks.seconds(b), (b - a) / work if work else 0.0)
        for a, b in online_in(clients, client, start, end)
    ]


def costs_of(
    work: Activities,
    transfer_bytes: tuple[float, float],
    watts: Float[np.ndarray, "U 3"] | None = None,
) -> Costs:
    """What each client has spent.

    Args:
      work: from `activities`.
      transfer_bytes: of a whole download and upload.
      watts: of computing, transferring and idling, see `power`; None: not known.
    """

    def sums(values: Float[np.ndarray, "P"]) -> Float[np.ndarray, "U 4"]:
        count = 4 * len(work.client)
        return np.bincount(4 * work.place + work.kind, values, count).reshape(-1, 4)

    seconds, share = sums(work.end - work.start), sums(work.share)
    compute, transfer = seconds[:, _COMPUTE], seconds[:, [_DOWN, _UP]].sum(axis=1)
    online = seconds[:, _ONLINE]
    idle = np.maximum(online - compute - transfer, 0.0)
    joules = np.full(len(idle), np.nan)
    if watts is not None:
        joules = (watts * np.stack([compute, transfer, idle], 1)).sum(axis=1)
    return Costs(
        client=work.client,
        bytes_down=share[:, _DOWN] * transfer_bytes[0],
        bytes_up=share[:, _UP] * transfer_bytes[1],
        compute=compute,
        transfer=transfer,
        idle=idle,
        offline=np.maximum(work.horizon - online, 0.0),
        joules=joules,
    )


def until(work: Activities, now: float) -> Activities:
    """The activities up to a moment, in seconds ≥ 0."""
    length = np.maximum(work.end - work.start, 1 / ticks.SECOND)  # or at once
    progress = np.where(now < work.end, (now - work.start).clip(0) / length, 1.0)
    end = np.maximum(np.minimum(work.end, now), work.start)
    return work._replace(end=end, share=work.share * progress, horizon=now)
