"""Frameworks whose server works in rounds: sfl, esync, fedat, fedcs, safa.

The functions are pure: the same fleet gives the same trace. All rows list their
clients by id; a delivery that is lost is waited for until the moment at which it would
have arrived; a round in which nothing arrives is no update.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from tsfl_jax.timeline.fleet import Fleet, finish, within
from tsfl_jax.timeline.trace import (
    MOST_ITERATIONS,
    Delivery,
    Trace,
    Update,
    begin,
    check_task,
    expected_seconds,
    make_trace,
)
from tsfl_jax.types import UserError
from tsfl_jax.validate import check


def sfl(fleet: Fleet, *, horizon: float, iterations: int) -> Trace:
    """Conventional synchronous rounds: everybody does H iterations, the slowest ends.

    Args:
      fleet: N clients. One who never finishes is not waited for.
      horizon: seconds > 0; updates until then count.
      iterations: H ≥ 1.

    Returns:
      A `Trace` with K = N.

    Raises:
      UserError: a value out of range, no update within the horizon.

    Source: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", 2017.
    """
    check_task(fleet, horizon, iterations)
    N = len(fleet.iteration)
    return _tier_rounds(fleet, horizon, [range(N)], [iterations] * N, iterations)


def esync(fleet: Fleet, *, horizon: float, iterations: int) -> Trace:
    """Synchronous rounds in which faster clients do more iterations.

    Everyone does as many iterations, at least H, as end by the moment at which the
    slowest client, doing H, is expected to arrive; times are expected by their means,
    without regard to when a client is online. A round ends when all have arrived.

    Args, Returns, Raises: as in `sfl`.

    Source: Z. Li et al., "ESync: Accelerating Intra-Domain Federated Learning in
    Heterogeneous Data Centers", 2020.
    """
    check_task(fleet, horizon, iterations)
    download, step, upload = expected_seconds(fleet)
    slowest = (download + iterations * step + upload).max()
    # The factor lets exact multiples fit; see `fleet.within`.
    fitting = np.floor((slowest - download - upload) / step * (1 + 1e-12))
    counts = np.maximum(fitting, iterations)
    if counts.max() > MOST_ITERATIONS:
        raise UserError(
            f"--config.timeline.speed: client {counts.argmax()} does "
            f"{counts.max():.3g} iterations while the slowest does {iterations}; "
            f"expected at most {MOST_ITERATIONS}; choose less different speeds"
        )
    counts = counts.astype(np.int64).tolist()
    return _tier_rounds(fleet, horizon, [range(len(counts))], counts, iterations)


def fedat(fleet: Fleet, *, horizon: float, iterations: int, tiers: int) -> Trace:
    """Tiers of similar speed; each runs its own synchronous rounds.

    Clients are sorted by their expected seconds of a task; the p-th of N is in tier
    ⌊pM/N⌋, tier 0 the fastest. The end of a tier's round is an update; ties go to the
    faster tier. A round's base model is the newest when the round begins, also for a
    client that comes online later.

    Args:
      fleet, horizon, iterations: as in `sfl`.
      tiers: 1 ≤ M ≤ N.

    Returns:
      A `Trace` with `group` = tier and K = ⌈N/M⌉.

    Raises:
      UserError: a value out of range, no update within the horizon.

    Source: Z. Chai et al., "FedAT: A High-Performance and Communication-Efficient
    Federated Learning System with Asynchronous Tiers", SC 2021.
    """
    check_task(fleet, horizon, iterations)
    N = len(fleet.iteration)
    check("timeline.tiers", tiers, N, "num_clients")
    download, step, upload = expected_seconds(fleet)
    order = np.argsort(download + iterations * step + upload, kind="stable")
    tier = np.arange(N) * tiers // N
    members = [np.sort(order[tier == m]).tolist() for m in range(tiers)]
    return _tier_rounds(fleet, horizon, members, [iterations] * N, iterations)


def _tier_rounds(
    fleet: Fleet,
    horizon: float,
    tiers: Sequence[Sequence[int]],
    counts: Sequence[int],
    iterations: int,
) -> Trace:
    """Synchronous rounds of every tier by itself; counts: iterations of each client."""
    updates: list[Update] = []
    ends: list[tuple[float, int, int, list[Delivery]]] = []  # a heap

    def start(tier: int, task: int, now: float):
        version = len(updates)
        begun = [
            begin(fleet, i, task, version=version, now=now, iterations=counts[i])
            for i in tiers[tier]
        ]
        begun = [d for d in begun if d.arrival < math.inf]
        if begun:
            heapq.heappush(ends, (max(d.arrival for d in begun), tier, task, begun))

    for tier in range(len(tiers)):
        start(tier, 0, 0.0)
    while ends and within(ends[0][0], horizon):
        now, tier, task, begun = heapq.heappop(ends)
        arrived = [d for d in begun if not d.lost]
        if arrived:
            updates.append(Update(now, arrived, tier))
        start(tier, task + 1, now)
    width = max(len(members) for members in tiers)
    return make_trace(updates, width, fleet, horizon, iterations)


def fedcs(fleet: Fleet, *, horizon: float, iterations: int, deadline: float) -> Trace:
    """Rounds with a deadline; the server picks clients that should meet it.

    Uploads are one after another. From the expected times, the server adds the client
    that makes the round longest by least (ties: smaller id), while the round is
    expected to end by the deadline. Who is offline when a round begins does not answer
    and is not picked; a round begins when somebody online could meet the deadline.
    In the round itself downloads and iterations are parallel, and uploads go in the
    order in which clients are ready (ties: smaller id), also if the next one is
    offline. An upload that would end after the deadline is dropped, but keeps the
    channel until then. The round ends with the last upload, or at the deadline if
    somebody was dropped.

    Args:
      fleet, horizon, iterations: as in `sfl`.
      deadline: seconds > 0 a round may last.

    Returns:
      A `Trace`; K is the most clients that delivered in a round.

    Raises:
      UserError: a value out of range, a deadline that nobody is expected to meet, no
        update within the horizon.

    Source: T. Nishio and R. Yonetani, "Client Selection for Federated Learning with
    Heterogeneous Resources in Mobile Edge", ICC 2019, Algorithm 3, with a download
    time of each client's own instead of a multicast to all.
    """
    check_task(fleet, horizon, iterations)
    check("timeline.deadline", deadline)
    download, step, upload = expected_seconds(fleet)
    ready = download + iterations * step
    fitting = [i for i, t in enumerate(ready + upload) if within(t, deadline)]
    if not fitting:
        raise UserError(
            f"--config.timeline.deadline={deadline:g}: no client is expected to meet "
            f"it; the fastest takes {(ready + upload).min():g} s; choose a longer one"
        )
    updates: list[Update] = []
    tasks = [0] * len(ready)
    now = 0.0
    while True:
        now = min(finish(fleet, i, now, 0.0) for i in fitting)
        if not within(now, horizon):
            break
        online = [i for i in fitting if finish(fleet, i, now, 0.0) == now]
        picked = _greedy(online, ready, upload, deadline)
        begun = []  # as if uploads took no time: sorts by who is ready first
        free = fleet._replace(upload=np.zeros_like(fleet.upload))
        for i in picked:
            begun.append(
                begin(
                    free,
                    i,
                    tasks[i],
                    version=len(updates),
                    now=now,
                    iterations=iterations,
                )
            )
            tasks[i] += 1
        channel, limit, kept, end = now, now + deadline, [], now
        for d in sorted(begun):
            seconds = fleet.upload[d.client, d.task % fleet.upload.shape[1]]
            # Ready at the end of a window, with nothing to upload, is delivered.
            if seconds > 0 or channel > d.arrival:
                channel = finish(fleet, d.client, max(channel, d.arrival), seconds)
            else:
                channel = d.arrival
            if within(channel, limit):
                kept.append(d._replace(arrival=channel))
                end = channel
        # An upload that is kept may end a rounding error after the deadline.
        now = max(limit, end) if len(kept) < len(picked) else end
        if not within(now, horizon):
            break
        arrived = sorted((d for d in kept if not d.lost), key=lambda d: d.client)
        if arrived:
            updates.append(Update(now, arrived))
    width = max((len(u.deliveries) for u in updates), default=1)
    return make_trace(updates, width, fleet, horizon, iterations)


def _greedy(clients, ready, upload, deadline) -> list[int]:
    """Clients in the order of selection; `ready` and `upload` are expected seconds."""
    left, picked, now = list(clients), [], 0.0
    while left:
        ends = [max(now, ready[i]) + upload[i] for i in left]
        best = int(np.argmin(ends))
        if not within(ends[best], deadline):
            break
        now = ends[best]
        picked.append(left.pop(best))
    return picked


def safa(
    fleet: Fleet, *, horizon: float, iterations: int, fraction: float, lag: int
) -> Trace:
    """Rounds that end when enough clients have delivered; stragglers may lag.

    At the start of round r every idle client, and every client whose base model is
    more than `lag` versions old, begins with the newest model; the latter gives up
    what it was doing. The others go on. The round ends with the ⌈C·N⌉-th delivery, or
    when everything under way has arrived; what arrives later, also at the same
    moment, counts in the next round. What has arrived by the end of a round is never
    given up, however old its base model is.

    Args:
      fleet, horizon, iterations: as in `sfl`. A task that was given up has used its
        iterations' draws.
      fraction: C in (0, 1].
      lag: versions ≥ 0.

    Returns:
      A `Trace` with K = ⌈C·N⌉.

    Raises:
      UserError: a value out of range, no update within the horizon.

    Source: W. Wu et al., "SAFA: A Semi-Asynchronous Protocol for Fast Federated
    Learning with Low Overhead", IEEE TC 2021; its lag tolerance, without its caches.
    """
    check_task(fleet, horizon, iterations)
    check("timeline.fraction", fraction)
    check("timeline.lag", lag)
    N = len(fleet.iteration)
    quota = math.ceil(fraction * N * (1 - 1e-12))  # 0.1 · 30 is a little more than 3
    updates: list[Update] = []
    tasks = [0] * N
    flying: dict[int, Delivery] = {}  # by client
    now = 0.0
    while True:
        version = len(updates)
        for i in range(N):
            idle = i not in flying
            # What arrived at the very end of the last round waits at the server.
            under_way = not idle and flying[i].arrival > now
            if idle or (under_way and version - flying[i].version > lag):
                flying[i] = begin(
                    fleet, i, tasks[i], version=version, now=now, iterations=iterations
                )
                tasks[i] += 1
        arrived, progress = [], False
        for d in sorted(flying.values()):
            full = len(arrived) == quota
            if d.arrival == math.inf or (full and d.arrival > now):
                break
            # A tie with the last one: known to be lost now, else for the next round.
            if full and not d.lost:
                continue
            del flying[d.client]
            now, progress = d.arrival, True
            if not d.lost:
                arrived.append(d)
        if not progress or not within(now, horizon):
            break
        if arrived:
            arrived.sort(key=lambda d: d.client)
            updates.append(Update(now, arrived))
    return make_trace(updates, quota, fleet, horizon, iterations)
