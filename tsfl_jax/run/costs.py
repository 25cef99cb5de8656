"""What an experiment costs its clients: bytes, and on a timeline seconds and joules."""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

from tsfl_jax.prepare import network
from tsfl_jax.prepare.prepare import Prepared
from tsfl_jax.timeline import costs
from tsfl_jax.timeline.costs import Costs
from tsfl_jax.timeline.fleet import watts


def traffic_of(prepared: Prepared, intervals: int) -> Float[np.ndarray, "2 T"]:
    """Bytes of a delivery down and up, in each interval."""
    sizes = prepared.network.params, prepared.hparams, intervals
    frozen = prepared.config.model.frozen
    return network.traffic_of(prepared.uplinks, prepared.rule, *sizes, frozen)


def bytes_moved(prepared: Prepared, delivered: Bool[np.ndarray, "T N"]) -> int:
    """Bytes down and up of all deliveries that count, ``[T, N]``."""
    per_delivery = traffic_of(prepared, len(delivered)).sum(axis=0)
    return round(float((per_delivery * delivered.sum(axis=1)).sum()))


def costs_of(
    prepared: Prepared,
    delivered: Bool[np.ndarray, "T N"],
    client: Int[np.ndarray, "*T N"],
) -> Costs:
    """What each client spends in the first intervals or updates.

    On a timeline until the last of these, by all tasks; otherwise only bytes, of the
    deliveries.

    Args:
      prepared: the experiment.
      delivered: in these intervals, who delivers.
      client: id of each slot.
    """
    workload, updates = prepared.workload, len(delivered)
    if workload.tasks is not None:
        return on_timeline(prepared)(np.append(0.0, workload.schedule.seconds)[updates])
    drawn, counts = workload.drawn, delivered.sum(axis=1)
    ids = np.broadcast_to(client, delivered.shape)[delivered]
    place = np.searchsorted(drawn, ids).clip(max=len(drawn) - 1)
    down, up = (
        np.bincount(place, np.repeat(part, counts), len(drawn))
        for part in traffic_of(prepared, updates)
    )
    return Costs(drawn, down, up, *[np.full(len(drawn), np.nan)] * 5)


def on_timeline(prepared: Prepared) -> Callable[[float], Costs]:
    """What each client has spent until a moment, in seconds."""
    workload, config = prepared.workload, prepared.config
    assert workload.tasks is not None and workload.fleet is not None
    work = costs.activities(workload.tasks, workload.fleet)
    power = watts(config.timeline.power, config.num_clients, work.client)
    return functools.partial(costs.costs_of, work, workload.transfer_bytes, power)
