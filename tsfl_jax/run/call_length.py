"""How many intervals one call of the compiled program has."""

import math

import jax
import numpy as np

from tsfl_jax.models import flop
from tsfl_jax.prepare.custom_hooks import input_dtype
from tsfl_jax.prepare.prepare import Prepared


def chunk_of(prepared: Prepared) -> int:
    """R, the intervals or updates of one compiled call; all calls have the same shape.

    On a timeline R is the number of updates that happen in R intervals on average. The
    last call is filled up: on a timeline, or where no divisor of T is near R. A run
    that may end early does so after a call, which then ends with a test.
    """
    config, updates = prepared.config, len(prepared.steps)
    if config.stop.at or config.stop.patience:
        period = min(config.eval_every, config.num_intervals)
        return 1 if config.timeline.framework != "none" else period
    most = min(config.report_every or _by_work(prepared), config.num_intervals)
    if config.timeline.framework != "none":
        return -(-updates * most // config.num_intervals)
    divisor = max(r for r in range(1, most + 1) if updates % r == 0)
    if 2 * divisor >= most or config.report_every:
        return divisor
    return -(-updates // -(-updates // most))


_FEW_INTERVALS = 5  # of a call, whatever they cost
_CALLS = 10  # at least, if there are enough intervals: each has a line of progress
# A small network on one CPU core: FLOP per second, and seconds that an interval and a
# mini-batch step take at least. Calls are of about a second.
FLOP_RATE, INTERVAL_SECONDS, STEP_SECONDS = 5e9, 1e-4, 5e-6


def _by_work(prepared: Prepared) -> int:
    """Intervals of a call that takes about a second; more where they are short.

    The host's part in a call does not depend on its length: for small networks calls of
    a few intervals would be mostly that. The choice depends on the settings only, never
    on the machine.
    """
    config, network = prepared.config, prepared.network
    steps = prepared.steps.sum(dtype=np.int64) / config.num_intervals
    samples = 3 * config.batch_size * steps  # forward once, backward about twice
    samples += len(prepared.dataset.x_test) / config.eval_every
    seconds = INTERVAL_SECONDS + STEP_SECONDS * steps
    most = max(_FEW_INTERVALS, -(-config.num_intervals // _CALLS))
    weights = sum(math.prod(p.shape) for p in jax.tree.leaves(network.params))
    # A lower bound first: to count the FLOP of a large network takes a while.
    if seconds + samples * 2 * weights / FLOP_RATE > 1 / _FEW_INTERVALS:
        return _FEW_INTERVALS
    shape = (1, *prepared.dataset.x_test.shape[1:])
    x = jax.ShapeDtypeStruct(shape, input_dtype(prepared.dataset))
    flop_per_sample = flop.count(network.model.predict, network.params, x)
    seconds += samples * flop_per_sample / FLOP_RATE
    return int(np.clip(1 / seconds, _FEW_INTERVALS, most))
