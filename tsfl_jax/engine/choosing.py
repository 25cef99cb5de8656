"""Who of an interval's candidates trains, chosen by what their data say at w^t.

Before `run_interval`: the K that are chosen of d candidates become the clients of the
interval, so that no rule and no loop sees the others. NOT done here: who the candidates
are, and the choice itself; see `timeline.cohort` and `timeline.feedback`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tsfl_jax import trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices
from tsfl_jax.engine.interval import claimed, participants
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.engine.structures import Inputs, Interval, State
from tsfl_jax.timeline import feedback
from tsfl_jax.types import Params


def choose(
    interval: Interval, choice: feedback.Choice
) -> tuple[State, Inputs, Int[Array, "K"]]:
    """Choose K of the candidates of an interval.

    The state with what those chosen let be heard, the inputs of K clients, and their
    places among the candidates, ascending.
    """
    parts, state, _, _, problem, inputs = interval
    clients = participants(interval)
    if choice.sampler == "power_of_choice":
        loss, _ = losses(parts, state.params, problem.samples, clients)
        chosen = feedback.power_of_choice(loss, choice.size)
        chosen_clients = trees.take(clients, chosen)
        return state, _inputs_of(parts.spec, inputs, chosen, chosen_clients), chosen
    number, reports = inputs.interval + 1, trees.take(state.feedback, clients.place)
    chosen = feedback.oort(reports, clients.size, inputs.lots, number, choice.size)
    clients = trees.take(clients, chosen)
    inputs = _inputs_of(parts.spec, inputs, chosen, clients)
    _, square = losses(parts, state.params, problem.samples, clients)
    utility = clients.size * jnp.sqrt(square)
    utility = jnp.where(jnp.isfinite(utility), utility, 0.0)
    # Nothing is heard of a client whose upload is lost, nor in intervals that fill up.
    heard = jnp.where(claimed(inputs) > 0, clients.place, len(state.feedback.last))
    reports = feedback.Known(utility, jnp.broadcast_to(number, heard.shape))
    reports = trees.put(state.feedback, heard, reports)
    return state._replace(feedback=reports), inputs, chosen


def _inputs_of(
    spec: ProgramSpec, inputs: Inputs, chosen: Int[Array, "K"], clients: local.Client
) -> Inputs:
    """The inputs of the clients chosen, assigned to the devices as K clients are."""
    names = ("tau", "size", "reported", "client", "share")
    slots = {n: jnp.asarray(getattr(inputs, n))[chosen] for n in names}
    task, snapshot, lag = (jnp.asarray(a)[chosen] for a in inputs.delivery[:3])
    delivery = inputs.delivery._replace(task=task, snapshot=snapshot, lag=lag)
    work, grouped = local.mini_batch_steps(spec, clients), spec.mapping == "sequential"
    places = devices.places(len(chosen), devices.count(spec.axis), grouped=grouped)
    assigned = devices.assign_again(work, places, spec.axis, grouped=grouped)
    return inputs._replace(assigned=assigned, delivery=delivery, lots=None, **slots)


def losses(
    parts: Parts, params: Params, samples: local.Samples, clients: local.Client
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """The mean loss, and the mean squared loss, of all samples that each client holds.

    The same on every device, without derivatives.
    """
    spec, model = parts.spec, parts.model
    params, samples = jax.tree.map(lax.stop_gradient, (params, samples))
    batch = jnp.arange(spec.batch_size)

    def one(client: local.Client) -> Float[Array, "2"]:
        def add(b: Array, sums: Array) -> Array:
            place = b * spec.batch_size + batch
            is_sample = place < client.size
            rows = client.row[jnp.where(is_sample, place, 0)]
            outputs = model.predict(params, local.scaled(samples, samples.x[rows]))
            loss = jnp.where(is_sample, model.loss(outputs, samples.y[rows]), 0.0)
            return sums + jnp.stack([loss.sum(), jnp.square(loss).sum()])

        batches = -(-client.size // spec.batch_size)
        return lax.fori_loop(0, batches, add, jnp.zeros(2)) / client.size

    return tuple(devices.shared_map(one, clients, spec.axis, spec.width).T)
