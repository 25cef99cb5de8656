"""Frameworks between rounds and none: tasks may span several updates.

safa: rounds that late clients survive, and a selection after training. cached: clients
that are not selected keep what they have made. ttfed: the clock triggers updates.

In a round of SAFA, of what arrives ⌈C·N⌉ deliveries are picked: those of clients that
were not picked in the last round, as they come (CFCFM); where these are too few once
everything under way has arrived, also the first of the others. With the delivery that
fills the quota the round ends; what arrives later, also at the same moment, is of the
next round. What had arrived and was not picked counts in the next update (the bypass),
unless its client delivers again by then. What has arrived by the end of a round is
never given up, however old its base model is.

The rule `safa` averages the paper's cache of all clients' last models; under other
rules an update has the picked and the bypassed ones. Simplified: a round has no
deadline.

Of `cached` the source's abstract says what its docstring does, and no more could be
found of it. The reading here: all clients train, each from the model that it downloaded
last, and only ⌈C·N⌉ selected ones upload in a round. Who is not selected keeps what it
has made until it is; so a slow client has often finished by then. After `lag` versions
a client is selected before all others, so that no update is cached forever.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from tsfl_jax.timeline import cohort, ticks, trace
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, finish
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.trace import Simulation, Task, Update, begin, make_simulation

_Numbers = collections.defaultdict[int, Iterator[int]]  # of the next tasks, by client


def _quota_of(fraction: float, num_clients: int) -> int:
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
    cohorts, end = cohort.in_ticks(fleet, horizon)
    quota = _quota_of(fraction, cohorts.size)
    updates = list[Update]()
    begun = list[Task]()  # without those that are under way
    flying, numbers = dict[int, Task](), _Numbers(itertools.count)  # by client
    picked: set[int] = set()  # in the last round
    bypassed: dict[int, Task] = {}  # arrived then, and not picked
    now, idle = 0, 0
    for number in itertools.count():
        now, version = cohort.opening(cohorts, now), len(updates)
        if now > end:
            break
        begun += _give_up(flying, version - lag, now)
        ids = cohort.ask(cohorts, number, now)
        new = {"version": version, "now": now, "iterations": iterations}
        for i, k in _who_begin(flying, ids, numbers, now).items():
            flying[i] = begin(cohorts.fleet, i, k, **new)
        ended, picks, now = _next_round(flying, quota, now, picked)
        idle = 0 if ended else idle + 1
        if now > end or idle == cohorts.patience:
            break
        begun += [flying.pop(task.client) for task in ended]
        if picks:
            # By client; of two tasks of one the newer counts.
            counted = bypassed | {task.client: task for task in picks}
            updates.append(Update(now, [counted[i] for i in sorted(counted)]))
            picked = {task.client for task in picks}
            arrived = {t.client: t for t in ended if not t.lost}
            bypassed = {i: t for i, t in arrived.items() if i not in picked}
    begun += flying.values()
    width = max([quota, *(len(update.tasks) for update in updates)])
    return make_simulation(updates, begun, width, end)


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


def _who_begin(
    flying: dict[int, Task],
    ids: Sequence[int],
    numbers: dict[int, Iterator[int]],
    now: Ticks,
) -> dict[int, int]:
    """Who begins, idle ones of `ids` and all that come back: numbers of tasks."""
    again = {t.client: t.number for t in flying.values() if t.start > now}
    return again | {i: next(numbers[i]) for i in dict.fromkeys(ids) if i not in flying}


def _next_round(
    flying: dict[int, Task], quota: int, now: Ticks, before: set[int]
) -> tuple[list[Task], list[Task], Ticks]:
    """The tasks that arrive or are seen to be lost in a round, the picked, its end."""
    ended: list[Task] = []
    fresh: list[Task] = []  # of clients that were not picked before
    repeated: list[Task] = []
    for task in sorted(flying.values()):
        full = len(fresh) == quota
        if task.arrival == math.inf or (full and task.arrival > now):
            break
        # A tie with the last one: known to be lost now, else for the next round.
        if full and not task.lost:
            continue
        ended.append(task)
        if not task.lost:
            (repeated if task.client in before else fresh).append(task)
        now = max(now, task.arrival)  # some arrive before the round can open
    return ended, fresh + repeated[: quota - len(fresh)], now


def cached(
    fleet: Fleet | Cohorts,
    *,
    horizon: float,
    iterations: int,
    fraction: float,
    lag: int,
    rng: np.random.Generator,
) -> Simulation:
    """Simulate rounds in which ⌈C·N⌉ clients upload what they have trained.

    At the start of a round every idle client downloads the newest model and begins, and
    those that upload are selected: first who is more than `lag` versions behind, the
    oldest first, then others at random. A selected one uploads at once what it has
    cached, or when it has finished; the round ends with the last of them.

    Args:
      fleet, horizon, iterations: as in `sfl`. Of cohorts those in the round's begin,
        the selected are of all at work, and N is their size.
      fraction: C in (0, 1].
      lag: versions ≥ 0.
      rng: for the selection.

    Returns:
      A `Simulation`; K is ⌈C·N⌉.

    Raises: as `sfl`.

    Source: J. Hao, Y. Zhao, J. Zhang, "Time Efficient Federated Learning with
    Semi-Asynchronous Communication", ICPADS 2020.
    """
    cohorts, end = cohort.in_ticks(fleet, horizon)
    quota = _quota_of(fraction, cohorts.size)
    updates: list[Update] = []
    begun: list[Task] = []  # without those of `pending`
    # By client: at work, or cached; numbers of the next tasks.
    pending, numbers = dict[int, Task](), _Numbers(itertools.count)
    now, idle = 0, 0
    for number in itertools.count():
        now = cohort.opening(cohorts, now)
        if now > end or idle == cohorts.patience:
            break
        new = {"version": len(updates), "now": now, "iterations": iterations}
        ids = cohort.ask(cohorts, number, now)
        for i, k in _who_begin(pending, ids, numbers, now).items():
            pending[i] = begin(cohorts.fleet, i, k, **new)
        selected = _selected(pending.values(), quota, len(updates) - lag, rng)
        ended = [_uploaded(cohorts.fleet, pending.pop(t.client), now) for t in selected]
        begun += ended
        idle = 0 if ended else idle + 1
        now = max([now, *(task.arrival for task in ended)])
        if now > end:
            break
        trace.add_round(updates, ended, now)
    # These have not been asked to upload.
    begun += [t._replace(arrival=math.inf, stop=math.inf) for t in pending.values()]
    return make_simulation(updates, begun, quota, end)


def _selected(
    pending: Iterable[Task], quota: int, oldest: int, rng: np.random.Generator
) -> list[Task]:
    """Who uploads; the server does not wait for a client that never finishes."""
    finishing = sorted(
        (task for task in pending if task.arrival < math.inf), key=lambda t: t.client
    )
    late = sorted((t for t in finishing if t.version < oldest), key=lambda t: t.version)
    drawn = [finishing[k] for k in rng.permutation(len(finishing))]
    return (late + [task for task in drawn if task.version >= oldest])[:quota]


def _uploaded(fleet: ExactFleet, task: Task, now: Ticks) -> Task:
    """The task of a client that may upload from now on."""
    upload = fleet.of(task.client).upload.item(task.number % fleet.draws)
    arrival = max(task.arrival, finish(fleet, task.client, now, upload))
    return task._replace(arrival=arrival, stop=arrival)


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
      UserError: nothing delivered in all intervals.

    Source: X. Zhou, Y. Deng, H. Xia, S. Wu, M. Bennis, "Time-Triggered Federated
    Learning Over Wireless Networks", IEEE TWC 2022.
    """
    cohorts, end = cohort.in_ticks(fleet, num_intervals * interval)
    length = ticks.of(interval)
    updates: list[Update] = []
    begun: list[Task] = []  # without those that are under way
    numbers: collections.Counter[int] = collections.Counter()  # of the next tasks
    flying: dict[int, Task] = {}  # by client
    for number in range(num_intervals):
        now, last = number * length, (number + 1) * length
        new = {"version": len(updates), "now": now, "iterations": iterations}
        for i in dict.fromkeys(cohort.ask(cohorts, number, now)):
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
        trace.add_round(updates, ended, last)
    begun += flying.values()
    return make_simulation(updates, begun, 0, end)
