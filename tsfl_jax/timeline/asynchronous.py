"""Frameworks without rounds: an update follows from arrivals (afl, fedbuff), or from
the clock (tsfl).
"""

import heapq
import math

import numpy as np

from tsfl_jax.timeline.fleet import Fleet, finish, online_seconds, within
from tsfl_jax.timeline.trace import (
    Delivery,
    Trace,
    Update,
    begin,
    check_task,
    make_trace,
)
from tsfl_jax.types import UserError
from tsfl_jax.validate import check


def afl(fleet: Fleet, *, horizon: float, iterations: int) -> Trace:
    """Asynchronous: every arrival is an update; the client goes on with the newest.

    Args:
      fleet: N clients. One who is offline downloads, once online, what is then newest.
      horizon: seconds > 0; updates until then count.
      iterations: H ≥ 1.

    Returns:
      A `Trace` with K = 1.

    Raises:
      UserError: a value out of range, no update within the horizon.

    Source: C. Xie, S. Koyejo, I. Gupta, "Asynchronous Federated Optimization", 2019.
    """
    return fedbuff(fleet, horizon=horizon, iterations=iterations, buffer=1)


def fedbuff(fleet: Fleet, *, horizon: float, iterations: int, buffer: int) -> Trace:
    """Asynchronous with a buffer: every K-th arrival is an update.

    Who delivers downloads at once what is then newest; who fills the buffer, the new
    model. A client may be twice in a row; rows are in the order of arrival.

    Args:
      fleet, horizon, iterations: as in `afl`.
      buffer: 1 ≤ K ≤ N.

    Returns:
      A `Trace` with that K. Arrivals in a buffer that is not full at the end are not
      in it.

    Raises:
      UserError: a value out of range, no update within the horizon.

    Source: J. Nguyen et al., "Federated Learning with Buffered Asynchronous
    Aggregation", AISTATS 2022.
    """
    check_task(fleet, horizon, iterations)
    N = len(fleet.iteration)
    check("timeline.buffer", buffer, N, "num_clients")
    updates: list[Update] = []
    arrived: list[Delivery] = []
    tasks = [0] * N
    # A client is in here once: with the task it will deliver, or with None where it
    # will download. Ties go to the smaller id.
    events: list[tuple[float, int, Delivery | None]] = [
        (finish(fleet, i, 0.0, 0.0), i, None) for i in range(N)
    ]
    heapq.heapify(events)
    while within(events[0][0], horizon):
        now, i, done = heapq.heappop(events)
        if done is None:
            done = begin(
                fleet,
                i,
                tasks[i],
                version=len(updates),
                now=now,
                iterations=iterations,
            )
            tasks[i] += 1
            heapq.heappush(events, (done.arrival, i, done))
            continue
        if not done.lost:
            arrived.append(done)
            if len(arrived) == buffer:
                updates.append(Update(now, arrived))
                arrived = []
        heapq.heappush(events, (finish(fleet, i, now, 0.0), i, None))
    return make_trace(updates, buffer, fleet, horizon, iterations)


def tsfl(fleet: Fleet, *, num_intervals: int, interval: float, carry: bool) -> Trace:
    """Time-driven synchronous: in interval t, of Δ seconds, τ_i iterations fit.

    At tΔ everyone downloads. Its upload begins as late as it can to end by (t+1)Δ;
    in between it does as many iterations as fit. Nothing else happens offline.

    Args:
      fleet: N clients.
      num_intervals: T ≥ 1.
      interval: Δ > 0 seconds.
      carry: the time spent on the unfinished iteration counts for the first one of
        the next interval, else it is lost and the same iteration begins anew.

    Returns:
      A `Trace` with R = T, K = N, clients 0..N−1 in every row, `task` = `version` = t.
      Where a client delivers nothing, or its delivery is lost, `iterations` is 0 and
      `arrival` NaN; `start` is NaN if it was offline all the interval.

    Raises:
      UserError: a value out of range, nothing delivered in all intervals.

    Source: Y. Shao et al., "Robust Model Aggregation for Heterogeneous Federated
    Learning: Analysis and Optimizations"; the carry-over is ours.
    """
    N, J = fleet.iteration.shape
    check("num_clients", N)
    check("num_intervals", num_intervals)
    check("schedule.interval_seconds", interval)
    done = [0] * N  # iterations finished so far
    spent = [0.0] * N  # seconds spent on the next one
    updates = []
    for t in range(num_intervals):
        start, end, k = t * interval, (t + 1) * interval, t % J
        row = []
        for i in range(N):
            available = online_seconds(fleet, i, start, end)
            count = 0
            budget = available - fleet.download[i, k] - fleet.upload[i, k]
            if budget > 0:
                budget += spent[i]
                count, left = fitting(fleet.iteration[i], done[i], budget, end)
                done[i] += count
                spent[i] = left if carry else 0.0
            first = finish(fleet, i, start, 0.0)
            arrives = count > 0 and not fleet.lost[i, k]
            last = min(finish(fleet, i, start, available), end)
            row.append(
                Delivery(
                    last if arrives else math.nan,
                    i,
                    t,
                    t,
                    count if arrives else 0,
                    first if first < end else math.nan,
                    False,
                )
            )
        updates.append(Update(end, row))
    if not any(d.iterations for update in updates for d in update.deliveries):
        raise _nothing(fleet, num_intervals, interval)
    return make_trace(updates, N, fleet, num_intervals * interval, 1)


def fitting(
    iteration: np.ndarray, first: int, budget: float, end: float
) -> tuple[int, float]:
    """How many iterations from the first on fit into the seconds, and what is left."""
    J, count, used = len(iteration), 0, 0.0
    # Ten times 0.1 s shall fit into 1 s. The slack is relative to the interval's end,
    # since that is what the budget was rounded to; it is never more than 1e-12 Δ
    # times the intervals so far.
    slack = 1e-12 * end
    while used + iteration[(first + count) % J] <= budget + slack:
        used += float(iteration[(first + count) % J])
        count += 1
    return count, max(budget - used, 0.0)


def _nothing(fleet: Fleet, num_intervals: int, interval: float) -> UserError:
    seconds = fleet.download[:, 0] + fleet.iteration[:, 0] + fleet.upload[:, 0]
    return UserError(
        f"--config.schedule.interval_seconds={interval:g}: no client delivers anything "
        f"in --config.num_intervals={num_intervals}; the fastest client's first "
        f"iteration takes {seconds.min():g} s with its download and upload; choose "
        "longer intervals, and less dropout if deliveries are lost"
    )
