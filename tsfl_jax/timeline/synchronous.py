"""Frameworks whose server works in rounds: sfl, esync, fedat, fedcs.

The functions are pure: the same fleet gives the same trace. Rows list their clients by
id. The server waits for a lost delivery until it would have arrived. A round without an
arrival is no update. With `Cohorts` in place of a fleet some clients are asked in each
round: those of round r, of its tier, whatever has happened before.
"""

import collections
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tsfl_jax.timeline import cohort, crowd, ticks, trace
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, expected, finish
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.timeline.trace import Simulation, Task, Update, begin, make_simulation
from tsfl_jax.types import INT32_MAX, UserError


def sfl(fleet: Fleet | Cohorts, *, horizon: float, iterations: int) -> Simulation:
    """Simulate conventional SFL: a round ends when all clients did H iterations.

    Args:
      fleet: N clients, or cohorts: of K' ≥ K asked the first K count. The server does
        not wait for one that never finishes.
      horizon: seconds > 0; updates until then count.
      iterations: H ≥ 1.

    Returns:
      A `Simulation` with K = N, or the K of cohorts.

    Raises:
      UserError: no update within the horizon.

    Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", 2017.
    """
    return _tier_rounds(*cohort.in_ticks(fleet, horizon), iterations)


def esync(fleet: Fleet | Cohorts, *, horizon: float, iterations: int) -> Simulation:
    """Simulate ESync: synchronous rounds in which faster clients do more iterations.

    A client does as many iterations, at least H, as end by the expected arrival of the
    slowest client of the round, which does H. Expected times are means that ignore when
    a client is online. A round ends when all have arrived.

    Args, Returns, Raises: as in `sfl`.

    Source: Z. Li et al., "ESync: Accelerating Intra-Domain Federated Learning in
    Heterogeneous Data Centers", 2020.
    """
    cohorts, end = cohort.in_ticks(fleet, horizon)
    counts = functools.partial(_while_the_slowest, cohorts.fleet, iterations)
    return _tier_rounds(cohorts, end, iterations, counts)


def _while_the_slowest(
    fleet: ExactFleet, iterations: int, ids: Sequence[int]
) -> list[int]:
    """Iterations that ESync's clients do while the slowest does H."""
    times = [(d + u, step) for d, step, u in (expected(fleet, i) for i in ids)]
    slowest = max((sent + iterations * step for sent, step in times), default=0)
    counts = [max((slowest - sent) // step, iterations) for sent, step in times]
    if (most := max(counts, default=0)) > INT32_MAX:
        raise UserError(
            f"--config.timeline.speed: client {ids[counts.index(most)]} does "
            f"{most:.3g} iterations while the slowest does {iterations}; "
            f"expected at most {INT32_MAX}; choose speeds that differ less"
        )
    return counts


def fedat(
    fleet: Fleet | Cohorts, *, horizon: float, iterations: int, tiers: int
) -> Simulation:
    """Simulate FedAT: tiers of similar speed, each with synchronous rounds of its own.

    Clients are sorted by their expected seconds of a task; the p-th of N is in tier
    ⌊pM/N⌋, tier 0 the fastest. The end of a tier's round is an update; ties go to the
    faster tier. A round's base model is the newest when the round begins, also for a
    client that comes online later. A cohort is of one tier; all N are sorted once.

    Args:
      fleet, horizon, iterations: as in `sfl`.
      tiers: 1 ≤ M ≤ N.

    Returns:
      A `Simulation` with `group` = tier and K = ⌈N/M⌉, or at most that of cohorts.

    Raises: as `sfl`.

    Source: Z. Chai et al., "FedAT: A High-Performance and Communication-Efficient
    Federated Learning System with Asynchronous Tiers", SC 2021.
    """
    cohorts, end = cohort.in_ticks(fleet, horizon)
    if cohorts.crowd is not None:
        total = crowd.task_seconds(cohorts.crowd, iterations)
        order = np.argsort(total, kind="stable").astype(np.int32)
    else:
        means = (expected(cohorts.fleet, i) for i in range(cohorts.fleet.clients))
        total = [d + iterations * s + u for d, s, u in means]
        order = np.array(sorted(range(len(total)), key=total.__getitem__))
    N = len(order)
    check("timeline.tiers", tiers, N, "num_clients")
    edges = [-(-m * N // tiers) for m in range(tiers + 1)]
    members = [np.sort(order[a:b]) for a, b in itertools.pairwise(edges)]
    return _tier_rounds(cohort.with_tiers(cohorts, members), end, iterations)


def _tier_rounds(
    cohorts: Cohorts,
    horizon: Ticks,
    iterations: int,
    counts: Callable[[Sequence[int]], list[int]] | None = None,
) -> Simulation:
    """Synchronous rounds of each tier; counts: of iterations, of a round's clients."""
    updates: list[Update] = []
    begun: list[Task] = []  # without those of the rounds that go on
    # A heap of rounds that end; one without tasks is to trace.begin then.
    ends: list[tuple[Ticks, int, int, list[Task]]] = []

    def start(tier: int, number: int, now: Ticks) -> None:
        for k in range(number, number + cohorts.patience):
            if (first := cohort.opening(cohorts, now, tier)) > now:
                heapq.heappush(ends, (first, tier, k, []))
                return
            ids = cohort.ask(cohorts, k, now, tier)
            iterations_of = counts(ids) if counts else [iterations] * len(ids)
            new = {"version": len(updates), "now": now}
            tasks = [
                begin(cohorts.fleet, i, k, **new, iterations=count)
                for i, count in zip(ids, iterations_of, strict=True)
            ]
            end = _ending(tasks, cohorts.size)[1]
            if end < math.inf:
                heapq.heappush(ends, (end, tier, k, tasks))
                return
            begun.extend(tasks)  # none of them finishes

    for tier in range(len(cohorts.members)):
        start(tier, 0, 0)
    while ends and ends[0][0] <= horizon:
        now, tier, number, tasks = heapq.heappop(ends)
        if not tasks:
            start(tier, number, now)
            continue
        ended, _ = _ending(tasks, cohorts.size)
        begun += [task._replace(until=now) for task in ended]
        # Who has not finished gives this task up for that of the next round.
        finished = {task.client for task in ended}
        begun += [
            task._replace(stop=now)
            for task in tasks
            if task.client not in finished and task.start < now
        ]
        trace.add_round(updates, ended, now, tier)
        start(tier, number + 1, now)
    begun += [task for *_, tasks in ends for task in tasks]
    return make_simulation(updates, begun, cohorts.size, horizon)


def _ending(tasks: Sequence[Task], quota: int) -> tuple[list[Task], Ticks]:
    """The tasks that end in a round, and when the quota is full, or all have ended."""
    ends = sorted(task for task in tasks if task.arrival < math.inf)
    arrived = [task for task in ends if not task.lost]
    if len(arrived) < quota:
        return ends, ends[-1].arrival if ends else math.inf
    now = arrived[quota - 1].arrival
    return arrived[:quota] + [t for t in ends if t.lost and t.arrival <= now], now


def fedcs(
    fleet: Fleet | Cohorts, *, horizon: float, iterations: int, deadline: float
) -> Simulation:
    """Simulate FedCS: rounds with a deadline, of clients that should meet it.

    A round begins when a client that could meet the deadline is online. The server
    selects among the clients online then (`_greedy`). Downloads and iterations are
    parallel, uploads are not (`_upload_in_turn`). The round ends with the last upload,
    or at the deadline if one was dropped.

    Args:
      fleet, horizon, iterations: as in `sfl`; the server selects within a cohort, and
        if none can be selected waits until the deadline.
      deadline: seconds > 0 a round may last.

    Returns:
      A `Simulation`; K is the most clients that delivered in a round.

    Raises:
      UserError: no update within the horizon.

    Source: T. Nishio and R. Yonetani, "Client Selection for Federated Learning with
    Heterogeneous Resources in Mobile Edge", ICC 2019, Algorithm 3, with a download
    time of each client's own instead of a multicast to all.
    """
    cohorts, until = cohort.in_ticks(fleet, horizon)
    clients, longest, J = cohorts.fleet, ticks.of(deadline), cohorts.fleet.draws
    # As if uploads took no time: they wait for the channel.
    silent = clients._replace(
        of=lambda i: clients.of(i)._replace(upload=np.zeros(J, int))
    )
    # J times when a client is expected to be ready, and to upload.
    ready, upload = dict[int, int](), dict[int, int]()
    updates, begun = list[Update](), list[Task]()
    numbers: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
    now: Ticks = 0
    for number in itertools.count():
        now = cohort.opening(cohorts, now)
        ids = cohort.ask(cohorts, number, now)
        for i in (i for i in ids if i not in ready):
            d, step, upload[i] = expected(clients, i)
            ready[i] = d + iterations * step
        able = [i for i in dict.fromkeys(ids) if ready[i] + upload[i] <= longest * J]
        if cohorts.crowd is None:
            now = min((finish(clients, i, now, 0) for i in able), default=math.inf)
        if now > until:
            break
        online = [i for i in able if finish(clients, i, now, 0) == now]
        new = {"version": len(updates), "now": now, "iterations": iterations}
        tasks = [
            begin(silent, i, number if cohorts.crowd else next(numbers[i]), **new)
            for i in _greedy(online, ready, upload, longest * J)
        ]
        late = now + longest
        tasks, now = _upload_in_turn(clients, tasks, late) if tasks else ([], late)
        if now > until:
            break
        begun += tasks
        trace.add_round(updates, [t for t in tasks if t.arrival == t.stop], now)
    return make_simulation(updates, begun, 0, until)


def _upload_in_turn(
    fleet: ExactFleet, tasks: Sequence[Task], limit: Ticks
) -> tuple[list[Task], Ticks]:
    """The tasks of a round as their uploads end, and when the round ends."""
    # In the order in which clients are ready (ties: smaller id), offline or not. One
    # that would end after the limit is dropped, but keeps the channel until then.
    channel: Ticks = 0
    turns: list[Task] = []
    for task in sorted(tasks):
        work = fleet.of(task.client).upload.item(task.number % fleet.draws)
        # Ready at the end of a window, with nothing to upload, is delivered.
        if work or channel > task.arrival:
            channel = finish(fleet, task.client, max(channel, task.arrival), work)
        else:
            channel = task.arrival
        turns.append(task._replace(arrival=channel, stop=min(channel, limit)))
    return turns, min(channel, limit)


def _greedy(
    clients: list[int], ready: dict[int, int], upload: dict[int, int], deadline: Ticks
) -> list[int]:
    """Clients by selection: first who makes the round longer by least, then the id."""
    # Until it would end after the deadline. All times are J times the expected ones.
    left, picked, now = list(clients), [], 0
    while left:
        ends = [max(now, ready[i]) + upload[i] for i in left]
        now = min(ends)
        if now > deadline:
            break
        picked.append(left.pop(ends.index(now)))
    return picked
