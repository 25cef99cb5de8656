"""One interval of all clients: train, aggregate, evaluate, report.

Interval t of T-SFL: every client trains τ_i^t local iterations from w^t, the server
forms w^{t+1} from Σ_i ρ_i^t w_i^t, the new model is evaluated. Where clients are not in
step (`types.Delivery`), it is one global update by those who deliver: each started from
the model it had downloaded, one of a pool of earlier ones. Nothing in it talks to the
host.

Random streams are those of `rng`, by interval and client, so results do not depend on
how clients are chunked or ordered, nor on where a run was resumed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tsfl_jax import rng
from tsfl_jax.engine import base_models, evaluation, exact_sums, mapping
from tsfl_jax.engine import client as local
from tsfl_jax.engine.probes import make_probe
from tsfl_jax.engine.recipe import Recipe
from tsfl_jax.models.losses import weight_entropy
from tsfl_jax.models.networks import Model
from tsfl_jax.rules.base import Aggregator, Event, Situation
from tsfl_jax.types import (
    Array,
    ClientGradients,
    Constants,
    Delivery,
    HParams,
    Params,
    PRNGKey,
)


class State(NamedTuple):
    """What one interval hands to the next."""

    params: Params  # w^t, the global model's Flax variables
    server: Any  # the aggregation rule's own state
    diverged: Array  # bool: no client's model was finite; params are the last good ones
    pool: Params | None = None  # [P, ...], earlier models that clients start from
    sent: Params | None = None  # [P, ...], what the rule had sent with those models


class Problem(NamedTuple):
    """Everything on the device that does not change during a run."""

    samples: local.Samples
    test: evaluation.TestSet
    rows: Array  # [N, D] int32, which samples each client may use
    client: Array  # [N] int32 ids, which name the clients' random streams


class Inputs(NamedTuple):
    """What interval t is told; a leading axis ``[R]`` makes a chunk of intervals."""

    interval: Array  # int32, t = 0..T−1
    tau: Array  # [N] int32
    size: Array  # [N] int32
    evaluate: Array  # bool
    assigned: Array  # [K] int32, whom this device trains; N where nobody, see `devices`
    # [N] int32, local iterations that clients report; None: those they did, τ.
    reported: Array | None = None
    # None: all clients, from w^t. Else N above is the number of places of a delivery.
    delivery: Delivery | None = None


class History(NamedTuple):
    """What interval t reports; NaN where it does not apply or was not measured."""

    test_accuracy: Array  # in [0, 1]; NaN where the model does not classify
    test_loss: Array  # in nats, or the model's own unit
    train_loss: Array  # likewise, mean over all samples trained on in the interval
    threshold: Array  # K
    num_selected: Array  # int32
    weight_entropy: Array  # nats
    smoothness: Array  # L
    grad_sq_norm: Array  # G²
    grad_variance: Array  # σ²
    grad_square: Array  # ‖∇F(w^t)‖²
    coupling: Array  # c
    num_dropped: Array  # int32, clients with τ > 0 whose model was not finite
    samples: Array  # [N] int32, samples trained on; their sum needs 64 bits
    diverged: Array  # bool, from the interval on in which every model was lost
    rho: Array  # [N]
    selected: Array  # [N] bool
    client_variance: Array  # [N] σ_i²
    client_dissimilarity: Array  # [N] ‖∇F_i − ∇F‖²


def _clients(problem: Problem, inputs: Inputs) -> local.Client:
    """Everybody, or those who deliver; leading axis ``[N]``."""
    if inputs.delivery is None:
        return local.Client(problem.client, inputs.tau, inputs.size, problem.rows)
    who = inputs.delivery.client
    return local.Client(
        problem.client[who],
        inputs.tau,
        inputs.size,
        problem.rows[who],
        inputs.delivery.task,
        inputs.delivery.base,
    )


def _situation(
    key: PRNGKey,
    clients: local.Client,
    inputs: Inputs,
    reported: Array,
    constants: Constants,
    gradients: ClientGradients,
    batch_size: int,
    iteration: str,
) -> Situation:
    """What a rule may see: a client's own word for its work, `reported`."""
    here = inputs.delivery is None
    return Situation(
        key,
        clients.id,
        reported,
        inputs.size,
        reported * local.steps_per_iteration(inputs.size, batch_size, iteration),
        jnp.zeros_like(reported) if here else inputs.delivery.lag,
        jnp.int32(0) if here else inputs.delivery.group,
        constants,
        gradients,
    )


def make_interval(
    model: Model,
    aggregator: Aggregator,
    optimizer: Callable[[HParams], optax.GradientTransformation],
    recipe: Recipe,
) -> Callable[[State, PRNGKey, HParams, Problem, Inputs], tuple[State, History]]:
    """Builds one interval of all clients; see `make_run` for the arguments."""

    batch_size, iteration, axis = recipe.batch_size, recipe.iteration, recipe.axis

    def total(tree):
        return tree if axis is None else lax.psum(tree, axis)

    train = local.make_local_training(
        model,
        optimizer,
        batch_size=batch_size,
        iteration=iteration,
        passes=recipe.passes,
    )

    probe = make_probe(model, recipe)

    def interval(state, key, hparams, problem, inputs):
        purposes = rng.keys(key, "training", "estimates", "rule")
        train_key, estimate_key, rule_key = jax.vmap(
            lambda stream: jax.random.fold_in(stream, inputs.interval)
        )(purposes)
        clients = _clients(problem, inputs)
        reported = inputs.tau if inputs.reported is None else inputs.reported
        constants, gradients = probe(
            state.params, estimate_key, clients, reported, problem.samples, hparams
        )
        situation = _situation(
            rule_key,
            clients,
            inputs,
            reported,
            constants,
            gradients,
            batch_size,
            iteration,
        )
        weights = aggregator.weights(situation, hparams)
        newest = None if aggregator.sent is None else aggregator.sent(state.server)

        def train_one(client, limit):
            stream, start, sent = train_key, state.params, newest
            if client.task is not None:
                stream = jax.random.fold_in(purposes[0], client.task)
                start, sent = base_models.one((state.pool, state.sent), client.base)
            correction = None
            if aggregator.correction is not None:
                correction = aggregator.correction(state.server, sent, client.id)
            client_key = jax.random.fold_in(stream, client.id)
            return train(
                start, client_key, client, problem.samples, hparams, limit, correction
            )

        def start_of(client):
            if aggregator.deltas and client.base is not None:
                return base_models.one(state.pool, client.base)
            return state.params

        # This device's share of the clients; an empty place is a client without work.
        somebody = inputs.assigned < inputs.tau.shape[0]
        here = jnp.where(somebody, inputs.assigned, 0)
        mine = jax.tree.map(lambda a: a[here], clients)
        mine = mine._replace(tau=jnp.where(somebody, mine.tau, 0))
        work = mine.tau * local.steps_per_iteration(mine.size, batch_size, iteration)
        # Every device gets what each has, its own in its places and 0 elsewhere.
        place = jnp.where(somebody, inputs.assigned, inputs.tau.shape[0])
        how = {
            "mapping": recipe.mapping,
            "chunk": recipe.block,
            "most": recipe.longest,
        }
        if aggregator.combine is None:
            rho = jnp.where(somebody, weights.rho[here], 0.0)
            weighted, results = mapping.weighted_models(
                train_one, start_of, mine, rho, state.params, work, axis=axis, **how
            )
            kept = weighted.kept
            server, event = (
                state.server,
                Event(situation, weights.rho, situation.tau > 0),
            )
            one = jnp.float32(1.0)
            total_rho = one if aggregator.deltas else weighted.asked
            mean = base_models.mean(state.params, weighted.moved, total_rho)
        else:
            models, results = mapping.all_models(train_one, mine, work, **how)
            updates = base_models.updates(
                models, results.finite, mine.base, state.params, state.pool
            )
            updates, finite = total(
                jax.tree.map(
                    lambda a: base_models.scattered(a, place, inputs.tau.shape[0]),
                    (updates, results.finite.astype(jnp.int32)),
                )
            )
            present = (finite > 0) & (situation.tau > 0)
            sent = None
            if inputs.delivery is not None:
                sent = base_models.one(state.sent, clients.base)
            event = Event(situation, weights.rho, present, sent)
            update, server = aggregator.combine(updates, state.server, event, hparams)
            nothing = jax.tree.map(jnp.zeros_like, update)
            mean = base_models.moved(state.params, update, nothing)
            kept = event.present.sum()
        params, server = aggregator.update(mean, state.params, server, event, hparams)
        worked = mine.tau > 0
        usable = results.finite & worked
        loss_sum = exact_sums.scalar(jnp.where(usable, results.loss, 0.0), axis)
        loss_count = exact_sums.scalar(
            jnp.where(usable, results.samples, 0).astype(jnp.float32), axis
        )
        samples, dropped, survivors = total(
            (
                base_models.scattered(results.samples, place, inputs.tau.shape[0]),
                jnp.sum(~results.finite & worked),
                usable.sum(),
            )
        )
        diverged = state.diverged
        if inputs.delivery is None:  # else others are still at work on good models
            diverged |= (dropped > 0) & (survivors == 0)
        # Nobody took part, or no model that has weight survived: w^t stays.
        updated = (kept > 0) & ~diverged
        new = State(params, server, diverged)
        old = state._replace(diverged=diverged, pool=None, sent=None)
        new = jax.tree.map(lambda n, o: jnp.where(updated, n, o), new, old)
        if inputs.delivery is not None:
            sent = None if aggregator.sent is None else aggregator.sent(new.server)
            pool, sent = base_models.kept(
                (state.pool, state.sent), (new.params, sent), inputs.delivery.keep
            )
            new = new._replace(pool=pool, sent=sent)

        accuracy, loss = lax.cond(
            inputs.evaluate,
            lambda w: evaluation.evaluate(
                model, w, problem.samples, problem.test, axis
            ),
            lambda w: (jnp.float32(jnp.nan), jnp.float32(jnp.nan)),
            new.params,
        )
        history = History(
            test_accuracy=accuracy.astype(jnp.float32),
            test_loss=loss.astype(jnp.float32),
            train_loss=(loss_sum / loss_count).astype(jnp.float32),
            threshold=weights.threshold,
            num_selected=weights.selected.sum(),
            weight_entropy=weight_entropy(weights.rho),
            smoothness=constants.smoothness,
            grad_sq_norm=constants.grad_sq_norm,
            grad_variance=constants.grad_variance,
            grad_square=gradients.square,
            coupling=weights.coupling,
            num_dropped=dropped,
            samples=samples,
            diverged=diverged,
            rho=weights.rho,
            selected=weights.selected,
            client_variance=gradients.variance,
            client_dissimilarity=gradients.dissimilarity,
        )
        return new, history

    return interval
