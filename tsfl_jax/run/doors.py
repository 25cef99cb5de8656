"""The two doors from Python: `simulate` one run, `sweep` many.

They train the same way and differ in the files they leave.
"""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsfl_jax import command
from tsfl_jax.config import Config
from tsfl_jax.engine import optimizers
from tsfl_jax.report import writers as reporting
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.run import ray_workers, runner, sweeps
from tsfl_jax.types import Array, Dataset, Params


def simulate(
    config: Config,
    *,
    model: Any = None,
    dataset: Dataset | None = None,
    optimizer: optimizers.Optimizer | None = None,
    aggregator: Aggregator | None = None,
    loss: Callable[[Array, Array], Array] | None = None,
    metrics: Mapping[str, Callable[[Array, Array], Any]] | None = None,
    augment: Callable[..., Any] | None = None,
    client_step: Callable[..., Any] | None = None,
    partition: Any = None,
    sampler: Callable[..., Any] | None = None,
    params: Params | None = None,
    workdir: str | pathlib.Path | None = None,
    writers: Sequence[reporting.Choice] = (),
    verbose: bool = False,
) -> runner.Result:
    """Run one experiment from Python; docs/custom.md has an example of each argument.

    Args:
      config: all settings.
      model: a Flax module, linen or nnx (``[B, H, W, C]`` → logits), a function of
        `nnx.Rngs` that makes one, or a `Model`.
      dataset: samples in memory, instead of ``config.data``.
      optimizer: an optax transformation, or a function `HParams` → transformation.
      aggregator: a rule of the user's own, instead of ``config.algorithm``.
      loss: (outputs ``[B, O]``, labels ``[B]``) → ``[B]``, instead of cross-entropy.
      metrics: like `loss`, or to (values, weights); test means are in the history.
      augment: (key, x ``[B, ...]``, y ``[B, ...]``) → (x, y), in training.
      client_step: `Step` → `Stepped`, instead of a step of the optimizer.
      partition: N lists of indices into the training samples, instead of a drawn split.
      sampler: `timeline.cohort.Draw` → ids of the clients that are asked.
      params: Flax variables to start from, such as `Result.params`.
      workdir: where to write files and checkpoints; None: nowhere.
      writers: names of --writer, `Writer`s, or functions of each interval's record.
      verbose: print progress on stderr.

    Returns:
      `Result`: the final parameters, the history per interval, the summary.

    Raises:
      UserError: an input that cannot work, in one line.
    """
    runner.check_outputs(workdir, writers)
    custom = {"model": model, "dataset": dataset, "optimizer": optimizer, "loss": loss}
    custom |= {"aggregator": aggregator, "metrics": metrics, "augment": augment}
    custom |= {"client_step": client_step, "partition": partition, "sampler": sampler}
    exp = runner.build(config, params=params, **custom)
    return runner.run(exp, workdir, sys.stderr if verbose else None, writers=writers)


def sweep(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    *,
    workdir: str | pathlib.Path | None = None,
    runs_per_call: int = 0,
    stop: Callable[[], bool] = command.was_stopped,
    watch: sweeps.Watch = lambda histories: None,
    verbose: bool = False,
    ray: bool | str = False,
    **custom: Any,
) -> sweeps.SweepResult:
    """Run or resume a sweep: one run per point, several in one compiled program.

    Args:
      config: all settings that are not swept.
      swept: setting → its values, such as ``{"seed": range(5), "lr": [0.01, 0.1]}``,
        for their product; or a list of points, ``[{"lr": 0.01}, {"lr": 0.1}]``,
        where what a point lacks keeps the config's value.
      workdir: folder for tables, figures and finished runs; the same call with the
        same folder resumes. None keeps everything in memory.
      runs_per_call: runs of one compiled call; 0 chooses by the device.
      stop: called after each chunk of intervals; True raises KeyboardInterrupt.
      watch: called after each call with the histories of finished runs, by number.
      verbose: print progress on stderr.
      ray: True, or the address of a Ray cluster: workers of its machines take shards
        of the runs; `workdir` is a folder that all see, `watch` is not called.
      **custom: `model`, `dataset`, `optimizer`, `aggregator`, … as in `simulate`.

    Returns:
      `SweepResult`: a row per run, and histories with a leading axis of runs.

    Raises:
      UserError: a setting or value that cannot work, in one line.
    """
    stream = sys.stderr if verbose else None
    options = {"runs_per_call": runs_per_call, "stream": stream, "stop": stop}
    if ray is not False:
        address = "" if ray is True else ray
        return ray_workers.run(
            config, swept, address, workdir=workdir, **options, **custom
        )
    return sweeps.run(config, swept, workdir=workdir, watch=watch, **options, **custom)
