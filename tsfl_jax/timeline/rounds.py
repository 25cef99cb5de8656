"""Who is asked in the rounds of a framework: all clients of a tier, or a cohort.

NOT done here: when a round ends and what counts; see `synchronous`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tsfl_jax.timeline.cohort import Cohorts, Ids, asked, opening
from tsfl_jax.timeline.crowd import fleet_of
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, exact, expected
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import Task, begin, end_of, in_ticks

# Rounds in succession, of different cohorts, that may end without a delivery.
PATIENCE = 1000

Expected = tuple[list[int], list[int], list[int]]  # see `fleet.expected`


class Asking(NamedTuple):
    """Who is asked, and how tasks begin."""

    # (number of a tier's round, ticks, tier) -> ids of clients, sorted.
    ask: Callable[[int, Ticks, int], Sequence[int]]
    opens: Callable[[Ticks, int], Ticks]  # (ticks, tier) -> when one may be asked
    # (ids, numbers of their tasks, iterations, version, ticks) -> their tasks.
    begin: Callable[
        [Sequence[int], Sequence[int], Sequence[int], int, Ticks], list[Task]
    ]
    expected: Callable[[Sequence[int]], Expected]  # times of some clients
    size: int  # most clients that count in a round
    patience: int = 1  # see `PATIENCE`
    fleet: ExactFleet | None = None  # of all clients; None: there are cohorts


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
    if isinstance(fleet, Cohorts):
        return _of_cohorts(fleet, tiers), end_of(horizon, iterations)
    clients, end = in_ticks(fleet, horizon, iterations)
    return _of_fleet(clients, tiers), end


def _of_fleet(fleet: ExactFleet, tiers: Sequence[Ids] | None) -> Asking:
    N = len(fleet.lost)
    everyone = [range(N)] if tiers is None else [ids.tolist() for ids in tiers]
    means = np.array(expected(fleet), object)

    def begin_each(
        ids: Sequence[int],
        numbers: Sequence[int],
        counts: Sequence[int],
        version: int,
        now: Ticks,
    ) -> list[Task]:
        each = zip(ids, numbers, counts, strict=True)
        new = {"version": version, "now": now}
        return [begin(fleet, i, k, **new, iterations=count) for i, k, count in each]

    return Asking(
        ask=lambda number, now, tier: everyone[tier],
        opens=lambda now, tier: now,
        begin=begin_each,
        expected=lambda ids: tuple(means[:, list(ids)].tolist()),
        size=max(map(len, everyone)),
        fleet=fleet,
    )


def _of_cohorts(cohorts: Cohorts, tiers: Sequence[Ids] | None) -> Asking:
    members, most = [None] if tiers is None else tiers, cohorts.crowd.num_clients
    if tiers is not None:
        most = max(map(len, tiers))

    def ask(number: int, now: Ticks, tier: int) -> Sequence[int]:
        ids = asked(cohorts, number, now, tier=tier, members=members[tier])
        return ids.tolist()

    def begin_each(
        ids: Sequence[int],
        numbers: Sequence[int],
        counts: Sequence[int],
        version: int,
        now: Ticks,
    ) -> list[Task]:
        if not ids:
            return []
        several = np.array(ids), np.array(numbers)
        times = fleet_of(cohorts.crowd, *several, max(counts))
        fleet, new = exact(times, several[0]), {"version": version, "now": now}
        each = enumerate(zip(ids, numbers, counts, strict=True))
        return [
            named(begin(fleet, row, 0, **new, iterations=count), i, k)
            for row, (i, k, count) in each
        ]

    return Asking(
        ask=ask,
        opens=lambda now, tier: opening(cohorts, now, members[tier]),
        begin=begin_each,
        expected=lambda ids: expected_of(cohorts, ids),
        size=min(cohorts.size, most),
        patience=PATIENCE,
    )


def expected_of(cohorts: Cohorts, ids: Sequence[int]) -> Expected:
    """The mean times of some clients, as of `fleet.expected`."""
    steady, several = cohorts.crowd._replace(jitter=0.0), np.array(ids, np.int64)
    return expected(exact(fleet_of(steady, several, 0, 1), several))


def named(task: Task, client: int, number: int) -> Task:
    """A task of a fleet of one task each, under its client's name and number."""
    return task._replace(client=client, number=number)


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
