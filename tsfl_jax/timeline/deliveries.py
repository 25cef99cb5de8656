"""From a timeline to arrays that the compiled program replays.

A `Trace` has the deliveries of each global update and the version of the global model
that each started from. Where all start from the newest one (T-SFL, SFL, FedCS, ESync)
it becomes τ ``[R, N]``; else deliveries that name a snapshot of an earlier model.
"""

import heapq

import numpy as np
from jaxtyping import Bool, Float, Int

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import Delivery, Schedule


def schedule_of(
    trace: Trace, size: Int[np.ndarray, " N"], cohorts: bool = False
) -> Schedule:
    """The schedule that the engine replays.

    Args:
      trace: R updates with up to K deliveries each.
      size: ``[N]`` int, samples of each client.
      cohorts: a client is in the slot that the trace has it in; else, where all start
        from the newest model, in that of its number.

    Returns:
      `Schedule` of all clients in order ``[R, N]``, or of those in slots ``[R, K]``,
      with snapshots where some start from an earlier model.
    """
    real = (trace.client >= 0) & (trace.iterations > 0)
    update = np.arange(len(trace.time))
    newest = trace.version == update[:, None]
    in_step = (newest | ~real).all() and not trace.group.any()
    seconds = trace.time.astype(np.float64)
    row, delivers = np.nonzero(real)[0], trace.client[real]
    if cohorts and in_step:
        # Who was asked and does nothing keeps its slot; an empty one names someone.
        is_asked = trace.client >= 0
        client = np.where(is_asked, trace.client, trace.client[is_asked].min())
        sizes = size[client].astype(np.int32)
        return complete(trace.iterations, sizes, seconds=seconds, client=client)
    once = len(np.unique(row * len(size) + delivers)) == len(row)
    if once and in_step:
        tau = np.zeros((len(update), len(size)), np.int32)
        tau[row, delivers] = trace.iterations[real]
        sizes = np.broadcast_to(size, tau.shape).astype(np.int32)
        return complete(tau, sizes, seconds=seconds)
    someone = delivers.min() if cohorts else 0
    client = np.where(real, trace.client, someone).astype(np.int32)
    version = np.where(real, trace.version, 0)
    snapshot, snapshots = _snapshots(version, real)
    delivery = Delivery(
        task=np.where(real, trace.task, 0).astype(np.int32),
        snapshot=np.where(real, snapshot[version], 0).astype(np.int32),
        lag=np.where(real, update[:, None] - version, 0).astype(np.int32),
        keep=snapshot[1:].astype(np.int32),
        group=trace.group.astype(np.int32),
    )
    tau = np.where(real, trace.iterations, 0).astype(np.int32)
    sizes = np.where(real, size[client], 1).astype(np.int32)
    return complete(
        tau,
        sizes,
        seconds=seconds,
        client=client,
        delivery=delivery,
        snapshots=snapshots,
    )


def _snapshots(
    version: Int[np.ndarray, "R K"], real: Bool[np.ndarray, "R K"]
) -> tuple[Int[np.ndarray, " R1"], int]:
    """Snapshot of every version ``[R + 1]``, P: never used; and P, as few as can be."""
    # Version v is there from update v − 1 (0: from the start) until the last update
    # that uses it, which reads before it writes.
    updates = len(version)
    last = np.full(updates + 1, -1)
    for r in range(updates):
        last[version[r][real[r]]] = r
    of_version, snapshots = np.full(updates + 1, -1), 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for v in range(updates + 1):
        while busy and busy[0][0] <= v - 1:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if last[v] < 0:
            continue
        if free:
            of_version[v] = heapq.heappop(free)
        else:
            of_version[v], snapshots = snapshots, snapshots + 1
        heapq.heappush(busy, (int(last[v]), int(of_version[v])))
    return np.where(of_version < 0, snapshots, of_version), snapshots


def evaluated(
    seconds: Float[np.ndarray, " R"], period: float
) -> Bool[np.ndarray, " R"]:
    """Whether an update is the last one up to a multiple of a period.

    Args:
      seconds: ``[R]`` float64 of the updates, ascending.
      period: virtual seconds > 0.

    Returns:
      ``[R]`` bool.
    """
    # An update at a multiple belongs to the seconds before it.
    number = -(-ticks.of_array(seconds) // ticks.of(period))
    return np.append(number[1:] > number[:-1], True)


def claimed(schedule: Schedule) -> Int[np.ndarray, "T K"]:
    """Iterations that the server knows of: those reported, or else those done."""
    return np.maximum(schedule.tau, schedule.reported)


def staleness(schedule: Schedule) -> Int[np.ndarray, " D"]:
    """Global updates since the model that each of all D deliveries started from.

    Returns:
      ``[D]`` int32 ≥ 0, all 0 where clients start from the newest model.
    """
    return np.asarray(schedule.delivery.lag)[claimed(schedule) > 0]


def drawn(schedule: Schedule) -> Int[np.ndarray, " U"]:
    """Sorted ids of the clients of a cohort or an update that ever work."""
    return np.unique(schedule.client[claimed(schedule) > 0])


def arriving(
    times: Schedule, trace: Trace | None, first: float, horizon: float
) -> Schedule:
    """The schedule where a client has few samples at first, and all at the end.

    A task that begins at second s is trained on max(1, ⌊|D_i| (f + (1 − f) s/S)⌋ of the
    client's samples, the first ones of its row, which are in random order.

    Args:
      times: with all samples.
      trace: what it replays; None: all tasks begin with their intervals.
      first: f in (0, 1], the share that is there at the beginning.
      horizon: S, seconds of the run.

    Returns:
      The schedule with other sizes; how long an iteration takes stays as it was.
    """
    if first == 1:
        return times
    starts = np.repeat(np.append(0.0, times.seconds)[:-1, None], times.tau.shape[1], 1)
    if trace is not None:
        row, slot = np.nonzero(trace.iterations > 0)
        column = trace.client[row, slot] if times.in_order else slot
        starts[row, column] = trace.start[row, slot]
    share = first + (1 - first) * np.minimum(starts / horizon, 1.0)
    size = np.maximum(np.floor(times.size * share), 1).astype(np.int32)
    return times._replace(size=size)
