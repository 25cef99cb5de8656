"""What a framework did when: one row for each global update, in virtual seconds.

NOT done here: the frameworks' rules; see `rounds`, `arrivals` and `frameworks`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tsfl_jax.timeline.fleet import Fleet, finish
from tsfl_jax.types import UserError
from tsfl_jax.validate import check

MOST_ITERATIONS = 2**31 - 1  # of a task: what int32 holds
_LONG = 2**20  # iterations of a task that are added up one by one


class Trace(NamedTuple):
    """R global updates from at most K deliveries each.

    Empty places are at the end of a row: client −1, other integers 0, floats NaN.
    """

    time: np.ndarray  # [R] float64 seconds, when the update happens, non-decreasing
    client: np.ndarray  # [R, K] int32, who delivers
    version: np.ndarray  # [R, K] int32 in 0..r, updates its base model had
    iterations: np.ndarray  # [R, K] int32, local iterations done
    task: np.ndarray  # [R, K] int32, which task of this client, counting its downloads
    start: np.ndarray  # [R, K] float64, when its download began
    arrival: np.ndarray  # [R, K] float64, when its model arrived at the server
    group: np.ndarray  # [R] int32, FedAT's tier of the update, else 0


class Delivery(NamedTuple):
    """A task that was begun. Sorts by arrival, ties by client id."""

    arrival: float  # seconds; inf: never
    client: int
    task: int
    version: int
    iterations: int
    start: float
    lost: bool  # at `arrival` the server learns that nothing comes


class Update(NamedTuple):
    """One row of a trace before it is padded."""

    time: float
    deliveries: Sequence[Delivery]
    group: int = 0


def begin(
    fleet: Fleet, client: int, task: int, *, version: int, now: float, iterations: int
) -> Delivery:
    """A client's task: it downloads, works and uploads, all only while online.

    Args:
      fleet: its times.
      client: in [0, N).
      task: k ≥ 0; it takes the client's iterations [k·H, (k+1)·H).
      version: updates the downloaded model has.
      now: seconds; the download begins at the client's first online moment from then.
      iterations: H ≥ 1, the same in all tasks of this client.

    Returns:
      The `Delivery`.
    """
    J = fleet.iteration.shape[1]
    # Very many take whole turns through the draws: memory does not grow with H.
    turns = iterations // J if iterations > _LONG else 0
    places = (task * iterations + np.arange(iterations - turns * J)) % J
    compute = float(fleet.iteration[client, places].sum())
    if turns:
        compute += turns * float(fleet.iteration[client].sum())
    k = task % J
    start = finish(fleet, client, now, 0.0)
    seconds = fleet.download[client, k] + compute + fleet.upload[client, k]
    return Delivery(
        finish(fleet, client, start, seconds),
        client,
        task,
        version,
        iterations,
        start,
        bool(fleet.lost[client, k]),
    )


def expected_seconds(fleet: Fleet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means of a client's draws: download, one iteration, upload; [N] float64 each."""
    return fleet.download.mean(1), fleet.iteration.mean(1), fleet.upload.mean(1)


def make_trace(
    updates: Sequence[Update], width: int, fleet: Fleet, horizon: float, iterations: int
) -> Trace:
    """Pads the rows to one width.

    Args:
      updates: R of them, in time.
      width: K, the most deliveries of an update.
      fleet: to say, if R = 0, how long first deliveries take.
      horizon: seconds; likewise.
      iterations: H of a task; likewise.

    Returns:
      A `Trace`.

    Raises:
      UserError: no updates.
    """
    if not updates:
        ends = [
            begin(fleet, i, 0, version=0, now=0.0, iterations=iterations).arrival
            for i in range(len(fleet.iteration))
        ]
        raise UserError(
            f"--config.num_intervals times --config.schedule.interval_seconds is "
            f"{horizon:g} s: no global update happens in that time; the clients' first "
            f"tasks end from {min(ends):g} s to {max(ends):g} s; choose more or longer "
            "intervals, and less --config.schedule.dropout if deliveries are lost"
        )
    R = len(updates)
    whole = {
        name: np.zeros((R, width), np.int32)
        for name in ("client", "version", "iterations", "task")
    }
    whole["client"][:] = -1
    real = {name: np.full((R, width), np.nan) for name in ("start", "arrival")}
    columns = whole | real
    for r, update in enumerate(updates):
        for name, column in columns.items():
            values = [getattr(d, name) for d in update.deliveries]
            column[r, : len(values)] = values
    return Trace(
        time=np.array([u.time for u in updates], np.float64),
        group=np.array([u.group for u in updates], np.int32),
        **columns,
    )


def summary(trace: Trace, num_clients: int) -> dict:
    """Figures of a whole trace.

    Args:
      trace: R ≥ 1 updates.
      num_clients: N.

    Returns:
      updates: R. deliveries: list of N counts; a place with 0 iterations is none.
      mean_staleness, max_staleness: over the deliveries, of the update's number r
      less the base model's version; NaN and 0 without deliveries. iterations: in all
      deliveries. seconds_per_update: mean, from 0 to the last update.
    """
    there = (trace.client >= 0) & (trace.iterations > 0)
    stale = (np.arange(len(trace.time))[:, None] - trace.version)[there]
    counts = np.bincount(trace.client[there], minlength=num_clients)
    return {
        "updates": len(trace.time),
        "deliveries": counts.tolist(),
        "mean_staleness": float(stale.mean()) if stale.size else math.nan,
        "max_staleness": int(stale.max(initial=0)),
        "iterations": int(trace.iterations[there].sum(dtype=np.int64)),
        "seconds_per_update": float(trace.time[-1] / len(trace.time)),
    }


def check_task(fleet: Fleet, horizon: float, iterations: int):
    """Raises `UserError` for what all frameworks with tasks of H iterations refuse."""
    check("num_clients", len(fleet.iteration))
    if not 0 < horizon < math.inf:
        raise UserError(
            "--config.num_intervals times --config.schedule.interval_seconds is "
            f"{horizon} s: must be finite and > 0"
        )
    check("timeline.local_iterations", iterations)
