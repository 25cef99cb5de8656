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
        sums = {n: round(float(getattr(self, n).sum())) for n in BYTES}
        joules = float(self.joules.sum())
        return sums if np.isnan(joules) else sums | {"energy_joules": joules}


BYTES = ("bytes_down", "bytes_up")


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
    rows = list[tuple[int, int, float, float, float]]()
    for place, i in enumerate(ids):
        if place % _AT_ONCE == 0:
            clients.need(ids[place : place + _AT_ONCE])
        rows += [(place, _ONLINE, *s) for s in _pieces(clients, i, 0, until)]
        for task in tasks_of.get(i, ()):
            limit = min(ticks.of(task.stop), until)
            rows += [(place, *row) for row in _of_task(clients, task, limit)]
    place, kind, start, stop, share = np.array(rows, float).reshape(-1, 5).T
    numbers = place.astype(int), kind.astype(int)
    return Activities(*numbers, start, stop, share, np.array(ids, int), end)


def _of_task(
    clients: ExactFleet, task: Task, limit: Ticks
) -> Iterable[tuple[int, float, float, float]]:
    """(kind, start, end, share) of what a client has done for a task by a moment."""
    for name, first, last in segments.parts(clients, task, apart=False):
        kind = _KINDS[name]
        if kind == _UP and not task.iterations:
            continue  # there is nothing to upload
        times, number = clients.of(task.client), task.number % clients.draws
        whole = {_DOWN: times.download, _UP: times.upload}.get(kind)
        work = 0 if whole is None else whole.item(number)
        yield from (
            (kind, *piece)
            for piece in _pieces(clients, task.client, first, min(last, limit), work)
        )
        if whole is not None and not work and last <= limit:
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
    done: Activities,
    transfer_bytes: tuple[float, float],
    watts: Float[np.ndarray, "U 3"] | None = None,
) -> Costs:
    """What each client has spent.

    Args:
      done: from `activities`.
      transfer_bytes: of a whole download and upload.
      watts: of computing, transferring and idling, see `power`; None: not known.
    """

    def sums(values: Float[np.ndarray, "P"]) -> Float[np.ndarray, "U 4"]:
        count = 4 * len(done.client)
        return np.bincount(4 * done.place + done.kind, values, count).reshape(-1, 4)

    seconds, share = sums(done.end - done.start), sums(done.share)
    compute, transfer = seconds[:, _COMPUTE], seconds[:, [_DOWN, _UP]].sum(axis=1)
    online = seconds[:, _ONLINE]
    idle = np.maximum(online - compute - transfer, 0.0)
    joules = np.full(len(idle), np.nan)
    if watts is not None:
        joules = (watts * np.stack([compute, transfer, idle], 1)).sum(axis=1)
    return Costs(
        client=done.client,
        bytes_down=share[:, _DOWN] * transfer_bytes[0],
        bytes_up=share[:, _UP] * transfer_bytes[1],
        compute=compute,
        transfer=transfer,
        idle=idle,
        offline=np.maximum(done.horizon - online, 0.0),
        joules=joules,
    )


def over_time(
    done: Activities,
    seconds: Float[np.ndarray, "E"],
    transfer_bytes: tuple[float, float],
    watts: Float[np.ndarray, "U 3"] | None = None,
) -> dict[str, Float[np.ndarray, "E"]]:
    """Bytes and joules of all clients until each of some moments, by name.

    Arguments as of `costs_of`; no joules without `watts`.
    """
    sent = np.array([0.0, *transfer_bytes, 0.0])[done.kind] * done.share
    amounts = {"bytes": sent}
    if watts is not None:
        idle = watts[done.place, 2]
        column = np.array([0, 1, 1, 2])[done.kind]  # of watts
        # Time online is idle but for what is done in it.
        extra = watts[done.place, column] - np.where(done.kind == _ONLINE, 0.0, idle)
        amounts["joules"] = extra * (done.end - done.start)
    length = np.maximum(done.end - done.start, 1 / ticks.SECOND)  # or at once
    totals = {name: np.zeros(len(seconds)) for name in amounts}
    for k, now in enumerate(seconds):
        is_done = now >= done.end
        progress = np.where(is_done, 1.0, np.maximum(now - done.start, 0.0) / length)
        for name, amount in amounts.items():
            totals[name][k] = (amount * progress).sum()
    return totals
