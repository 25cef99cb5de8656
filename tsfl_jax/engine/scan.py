"""The compiled program: a scan over intervals, on several devices, in several lanes.

`make_run` returns one pure function for a chunk of intervals, of one experiment or of
many that differ in arrays only.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Num

from tsfl_jax import trees
from tsfl_jax.engine import choosing, devices
from tsfl_jax.engine.interval import broadcast_of, run_interval
from tsfl_jax.engine.program_spec import Parts
from tsfl_jax.engine.structures import History, Inputs, Interval, Problem, State
from tsfl_jax.models.networks import Model
from tsfl_jax.rules import apply
from tsfl_jax.rules.base import Aggregator, Counts
from tsfl_jax.timeline import feedback
from tsfl_jax.types import HParams, PRNGKey
from tsfl_jax.uplink import chain
from tsfl_jax.uplink.chain import Chain

Run = Callable[[State, PRNGKey, HParams, Problem, Inputs], tuple[State, History]]


# Fields of `Problem` that each experiment has of its own, with a leading axis [L].
PER_RUN = ("rows", "client", "validation", "class_index", "attacker", "scored")
# Fields of `Inputs` that all experiments of a program share.
SHARED = ("interval", "evaluate")


# What every device has a copy of, and what the devices share; for arrays and trees.
WHOLE: Any = PartitionSpec()
DIVIDED: Any = PartitionSpec(devices.AXIS)
PROBLEM_SPEC = Problem(*[WHOLE] * len(Problem._fields))._replace(test=DIVIDED)
INPUTS_SPEC = Inputs(*[WHOLE] * len(Inputs._fields))._replace(
    assigned=PartitionSpec(None, None, devices.AXIS)
)
ARGUMENTS_SPEC = (WHOLE, WHOLE, WHOLE, PROBLEM_SPEC, INPUTS_SPEC)


def over_lanes(
    function: Callable[[Any], Any], side_by_side: bool
) -> Callable[[Any], Any]:
    """`function` of one experiment for a tree with a leading axis ``[L]``.

    Vectorized over the axis, or one after another; a single one is computed without the
    axis, as a compiler makes most of it.
    """

    def of_all(lanes: Any) -> Any:
        if jax.tree.leaves(lanes)[0].shape[0] == 1:
            one = function(jax.tree.map(lambda a: a[0], lanes))
            return jax.tree.map(lambda a: a[None], one)
        return jax.vmap(function)(lanes) if side_by_side else lax.map(function, lanes)

    return of_all


def make_lanes_run(
    run: Run, mesh: Mesh, *, side_by_side: bool
) -> Callable[[State, PRNGKey, HParams, Problem, Inputs], tuple[State, History]]:
    """`run` for L experiments on the devices of a mesh.

    Args:
      run: from `make_run`, with this mesh's axis.
      mesh: devices that share the clients, with the axis `devices.AXIS`.
      side_by_side: see `over_lanes`.

    Returns:
      A function like `run`, with a leading axis ``[L]`` on state, key and
      hyper-parameters, on the fields `PER_RUN` of the problem, and on all inputs but
      `SHARED`.
    """

    def all_lanes(
        state: State, key: PRNGKey, hparams: HParams, problem: Problem, inputs: Inputs
    ) -> tuple[State, History]:
        shared = {name: getattr(inputs, name) for name in SHARED}
        per_run = {name: getattr(problem, name) for name in PER_RUN}

        def one(lane: Any) -> tuple[State, History]:
            state, key, hparams, per_run, inputs = lane
            inputs = inputs._replace(**shared)
            return run(state, key, hparams, problem._replace(**per_run), inputs)

        laned_inputs = inputs._replace(**dict.fromkeys(SHARED))
        lanes = state, key, hparams, per_run, laned_inputs
        return over_lanes(one, side_by_side)(lanes)

    return jax.shard_map(
        all_lanes,
        mesh=mesh,
        in_specs=ARGUMENTS_SPEC,
        out_specs=WHOLE,
        # Every device computes the same state from the same sums; the checker cannot
        # see that through loops whose length differs from client to client.
        check_vma=False,
    )


def init_state(
    model: Model,
    rules: tuple[Aggregator, ...],
    key: PRNGKey,
    x: Num[Array, "B ..."],
    counts: Counts,
    snapshots: int = 0,
    choice: feedback.Choice | None = None,
    uplinks: Chain = (),
    hparams: HParams = HParams(),  # noqa: B008
) -> State:
    """w^0 and the states of rules and links.

    Args:
      model, rules, uplinks: as in `Parts`.
      key: of the initial model.
      x: one batch of scaled network input.
      counts: numbers of clients and tiers, and samples of each client.
      snapshots: P, earlier models kept; 0 if all clients start from w^t.
      choice: how clients are chosen of the candidates; None: they are not.
      hparams: with the settings of the links.
    """
    params = model.init(key, x)
    server = apply.init_state(rules, trees.parted(params)[0], counts)
    state = State(params, server, jnp.bool_(False))
    links = chain.init(uplinks, params, hparams)
    state = state._replace(uplinks=trees.repeated(links, counts.clients))
    if choice and choice.sampler == "oort":
        return state._replace(feedback=feedback.nothing_known(counts.clients))
    if snapshots:
        version = params, broadcast_of(rules[0], server)
        earlier, broadcast = trees.repeated(version, snapshots)
        state = state._replace(snapshots=earlier, broadcast=broadcast)
    return state


def make_run(parts: Parts, axis: str | None = None) -> Run:
    """Build the scan over a chunk of intervals.

    Args:
      parts: of the program; of its rules ``hparams.rule`` picks one.
      axis: of the mesh of devices that share the clients; None: one device.

    Returns:
      ``run(state, key, hparams, problem, inputs[R]) -> (state, history[R])``, pure and
      to be jitted by the caller.
    """
    spec = dataclasses.replace(parts.spec, axis=axis)
    parts = parts._replace(spec=spec)

    def intervals(
        state: State, key: PRNGKey, hparams: HParams, problem: Problem, inputs: Inputs
    ) -> tuple[State, History]:
        def body(state: State, inputs: Inputs) -> tuple[State, History]:
            interval = Interval(parts, state, key, hparams, problem, inputs)
            chosen = None
            if spec.choice:
                state, inputs, chosen = choosing.choose(interval, spec.choice)
                interval = interval._replace(state=state, inputs=inputs)
            new, history = run_interval(interval)
            new = new._replace(feedback=state.feedback)
            return new, history._replace(chosen=chosen)

        # Inside of the network `models.precision` may choose other products.
        with trees.arithmetic():
            return lax.scan(body, state, inputs)

    return intervals
