"""A run that goes on with a larger T than it was begun with.

The intervals so far must be those of the longer run: its schedule must begin with
them, and nothing in their training may depend on T.
"""

import dataclasses

import jax
import numpy as np

from tsfl_jax.engine import scan
from tsfl_jax.models import tracing
from tsfl_jax.prepare.prepare import Prepared, schedule_fingerprints
from tsfl_jax.run import lanes
from tsfl_jax.run.program import Arrays, Program
from tsfl_jax.types import UserError


def earlier(
    prepared: Prepared, program: Program, arrays: Arrays, intervals: int, updates: int
) -> dict[str, str | int]:
    """What differs in the identity of the same run with fewer intervals.

    A schedule that begins otherwise has another digest than the run's, and is refused
    with that.

    Args:
      prepared, program, arrays: of the longer run.
      intervals: the earlier T.
      updates: the updates in these, on a timeline another number.

    Raises:
      UserError: training depends on T.
    """
    config = prepared.config
    is_cosine = config.lr_schedule == "cosine"
    if is_cosine or _reads_intervals(program, arrays):
        cause = "lr_schedule=cosine" if is_cosine else "the training"
        raise UserError(
            f"--config.num_intervals={config.num_intervals}: the run was begun with "
            f"{intervals}, and {cause} depends on it; choose another --workdir"
        )
    times = prepared.workload.schedule
    first = jax.tree.map(lambda a: a[:updates] if np.ndim(a) else a, times)
    digests = schedule_fingerprints(first, config.timeline)
    return {"num_intervals": intervals} | digests


def _reads_intervals(program: Program, arrays: Arrays) -> bool:
    """Whether anything but the schedule of η, such as a rule, reads T."""
    spec = dataclasses.replace(program.spec, lr_varies=False)
    run = scan.make_run(program.parts._replace(spec=spec))
    state, key, hparams, *arguments = lanes.arguments_of_run(arrays, program.chunk)
    jaxpr = jax.make_jaxpr(run)(state, key, hparams, *arguments).jaxpr
    unmarked = jax.tree.map(lambda _: False, (state, key, hparams, *arguments))
    marked = unmarked[2]._replace(lr_total=True)
    marks = jax.tree.leaves((*unmarked[:2], marked, *unmarked[3:]))
    return any(m and u for m, u in zip(marks, tracing.used(jaxpr), strict=True))
