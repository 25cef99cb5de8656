"""Frameworks without rounds: an update follows from arrivals (afl, fedbuff), or from
the clock (tsfl).
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.fleet import (
    ExactFleet,
    Fleet,
    exact,
    finish,
    latest_start,
    online_in,
)
from tsfl_jax.timeline.settings import check
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import (
    COUNTED,
    LOST,
    OPEN,
    Simulation,
    Task,
    Trace,
    Update,
    begin,
    in_ticks,
    make_simulation,
)
from tsfl_jax.types import UserError


def afl(fleet: Fleet, *, horizon: float, iterations: int) -> Simulation:
    """Simulate AFL: every arrival is an update, and its client begins the next task.

    Args:
      fleet: N clients. An offline client downloads, once online, the newest model.
      horizon: seconds > 0; updates until then count.
      iterations: H ≥ 1.

    Returns:
      A `Simulation` with K = 1.

    Raises:
      UserError: a value out of range, no update within the horizon.

    Source: C. Xie, S. Koyejo, I. Gupta, "Asynchronous Federated Optimization", 2019.
    """
    return fedbuff(fleet, horizon=horizon, iterations=iterations, buffer=1)


def fedbuff(
    fleet: Fleet, *, horizon: float, iterations: int, buffer: int
) -> Simulation:
    """Simulate FedBuff: every K-th arrival is an update.

    A client that delivers downloads the newest model at once; the one that fills the
    buffer, the updated model. A client may deliver twice in an update; rows are in the
    order of arrival.

    Args:
      fleet, horizon, iterations: as in `afl`.
      buffer: deliveries of an update, 1 ≤ K ≤ N.

    Returns:
      A `Simulation` with that K. Arrivals in a buffer that is not full at the end do
      not count.

    Raises: as `afl`.

    Source: J. Nguyen et al., "Federated Learning with Buffered Asynchronous
    Aggregation", AISTATS 2022.
    """
    clients, end = in_ticks(fleet, horizon, iterations)
    N = len(clients.lost)
    check("timeline.buffer", buffer, N, "num_clients")
    updates: list[Update] = []
    arrived: list[Task] = []
    begun: list[Task] = []
    number = [itertools.count() for _ in range(N)]  # of a client's next task
    # A client is in here once: with the task it will deliver, or with None where it
    # will download. Ties go to the smaller id.
    events: list[tuple[Ticks, int, Task | None]] = [
        (finish(clients, i, 0, 0), i, None) for i in range(N)
    ]
    heapq.heapify(events)
    while events[0][0] <= end:
        now, i, done = heapq.heappop(events)
        if done is None:
            new = {"version": len(updates), "now": now, "iterations": iterations}
            begun.append(begin(clients, i, next(number[i]), **new))
            heapq.heappush(events, (begun[-1].arrival, i, begun[-1]))
            continue
        if not done.lost:
            arrived.append(done)
        if len(arrived) == buffer:
            updates.append(Update(now, arrived))
            arrived = []
        heapq.heappush(events, (finish(clients, i, now, 0), i, None))
    return make_simulation(updates, begun, buffer, clients, end, iterations)


def tsfl(
    fleet: Fleet, *, num_intervals: int, interval: float, carry: bool
) -> Simulation:
    """Simulate T-SFL: τ_i iterations of client i fit in interval t of Δ seconds.

    All clients download at tΔ. An upload begins as late as it can to end by (t+1)Δ; in
    between the client does as many iterations as fit. Nothing happens offline.

    Args:
      fleet: N clients.
      num_intervals: T ≥ 1.
      interval: Δ > 0 seconds.
      carry: the time spent on the unfinished iteration counts for the first one of
        the next interval, else it is lost and the same iteration begins anew.

    Returns:
      A `Simulation` with R = T, K = N, clients 0..N−1 in every row of the trace,
      `task` = `version` = t. Where a client delivers nothing, or its delivery is
      lost, `iterations` is 0 and `arrival` NaN; `start` is NaN if it was offline all
      the interval.

    Raises:
      UserError: a value out of range, nothing delivered in all intervals.

    Source: Y. Shao et al., "Robust Model Aggregation for Heterogeneous Federated
    Learning: Analysis and Optimizations"; the carry-over is ours.
    """
    N, T = len(fleet.iteration), num_intervals
    check("num_clients", N)
    check("num_intervals", T)
    check("schedule.interval_seconds", interval)
    clients, length = exact(fleet), ticks.of(interval)
    tasks = [
        task for i in range(N) for task in _intervals(clients, i, T, length, carry)
    ]
    counted = [task for task in tasks if task.fate == COUNTED]
    if not counted:
        raise _nothing(fleet, T, interval)
    number, client = np.indices((T, N), np.int32)
    iterations, arrival = np.zeros((T, N), np.int32), np.full((T, N), math.nan)
    there = [t.number for t in counted], [t.client for t in counted]
    iterations[there] = [t.iterations for t in counted]
    arrival[there] = [t.arrival for t in counted]
    time = ticks.multiples(T, interval)
    start = [
        [ticks.seconds(finish(clients, i, t * length, 0)) for i in range(N)]
        for t in range(T)
    ]
    trace = Trace(
        time=time,
        client=client,
        version=number,
        iterations=iterations,
        task=number.copy(),
        start=np.where(np.array(start) < time[:, None], start, math.nan),
        arrival=arrival,
        group=np.zeros(T, np.int32),
    )
    return Simulation(trace, tasks)


def _intervals(
    fleet: ExactFleet, client: int, num_intervals: int, length: Ticks, carry: bool
) -> Iterator[Task]:
    """T-SFL's tasks of a client in seconds: one per interval with time to train."""
    J, work = fleet.download.shape[1], fleet.work[client].tolist()
    done, spent = 0, 0
    for t in range(num_intervals):
        k = t % J
        windows = online_in(fleet, client, t * length, (t + 1) * length)
        upload = fleet.upload.item(client, k)
        budget = sum([b - a for a, b in windows]) - fleet.download.item(client, k)
        budget -= upload
        if budget > 0:
            count, left = fitting(work, done, budget + spent)
            ready = windows[-1][1]
            if not count:  # there is nothing to upload
                ready = latest_start(fleet, client, ready, upload)
            lost, arrival = fleet.lost.item(client, k), ticks.seconds(ready)
            yield Task(
                arrival=arrival,
                client=client,
                number=t,
                version=t,
                iterations=count,
                start=ticks.seconds(windows[0][0]),
                lost=lost,
                stop=arrival,
                first=done,
                spent=ticks.seconds(spent),
                fills=True,
                fate=(LOST if lost else COUNTED) if count else OPEN,
            )
            done, spent = done + count, left if carry else 0


def fitting(work: list[int], first: int, budget: int) -> tuple[int, int]:
    """Iterations from the first on that fit into the budget, and the ticks left.

    Args:
      work: of a client, see `ExactFleet`.
      first: number of an iteration.
      budget: ticks ≥ 0.
    """
    J = len(work) - 1
    cycles, rest = divmod(budget + work[first % J], work[J])
    place = bisect.bisect_right(work, rest) - 1
    return cycles * J + place - first % J, rest - work[place]


def _nothing(fleet: Fleet, num_intervals: int, interval: float) -> UserError:
    seconds = fleet.download[:, 0] + fleet.iteration[:, 0] + fleet.upload[:, 0]
    return UserError(
        f"--config.schedule.interval_seconds={interval:g}: no client delivers anything "
        f"in --config.num_intervals={num_intervals}; the fastest client's first "
        f"iteration takes {seconds.min():g} s with its download and upload; choose "
        "longer intervals, and less dropout if deliveries are lost"
    )
