"""Samples that arrive while a run goes on."""

import numpy as np

from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import Schedule


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
