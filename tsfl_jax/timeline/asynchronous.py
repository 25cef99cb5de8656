"""Frameworks without rounds: an update follows from arrivals (afl, fedbuff), or from
the clock (tsfl).
"""

import bisect
import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.timeline import crowd, ticks
from tsfl_jax.timeline.cohort import NOBODY, Cohorts, asked, next_start
from tsfl_jax.timeline.fleet import (
    ExactFleet,
    Fleet,
    exact,
    finish,
    latest_start,
    online_in,
)
from tsfl_jax.timeline.rounds import PATIENCE, named
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
    end_of,
    in_ticks,
    make_simulation,
)
from tsfl_jax.types import UserError


def afl(fleet: Fleet | Cohorts, *, horizon: float, iterations: int) -> Simulation:
    """Simulate AFL: every arrival is an update, and its client begins the next task.

    Args:
      fleet: N clients. An offline client downloads, once online, the newest model.
        Or cohorts: at most K clients are at work, and when one delivers a new one
        begins, drawn from those that are not.
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
    fleet: Fleet | Cohorts, *, horizon: float, iterations: int, buffer: int
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
    if isinstance(fleet, Cohorts):
        end, N, clients = end_of(horizon, iterations), fleet.crowd.num_clients, None
        following = _drawn(fleet, iterations)
    else:
        clients, end = in_ticks(fleet, horizon, iterations)
        N = len(clients.lost)
        following = _the_same(clients)
    check("timeline.buffer", buffer, N, "num_clients")
    updates: list[Update] = []
    arrived: list[Task] = []
    begun: list[Task] = []
    # A client is in here once: with the task it will deliver, or with None where it
    # will download. Ties go to the smaller id. No turn: to look for clients anew.
    events: list[tuple[Ticks, int, Task | None, _Turn | None]] = [(0, -1, None, None)]
    busy: set[int] = set()
    while events and events[0][0] <= end:
        now, i, done, turn = heapq.heappop(events)
        if turn is not None and done is None:
            new = {"version": len(updates), "now": now, "iterations": iterations}
            task = begin(turn.fleet, turn.row, turn.draw, **new)
            begun.append(named(task, i, turn.number))
            heapq.heappush(events, (task.arrival, i, begun[-1], turn))
            continue
        if done is not None:
            busy.remove(i)
            if not done.lost:
                arrived.append(done)
            if len(arrived) == buffer:
                updates.append(Update(now, arrived))
                arrived = []
        for start, turn in following(now, i, busy):
            client = -1 if turn is None else turn.client
            heapq.heappush(events, (start, client, None, turn))
            busy |= {client} - {-1}
    return make_simulation(updates, begun, buffer, clients, end, iterations)


class _Turn(NamedTuple):
    """A client that will download, and where its times are."""

    client: int
    number: int  # of its task
    fleet: ExactFleet
    row: int  # of the fleet
    draw: int  # of the row


# (ticks, who has delivered or −1, those at work) -> who follows, and when; None: look
# again then.
_Following = Callable[[Ticks, int, set[int]], list[tuple[Ticks, _Turn | None]]]


def _the_same(fleet: ExactFleet) -> _Following:
    """Who delivers follows itself."""
    N, J = fleet.download.shape
    number = [itertools.count() for _ in range(N)]  # of a client's next task

    def following(
        now: Ticks, client: int, busy: set[int]
    ) -> list[tuple[Ticks, _Turn | None]]:
        del busy
        return [
            (finish(fleet, i, now, 0), _Turn(i, k, fleet, i, k))
            for i in (range(N) if client < 0 else [client])
            for k in [next(number[i])]
        ]

    return following


_AT_ONCE = 64  # clients that are drawn together


def _drawn(cohorts: Cohorts, iterations: int) -> _Following:
    """Draw n asks one client, which its sampler knows as a cohort of one."""
    numbers = itertools.count()
    # Without the clock the next ones are known, whatever happens; but where most
    # clients are at work they would mostly be among those.
    online = cohorts.sampler.online
    crowded = 2 * cohorts.size > cohorts.crowd.num_clients
    alone = online or (crowded and cohorts.sampler.around)
    line: collections.deque[_Turn] = collections.deque()

    def draw(now: Ticks, busy: set[int]) -> None:
        several = list(itertools.islice(numbers, 1 if alone else _AT_ONCE))
        known = np.array(sorted(busy), np.int64) if alone else NOBODY
        each = [asked(cohorts, n, now, size=1, busy=known) for n in several]
        number = np.repeat(several, list(map(len, each)))
        if len(number):
            ids = np.concatenate(each)
            times = crowd.fleet_of(cohorts.crowd, ids, number, iterations)
            fleet, pairs = exact(times, ids), zip(ids, number, strict=True)
            line.extend(
                _Turn(int(i), int(n), fleet, row, 0) for row, (i, n) in enumerate(pairs)
            )

    def following(
        now: Ticks, client: int, busy: set[int]
    ) -> list[tuple[Ticks, _Turn | None]]:
        del client
        found, there = [], set(busy)
        for _ in range(PATIENCE):
            if len(there) == cohorts.size:
                break
            if not line:
                draw(now, there)
            if not line and alone:  # nobody who could be asked
                break
            turn = line.popleft() if line else None
            if turn is None or turn.client in there:
                continue
            if (start := finish(turn.fleet, turn.row, now, 0)) < math.inf:
                found.append((start, turn))
                there.add(turn.client)
        if online and len(there) < cohorts.size:
            found.append((next_start(cohorts.online, now), None))
        return found

    return following


def tsfl(
    fleet: Fleet | Cohorts, *, num_intervals: int, interval: float, carry: bool
) -> Simulation:
    """Simulate T-SFL: τ_i iterations of client i fit in interval t of Δ seconds.

    All clients download at tΔ. An upload begins as late as it can to end by (t+1)Δ; in
    between the client does as many iterations as fit. Nothing happens offline.

    Args:
      fleet: N clients, or cohorts, of which that of interval t is asked.
      num_intervals: T ≥ 1.
      interval: Δ > 0 seconds.
      carry: the time spent on the unfinished iteration counts for the first one of
        the next interval, else it is lost and the same iteration begins anew; not
        with cohorts, whose clients change.

    Returns:
      A `Simulation` with R = T, K = N, clients 0..N−1 in every row of the trace, or
      those asked, `task` = `version` = t. Where a client delivers nothing, or its
      delivery is lost, `iterations` is 0 and `arrival` NaN; `start` is NaN if it was
      offline all the interval.

    Raises:
      UserError: a value out of range, nothing delivered in all intervals.

    Source: Y. Shao et al., "Robust Model Aggregation for Heterogeneous Federated
    Learning: Analysis and Optimizations"; the carry-over is ours.
    """
    T, length = num_intervals, ticks.of(interval)
    check("num_intervals", T)
    check("schedule.interval_seconds", interval)
    if isinstance(fleet, Cohorts):
        return _tsfl_of_cohorts(fleet, T, interval)
    N = len(fleet.iteration)
    check("num_clients", N)
    clients = exact(fleet)
    tasks = [
        task for i in range(N) for task in _intervals(clients, i, T, length, carry)
    ]
    if not any(task.fate == COUNTED for task in tasks):
        raise _nothing(fleet, T, interval)
    places = {(task.number, task.client): task for task in tasks}
    client = np.indices((T, N), np.int32)[1]
    start = [
        [ticks.seconds(finish(clients, i, t * length, 0)) for i in range(N)]
        for t in range(T)
    ]
    return Simulation(_trace_of(client, np.array(start), places, interval), tasks)


def _trace_of(
    client: Int[np.ndarray, "T K"],
    start: Float[np.ndarray, "T K"],
    tasks: dict[tuple[int, int], Task],
    interval: float,
) -> Trace:
    """The trace of T-SFL; tasks by interval and column."""
    T, time = len(client), ticks.multiples(len(client), interval)
    number = np.indices(client.shape, np.int32)[0]
    iterations = np.zeros(client.shape, np.int32)
    arrival = np.full(client.shape, math.nan)
    for place, task in tasks.items():
        if task.fate == COUNTED:
            iterations[place], arrival[place] = task.iterations, task.arrival
    return Trace(
        time=time,
        client=client,
        version=number,
        iterations=iterations,
        task=number.copy(),
        start=np.where(start < time[:, None], start, math.nan),
        arrival=arrival,
        group=np.zeros(T, np.int32),
    )


def _tsfl_of_cohorts(cohorts: Cohorts, T: int, interval: float) -> Simulation:
    """T-SFL's intervals of the clients that are asked in each."""
    length, shape = ticks.of(interval), (T, cohorts.size)
    client, start = np.full(shape, -1, np.int32), np.full(shape, math.nan)
    places: dict[tuple[int, int], Task] = {}
    fleet = crowd.fleet_of(cohorts.crowd, np.arange(1), 0, 1)  # for the message
    for t in range(T):
        ids = asked(cohorts, t, t * length)
        if not len(ids):
            continue
        client[t, : len(ids)] = ids
        fleet = _long_enough(cohorts, ids, t, interval)
        clients = exact(fleet, ids)
        for row, i in enumerate(ids.tolist()):
            start[t, row] = ticks.seconds(finish(clients, row, t * length, 0))
            task, *_ = _interval(clients, row, 0, t * length, length)
            if task is not None:
                places[t, row] = named(task, i, t)._replace(version=t)
    if not any(task.fate == COUNTED for task in places.values()):
        raise _nothing(fleet, T, interval)
    tasks = {(task.client, t): task for (t, _), task in places.items()}
    trace = _trace_of(client, start, places, interval)
    return Simulation(trace, [tasks[name] for name in sorted(tasks)])


def _long_enough(
    cohorts: Cohorts, ids: Int[np.ndarray, " K"], number: int, interval: float
) -> Fleet:
    """Times of tasks with as many iterations as fit, or as differ."""
    count = 16
    while True:
        fleet = crowd.fleet_of(cohorts.crowd, ids, number, count)
        drawn = fleet.iteration.shape[1]
        if drawn < count or (fleet.iteration.sum(1) > interval).all():
            return fleet
        count *= 2


def _intervals(
    fleet: ExactFleet, client: int, num_intervals: int, length: Ticks, carry: bool
) -> Iterator[Task]:
    """T-SFL's tasks of a client in seconds: one per interval with time to train."""
    done, spent = 0, 0
    for t in range(num_intervals):
        task, left = _interval(fleet, client, t, t * length, length, done, spent)
        if task is not None:
            yield task
            done, spent = done + task.iterations, left if carry else 0


def _interval(
    fleet: ExactFleet,
    row: int,
    number: int,
    start: Ticks,
    length: Ticks,
    done: int = 0,
    spent: int = 0,
) -> tuple[Task | None, int]:
    """What a client does in an interval, if anything, and the ticks left."""
    k = number % fleet.download.shape[1]
    windows = online_in(fleet, row, start, start + length)
    upload = fleet.upload.item(row, k)
    budget = sum([b - a for a, b in windows]) - fleet.download.item(row, k) - upload
    if budget <= 0:
        return None, 0
    count, left = fitting(fleet.work[row].tolist(), done, budget + spent)
    ready = windows[-1][1]
    if not count:  # there is nothing to upload
        ready = latest_start(fleet, row, ready, upload)
    lost, arrival = fleet.lost.item(row, k), ticks.seconds(ready)
    task = Task(
        arrival=arrival,
        client=row,
        number=number,
        version=number,
        iterations=count,
        start=ticks.seconds(windows[0][0]),
        lost=lost,
        stop=arrival,
        first=done,
        spent=ticks.seconds(spent),
        fills=True,
        fate=(LOST if lost else COUNTED) if count else OPEN,
    )
    return task, left


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
