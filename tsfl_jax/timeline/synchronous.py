"""Frameworks whose server works in rounds: sfl, esync, fedat, fedcs, safa.

The functions are pure: the same fleet gives the same trace. Rows list their clients by
id. The server waits for a lost delivery until it would have arrived. A round without an
arrival is no update.
"""

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.events import quota_of
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, expected, finish
from tsfl_jax.timeline.settings import check
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import (
    Simulation,
    Task,
    Update,
    add_round,
    begin,
    in_ticks,
    make_simulation,
)
from tsfl_jax.types import INT32_MAX, UserError


def sfl(fleet: Fleet, *, horizon: float, iterations: int) -> Simulation:
    """Simulate conventional SFL: a round ends when all clients did H iterations.

    Args:
      fleet: N clients. The server does not wait for one that never finishes.
      horizon: seconds > 0; updates until then count.
      iterations: H ≥ 1.

    Returns:
      A `Simulation` with K = N.

    Raises:
      UserError: a value out of range, no update within the horizon.

    Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", 2017.
    """
    clients, end = in_ticks(fleet, horizon, iterations)
    N = len(clients.lost)
    return _tier_rounds(clients, end, [range(N)], [iterations] * N, iterations)


def esync(fleet: Fleet, *, horizon: float, iterations: int) -> Simulation:
    """Simulate ESync: synchronous rounds in which faster clients do more iterations.

    A client does as many iterations, at least H, as end by the expected arrival of the
    slowest client, which does H. Expected times are means that ignore when a client is
    online. A round ends when all have arrived.

    Args, Returns, Raises: as in `sfl`.

    Source: Z. Li et al., "ESync: Accelerating Intra-Domain Federated Learning in
    Heterogeneous Data Centers", 2020.
    """
    clients, end = in_ticks(fleet, horizon, iterations)
    each = [(d + u, step) for d, step, u in zip(*expected(clients), strict=True)]
    slowest = max(rest + iterations * step for rest, step in each)
    counts = [max((slowest - rest) // step, iterations) for rest, step in each]
    if max(counts) > INT32_MAX:
        raise UserError(
            f"--config.timeline.speed: client {counts.index(max(counts))} does "
            f"{max(counts):.3g} iterations while the slowest does {iterations}; "
            f"expected at most {INT32_MAX}; choose speeds that differ less"
        )
    return _tier_rounds(clients, end, [range(len(counts))], counts, iterations)


def fedat(fleet: Fleet, *, horizon: float, iterations: int, tiers: int) -> Simulation:
    """Simulate FedAT: tiers of similar speed, each with synchronous rounds of its own.

    Clients are sorted by their expected seconds of a task; the p-th of N is in tier
    ⌊pM/N⌋, tier 0 the fastest. The end of a tier's round is an update; ties go to the
    faster tier. A round's base model is the newest when the round begins, also for a
    client that comes online later.

    Args:
      fleet, horizon, iterations: as in `sfl`.
      tiers: 1 ≤ M ≤ N.

    Returns:
      A `Simulation` with `group` = tier and K = ⌈N/M⌉.

    Raises: as `sfl`.

    Source: Z. Chai et al., "FedAT: A High-Performance and Communication-Efficient
    Federated Learning System with Asynchronous Tiers", SC 2021.
    """
    clients, end = in_ticks(fleet, horizon, iterations)
    N = len(clients.lost)
    check("timeline.tiers", tiers, N, "num_clients")
    total = [d + iterations * s + u for d, s, u in zip(*expected(clients), strict=True)]
    order = sorted(range(N), key=total.__getitem__)
    tier = np.arange(N) * tiers // N
    members = [np.sort(np.array(order)[tier == m]).tolist() for m in range(tiers)]
    return _tier_rounds(clients, end, members, [iterations] * N, iterations)


def _tier_rounds(
    fleet: ExactFleet,
    horizon: Ticks,
    tiers: Sequence[Sequence[int]],
    counts: Sequence[int],
    iterations: int,
) -> Simulation:
    """Synchronous rounds of each tier; counts: iterations of each client."""
    updates: list[Update] = []
    begun: list[Task] = []  # without those of the rounds that go on
    ends: list[tuple[Ticks, int, int, list[Task]]] = []  # a heap

    def start(tier: int, number: int, now: Ticks) -> None:
        new = {"version": len(updates), "now": now}
        tasks = [
            begin(fleet, i, number, **new, iterations=counts[i]) for i in tiers[tier]
        ]
        arrivals = [task.arrival for task in tasks if task.arrival < math.inf]
        if arrivals:
            heapq.heappush(ends, (max(arrivals), tier, number, tasks))
        else:  # no client of this tier finishes: its last round does not end
            begun.extend(tasks)

    for tier in range(len(tiers)):
        start(tier, 0, 0)
    while ends and ends[0][0] <= horizon:
        now, tier, number, tasks = heapq.heappop(ends)
        ended = [task for task in tasks if task.arrival < math.inf]
        begun += ended
        # A client that never finishes gives this task up for that of the next round.
        begun += [
            task._replace(stop=now)
            for task in tasks
            if task.arrival == math.inf and task.start < now
        ]
        add_round(updates, ended, now, tier)
        start(tier, number + 1, now)
    begun += [task for *_, tasks in ends for task in tasks]
    width = max(map(len, tiers))
    return make_simulation(updates, begun, width, fleet, horizon, iterations)


def fedcs(
    fleet: Fleet, *, horizon: float, iterations: int, deadline: float
) -> Simulation:
    """Simulate FedCS: rounds with a deadline, of clients that should meet it.

    A round begins when a client that could meet the deadline is online. The server
    selects among the clients that are online then, see `_greedy`. Downloads and
    iterations are parallel, uploads are not, see `_upload_in_turn`. The round ends
    with the last upload, or at the deadline if an upload was dropped.

    Args:
      fleet, horizon, iterations: as in `sfl`.
      deadline: seconds > 0 a round may last.

    Returns:
      A `Simulation`; K is the most clients that delivered in a round.

    Raises:
      UserError: a value out of range, a deadline that no client is expected to
        meet, no update within the horizon.

    Source: T. Nishio and R. Yonetani, "Client Selection for Federated Learning with
    Heterogeneous Resources in Mobile Edge", ICC 2019, Algorithm 3, with a download
    time of each client's own instead of a multicast to all.
    """
    clients, until = in_ticks(fleet, horizon, iterations)
    check("timeline.deadline", deadline)
    longest, J = ticks.of(deadline), fleet.iteration.shape[1]
    download, step, upload = expected(clients)
    ready = [d + iterations * s for d, s in zip(download, step, strict=True)]
    total = [r + u for r, u in zip(ready, upload, strict=True)]
    able = [i for i, t in enumerate(total) if t <= longest * J]
    if not able:
        raise UserError(
            f"--config.timeline.deadline={deadline:g}: no client is expected to meet "
            f"it; the fastest takes {ticks.seconds(min(total)) / J:g} s; choose a "
            "longer one"
        )
    # As if uploads took no time: they wait for the channel.
    silent = clients._replace(upload=np.zeros_like(clients.upload))
    updates: list[Update] = []
    begun: list[Task] = []
    number = [itertools.count() for _ in ready]  # of a client's next task
    now: Ticks = 0
    while True:
        now = min(finish(clients, i, now, 0) for i in able)
        if now > until:
            break
        online = [i for i in able if finish(clients, i, now, 0) == now]
        picked = _greedy(online, ready, upload, longest * J)
        new = {"version": len(updates), "now": now, "iterations": iterations}
        tasks = [begin(silent, i, next(number[i]), **new) for i in picked]
        tasks, now = _upload_in_turn(clients, tasks, now + longest)
        if now > until:
            break
        begun += tasks
        add_round(updates, [t for t in tasks if t.arrival == t.stop], now)
    width = max((len(update.tasks) for update in updates), default=1)
    return make_simulation(updates, begun, width, clients, until, iterations)


def _upload_in_turn(
    fleet: ExactFleet, tasks: Sequence[Task], limit: Ticks
) -> tuple[list[Task], Ticks]:
    """The tasks of a round as their uploads end, and when the round ends.

    Uploads go in the order in which clients are ready (ties: smaller id), also if the
    next one is offline. An upload that would end after the limit is dropped, but keeps
    the channel until then.
    """
    channel: Ticks = 0
    turns: list[Task] = []
    for task in sorted(tasks):
        work = fleet.upload.item(task.client, task.number % fleet.upload.shape[1])
        # Ready at the end of a window, with nothing to upload, is delivered.
        if work or channel > task.arrival:
            channel = finish(fleet, task.client, max(channel, task.arrival), work)
        else:
            channel = task.arrival
        turns.append(task._replace(arrival=channel, stop=min(channel, limit)))
    return turns, min(channel, limit)


def _greedy(
    clients: list[int], ready: list[int], upload: list[int], deadline: Ticks
) -> list[int]:
    """Clients in the order of selection; all times are J times the expected ones.

    Adds the client that makes the round longest by least (ties: smaller id), while the
    round is expected to end by the deadline.
    """
    left, picked, now = list(clients), [], 0
    while left:
        ends = [max(now, ready[i]) + upload[i] for i in left]
        now = min(ends)
        if now > deadline:
            break
        picked.append(left.pop(ends.index(now)))
    return picked


def safa(
    fleet: Fleet, *, horizon: float, iterations: int, fraction: float, lag: int
) -> Simulation:
    """Simulate SAFA: rounds that end when enough clients have delivered.

    At the start of round r every idle client, and every client whose base model is
    more than `lag` versions old, begins with the newest model; the latter gives up
    its task. The others go on; one that is offline downloads what is newest once it is
    online. The round ends with the ⌈C·N⌉-th delivery, or
    when everything under way has arrived; what arrives later, also at the same
    moment, counts in the next round. What has arrived by the end of a round is never
    given up, however old its base model is.

    Args:
      fleet, horizon, iterations: as in `sfl`. A task that was given up has used its
        iterations' draws.
      fraction: C in (0, 1].
      lag: versions ≥ 0.

    Returns:
      A `Simulation` with K = ⌈C·N⌉.

    Raises: as `sfl`.

    Source: W. Wu et al., "SAFA: A Semi-Asynchronous Protocol for Fast Federated
    Learning with Low Overhead", IEEE TC 2021; its lag tolerance, without its cache and
    without its preference for clients that did not count in the last round.
    """
    clients, end = in_ticks(fleet, horizon, iterations)
    check("timeline.fraction", fraction)
    check("timeline.lag", lag)
    N = len(clients.lost)
    quota = quota_of(fraction, N)
    updates: list[Update] = []
    begun: list[Task] = []  # without those that are under way
    number = [itertools.count() for _ in range(N)]  # of a client's next task
    flying: dict[int, Task] = {}  # by client
    now: Ticks = 0
    while True:
        new = {"version": len(updates), "now": now, "iterations": iterations}
        for i in range(N):
            task = flying.get(i)
            if task is not None and task.start > now:  # offline until then
                flying[i] = begin(clients, i, task.number, **new)
                continue
            if task is not None:
                # What arrived at the very end of the last round waits at the server.
                if task.arrival <= now or len(updates) - task.version <= lag:
                    continue
                begun.append(task._replace(stop=now))
            flying[i] = begin(clients, i, next(number[i]), **new)
        ended, now = _next_round(flying, quota, now)
        if not ended or now > end:
            break
        for task in ended:
            begun.append(flying.pop(task.client))
        add_round(updates, ended, now)
    begun += flying.values()
    return make_simulation(updates, begun, quota, clients, end, iterations)


def _next_round(
    flying: dict[int, Task], quota: int, now: Ticks
) -> tuple[list[Task], Ticks]:
    """SAFA's tasks that arrive or are seen to be lost in a round, and its end."""
    ended: list[Task] = []
    arrived = 0
    for task in sorted(flying.values()):
        full = arrived == quota
        if task.arrival == math.inf or (full and task.arrival > now):
            break
        # A tie with the last one: known to be lost now, else for the next round.
        if full and not task.lost:
            continue
        ended.append(task)
        arrived += not task.lost
        now = task.arrival
    return ended, now
