"""HySync: arrivals within a short time of each other are one synchronous update.

The source's abstract says that no selected client is waited for, and that highly
concurrent updates are merged, which keeps staleness down; no more could be found of it.
The reading here: the first arrival opens a window of fixed length, and at its end all
that have arrived are aggregated and go on with the new model.

Source: G. Shi, L. Li, J. Wang, W. Chen, K. Ye, C. Xu, "HySync: Hybrid Federated
Learning with Effective Synchronization", HPCC 2020.
"""

import heapq

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.asynchronous import following_of
from tsfl_jax.timeline.cohort import Cohorts, given
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.timeline.settings import check
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import (
    Simulation,
    Task,
    Update,
    add_round,
    begin,
    make_simulation,
)


def hysync(
    fleet: Fleet | Cohorts, *, horizon: float, iterations: int, window: float
) -> Simulation:
    """Simulate HySync: an update is made a window after the first arrival.

    Who arrives in the window, at its end too, waits for the update and then downloads
    the new model; the others go on, one version older. A lost upload opens no window,
    and its client begins anew at once. A window of 0 merges what arrives at the same
    moment; one as long as the slowest task is conventional SFL with a pause.

    Args:
      fleet, horizon, iterations: as in `afl`.
      window: seconds ≥ 0.

    Returns:
      A `Simulation`; K is the most deliveries of an update.

    Raises: as `afl`.
    """
    check("timeline.window", window)
    cohorts, end = given(fleet, horizon, iterations)
    clients, everyone, length = cohorts.fleet, cohorts.everyone, ticks.of(window)
    following = following_of(cohorts)
    updates: list[Update] = []
    waiting: list[Task] = []
    begun: list[Task] = []
    # As in `fedbuff`; N is the end of a window, after all that arrive at that moment.
    close = clients.clients
    events: list[tuple[Ticks, int, Task | int]] = [(0, -1, 0)]
    busy: set[int] = set()
    while events and events[0][0] <= end:
        now, i, done = heapq.heappop(events)
        free = [i]
        if i == close:
            add_round(updates, waiting, now)
            free, waiting = [task.client for task in waiting], []
        elif i >= 0 and isinstance(done, int):
            new = {"version": len(updates), "now": now, "iterations": iterations}
            begun.append(begin(clients, i, done, **new))
            heapq.heappush(events, (begun[-1].arrival, i, begun[-1]))
            continue
        elif isinstance(done, Task) and not done.lost:
            if not waiting:
                heapq.heappush(events, (now + length, close, 0))
            waiting.append(done)
            continue
        busy -= set(free)
        for who in free:
            for start, client, number in following(now, who, busy):
                heapq.heappush(events, (start, client, number))
                busy |= {client} - {-1}
    return make_simulation(updates, begun, 0, everyone, end, iterations)
