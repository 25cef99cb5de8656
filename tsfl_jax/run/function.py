"""An experiment as a pure function of arrays, for `jax.jit`, `jax.grad`, `jax.vmap`.

NOT done here: several devices, checkpoints, files. `runner` has those.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from tsfl_jax.config import Config, replace
from tsfl_jax.engine import devices, scan
from tsfl_jax.prepare.prepare import accepted, prepare_validated
from tsfl_jax.run import lanes
from tsfl_jax.types import HParams, PRNGKey


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
