"""Frameworks without rounds: an update follows from arrivals (afl, fedbuff, hysync), or
from the clock (tsfl).
"""

import bisect
import collections
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tsfl_jax.timeline import cohort, ticks, trace
from tsfl_jax.timeline import fleet as fleets
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, finish
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.timeline.trace import (
    COUNTED,
    LOST,
    OPEN,
    Simulation,
    Task,
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
      UserError: no update within the horizon.

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
    cohorts, end = cohort.in_ticks(fleet, horizon)
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

    begun = _run_arrivals(cohorts, end, iterations, updates, ended)
    return make_simulation(updates, begun, buffer, end)


def hysync(
    fleet: Fleet | Cohorts, *, horizon: float, iterations: int, window: float
) -> Simulation:
    """Simulate HySync: an update is made a window after the first arrival.

    Who arrives in the window, at its end too, waits for the update and then downloads
    the new model; the others go on, one version older. A lost upload opens no window,
    and its client begins anew at once. A window of 0 merges what arrives at the same
    moment; one as long as the slowest task is conventional SFL with a pause.

    The source's abstract says that no selected client is waited for, and that highly
    concurrent updates are merged, which keeps staleness down; no more could be found of
    it. The reading here: the first arrival opens a window of fixed length, and at its
    end all that have arrived are aggregated and go on with the new model.

    Args:
      fleet, horizon, iterations: as in `afl`.
      window: seconds ≥ 0.

    Returns:
      A `Simulation`; K is the most deliveries of an update.

    Raises: as `afl`.

    Source: G. Shi, L. Li, J. Wang, W. Chen, K. Ye, C. Xu, "HySync: Hybrid Federated
    Learning with Effective Synchronization", HPCC 2020.
    """
    cohorts, end = cohort.in_ticks(fleet, horizon)
    length = ticks.of(window)
    updates: list[Update] = []
    waiting: list[Task] = []

    def ended(now: Ticks, task: Task | None) -> Ended:
        if task is None:  # the end of the window
            trace.add_round(updates, waiting, now)
            free = [task.client for task in waiting]
            waiting.clear()
            return free, None
        if task.lost:
            return [task.client], None
        waiting.append(task)
        return [], now + length if len(waiting) == 1 else None

    begun = _run_arrivals(cohorts, end, iterations, updates, ended)
    return make_simulation(updates, begun, 0, end)


# Clients that are free now, and a time to look at what has arrived, or None.
Ended = tuple[list[int], Ticks | None]


def _run_arrivals(
    cohorts: Cohorts,
    end: Ticks,
    iterations: int,
    updates: Sequence[Update],
    ended: Callable[[Ticks, Task | None], Ended],
) -> list[Task]:
    """Run clients one after another's arrival; all tasks that began."""
    # `ended` gets each task that arrives, or None at a time that it asked for, after
    # all arrivals at that time; it may add an update.
    clients = cohorts.fleet
    following = _drawn(cohorts) if cohorts.crowd else _the_same(clients)
    look, begun = clients.clients, []
    # A client is in here once: with the task it will deliver, or with the number of
    # that which it will download. Ties go to the smaller id. −1: to look for clients;
    # N: at what has arrived.
    events: list[tuple[Ticks, int, Task | int]] = [(0, -1, 0)]
    busy: set[int] = set()
    while events and events[0][0] <= end:
        now, i, task = heapq.heappop(events)
        if 0 <= i < look and isinstance(task, int):
            new = {"version": len(updates), "now": now, "iterations": iterations}
            begun.append(begin(clients, i, task, **new))
            heapq.heappush(events, (begun[-1].arrival, i, begun[-1]))
            continue
        free = [i]
        if i >= 0:
            free, later = ended(now, task if isinstance(task, Task) else None)
            if later is not None:
                heapq.heappush(events, (later, look, 0))
        busy -= {*free}
        for finished in free:
            for start, client, number in following(now, finished, busy):
                heapq.heappush(events, (start, client, number))
                busy |= {client} - {-1}
    return begun


# (ticks, who has delivered or −1, those at work) -> (when, who follows, number of its
# task); −1: look again then.
_Following = Callable[[Ticks, int, set[int]], list[tuple[Ticks, int, int]]]


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
        away = np.array(sorted(busy), np.int64) if alone else cohort.NO_CLIENTS
        for number in itertools.islice(numbers, 1 if alone else _AT_ONCE):
            ids = cohort.draw_cohort(cohorts, number, now, size=1, busy=away)
            line.extend((i, number) for i in ids.tolist())
        cohorts.fleet.need([i for i, _ in line])

    def following(now: Ticks, _: int, busy: set[int]) -> list[tuple[Ticks, int, int]]:
        starts, at_work = [], set(busy)
        for _ in range(cohorts.patience):
            if len(at_work) == cohorts.size:
                break
            if not line:
                draw(now, at_work)
            if not line and alone:  # there is no client to ask
                break
            i, number = line.popleft() if line else (-1, 0)
            if i < 0 or i in at_work:
                continue
            if (start := finish(cohorts.fleet, i, now, 0)) < math.inf:
                starts.append((start, i, number))
                at_work.add(i)
        if online and len(at_work) < cohorts.size:
            starts.append((cohort.next_start(cohorts.online, now), -1, 0))
        return starts

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
      UserError: nothing delivered in all intervals.

    Source: Y. Shao et al., "Robust Model Aggregation for Heterogeneous Federated
    Learning: Analysis and Optimizations"; the carry-over is ours.
    """
    T = num_intervals
    cohorts, length = cohort.in_ticks(fleet, interval)
    clients, counted = cohorts.fleet, list[Update]()
    counts, spent = collections.Counter[int](), dict[int, int]()
    tasks: dict[tuple[int, int], Task] = {}
    for t in range(T):
        counted.append(Update((t + 1) * length, []))
        for i in cohort.ask(cohorts, t, t * length):
            # Those of a cohort do not depend on when a client was asked before.
            first = counts[i] if cohorts.crowd is None else t * _APART
            task, left = _interval(clients, i, t, length, first, spent.get(i, 0))
            if task.fills:
                tasks[i, t] = task
                counts[i] += task.iterations
                spent[i] = left if carry else 0
            if task.fate != COUNTED:
                task = task._replace(iterations=0, arrival=math.nan)
            counted[t].tasks.append(task)
    if not any(task.fate == COUNTED for task in tasks.values()):
        raise UserError(
            f"--config.schedule.interval_seconds={interval:g}: no client delivers "
            f"anything in --config.num_intervals={T}; choose longer intervals, and "
            "less --config.schedule.dropout if deliveries are lost"
        )
    rows = trace.trace_of(counted, cohorts.size)
    return Simulation(rows, [trace.in_seconds(tasks[name]) for name in sorted(tasks)])


_APART = 97  # iterations between those of an interval and of the next


def _interval(
    fleet: ExactFleet, client: int, number: int, length: Ticks, first: int, spent: int
) -> tuple[Task, int]:
    """What a client does in an interval, which it fills or not, and the ticks left."""
    k, times = number % fleet.draws, fleet.of(client)
    end = (number + 1) * length
    windows = fleets.online_in(fleet, client, end - length, end)
    start = windows[0][0] if windows else math.nan
    task = Task(math.nan, client, number, number, 0, start, False, end, first)
    upload = times.upload.item(k)
    budget = sum([b - a for a, b in windows]) - times.download.item(k) - upload
    if budget <= 0:
        return task, 0
    count, left = _fitting(times.work.tolist(), first, budget + spent)
    arrival, lost = windows[-1][1], times.lost.item(k)
    if not count:  # there is nothing to upload
        arrival = fleets.latest_start(fleet, client, arrival, upload)
    fate = (LOST if lost else COUNTED) if count else OPEN
    task = task._replace(arrival=arrival, iterations=count, lost=lost, stop=arrival)
    return task._replace(spent=spent, fills=True, until=end, fate=fate), left


def _fitting(work: list[int], first: int, budget: int) -> tuple[int, int]:
    """Iterations from the first on that fit into the budget, and the ticks left."""
    J = len(work) - 1
    cycles, left = divmod(budget + work[first % J], work[J])
    place = bisect.bisect_right(work, left) - 1
    return cycles * J + place - first % J, left - work[place]
