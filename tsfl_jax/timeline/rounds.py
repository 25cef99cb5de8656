"""Who is asked in the rounds of a framework: all clients of a tier, or a cohort.

NOT done here: when a round ends and what counts; see `synchronous`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tsfl_jax.timeline.cohort import Cohorts, Ids, asked, opening
from tsfl_jax.timeline.fleet import ExactFleet, Fleet
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import Task, end_of, in_ticks

# Rounds in succession, of different cohorts, that may end without a delivery.
PATIENCE = 1000


class Asking(NamedTuple):
    """Who is asked, and their times."""

    # (number of a tier's round, ticks, tier) -> ids of clients, sorted.
    ask: Callable[[int, Ticks, int], Sequence[int]]
    opens: Callable[[Ticks, int], Ticks]  # (ticks, tier) -> when one may be asked
    size: int  # most clients that count in a round
    patience: int  # see `PATIENCE`; 1: all clients are asked
    fleet: ExactFleet

    @property
    def everyone(self) -> ExactFleet | None:
        """The fleet where all are asked; see `trace.make_simulation`."""
        return self.fleet if self.patience == 1 else None


def asking(
    fleet: Fleet | Cohorts,
    horizon: float,
    iterations: int,
    tiers: Sequence[Ids] | None = None,
) -> tuple[Asking, Ticks]:
    """Who is asked, and the horizon in ticks, for tasks of H iterations.

    Args:
      fleet: N clients, of which all are asked, or cohorts.
      horizon: seconds > 0.
      iterations: H ≥ 1.
      tiers: sorted ids of each tier's clients; None: one of all.

    Raises:
      UserError: what no framework accepts.
    """
    if not isinstance(fleet, Cohorts):
        clients, end = in_ticks(fleet, horizon, iterations)
        everyone = [range(clients.clients)]
        if tiers is not None:
            everyone = [ids.tolist() for ids in tiers]
        most = max(map(len, everyone))
        ask, opens = lambda number, now, tier: everyone[tier], lambda now, tier: now
        return Asking(ask, opens, most, 1, clients), end
    cohorts, members = fleet, [None] if tiers is None else tiers
    most = cohorts.fleet.clients if tiers is None else max(map(len, tiers))

    def ask(number: int, now: Ticks, tier: int) -> Sequence[int]:
        ids = asked(cohorts, number, now, tier=tier, members=members[tier]).tolist()
        cohorts.fleet.need(ids)
        return ids

    def opens(now: Ticks, tier: int) -> Ticks:
        return opening(cohorts, now, members[tier])

    found = Asking(ask, opens, min(cohorts.size, most), PATIENCE, cohorts.fleet)
    return found, end_of(horizon, iterations)


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
