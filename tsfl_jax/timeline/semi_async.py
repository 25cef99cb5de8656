"""SAFA: rounds that late clients survive, and a selection after training.

Of what arrives in a round ⌈C·N⌉ deliveries are picked: those of clients that were not
picked in the last round, as they come (CFCFM); where these are too few once everything
under way has arrived, also the first of the others. With the delivery that fills the
quota the round ends; what arrives later, also at the same moment, is of the next round.
What had arrived and was not picked counts in the next update (the bypass), unless its
client delivers again by then. What has arrived by the end of a round is never given up,
however old its base model is.

The rule `safa` averages the paper's cache of all clients' last models; under other
rules an update has the picked and the bypassed ones. Simplified: a round has no
deadline.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from tsfl_jax.timeline.cohort import Cohorts, ask, given, opening
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.timeline.trace import Simulation, Task, Update, begin, make_simulation


def quota_of(fraction: float, num_clients: int) -> int:
    """⌈C·N⌉ of C as it is written: 0.1 of 30 clients are 3."""
    return math.ceil(Fraction(repr(float(fraction))) * num_clients)


def safa(
    fleet: Fleet | Cohorts,
    *,
    horizon: float,
    iterations: int,
    fraction: float,
    lag: int,
) -> Simulation:
    """Simulate SAFA: rounds that end when enough clients have delivered.

    At the start of round r every idle client, and every client whose base model is more
    than `lag` versions old, begins with the newest model; the latter gives up its task.
    The others go on; one that is offline downloads what is newest once it is online.

    Args:
      fleet, horizon, iterations: as in `sfl`. A task that was given up has used its
        iterations' draws. Of cohorts, only those in the round's begin; N is their size.
      fraction: C in (0, 1].
      lag: versions ≥ 0.

    Returns:
      A `Simulation`; K is ⌈C·N⌉, or the most deliveries of an update.

    Raises: as `sfl`.

    Source: W. Wu et al., "SAFA: A Semi-Asynchronous Protocol for Fast Federated
    Learning with Low Overhead", IEEE TC 2021, Algorithms 1 and 2.
    """
    check("timeline.fraction", fraction)
    check("timeline.lag", lag)
    cohorts, end = given(fleet, horizon, iterations)
    quota = quota_of(fraction, cohorts.size)
    updates: list[Update] = []
    begun: list[Task] = []  # without those that are under way
    numbers: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
    flying: dict[int, Task] = {}  # by client
    picked: set[int] = set()  # in the last round
    held: dict[int, Task] = {}  # arrived then, and not picked
    now, idle = 0, 0
    for number in itertools.count():
        now, version = opening(cohorts, now), len(updates)
        if now > end:
            break
        begun += _give_up(flying, version - lag, now)
        ids = ask(cohorts, number, now)
        new = {"version": version, "now": now, "iterations": iterations}
        for i, k in who_begin(flying, ids, numbers, now).items():
            flying[i] = begin(cohorts.fleet, i, k, **new)
        ended, picks, now = _next_round(flying, quota, now, picked)
        idle = 0 if ended else idle + 1
        if now > end or idle == cohorts.patience:
            break
        begun += [flying.pop(task.client) for task in ended]
        if picks:
            updates.append(_update(now, picks, held))
            picked = {task.client for task in picks}
            held = {t.client: t for t in ended if not t.lost and t.client not in picked}
    begun += flying.values()
    width = max([quota, *(len(update.tasks) for update in updates)])
    return make_simulation(updates, begun, width, cohorts.everyone, end, iterations)


def _update(now: Ticks, picks: Sequence[Task], held: dict[int, Task]) -> Update:
    """The picked tasks and the bypassed ones, by client; a newer one of each counts."""
    counted = held | {task.client: task for task in picks}
    return Update(now, [counted[i] for i in sorted(counted)])


def _give_up(flying: dict[int, Task], oldest: int, now: Ticks) -> list[Task]:
    """Remove the tasks of older versions, and return them as they end."""
    # What arrived at the very end of the last round waits at the server; who was
    # offline until now has not begun.
    late = [
        task
        for task in flying.values()
        if task.start <= now < task.arrival and task.version < oldest
    ]
    return [flying.pop(task.client)._replace(stop=now) for task in late]


def who_begin(
    flying: dict[int, Task],
    ids: Sequence[int],
    numbers: dict[int, Iterator[int]],
    now: Ticks,
) -> dict[int, int]:
    """Clients that download the newest model, and the numbers of their tasks.

    Those of `ids` that are not at work, and all that have been offline until now.
    """
    again = {t.client: t.number for t in flying.values() if t.start > now}
    return again | {i: next(numbers[i]) for i in dict.fromkeys(ids) if i not in flying}


def _next_round(
    flying: dict[int, Task], quota: int, now: Ticks, before: set[int]
) -> tuple[list[Task], list[Task], Ticks]:
    """The tasks that arrive or are seen to be lost in a round, the picked, its end."""
    ended: list[Task] = []
    first: list[Task] = []  # of clients that were not picked before
    others: list[Task] = []
    for task in sorted(flying.values()):
        full = len(first) == quota
        if task.arrival == math.inf or (full and task.arrival > now):
            break
        # A tie with the last one: known to be lost now, else for the next round.
        if full and not task.lost:
            continue
        ended.append(task)
        if not task.lost:
            (others if task.client in before else first).append(task)
        now = max(now, task.arrival)  # some arrive before the round can open
    return ended, first + others[: quota - len(first)], now
