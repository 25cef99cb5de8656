"""What an experiment will cost and how its work is dealt, in numbers, before training.

`explain_text` formats it as text, `gantt` shows the timeline.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax.engine import devices
from tsfl_jax.experiment import memory, workload
from tsfl_jax.experiment.identity import labels_of, settings_of
from tsfl_jax.experiment.prepare import Prepared, chunk_of
from tsfl_jax.report.timeline import Timeline
from tsfl_jax.theory import bounds
from tsfl_jax.timeline import replay, segments
from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import Schedule


class Work(NamedTuple):
    """Who does how much."""

    deliveries: np.ndarray  # [N] int, of each client in the whole run
    iterations: np.ndarray  # [N] int, local iterations of each client that count
    mean_tau: float  # of a delivery; NaN: none
    degree: float  # δ of an update's local iterations, the mean of all updates
    mean_staleness: float  # global updates since the model a delivery started from
    max_staleness: int
    samples: int  # trained on in the whole run


class Steps(NamedTuple):
    """Mini-batch steps of the whole run: useful ones, and what the devices execute."""

    useful: int
    executed: dict[str, int]  # by mapping
    balance: dict[str, float]  # by mapping: busiest device / mean of the devices ≥ 1


class Explanation(NamedTuple):
    """All that is known before training."""

    settings: dict[str, Any]  # by name, {"data.name": "mnist"}
    labels: dict[str, Any]
    updates: int
    seconds: float  # virtual, until the last update
    parameters: int
    work: Work
    steps: Steps
    timeline: Timeline
    memory: dict[str, int]  # bytes on every device, estimated
    devices: str
    lanes: dict[str, int]  # by mapping: models trained side by side on a device
    updates_per_call: int


def work_of(prepared: Prepared) -> Work:
    """Deliveries, τ, staleness and samples of the whole run."""
    times = prepared.times
    there = times.tau > 0
    clients = len(prepared.dealt.capacity)
    settings = settings_of(prepared)
    lag = times.delivery.lag[there] if times.delivery is not None else np.zeros(1, int)
    # A pass has ⌈|D|/B⌉ batches, of which only the last one may be short.
    batches = -(-times.size.astype(np.int64) // settings["batch_size"])
    passes, rest = np.divmod(prepared.steps.astype(np.int64), batches)
    samples = passes * times.size + rest * settings["batch_size"]
    return Work(
        deliveries=replay.dense(there.astype(int), times, clients).sum(0),
        iterations=replay.dense(times.tau, times, clients).sum(0, dtype=np.int64),
        mean_tau=float(times.tau[there].mean()) if there.any() else float("nan"),
        degree=_degree(times),
        mean_staleness=float(lag.mean()) if lag.size else 0.0,
        max_staleness=int(lag.max(initial=0)),
        samples=int(samples.sum()),
    )


def _degree(times: Schedule) -> float:
    if times.delivery is None:
        return float(np.mean(bounds.heterogeneity_degree(times.tau)))
    # Of those who deliver: the others are still at work.
    each = [bounds.heterogeneity_degree(tau[tau > 0]) for tau in times.tau if any(tau)]
    return float(np.mean(each)) if each else 0.0


def steps_of(work: np.ndarray, slot: np.ndarray, num_devices: int, chunk: int) -> Steps:
    """Useful and executed mini-batch steps, under both mappings.

    Args:
      work: ``[R, K]`` mini-batch steps of each delivery; K places.
      slot: ``[R, D·P]`` who is trained where, see `devices.deal`; K: nobody.
      num_devices: D.
      chunk: most clients side by side under "vmap".

    Returns:
      `Steps`. "sequential" executes the useful ones. Under "vmap" all of a chunk run
      the longest client's steps; where a device has one chunk only, those of the
      longest client of the whole run, and chunks are filled up.
    """
    updates = len(work)
    padded = np.pad(work.astype(np.int64), ((0, 0), (0, 1)))  # nobody has no work
    mine = np.take_along_axis(padded, slot, 1).reshape(updates, num_devices, -1)
    chunk = min(chunk, mine.shape[2])
    chunks = -(-mine.shape[2] // chunk)
    filled = np.pad(mine, ((0, 0), (0, 0), (0, chunks * chunk - mine.shape[2])))
    limit = filled.reshape(updates, num_devices, chunks, chunk).max(-1)
    if chunks == 1:
        limit = np.full_like(limit, work.max(initial=0))
    lanes = {"sequential": mine.sum(2), "vmap": chunk * limit.sum(2)}  # [R, D]
    return Steps(
        useful=int(work.sum(dtype=np.int64)),
        executed={name: int(steps.sum()) for name, steps in lanes.items()},
        # In each update all devices wait for the busiest.
        balance={
            name: float(steps.max(1).sum() / max(steps.mean(1).sum(), 1))
            for name, steps in lanes.items()
        },
    )


def _timeline(prepared: Prepared, settings: dict[str, Any]) -> Timeline:
    times, framework = prepared.times, settings["timeline.framework"]
    most = int(times.tau.max(initial=1))
    if framework == "none":
        found = segments.of_schedule(times.tau)
        ends = np.arange(1.0, len(times.tau) + 1)
        return Timeline(found, [], ends, {}, most, False, segments.shares(found))
    fleet = workload.fleet_of(prepared.config, workload.sizes_of(prepared.config))
    trace, tasks = workload.simulate_timeline(prepared.config, fleet)
    found = list(segments.segments(tasks, fleet, float(trace.time[-1])))
    shares = segments.shares(found)
    return Timeline(found, tasks, trace.time, _tiers(trace), most, True, shares)


def _tiers(trace: Trace) -> dict[int, int]:
    if not trace.group.any():
        return {}
    row, column = np.nonzero(trace.iterations > 0)
    who, tier = trace.client[row, column].tolist(), trace.group[row].tolist()
    return dict(zip(who, tier, strict=True))


def explain(prepared: Prepared, mesh: Mesh) -> Explanation:
    """Everything about an experiment that is known without training and compiling.

    Args:
      prepared: the experiment.
      mesh: the devices it would use.

    Returns:
      `Explanation`.
    """
    settings, updates = settings_of(prepared), len(prepared.times.tau)
    clients, state = settings["num_clients"], memory.state_of(prepared)
    per_call = chunk_of(prepared)
    chunk = min(settings["client_chunk"] or clients, clients)
    # A last call that is filled up executes the padding, too.
    steps = np.pad(prepared.steps, ((0, -updates % per_call), (0, 0)))
    slot = devices.deal(steps, mesh.size)
    lanes = {"sequential": 1, "vmap": min(chunk, slot.shape[1] // mesh.size)}
    kind = mesh.devices.flat[0].platform.upper()
    return Explanation(
        settings=settings,
        labels=labels_of(prepared),
        updates=updates,
        seconds=float(prepared.times.seconds[-1]),
        parameters=sum(a.size for a in jax.tree.leaves(state.params["params"])),
        work=work_of(prepared),
        steps=steps_of(steps, slot, mesh.size, chunk),
        timeline=_timeline(prepared, settings),
        memory=memory.estimated(prepared, state, mesh.size, lanes[prepared.mapping]),
        devices=f"{mesh.size} × {kind}",
        lanes=lanes,
        updates_per_call=per_call,
    )
