"""One interval of all clients: train, aggregate, evaluate, record.

Algorithm 1 of Shao et al., "Robust Model Aggregation for Heterogeneous Federated
Learning: Analysis and Optimizations", is `run_interval`. In interval t of T-SFL every
client trains τ_i^t local iterations from w^t, the server forms w^{t+1} from
Σ_i ρ_i^t w_i^t, and the new model is evaluated. In asynchronous frameworks
(`types.Delivery`) an interval is one global update by the clients that deliver: each
started from the model it had downloaded, one of P snapshots of earlier global models.
Those that take part are in K slots: all N clients, or a cohort.
NOT done: nothing here communicates with the host.

Random streams are those of `rng`, by interval and client, so results do not depend on
how clients are grouped in blocks or ordered, nor on where a run was resumed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int

from tsfl_jax import rng, trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import (
    client_states,
    evaluation,
    from_updates,
    mapping,
    optimizers,
)
from tsfl_jax.engine.estimates import estimate
from tsfl_jax.engine.mapping import Tally, count
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.engine.structures import History, Inputs, Problem, State
from tsfl_jax.models.losses import weight_entropy
from tsfl_jax.rules.apply import Mixed, apply, decide, mix_stacked
from tsfl_jax.rules.base import Aggregator, ClientOutputs, Received, RoundInfo, Weights
from tsfl_jax.types import (
    Array,
    ClientGradients,
    Constants,
    HParams,
    Params,
    PRNGKey,
)
from tsfl_jax.uplink import chain
from tsfl_jax.uplink.link import LinkInfo


def run_interval(
    parts: Parts,
    state: State,
    key: PRNGKey,
    hparams: HParams,
    problem: Problem,
    inputs: Inputs,
) -> tuple[State, History]:
    """One interval of all clients: Algorithm 1.

    Args:
      parts: network, rule, optimizer and spec.
      state: w^t and what goes with it.
      key: of the run.
      hparams: scalars that may be swept.
      problem: samples, test set and index table.
      inputs: the schedule of this interval.

    Returns:
      The state with w^{t+1}, and the record of the interval.
    """
    if parts.spec.lr_varies:
        hparams = optimizers.in_interval(hparams, jnp.asarray(inputs.interval))
    streams = rng.keys(key, "training", "estimates", "rule")
    estimate_key, rule_key = jax.vmap(
        lambda stream: jax.random.fold_in(stream, inputs.interval)
    )(streams[1:])
    clients = renewed(problem, key, inputs.interval, participants(problem, inputs))
    seen = clients._replace(tau=claimed(inputs))
    estimates = estimate(
        parts, state.params, estimate_key, seen, problem.samples, hparams
    )
    info = observe(parts.spec, rule_key, seen, inputs, estimates)
    weights = decide(parts.rules, info, hparams)
    train = client_training(parts, state, streams[0], hparams, problem, inputs)
    counts = weights.rho, weights.shares
    on_device = mapping.device_clients(parts.spec, clients, inputs.assigned, *counts)
    broadcast = None
    if parts.spec.snapshots:
        broadcast = trees.take(state.broadcast, clients.snapshot)
    received = Received(info, weights.rho, info.tau > 0, broadcast, weights.shares)
    arrived = train_and_combine(
        parts, state, train, on_device, clients, weights, received, hparams, problem
    )
    tally = count(arrived.results, on_device, inputs.tau.shape[0], parts.spec.axis)
    new = advance(parts, state, arrived, tally, inputs.delivery.keep, hparams)
    states = client_states.kept(
        parts.spec, state.uplinks, arrived.results, on_device, clients
    )
    new = new._replace(uplinks=states)
    scores = evaluate_if_due(parts, new, problem, inputs.evaluate, hparams)
    return new, record(new, scores, tally, arrived, estimates)


def participants(problem: Problem, inputs: Inputs) -> local.Client:
    """The clients in the slots; leading axis ``[K]``."""
    place = jnp.asarray(inputs.client)
    return local.Client(
        id=jnp.asarray(problem.client)[place],
        tau=jnp.asarray(inputs.tau),
        size=jnp.asarray(inputs.size),
        row=jnp.asarray(problem.rows)[place],
        place=place,
        task=jnp.asarray(inputs.delivery.task),
        snapshot=jnp.asarray(inputs.delivery.snapshot),
    )


def claimed(inputs: Inputs) -> Int[Array, "K"]:
    """Local iterations that the clients of an interval report."""
    reported = jnp.asarray(inputs.reported)
    return jnp.where(reported < 0, inputs.tau, reported)


def observe(
    spec: ProgramSpec,
    key: PRNGKey,
    seen: local.Client,
    inputs: Inputs,
    estimates: tuple[Constants, ClientGradients],
) -> RoundInfo:
    """What a rule may see: the work that clients claim, ages, and the estimates."""
    constants, gradients = estimates
    per_iteration = local.steps_per_iteration(
        seen.size, spec.batch_size, spec.iteration
    )
    return RoundInfo(
        key=key,
        client=seen.id,
        tau=seen.tau,
        size=seen.size,
        steps=seen.tau * per_iteration,
        lag=jnp.asarray(inputs.delivery.lag),
        group=jnp.asarray(inputs.delivery.group),
        constants=constants,
        gradients=gradients,
        interval=jnp.asarray(inputs.interval),
        threshold=jnp.asarray(inputs.threshold),
        place=seen.place,
        share=jnp.asarray(inputs.share),
    )


def renewed(
    problem: Problem, key: PRNGKey, interval: Int[Array, ""], clients: local.Client
) -> local.Client:
    """The clients with the samples that they hold in this interval.

    The same as before, or with `class_index` a random sample of the same class for
    each, drawn with replacement: what a client holds changes, and its shares of the
    classes do not.
    """
    if problem.class_index is None:
        return clients
    stream = jax.random.fold_in(rng.fold(key, "online samples"), interval)
    keys = jax.vmap(lambda i: jax.random.fold_in(stream, i))(clients.id)
    drawn = jax.vmap(lambda k: jax.random.uniform(k, clients.row.shape[1:]))(keys)
    first, count, order, label = map(jnp.asarray, problem.class_index)
    label = label[clients.row]
    place = jnp.floor(drawn * count[label]).astype(jnp.int32)
    place = first[label] + jnp.minimum(place, count[label] - 1)
    return clients._replace(row=order[place])


def client_training(
    parts: Parts,
    state: State,
    key: PRNGKey,
    hparams: HParams,
    problem: Problem,
    inputs: Inputs,
) -> Callable[..., mapping.Trained]:
    """A function of the links' states of all clients, a client and its limit of steps.

    It trains the client and sends its update through the chain; `key` is of training in
    the whole run.
    """
    # Whether updates are measured against the models they started from, not w^t.
    is_own_start = any(r.mixing.deltas or r.mixing.combine for r in parts.rules)

    def train(states: Any, client: local.Client, limit: Any) -> mapping.Trained:
        start, interval = start_of(parts, state, key, client), inputs.interval
        states = trees.take(states, client.place)
        variables = chain.start(
            parts.uplinks, start.variables, states, interval, hparams
        )
        start = start._replace(variables=variables)
        model, result = local.train(
            parts, start, client, problem.samples, hparams, limit
        )
        version = variables if is_own_start else state.params
        info = LinkInfo(rng.fold(start.key, "uplink"), interval, version, model)
        update, states = chain.send(parts.uplinks, states, info, hparams)
        return mapping.Trained(update, result._replace(uplinks=states))

    return train


def start_of(
    parts: Parts, state: State, key: PRNGKey, client: local.Client
) -> local.Start:
    """What one client starts from: w^t, or the snapshot that it had downloaded.

    Args:
      parts: for the rule's gradient correction.
      state: w^t and the snapshots.
      key: of training in the whole run, which a task's own key is folded from.
      client: one client.
    """
    rule, variables = parts.rule, state.params
    broadcast = broadcast_of(rule, state.server)
    if parts.spec.snapshots:
        versions = state.snapshots, state.broadcast
        variables, broadcast = trees.take(versions, client.snapshot)
    added = None
    if (correction := rule.clients.gradient_correction) is not None:
        added = correction(state.server, broadcast, client.place)
    stream = jax.random.fold_in(key, client.task)
    return local.Start(variables, jax.random.fold_in(stream, client.id), added)


def broadcast_of(rule: Aggregator, server: Any) -> Params:
    """What clients download with the model, (): nothing."""
    download = rule.clients.broadcast
    return () if download is None else download(server)


class Arrived(NamedTuple):
    """What training gave, ready for the server's step."""

    mixed: Mixed
    results: local.LocalResult  # [K], of this device's clients
    regret: from_updates.Regret | None = None  # None: not measured


def train_and_combine(
    parts: Parts,
    state: State,
    train: Callable[..., mapping.Trained],
    on_device: mapping.DeviceClients,
    clients: local.Client,
    weights: Weights,
    received: Received,
    hparams: HParams,
    problem: Problem,
) -> Arrived:
    """Train the clients and make one update of theirs.

    By weights: Σ_i ρ_i (w_i − w^t), or with the rule's `deltas` Σ_i ρ_i (w_i − base_i),
    base_i being the model that client i started from, as clients finish. By the rule's
    `combine`: Δ, made of all updates. By the rule's `from_updates`: as by weights, ρ
    chosen from what training gave. All that is of the parameters; other collections
    become a mean of the clients' own, `mean_values`.
    """
    spec = parts.spec
    if parts.rule.stacks or spec.regret or spec.waves > 1:
        updates, results = client_states.stacked_updates(
            train, state.uplinks, on_device, clients, spec
        )
        return combine_stacked(
            parts,
            state,
            updates,
            results,
            on_device,
            weights,
            received,
            hparams,
            problem,
        )
    weighted, results = mapping.weighted_updates(
        functools.partial(train, state.uplinks),
        on_device,
        state.params,
        spec,
        state.uplinks,
    )
    return Arrived(_of_sum(weighted, weights, received, state), results)


def _of_sum(
    weighted: mapping.Weighted, weights: Weights, received: Received, state: State
) -> Mixed:
    """The update that a weighted sum over the devices is."""
    return Mixed(
        update=weighted.moved,
        collections=weighted.collections,
        kept=weighted.kept,
        total=weighted.total_rho,
        weights=weights,
        received=received,
        state=state.server,
    )


def combine_stacked(
    parts: Parts,
    state: State,
    device_updates: Params,
    results: local.LocalResult,
    on_device: mapping.DeviceClients,
    weights: Weights,
    received: Received,
    hparams: HParams,
    problem: Problem,
) -> Arrived:
    """One update of all clients' stacked ones, and the regret of its weights."""
    rule, spec, delta, regret = parts.rule, parts.spec, None, None
    updates, present = mapping.gathered(
        device_updates, results, on_device, received, spec.axis
    )
    validation = problem.samples, problem.validation
    if rule.stacks:
        losses = mapping.losses_of(results, on_device, present, spec.axis)
        objective = from_updates.objective(parts, state.params, updates, *validation)
        mixed = mix_stacked(
            rule,
            updates,
            state.params,
            weights,
            present,
            state.server,
            ClientOutputs(losses, objective),
            hparams,
        )
        if rule.mixing.combine is not None:
            delta = {**mixed.update, "others": trees.values(mixed.collections)}
    else:
        weighted = mapping.weighted_stack(
            device_updates, on_device, results, state.params, spec
        )
        mixed = _of_sum(weighted, weights, received, state)
    if spec.regret:
        at = from_updates.objective(parts, state.params, updates, *validation, delta)
        assert at is not None, "checked before the run"
        rho, shares = mixed.received.rho, mixed.received.shares
        present = present._replace(rho=rho, shares=shares)
        regret = from_updates.regret_of(at, present, delta is None, hparams)
    return Arrived(mixed, results, regret)


def advance(
    parts: Parts,
    state: State,
    arrived: Arrived,
    tally: Tally,
    keep: Int[Array, ""],
    hparams: HParams,
) -> State:
    """w^{t+1} = update(Σ_i ρ_i w_i, w^t), or w^t without a finite model with weight."""
    mixed, diverged = arrived.mixed, state.diverged
    if parts.rule.mixing.combine is None:
        key = mixed.received.info.key
        update = chain.receive(parts.uplinks, mixed.update, key, hparams)
        mixed = mixed._replace(update=update)
    in_step = not parts.spec.snapshots
    if in_step:  # else other clients are still at work on good models
        diverged |= (tally.discarded > 0) & (tally.survivors == 0)
    params, server, is_finite = apply(
        parts.rules,
        mixed,
        state.params,
        state.server,
        hparams,
        jnp.logical_not(diverged),
    )
    diverged |= (mixed.kept > 0) & ~is_finite
    new = State(params, server, diverged)
    if in_step:
        return new
    version = new.params, broadcast_of(parts.rule, new.server)
    snapshots, broadcast = trees.put((state.snapshots, state.broadcast), keep, version)
    return new._replace(snapshots=snapshots, broadcast=broadcast)


def evaluate_if_due(
    parts: Parts,
    new: State,
    problem: Problem,
    due: Bool[Array, ""],
    hparams: HParams,
) -> evaluation.Scores:
    """Accuracy, loss and metrics of w^{t+1} on the test set; NaN if it is not due."""
    axis, sizes, scored = parts.spec.axis, problem.group_size, problem.scored

    def score(params: Params) -> evaluation.Scores:
        given = problem.samples, problem.test
        return evaluation.evaluate(parts.model, params, *given, axis, sizes)

    def test(params: Params, states: Any) -> evaluation.Scores:
        if scored is None:
            return score(params)
        return evaluation.evaluate_personal(
            parts, params, states, problem.client, scored, hparams, score
        )

    number = sizes if scored is None else scored.client
    return lax.cond(
        due,
        test,
        lambda *_: evaluation.nothing(parts.model, number),
        new.params,
        new.uplinks,
    )


def record(
    new: State,
    scores: evaluation.Scores,
    tally: Tally,
    arrived: Arrived,
    estimates: tuple[Constants, ClientGradients],
) -> History:
    """The record of an interval."""
    (constants, gradients), weights = estimates, arrived.mixed.weights
    measured = {} if arrived.regret is None else arrived.regret._asdict()
    return History(
        test_accuracy=scores.accuracy.astype(jnp.float32),
        test_loss=scores.loss.astype(jnp.float32),
        train_loss=tally.loss.astype(jnp.float32),
        threshold=weights.threshold,
        num_selected=weights.selected.sum(),
        weight_entropy=weight_entropy(weights.rho),
        smoothness=constants.smoothness,
        grad_sq_norm=constants.grad_sq_norm,
        grad_variance=constants.grad_variance,
        grad_square=gradients.square,
        coupling=weights.coupling,
        num_discarded=tally.discarded,
        samples=tally.samples,
        diverged=new.diverged,
        rho=weights.rho,
        selected=weights.selected,
        client_variance=gradients.variance,
        client_dissimilarity=gradients.dissimilarity,
        metrics=scores.metrics,
        group_accuracy=scores.group_accuracy,
        group_loss=scores.group_loss,
        **measured,
    )
