"""What an experiment costs its clients: bytes, and on a timeline seconds and joules."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from tsfl_jax.prepare import network
from tsfl_jax.prepare.prepare import Prepared
from tsfl_jax.timeline import costs
from tsfl_jax.timeline.costs import Costs
from tsfl_jax.timeline.power import watts


def traffic_of(prepared: Prepared, intervals: int) -> Float[np.ndarray, "2 T"]:
    """Bytes of a delivery down and up, in each interval."""
    sizes = prepared.network.params, prepared.hparams, intervals
    return network.traffic_of(prepared.uplinks, prepared.rule, *sizes)


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
    workload = prepared.workload
    if workload.tasks is not None:
        return costs.costs_of(*on_timeline(prepared, len(delivered)))
    drawn, traffic = workload.drawn, traffic_of(prepared, len(delivered))
    ids = np.broadcast_to(client, delivered.shape)[delivered]
    down, up = (
        np.bincount(
            np.searchsorted(drawn, ids).clip(max=len(drawn) - 1),
            np.broadcast_to(part[:, None], delivered.shape)[delivered],
            len(drawn),
        )
        for part in traffic
    )
    return Costs(drawn, down, up, *[np.full(len(drawn), np.nan)] * 5)


def on_timeline(prepared: Prepared, updates: int) -> tuple[Any, Any, Any]:
    """The arguments of `costs.costs_of`, until an update."""
    workload, config = prepared.workload, prepared.config
    assert workload.tasks is not None and workload.fleet is not None
    end = float(workload.schedule.seconds[updates - 1]) if updates else 0.0
    work = costs.activities(workload.tasks, workload.fleet, end)
    text, N = config.timeline.power, config.num_clients
    power = watts(text, N, work.client) if text else None
    return work, workload.transfer_bytes, power
