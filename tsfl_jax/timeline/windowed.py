"""HySync: arrivals within a short time of each other are one synchronous update.

The source's abstract says that no selected client is waited for, and that highly
concurrent updates are merged, which keeps staleness down; no more could be found of it.
The reading here: the first arrival opens a window of fixed length, and at its end all
that have arrived are aggregated and go on with the new model.

Source: G. Shi, L. Li, J. Wang, W. Chen, K. Ye, C. Xu, "HySync: Hybrid Federated
Learning with Effective Synchronization", HPCC 2020.
"""

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.asynchronous import Ended, run_arrivals
from tsfl_jax.timeline.cohort import Cohorts, given
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.timeline.trace import (
    Simulation,
    Task,
    Update,
    add_round,
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
    length = ticks.of(window)
    updates: list[Update] = []
    waiting: list[Task] = []

    def ended(now: Ticks, task: Task | None) -> Ended:
        if task is None:  # the end of the window
            add_round(updates, waiting, now)
            free = [task.client for task in waiting]
            waiting.clear()
            return free, None
        if task.lost:
            return [task.client], None
        waiting.append(task)
        return [], now + length if len(waiting) == 1 else None

    begun = run_arrivals(cohorts, end, iterations, updates, ended)
    return make_simulation(updates, begun, 0, cohorts.everyone, end, iterations)
