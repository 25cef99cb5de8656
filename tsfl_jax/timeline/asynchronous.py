"""Frameworks without rounds: an update follows from arrivals (afl, fedbuff), or from
the clock (tsfl).
"""

import bisect
import collections
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.cohort import (
    NOBODY,
    Cohorts,
    all_of,
    ask,
    asked,
    given,
    next_start,
)
from tsfl_jax.timeline.fleet import (
    ExactFleet,
    Fleet,
    exact,
    finish,
    latest_start,
    online_in,
)
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.timeline.trace import (
    COUNTED,
    LOST,
    OPEN,
    Simulation,
    Task,
    Trace,
    Update,
    begin,
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
    cohorts, end = given(fleet, horizon, iterations)
    check("timeline.buffer", buffer, cohorts.fleet.clients, "num_clients")
    updates: list[Update] = []
    arrived: list[Task] = []

    def ended(now: Ticks, task: Task | None) -> Ended:
        assert task is not None, "no time to look"
        if not task.lost:
            arrived.append(task)
        if len(arrived) == buffer:
            updates.append(Update(now, [*arrived]))
            arrived.clear()
        return [task.client], None

    begun = run_arrivals(cohorts, end, iterations, updates, ended)
    return make_simulation(updates, begun, buffer, cohorts.everyone, end, iterations)


# Clients that are free now, and a time to look at what has arrived, or None.
Ended = tuple[list[int], Ticks | None]


def run_arrivals(
    cohorts: Cohorts,
    end: Ticks,
    iterations: int,
    updates: Sequence[Update],
    ended: Callable[[Ticks, Task | None], Ended],
) -> list[Task]:
    """Run clients one after another's arrival, each of which another task follows.

    Args:
      cohorts, end, iterations: as of `given`.
      updates: made so far; their number is the version that is downloaded.
      ended: told the ticks and the task that arrives then, or None at a time that it
        asked for, after all that arrives at that moment; it may add an update.

    Returns:
      All tasks that began.
    """
    clients, following = cohorts.fleet, _following(cohorts)
    look, begun = clients.clients, []
    # A client is in here once: with the task it will deliver, or with the number of
    # that which it will download. Ties go to the smaller id. −1: to look for clients;
    # N: at what has arrived.
    events: list[tuple[Ticks, int, Task | int]] = [(0, -1, 0)]
    busy: set[int] = set()
    while events and events[0][0] <= end:
        now, i, done = heapq.heappop(events)
        if 0 <= i < look and isinstance(done, int):
            new = {"version": len(updates), "now": now, "iterations": iterations}
            begun.append(begin(clients, i, done, **new))
            heapq.heappush(events, (begun[-1].arrival, i, begun[-1]))
            continue
        free = [i]
        if i >= 0:
            free, later = ended(now, done if isinstance(done, Task) else None)
            if later is not None:
                heapq.heappush(events, (later, look, 0))
        busy -= {*free}
        for who in free:
            for start, client, number in following(now, who, busy):
                heapq.heappush(events, (start, client, number))
                busy |= {client} - {-1}
    return begun


# (ticks, who has delivered or −1, those at work) -> (when, who follows, number of its
# task); −1: look again then.
_Following = Callable[[Ticks, int, set[int]], list[tuple[Ticks, int, int]]]


def _following(cohorts: Cohorts) -> _Following:
    """Who begins after a delivery: the same client, or of cohorts one that is drawn."""
    everyone = cohorts.everyone
    return _the_same(everyone) if everyone else _drawn(cohorts)


def _the_same(fleet: ExactFleet) -> _Following:
    """Who delivers follows itself."""
    number = [itertools.count() for _ in range(fleet.clients)]  # of its next task
    return lambda now, client, busy: [
        (finish(fleet, i, now, 0), i, next(number[i]))
        for i in (range(fleet.clients) if client < 0 else [client])
    ]


_AT_ONCE = 64  # clients that are drawn together


def _drawn(cohorts: Cohorts) -> _Following:
    """Draw n asks one client, which its sampler knows as a cohort of one."""
    numbers = itertools.count()
    # Without the clock the next ones are known, whatever happens; but where most
    # clients are at work they would mostly be among those.
    online = cohorts.sampler.online
    crowded = 2 * cohorts.size > cohorts.fleet.clients
    alone = online or (crowded and cohorts.sampler.around)
    line: collections.deque[tuple[int, int]] = collections.deque()

    def draw(now: Ticks, busy: set[int]) -> None:
        known = np.array(sorted(busy), np.int64) if alone else NOBODY
        for number in itertools.islice(numbers, 1 if alone else _AT_ONCE):
            ids = asked(cohorts, number, now, size=1, busy=known)
            line.extend((i, number) for i in ids.tolist())
        cohorts.fleet.need([i for i, _ in line])

    def following(
        now: Ticks, client: int, busy: set[int]
    ) -> list[tuple[Ticks, int, int]]:
        del client
        found, there = [], set(busy)
        for _ in range(cohorts.patience):
            if len(there) == cohorts.size:
                break
            if not line:
                draw(now, there)
            if not line and alone:  # nobody who could be asked
                break
            i, number = line.popleft() if line else (-1, 0)
            if i < 0 or i in there:
                continue
            if (start := finish(cohorts.fleet, i, now, 0)) < math.inf:
                found.append((start, i, number))
                there.add(i)
        if online and len(there) < cohorts.size:
            found.append((next_start(cohorts.online, now), -1, 0))
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
    cohorts = fleet
    if not isinstance(cohorts, Cohorts):
        check("num_clients", len(cohorts.iteration))
        cohorts = all_of(exact(cohorts))
    clients, width = cohorts.fleet, cohorts.size
    client, start = np.full((T, width), -1, np.int32), np.full((T, width), math.nan)
    done, spent = collections.Counter[int](), dict[int, int]()
    places: dict[tuple[int, int], Task] = {}
    for t in range(T):
        for k, i in enumerate(ask(cohorts, t, t * length)):
            client[t, k] = i
            start[t, k] = ticks.seconds(finish(clients, i, t * length, 0))
            # Those of a cohort do not depend on when a client was asked before.
            first = done[i] if cohorts.crowd is None else t * _APART
            before = first, spent.get(i, 0)
            task, left = _interval(clients, i, t, t * length, length, *before)
            if task is not None:
                places[t, k] = task
                done[i] += task.iterations
                spent[i] = left if carry else 0
    if not any(task.fate == COUNTED for task in places.values()):
        raise _nothing(clients, T, interval, client)
    tasks = {(task.client, task.number): task for task in places.values()}
    trace = _trace_of(client, start, places, interval)
    return Simulation(trace, [tasks[name] for name in sorted(tasks)])


_APART = 97  # iterations between those of an interval and of the next


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


def _interval(
    fleet: ExactFleet,
    client: int,
    number: int,
    start: Ticks,
    length: Ticks,
    done: int,
    spent: int,
) -> tuple[Task | None, int]:
    """What a client does in an interval, if anything, and the ticks left."""
    k, times = number % fleet.draws, fleet.of(client)
    windows = online_in(fleet, client, start, start + length)
    upload = times.upload.item(k)
    budget = sum([b - a for a, b in windows]) - times.download.item(k) - upload
    if budget <= 0:
        return None, 0
    count, left = fitting(times.work.tolist(), done, budget + spent)
    ready = windows[-1][1]
    if not count:  # there is nothing to upload
        ready = latest_start(fleet, client, ready, upload)
    lost, arrival = times.lost.item(k), ticks.seconds(ready)
    task = Task(
        arrival=arrival,
        client=client,
        number=number,
        version=number,
        iterations=count,
        start=ticks.seconds(windows[0][0]),
        lost=lost,
        stop=arrival,
        first=done,
        spent=ticks.seconds(spent),
        fills=True,
        until=ticks.seconds(start + length),
        fate=(LOST if lost else COUNTED) if count else OPEN,
    )
    return task, left


def fitting(work: list[int], first: int, budget: int) -> tuple[int, int]:
    """Iterations from the first on that fit into the budget, and the ticks left.

    Args:
      work: of a client, see `fleet.ClientTimes`.
      first: number of an iteration.
      budget: ticks ≥ 0.
    """
    J = len(work) - 1
    cycles, rest = divmod(budget + work[first % J], work[J])
    place = bisect.bisect_right(work, rest) - 1
    return cycles * J + place - first % J, rest - work[place]


def _nothing(
    fleet: ExactFleet,
    num_intervals: int,
    interval: float,
    client: Int[np.ndarray, "T K"],
) -> UserError:
    several = map(fleet.of, np.unique(client[client >= 0]).tolist())
    first = [c.work.item(1) + c.download.item(0) + c.upload.item(0) for c in several]
    seconds = ticks.seconds(min(first, default=math.inf))
    return UserError(
        f"--config.schedule.interval_seconds={interval:g}: no client delivers anything "
        f"in --config.num_intervals={num_intervals}; the fastest client's first "
        f"iteration takes {seconds:g} s with its download and upload; choose longer "
        "intervals, and less dropout if deliveries are lost"
    )
