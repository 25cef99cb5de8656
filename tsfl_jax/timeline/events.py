"""How many events a framework will simulate, from the mean times, before it does.

An event is a task, or an iteration of T-SFL, and takes some ten microseconds. Clients
count as if they were always online, so that there may be fewer. All functions take a
`Fleet` and what the framework takes; the rest does not matter. They return a number
≥ 0, perhaps inf.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Float

from tsfl_jax.timeline.fleet import Fleet


def quota_of(fraction: float, num_clients: int) -> int:
    """⌈C·N⌉ of C as it is written: 0.1 of 30 clients are 3."""
    return math.ceil(Fraction(repr(float(fraction))) * num_clients)


def _tasks(fleet: Fleet, horizon: float, iterations: int) -> Float[np.ndarray, "N"]:
    """Tasks of each client until the horizon, the most first."""
    with np.errstate(over="ignore", divide="ignore"):
        task = (fleet.download + iterations * fleet.iteration + fleet.upload).mean(1)
        return np.sort(horizon / task)[::-1]


def of_clock(
    fleet: Fleet, *, num_intervals: int, interval: float, **others: Any
) -> float:
    """Every client works through all intervals."""
    del others
    step = fleet.iteration.mean(1)
    with np.errstate(over="ignore", divide="ignore"):
        iterations = (num_intervals * interval / step).sum()
    return float(num_intervals * len(step) + iterations)


def of_trigger(
    fleet: Fleet, *, num_intervals: int, interval: float, iterations: int, **others: Any
) -> float:
    """At most a task per client and interval."""
    del others
    tasks = _tasks(fleet, num_intervals * interval, iterations)
    return float(num_intervals + np.minimum(tasks + 1, num_intervals).sum())


def of_arrivals(
    fleet: Fleet, *, horizon: float, iterations: int, **others: Any
) -> float:
    """Every client begins its next task when it has delivered."""
    del others
    tasks = _tasks(fleet, horizon, iterations)
    return float(tasks.sum() + len(tasks))


def of_selection(
    fleet: Fleet, *, horizon: float, iterations: int, **others: Any
) -> float:
    """Rounds of the fastest; each compares all clients for every one it selects."""
    del others
    tasks = _tasks(fleet, horizon, iterations)
    N = len(tasks)
    return float(N * (1 + N / 100) * (tasks[0] + 1))


def of_quota(
    fleet: Fleet, *, horizon: float, iterations: int, fraction: float, **others: Any
) -> float:
    """Rounds as fast as the client that fills the quota."""
    del others
    tasks = _tasks(fleet, horizon, iterations)
    N = len(tasks)
    return float(N * (tasks[quota_of(fraction, N) - 1] + 1))


def of_tiers(
    fleet: Fleet, *, horizon: float, iterations: int, tiers: int = 1, **others: Any
) -> float:
    """Rounds of each tier, as fast as its slowest client; without tiers, of all."""
    del others
    tasks = _tasks(fleet, horizon, iterations)
    N = len(tasks)
    ends = np.append(np.flatnonzero(np.diff(np.arange(N) * tiers // N)), N - 1)
    return float((np.diff(ends, prepend=-1) * (tasks[ends] + 1)).sum())
