"""The compiled program: a scan over intervals, on several devices, in several lanes.

`make_run` returns one pure function for a chunk of intervals, of one experiment or of
many that differ in arrays only.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tsfl_jax.engine import devices
from tsfl_jax.engine.interval import History, Inputs, Problem, State, make_interval
from tsfl_jax.models.networks import Model
from tsfl_jax.rules.base import Aggregator, Counts
from tsfl_jax.types import Array, HParams, PRNGKey

__all__ = ["History", "Inputs", "Problem", "State", "init_state", "make_run"]

# What every device has in whole, and what the devices share.
WHOLE, _SHARED = PartitionSpec(), PartitionSpec(devices.AXIS)
PROBLEM_SPEC = Problem(samples=WHOLE, test=_SHARED, rows=WHOLE, client=WHOLE)
INPUTS_SPEC = Inputs(
    *[WHOLE] * 4, slot=PartitionSpec(None, devices.AXIS), reported=WHOLE, delivery=WHOLE
)
LANES_INPUTS_SPEC = INPUTS_SPEC._replace(slot=PartitionSpec(None, None, devices.AXIS))


def _in_lanes(run: Callable, lanes: str) -> Callable:
    """`run` for many experiments that share samples, test set and evaluations."""
    in_problem = Problem(samples=None, test=None, rows=0, client=None)
    in_inputs = Inputs(None, 0, 0, None, 0, 0, 0)
    if lanes == "vmap":
        return jax.vmap(run, in_axes=(0, 0, 0, in_problem, in_inputs))

    def all_lanes(state, key, hparams, problem, inputs):
        def one(lane):
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
    aggregator: Aggregator,
    optimizer: Callable[[HParams], optax.GradientTransformation],
    *,
    batch_size: int,
    iteration: str = "pass",
    passes: int,
    mapping_name: str = "sequential",
    chunk: int = 1,
    most_steps: int | None = None,
    estimates: bool = False,
    measures: bool = False,
    mesh: Mesh | None = None,
    lanes: str = "",
) -> Callable[[State, PRNGKey, HParams, Problem, Inputs], tuple[State, History]]:
    """Builds the scan over a chunk of intervals.

    Args:
      model: the network.
      aggregator: the rule.
      optimizer: hyper-parameters → optax transformation of the clients.
      batch_size: B.
      iteration: what a local iteration is, "pass" or "step".
      passes: most passes of a client over its data, `client.most_passes`.
      mapping_name: "sequential" or "vmap", see `mapping`.
      chunk: clients side by side under "vmap".
      most_steps: mini-batch steps of the longest client in any interval, so that the
        program's loops have known lengths under "vmap"; None: found out as it runs.
      estimates: estimate those of L, G², σ² that are NaN in the hyper-parameters.
      measures: under every rule, measure what one that ``uses_gradients`` needs.
      mesh: devices that share the clients, with the axis `devices.AXIS`; None: one.
      lanes: "" one experiment. Else many, with a leading axis on the state, the key,
        the hyper-parameters, ``problem.rows`` and all inputs but interval and
        evaluate: one after another ("sequential") or side by side ("vmap").

    Returns:
      ``run(state, key, hparams, problem, inputs[R]) -> (state, history[R])``, pure and
      to be jitted by the caller.
    """
    interval = make_interval(
        model,
        aggregator,
        optimizer,
        batch_size=batch_size,
        iteration=iteration,
        passes=passes,
        mapping_name=mapping_name,
        chunk=chunk,
        most_steps=most_steps,
        estimates=estimates,
        measures=measures,
        axis=None if mesh is None else devices.AXIS,
    )

    def run(state, key, hparams, problem, inputs):
        def body(state, one):
            return interval(state, key, hparams, problem, one)

        return lax.scan(body, state, inputs)

    if lanes:
        run = _in_lanes(run, lanes)
    if mesh is None:
        return run
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(
            WHOLE,
            WHOLE,
            WHOLE,
            PROBLEM_SPEC,
            LANES_INPUTS_SPEC if lanes else INPUTS_SPEC,
        ),
        out_specs=WHOLE,
        # Every device computes the same state from the same sums; the checker cannot
        # see that through loops whose length differs from client to client.
        check_vma=False,
    )
