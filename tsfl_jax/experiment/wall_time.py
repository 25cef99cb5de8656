"""How long a run will take on this machine: measured with one call, or estimated.

An estimate counts FLOP and mini-batch steps and takes a CPU core to do so many of them
in a second; it may be wrong by a factor of a few. A measurement runs one call.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax.experiment import compile_times, prepare
from tsfl_jax.experiment.own_hooks import input_dtype
from tsfl_jax.experiment.prepare import Prepared, evaluated
from tsfl_jax.experiment.program import Arrays, Compiled
from tsfl_jax.models import flop
from tsfl_jax.report import progress
from tsfl_jax.rules import AGGREGATORS


class WallTime(NamedTuple):
    """Seconds of a run."""

    compiling: float  # without a cache
    training: float  # with evaluation; NaN: not known
    measured: int  # intervals that were run to know it; 0: estimated


def estimate(prepared: Prepared, mesh: Mesh) -> WallTime:
    """Estimate from counts; nothing runs. On other devices than CPUs NaN."""
    compiling = compile_times.guess(prepared.network.params)
    if mesh.devices.flat[0].platform != "cpu":
        return WallTime(compiling, float("nan"), 0)
    network, config = prepared.network, prepared.config
    steps = int(prepared.steps.sum(dtype=np.int64))
    tests = int(evaluated(prepared).sum()) * len(prepared.dataset.x_test)
    samples = 3 * config.batch_size * steps + tests  # backward is twice forward
    samples += 3 * len(prepared.steps) * _validated(prepared)
    dataset = prepared.dataset
    x = jax.ShapeDtypeStruct((1, *dataset.x_test.shape[1:]), input_dtype(dataset))
    each = flop.count(network.model.predict, network.params, x)
    seconds = len(prepared.steps) * prepare.INTERVAL_SECONDS
    seconds += steps * prepare.STEP_SECONDS + samples * each / prepare.FLOP_RATE
    return WallTime(compiling, seconds / mesh.size, 0)


def _validated(prepared: Prepared) -> int:
    """Validation samples of all evaluations in an interval."""
    config, rule = prepared.config, prepared.rule
    passes = 2 if rule.uses_validation else 0
    searches = int(rule is AGGREGATORS["oracle"]) + config.measure_regret
    passes += searches * config.oracle.steps + 3 * config.measure_regret
    return passes * config.data.validation


def measure(prepared: Prepared, compiled: Compiled, arrays: Arrays) -> WallTime:
    """Run one call, and extrapolate by mini-batch steps."""
    chunk = next(iter(compiled.chunks(arrays)))
    steps = prepared.steps.sum(axis=1, dtype=np.int64) + 1  # evaluation counts, too
    share = steps.sum() / steps[chunk.first : chunk.last].sum()
    return WallTime(compiled.seconds, float(chunk.seconds * share), chunk.last)


def text(found: WallTime) -> str:
    """Compile and training time in words."""
    compiling = f"compiling about {found.compiling:.0f} s without a cache"
    if np.isnan(found.training):
        return f"{compiling}; training is known after --explain=compile only"
    training = progress.clock(found.training)
    if found.measured:
        compiling = f"compiling {found.compiling:.1f} s"
        of = f"by the first {found.measured} intervals, which were run"
        return f"{compiling}; training about {training}, {of}"
    return (
        f"{compiling}; training very roughly {training}, by a count of operations "
        "(--explain=compile measures it)"
    )
