"""When the rounds of a framework end, and what counts in them."""

import math
from collections.abc import Sequence

from tsfl_jax.timeline.cohort import Cohorts, everyone
from tsfl_jax.timeline.fleet import ExactFleet, Fleet
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import Task, end_of, in_ticks

# Rounds in succession, of different cohorts, that may end without a delivery.
PATIENCE = 1000


def given(
    fleet: Fleet | Cohorts, horizon: float, iterations: int
) -> tuple[Cohorts, Ticks, ExactFleet | None]:
    """Who is asked, the horizon in ticks, and the fleet if all are asked.

    Raises:
      UserError: what no framework with tasks of H `iterations` accepts.
    """
    if isinstance(fleet, Cohorts):
        return fleet, end_of(horizon, iterations), None
    clients, end = in_ticks(fleet, horizon, iterations)
    return everyone(clients), end, clients


def ending(tasks: Sequence[Task], quota: int) -> tuple[list[Task], Ticks]:
    """The tasks that end in a round, and when it does; inf: it does not.

    It ends with the delivery that fills the quota; where so many do not arrive, with
    the last task that ends.
    """
    ends = sorted(task for task in tasks if task.arrival < math.inf)
    arrived = [task for task in ends if not task.lost]
    if len(arrived) < quota:
        return ends, ends[-1].arrival if ends else math.inf
    now = arrived[quota - 1].arrival
    return arrived[:quota] + [t for t in ends if t.lost and t.arrival <= now], now
