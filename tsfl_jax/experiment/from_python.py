"""`simulate` and `sweep`: train from Python, with parts of the user's own."""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsfl_jax.config import Config
from tsfl_jax.engine import optimizers
from tsfl_jax.experiment import assemble, runner, sweeps
from tsfl_jax.experiment.own_hooks import Own
from tsfl_jax.report import files
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Array, Dataset


def simulate(
    config: Config,
    *,
    model: Any = None,
    dataset: Dataset | None = None,
    optimizer: optimizers.Optimizer | None = None,
    aggregator: Aggregator | None = None,
    loss: Callable[[Array, Array], Array] | None = None,
    metrics: Mapping[str, Callable[[Array, Array], Array]] | None = None,
    augment: Callable[..., Any] | None = None,
    client_step: Callable[..., Any] | None = None,
    partition: Any = None,
    workdir: str | pathlib.Path | None = None,
    verbose: bool = False,
) -> runner.Result:
    """Run one experiment from Python; docs/own.md has an example of each argument.

    Args:
      config: all settings.
      model: a Flax module (images ``[B, H, W, C]`` → logits), linen or nnx, a function
        of `nnx.Rngs` that makes one, or a `Model`, instead of ``config.model``.
      dataset: samples in memory, instead of ``config.data``.
      optimizer: an optax transformation for the clients, or a function `HParams` →
        transformation, instead of SGD with momentum.
      aggregator: a rule of the user's own, instead of ``config.algorithm``.
      loss: (outputs ``[B, O]``, labels ``[B]``) → ``[B]``, instead of cross-entropy.
      metrics: functions like `loss` by name; their means over the test set are in the
        history.
      augment: (key, x ``[B, ...]``, y ``[B]``) → (x, y), in training.
      client_step: `Step` → `Stepped`, instead of a step of the optimizer.
      partition: N lists of indices into the training samples, instead of a drawn split.
      workdir: where to write files and checkpoints; None: nowhere.
      verbose: print progress on stderr.

    Returns:
      `Result`: the final parameters, the history per interval, the summary.

    Raises:
      UserError: an input that cannot work, in one line.
    """
    if workdir is not None:
        files.folder_of(workdir)  # before the work
    own = Own(model, dataset, optimizer, aggregator, loss, metrics, augment)
    own = own._replace(client_step=client_step, partition=partition)
    exp = assemble.build(config, **own._asdict())
    return runner.run(exp, workdir, sys.stderr if verbose else None)


def sweep(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    *,
    workdir: str | pathlib.Path | None = None,
    lanes_per_call: int = 0,
    stop: Callable[[], bool] = lambda: False,
    watch: sweeps.Watch = lambda done: None,
    verbose: bool = False,
    **own: Any,
) -> sweeps.SweepResult:
    """Run or resume a sweep: one run per point, as lanes of compiled programs.

    Args:
      config: all settings that are not swept.
      swept: setting → its values, such as ``{"seed": range(5), "lr": [0.01, 0.1]}``,
        for their product; or a list of points, ``[{"lr": 0.01}, {"lr": 0.1}]``,
        where what a point lacks keeps the config's value.
      workdir: folder for tables, figures and finished lanes; the same call with the
        same folder resumes. None keeps everything in memory.
      lanes_per_call: lanes of one compiled call; 0 chooses by the device.
      stop: called after each chunk of intervals; True raises KeyboardInterrupt.
      watch: called after each call with the histories of finished lanes, by lane.
      verbose: print progress on stderr.
      **own: `model`, `dataset`, `optimizer`, `aggregator`, … as in `simulate`.

    Returns:
      `SweepResult`: a row per lane, and histories with a leading axis of lanes.

    Raises:
      UserError: a setting or value that cannot work, in one line.
    """
    return sweeps.run(
        config,
        swept,
        workdir=workdir,
        lanes_per_call=lanes_per_call,
        stop=stop,
        watch=watch,
        stream=sys.stderr if verbose else None,
        **own,
    )
