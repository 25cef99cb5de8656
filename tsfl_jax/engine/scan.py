"""The compiled program: a scan over intervals, on several devices, in several lanes.

`make_run` returns one pure function for a chunk of intervals, of one experiment or of
many that differ in arrays only.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tsfl_jax.engine import devices
from tsfl_jax.engine.interval import History, Inputs, Problem, State, make_interval
from tsfl_jax.engine.recipe import Probes, Recipe
from tsfl_jax.models.networks import Model
from tsfl_jax.rules.base import Aggregator, Counts, one_of
from tsfl_jax.types import Array, HParams, PRNGKey

__all__ = [
    "History",
    "Inputs",
    "Probes",
    "Problem",
    "Recipe",
    "State",
    "init_state",
    "make_run",
]

# What every device has a copy of, and what the devices share.
WHOLE, _SHARED = PartitionSpec(), PartitionSpec(devices.AXIS)
PROBLEM_SPEC = Problem(samples=WHOLE, test=_SHARED, rows=WHOLE, client=WHOLE)
INPUTS_SPEC = Inputs(
    interval=WHOLE,
    tau=WHOLE,
    size=WHOLE,
    evaluate=WHOLE,
    assigned=PartitionSpec(None, devices.AXIS),
    reported=WHOLE,
    delivery=WHOLE,
)
LANES_INPUTS_SPEC = INPUTS_SPEC._replace(
    assigned=PartitionSpec(None, None, devices.AXIS)
)
# What differs between the lanes of a sweep: axis 0; None: shared by all lanes.
_LANES_PROBLEM = Problem(samples=None, test=None, rows=0, client=None)
_LANES_INPUTS = Inputs(
    interval=None, tau=0, size=0, evaluate=None, assigned=0, reported=0, delivery=0
)

Run = Callable[[State, PRNGKey, HParams, Problem, Inputs], tuple[State, History]]


def _over_lanes(run: Run, lanes: str) -> Run:
    """`run` for many experiments that share samples, test set and evaluations."""
    if lanes == "vmap":
        return jax.vmap(run, in_axes=(0, 0, 0, _LANES_PROBLEM, _LANES_INPUTS))

    def all_lanes(
        state: State, key: PRNGKey, hparams: HParams, problem: Problem, inputs: Inputs
    ) -> tuple[State, History]:
        def one(lane: tuple) -> tuple[State, History]:
            state, key, hparams, rows, own = lane
            mine = own._replace(interval=inputs.interval, evaluate=inputs.evaluate)
            return run(state, key, hparams, problem._replace(rows=rows), mine)

        own = inputs._replace(interval=None, evaluate=None)
        return lax.map(one, (state, key, hparams, problem.rows, own))

    return all_lanes


def init_state(
    model: Model,
    aggregator: Aggregator,
    key: PRNGKey,
    x: Array,
    counts: Counts,
    places: int = 0,
    size: Array | None = None,
) -> State:
    """w^0 and the rule's state.

    Args:
      x: one batch of scaled network input.
      counts: numbers of clients and tiers.
      places: P, earlier models kept; 0 where all clients start from w^t.
      size: ``[N]`` samples that each client holds; None: as many each.
    """
    params = model.init(key, x)
    server = aggregator.init(params, counts._replace(size=size))
    if not places:
        return State(params, server, jnp.bool_(False))
    sent = None if aggregator.sent is None else aggregator.sent(server)
    pool, sent = jax.tree.map(lambda w: jnp.repeat(w[None], places, 0), (params, sent))
    return State(params, server, jnp.bool_(False), pool, sent)


def make_run(
    model: Model,
    rules: tuple[Aggregator, ...],
    optimizer: Callable[[HParams], optax.GradientTransformation],
    recipe: Recipe,
    mesh: Mesh | None = None,
) -> Run:
    """Builds the scan over a chunk of intervals.

    Args:
      model: the network.
      rules: aggregation rules that the program can run; ``hparams.rule`` picks one.
      optimizer: hyper-parameters → optax transformation of the clients.
      recipe: all else that shapes the program.
      mesh: devices that share the clients, with the axis `devices.AXIS`; None: one.

    Returns:
      ``run(state, key, hparams, problem, inputs[R]) -> (state, history[R])``, pure and
      to be jitted by the caller.
    """
    recipe = dataclasses.replace(recipe, axis=None if mesh is None else devices.AXIS)
    interval = make_interval(model, one_of(rules), optimizer, recipe)

    def run(state, key, hparams, problem, inputs):
        def body(state, one):
            return interval(state, key, hparams, problem, one)

        return lax.scan(body, state, inputs)

    if recipe.lanes:
        run = _over_lanes(run, recipe.lanes)
    if mesh is None:
        return run
    inputs = LANES_INPUTS_SPEC if recipe.lanes else INPUTS_SPEC
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(WHOLE, WHOLE, WHOLE, PROBLEM_SPEC, inputs),
        out_specs=WHOLE,
        # Every device computes the same state from the same sums; the checker cannot
        # see that through loops whose length differs from client to client.
        check_vma=False,
    )
