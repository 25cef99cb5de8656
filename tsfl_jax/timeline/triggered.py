"""TT-Fed: the clock triggers updates, and tasks may span several intervals."""

import collections
import math

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.cohort import Cohorts, ask, given
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.timeline.trace import (
    Simulation,
    Task,
    Update,
    add_round,
    begin,
    make_simulation,
)


def ttfed(
    fleet: Fleet | Cohorts, *, num_intervals: int, interval: float, iterations: int
) -> Simulation:
    """Simulate TT-Fed: every Δ seconds an update of the tasks that have ended by then.

    A client whose task of H iterations takes at most mΔ is in tier m: it downloads at
    rΔ and counts in the update at (r + m)Δ, m − 1 versions behind. At the end of an
    interval who has delivered, or was lost, begins anew with the new model; the others
    go on. A tier follows from the time that a task takes, so that one with jitter may
    change it. An interval in which nothing arrives is no update.

    Simplified: no bandwidth is shared among the users, and none are selected by the
    paper's online search for it, of which nothing is known before training but speeds
    and delays. How arrived models are weighted is the rule's, here as everywhere.

    Args:
      fleet: N clients, or cohorts: of that of interval r those that are not at work
        begin.
      num_intervals: T ≥ 1.
      interval: Δ > 0 seconds, as in T-SFL.
      iterations: H ≥ 1.

    Returns:
      A `Simulation`; K is the most clients that delivered in an interval.

    Raises:
      UserError: a value out of range, nothing delivered in all intervals.

    Source: X. Zhou, Y. Deng, H. Xia, S. Wu, M. Bennis, "Time-Triggered Federated
    Learning Over Wireless Networks", IEEE TWC 2022.
    """
    check("num_intervals", num_intervals)
    check("schedule.interval_seconds", interval)
    cohorts, end = given(fleet, num_intervals * interval, iterations)
    length = ticks.of(interval)
    updates: list[Update] = []
    begun: list[Task] = []  # without those that are under way
    numbers: collections.Counter[int] = collections.Counter()  # of the next tasks
    flying: dict[int, Task] = {}  # by client
    for number in range(num_intervals):
        now, last = number * length, (number + 1) * length
        new = {"version": len(updates), "now": now, "iterations": iterations}
        for i in dict.fromkeys(ask(cohorts, number, now)):
            if i not in flying:
                flying[i] = begin(cohorts.fleet, i, numbers[i], **new)
        ended: list[Task] = []
        for task in [*flying.values()]:
            if last <= task.start < math.inf:
                # Offline until then: it has not begun, and will with a newer model.
                del flying[task.client]
            elif task.arrival <= last:
                numbers[task.client] += 1
                ended.append(flying.pop(task.client))
        begun += ended
        add_round(updates, ended, last)
    begun += flying.values()
    return make_simulation(updates, begun, 0, cohorts.everyone, end, iterations)
