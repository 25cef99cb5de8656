"""Semi-asynchronous rounds of selected clients; the others cache their updates.

The source's abstract says so much, and no more could be found of it. The reading here:
all clients train, each from the model that it downloaded last, and only ⌈C·N⌉ selected
ones upload in a round. Who is not selected keeps what it has made until it is; so a
slow client has often finished by then. After `lag` versions a client is selected before
all others, so that no update is cached forever.

Source: J. Hao, Y. Zhao, J. Zhang, "Time Efficient Federated Learning with
Semi-Asynchronous Communication", ICPADS 2020.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from tsfl_jax.timeline.cohort import Cohorts, ask, given, opening
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, finish
from tsfl_jax.timeline.semi_async import quota_of, who_begin
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.timeline.trace import (
    Simulation,
    Task,
    Update,
    add_round,
    begin,
    make_simulation,
)


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
    """
    check("timeline.fraction", fraction)
    check("timeline.lag", lag)
    cohorts, end = given(fleet, horizon, iterations)
    quota = quota_of(fraction, cohorts.size)
    updates: list[Update] = []
    begun: list[Task] = []  # without those that are held
    numbers: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
    held: dict[int, Task] = {}  # by client: at work, or cached
    now, idle = 0, 0
    for number in itertools.count():
        now = opening(cohorts, now)
        if now > end or idle == cohorts.patience:
            break
        new = {"version": len(updates), "now": now, "iterations": iterations}
        ids = ask(cohorts, number, now)
        for i, k in who_begin(held, ids, numbers, now).items():
            held[i] = begin(cohorts.fleet, i, k, **new)
        selected = _selected(held.values(), quota, len(updates) - lag, rng)
        ended = [_uploaded(cohorts.fleet, task, now) for task in selected]
        idle = 0 if ended else idle + 1
        now = max([now, *(task.arrival for task in ended)])
        if now > end:
            break
        for task in ended:
            del held[task.client]
        begun += ended
        add_round(updates, ended, now)
    begun += held.values()
    return make_simulation(updates, begun, quota, cohorts.everyone, end, iterations)


def _selected(
    held: Iterable[Task], quota: int, oldest: int, rng: np.random.Generator
) -> list[Task]:
    """Who uploads; the server does not wait for a client that never finishes."""
    there = sorted(
        (task for task in held if task.arrival < math.inf), key=lambda t: t.client
    )
    late = sorted((t for t in there if t.version < oldest), key=lambda t: t.version)
    drawn = [there[k] for k in rng.permutation(len(there))]
    return (late + [task for task in drawn if task.version >= oldest])[:quota]


def _uploaded(fleet: ExactFleet, task: Task, now: Ticks) -> Task:
    """The task of a client that may upload from now on."""
    upload = fleet.of(task.client).upload.item(task.number % fleet.draws)
    arrival = max(task.arrival, finish(fleet, task.client, now, upload))
    return task._replace(arrival=arrival, stop=arrival)
