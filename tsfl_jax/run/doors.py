"""The doors from Python: `simulate` one run, `sweep` many, `predict`, `as_function`.

The first two train the same way and differ in the files they leave. `as_function` is an
experiment as a pure function of arrays, for `jax.jit`, `jax.grad`, `jax.vmap`.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Num

from tsfl_jax import command, trees
from tsfl_jax.config import Config, replace
from tsfl_jax.data import in_memory, targets
from tsfl_jax.engine import client, devices, evaluation, optimizers, scan
from tsfl_jax.prepare import backend, trained
from tsfl_jax.prepare.network import network_of
from tsfl_jax.prepare.prepare import accepted, load_dataset, prepare_validated
from tsfl_jax.report import writers as reporting
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.run import lanes, runner, shards, sweeps
from tsfl_jax.types import Array, Dataset, HParams, Params, PRNGKey


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
    framework: Any = None,
    uplink: Any = None,
    lr_schedule: Callable[..., Any] | None = None,
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
      framework: a `timeline.Framework` or its function, instead of that of the config.
      uplink: an `Uplink`, or a list of links that updates pass in this order, instead
        of ``uplink.chain``.
      lr_schedule: update t → η_t / ``config.lr``, such as an optax schedule.
      params: Flax variables to start from, such as `Result.params`.
      workdir: where to write files and checkpoints; None: nowhere.
      writers: names of --writer, `Writer`s, or functions of each interval's record.
      verbose: print progress on stderr.

    Returns:
      `Result`: the final parameters, the history per interval, the summary.

    Raises:
      UserError: an input that cannot work, in one line.
    """
    reporting.check(writers)
    custom = {"model": model, "dataset": dataset, "optimizer": optimizer, "loss": loss}
    custom |= {"aggregator": aggregator, "metrics": metrics, "augment": augment}
    custom |= {"client_step": client_step, "partition": partition, "sampler": sampler}
    custom |= {"framework": framework, "uplink": uplink, "lr_schedule": lr_schedule}
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
        return shards.run_on_ray(
            config, swept, address, workdir=workdir, **options, **custom
        )
    return sweeps.run(config, swept, workdir=workdir, watch=watch, **options, **custom)


class Arguments(NamedTuple):
    """What the function of an experiment takes, in this order."""

    state: scan.State  # w^0 in `params`, and the rule's state
    key: PRNGKey  # that all random streams of training are folded from
    hparams: HParams  # float32 scalars
    problem: scan.Problem  # samples, test set, index table
    inputs: scan.Inputs  # the schedule, leading axis [T]


def as_function(config: Config, **custom: Any) -> tuple[scan.Run, Arguments]:
    """Make the pure function of an experiment, and the arrays it runs on.

    ``run(*arguments) -> (state, history)`` trains all T intervals. Where the network is
    smooth it has derivatives with respect to every float among the arguments, and to
    what an aggregation rule of the user's own closes over. Reverse mode needs clients
    side by side, which is what ``mapping="auto"`` means here. The arguments may be
    changed; of τ and |D_i| neither a client's mini-batch steps in an interval nor its
    passes may exceed the most that the schedule they were made of has.

    Args:
      config: all settings; `devices` and `checkpoint` have no effect.
      **custom: `model`, `dataset`, `optimizer`, `aggregator`, … as in `simulate`.

    Returns:
      (run, `Arguments`), for one device.

    Raises:
      UserError: an input that cannot work, in one line.
    """
    config, parts = accepted(config, **custom)
    if config.mapping == "auto":
        config = replace(config, {"mapping": "vmap"})
    with jax.ensure_compile_time_eval():  # also while a caller is being traced
        prepared = prepare_validated(config, parts)
        mesh = devices.make_mesh(1, config.num_clients)
        program, arrays = lanes.single(prepared, mesh)
        arguments = Arguments(*lanes.arguments_of_run(arrays, len(prepared.steps)))
    # The term of μ stays where μ = 0, and clients where ρ_i = 0, for their derivatives;
    # and τ may be changed.
    spec = dataclasses.replace(program.spec, proximal=True, train_all=True, even=False)
    parts = program.parts._replace(optimizer=prepared.optimizer, spec=spec)
    return scan.make_run(parts), arguments


def predict(
    config: Config, params: Params, *, model: Any = None, dataset: Dataset | None = None
) -> tuple[Float[np.ndarray, "M ..."], Num[np.ndarray, "M ..."]]:
    """Outputs of the network on the whole test set, with its labels or targets.

    For scores that are no means over the samples, such as macro-F1, AUC or calibration:
    hand both to a library such as scikit-learn.

    Args:
      config: that of the run.
      params: Flax variables, such as `Result.params`.
      model: as for `simulate`.
      dataset: as for `simulate`.

    Returns:
      float32 ``[M, O]``, logits where the network classifies (of tokens
      ``[M, S, O]``); int32 ``[M]``, or targets as float32 ``[M, ...]``.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    config, custom = accepted(config, model=model, dataset=dataset)
    backend.start_jax(config)
    data = load_dataset(config) if dataset is None else in_memory.check(dataset)
    network = network_of(config, data, custom)
    params = trained.fitted(trees.named(params), network.params, "params=")
    labels, model = targets.of(data)[1], network.model
    test = evaluation.make_test_set(data.x_test, labels)
    mean, scale = (jnp.asarray(a, jnp.float32) for a in (data.mean, 1.0 / data.std))
    samples = client.Samples(test.x, test.y, mean, scale)

    def outputs(params: Params, x: jax.Array) -> jax.Array:
        return lax.map(lambda b: model.predict(params, client.scaled(samples, b)), x)

    batches = np.asarray(jax.jit(outputs)(params, test.x), np.float32)
    return batches.reshape(-1, *batches.shape[2:])[: len(labels)], labels
