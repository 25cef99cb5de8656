"""From a timeline to arrays that the compiled program replays.

A `Trace` says who delivers at each global update, from which version of the global
model. Where everybody starts from the newest one (T-SFL, SFL, FedCS, ESync) it becomes
τ ``[R, N]``; else deliveries with the places of the earlier models in a pool.
"""

import heapq

import numpy as np

from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import Delivery, Schedule


def schedule_of(trace: Trace, size: np.ndarray) -> Schedule:
    """What the engine replays.

    Args:
      trace: R updates with up to K deliveries each.
      size: ``[N]`` int, samples of each client.

    Returns:
      `Schedule` with ``[R, N]`` arrays, or with a `Delivery` and ``[R, K]`` arrays.
    """
    real = (trace.client >= 0) & (trace.iterations > 0)
    update = np.arange(len(trace.time))
    newest = trace.version == update[:, None]
    seconds = trace.time.astype(np.float64)
    in_step = (newest | ~real).all() and not trace.group.any()
    if in_step and not _twice(trace.client, real):
        tau = np.zeros((len(update), len(size)), np.int32)
        row, column = np.nonzero(real)
        tau[row, trace.client[row, column]] = trace.iterations[row, column]
        sizes = np.broadcast_to(size, tau.shape).astype(np.int32)
        return Schedule(tau, sizes, seconds)
    client = np.where(real, trace.client, 0).astype(np.int32)
    version = np.where(real, trace.version, 0)
    place, places = _places(version, real)
    delivery = Delivery(
        client=client,
        task=np.where(real, trace.task, 0).astype(np.int32),
        base=np.where(real, place[version], 0).astype(np.int32),
        lag=np.where(real, update[:, None] - version, 0).astype(np.int32),
        keep=place[1:].astype(np.int32),
        group=trace.group.astype(np.int32),
    )
    tau = np.where(real, trace.iterations, 0).astype(np.int32)
    sizes = np.where(real, size[client], 1).astype(np.int32)
    return Schedule(tau, sizes, seconds, delivery, places)


def _twice(client: np.ndarray, real: np.ndarray) -> bool:
    """Whether a client delivers more than once in one update."""
    return any(
        len(np.unique(row[seen])) < seen.sum()
        for row, seen in zip(client, real, strict=True)
    )


def _places(version: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, int]:
    """Place of every version ``[R + 1]``, P: never used; and P, as few as can be.

    Version v is there from update v − 1 (0: from the start) until the last update that
    uses it, which reads before it writes.
    """
    updates = len(version)
    last = np.full(updates + 1, -1)
    for r in range(updates):
        last[version[r][real[r]]] = r
    place, free, busy, places = np.full(updates + 1, -1), [], [], 0
    for v in range(updates + 1):
        while busy and busy[0][0] <= v - 1:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if last[v] < 0:
            continue
        if free:
            place[v] = heapq.heappop(free)
        else:
            place[v], places = places, places + 1
        heapq.heappush(busy, (last[v], place[v]))
    return np.where(place < 0, places, place), places


def evaluated(seconds: np.ndarray, every: float) -> np.ndarray:
    """``[R]`` bool: the last update up to each multiple of `every` seconds.

    Args:
      seconds: ``[R]`` of the updates, ascending.
      every: virtual seconds > 0.
    """
    # An update at a multiple belongs to the seconds before it.
    period = np.ceil(seconds / every - 1e-9)
    return np.append(period[1:] > period[:-1], True)


def dense(
    values: np.ndarray, schedule: Schedule, num_clients: int, put: np.ufunc = np.add
) -> np.ndarray:
    """``[R, K]`` by delivery → ``[R, N]`` by client; ``[R, N]`` stays.

    What a client delivers twice in one update is added up, or `put` together otherwise.
    """
    if schedule.delivery is None:
        return values
    updates = len(values)
    out = np.zeros((updates, num_clients), values.dtype)
    there = schedule.tau[:updates] > 0
    row, column = np.nonzero(there)
    client = schedule.delivery.client[:updates][row, column]
    put.at(out, (row, client), values[row, column])
    return out
