"""What a timeline costs its clients: bytes, seconds and joules, from its tasks alone.

    joules = P_compute · compute + P_transfer · transfer + P_idle · idle

A transfer counts by the share of its time that has passed: in full where it has ended,
also of an upload that is lost or comes too late for an update; in part where it was
given up or the run ends. Idle is all other time online; offline costs nothing. Free
riders cost what they claim to do.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.timeline import segments, ticks
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import Fleet, online_in
from tsfl_jax.timeline.trace import Task

_COMPUTE, _DOWN, _UP, _ONLINE = range(4)
_KINDS = {segments.DOWNLOAD: _DOWN, segments.UPLOAD: _UP}  # others compute


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
        down, up, joules = self.bytes_down.sum(), self.bytes_up.sum(), self.joules.sum()
        energy = {} if math.isnan(joules) else {"energy_joules": float(joules)}
        return {"bytes_down": round(float(down)), "bytes_up": round(float(up))} | energy


class Activities(NamedTuple):
    """Times online, and in them the work of the tasks, without a break each."""

    client: Int[np.ndarray, "U"]
    # Each is four times its client's place in `client` and its kind; start, end, and
    # the work that it is a part of in ticks, 0: nothing, or done at once.
    rows: Float[np.ndarray, "4 P"]


def activities(tasks: Iterable[Task], fleet: Fleet | Cohorts) -> Activities:
    """What clients do for all tasks of a `Simulation`, by client."""
    ids, rows = [], [np.zeros((0, 4))]  # arrays of each client: there may be many
    for place, (clients, i, busy) in enumerate(segments.by_client(tasks, fleet)):
        windows = online_in(clients, i, 0, math.inf)
        lines = [(_ONLINE, a, b, 0) for a, b in windows]
        lines += [(_KINDS.get(p.kind, _COMPUTE), p.start, p.end, p.work) for p in busy]
        ids.append(i)
        rows.append(np.array(lines, float).reshape(-1, 4) + (4 * place, 0, 0, 0))
    return Activities(np.array(ids, int), np.concatenate(rows).T)


def costs_of(
    work: Activities,
    transfer_bytes: tuple[float, float],
    watts: Float[np.ndarray, "U 3"],
    end: float,
) -> Costs:
    """What each client has spent until a moment.

    Args:
      work: from `activities`.
      transfer_bytes: of a whole download and upload.
      watts: of computing, transferring and idling, see `fleet.watts`.
      end: seconds ≥ 0.
    """
    now, (cell, start, stop, whole) = ticks.of(end), work.rows
    passed, share = (np.minimum(stop, now) - start).clip(0), 1.0 * (stop <= now)
    np.divide(passed, whole, out=share, where=whole > 0)
    share, (compute, down, up, online) = (
        np.bincount(cell.astype(int), values, 4 * len(work.client)).reshape(-1, 4).T
        for values in (share, passed / ticks.SECOND)
    )
    transfer = down + up
    idle = np.maximum(online - compute - transfer, 0.0)
    return Costs(
        client=work.client,
        bytes_down=share[_DOWN] * transfer_bytes[0],
        bytes_up=share[_UP] * transfer_bytes[1],
        compute=compute,
        transfer=transfer,
        idle=idle,
        offline=np.maximum(end - online, 0.0),
        joules=(watts * np.stack([compute, transfer, idle], 1)).sum(axis=1),
    )
