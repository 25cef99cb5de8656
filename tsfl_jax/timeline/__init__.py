"""The frameworks by name: functions from a `Fleet` to a `Simulation`."""

from typing import Any

import numpy as np

from tsfl_jax.timeline.asynchronous import afl, fedbuff, tsfl
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.timeline.synchronous import esync, fedat, fedcs, safa, sfl
from tsfl_jax.timeline.trace import expected_seconds

FRAMEWORKS = {
    "sfl": sfl,
    "tsfl": tsfl,
    "afl": afl,
    "fedbuff": fedbuff,
    "fedat": fedat,
    "fedcs": fedcs,
    "esync": esync,
    "safa": safa,
}


def expected_events(
    name: str,
    fleet: Fleet,
    *,
    horizon: float = 0.0,
    iterations: int = 1,
    num_intervals: int = 0,
    interval: float = 0.0,
    tiers: int = 1,
    fraction: float = 1.0,
    **others: Any,
) -> float:
    """Estimate from the mean times how many events a framework simulates.

    An event is a task, or an iteration of T-SFL, and takes some ten microseconds.
    Clients count as if they were always online, so that there may be fewer.

    Args:
      name: a key of `FRAMEWORKS`.
      fleet: N clients.
      horizon, iterations, num_intervals, interval, tiers, fraction, others: what the
        framework takes; `others` do not matter.

    Returns:
      A number ≥ 0, perhaps inf.
    """
    del others
    download, step, upload = expected_seconds(fleet)
    N = len(step)
    with np.errstate(over="ignore", divide="ignore"):
        if name == "tsfl":
            return float(num_intervals * N + (num_intervals * interval / step).sum())
        tasks = np.sort(horizon / (download + iterations * step + upload))[::-1]
        if name in ("afl", "fedbuff"):
            return float(tasks.sum() + N)
        if name == "fedcs":  # selection compares all clients for each that it selects
            return float(N * (1 + N / 100) * (tasks[0] + 1))
        if name == "safa":  # as fast as the client that fills the quota
            quota = max(int(np.ceil(fraction * N * (1 - 1e-12))), 1)
            return float(N * (tasks[quota - 1] + 1))
        # Each tier is as fast as its slowest client; esync and sfl have one tier.
        tiers = tiers if name == "fedat" else 1
        ends = np.append(np.flatnonzero(np.diff(np.arange(N) * tiers // N)), N - 1)
        return float((np.diff(ends, prepend=-1) * (tasks[ends] + 1)).sum())
