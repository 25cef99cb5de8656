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

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int

from tsfl_jax import rng, trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import evaluation, from_updates, mapping, optimizers
from tsfl_jax.engine.estimates import estimate
from tsfl_jax.engine.mapping import Tally, count
from tsfl_jax.engine.program_spec import ProgramSpec
from tsfl_jax.engine.structures import History, Inputs, Interval, Problem, State
from tsfl_jax.models.losses import weight_entropy
from tsfl_jax.rules.apply import Mixed, apply, decide, mix_stacked
from tsfl_jax.rules.base import Aggregator, ClientOutputs, Received, RoundInfo, Weights
from tsfl_jax.types import Array, ClientGradients, Constants, Params, PRNGKey
from tsfl_jax.uplink import chain
from tsfl_jax.uplink.link import LinkInfo, SumInfo


def run_interval(interval: Interval) -> tuple[State, History]:
    """One interval of all clients, Algorithm 1; the new state and the record."""
    parts, state, key, hparams, problem, inputs = interval
    if factors := parts.spec.lr_factors:
        t = jnp.asarray(inputs.interval)
        hparams = optimizers.in_interval(hparams, t, factors)
        interval = interval._replace(hparams=hparams)
    streams = rng.keys(key, "training", "estimates", "rule")
    estimate_key, rule_key = jax.vmap(
        lambda stream: jax.random.fold_in(stream, inputs.interval)
    )(streams[1:])
    clients = participants(interval)
    seen = clients._replace(tau=claimed(inputs))
    estimates = estimate(interval, estimate_key, seen)
    info = observe(interval, rule_key, seen, estimates)
    weights = decide(parts.rules, info, hparams)
    on_device = mapping.device_clients(
        parts.spec, clients, inputs.assigned, weights.rho, weights.shares
    )
    broadcast = None
    if parts.spec.snapshots:
        broadcast = trees.take(state.broadcast, clients.snapshot)
    received = Received(info, weights.rho, info.tau > 0, broadcast, weights.shares)
    train = client_training(interval, streams[0])
    arrived = train_and_combine(interval, train, on_device, clients, weights, received)
    tally = count(arrived.results, on_device, inputs.tau.shape[0], parts.spec.axis)
    sums = of_sum(arrived.mixed, len(problem.client), parts.spec.frozen)
    new = advance(interval, arrived, tally, sums)
    states = kept_states(parts.spec, state.uplinks, arrived.results, on_device, clients)
    new = new._replace(uplinks=chain.adapt(parts.uplinks, states, sums, hparams))
    return new, record(new, evaluate_if_due(interval, new), tally, arrived, estimates)


def participants(interval: Interval) -> local.Client:
    """The clients in the slots, with the samples that they hold now; axis ``[K]``."""
    problem, inputs = interval.problem, interval.inputs
    place = jnp.asarray(inputs.client)
    clients = local.Client(
        id=jnp.asarray(problem.client)[place],
        tau=jnp.asarray(inputs.tau),
        size=jnp.asarray(inputs.size),
        row=jnp.asarray(problem.rows)[place],
        place=place,
        task=jnp.asarray(inputs.delivery.task),
        snapshot=jnp.asarray(inputs.delivery.snapshot),
    )
    return renewed(problem, interval.key, inputs.interval, clients)


def claimed(inputs: Inputs) -> Int[Array, "K"]:
    """Local iterations that the clients of an interval report."""
    reported = jnp.asarray(inputs.reported)
    return jnp.where(reported < 0, inputs.tau, reported)


def observe(
    interval: Interval,
    key: PRNGKey,
    seen: local.Client,
    estimates: tuple[Constants, ClientGradients],
) -> RoundInfo:
    """What a rule may see: the work that clients claim, ages, and the estimates."""
    inputs, (constants, gradients) = interval.inputs, estimates
    return RoundInfo(
        key=key,
        client=seen.id,
        tau=seen.tau,
        size=seen.size,
        steps=local.mini_batch_steps(interval.parts.spec, seen),
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
    if not problem.class_index:
        return clients
    stream = jax.random.fold_in(rng.fold(key, "online samples"), interval)
    keys = jax.vmap(lambda i: jax.random.fold_in(stream, i))(clients.id)
    drawn = jax.vmap(lambda k: jax.random.uniform(k, clients.row.shape[1:]))(keys)
    first, count, order, label = map(jnp.asarray, problem.class_index)
    label = label[clients.row]
    place = jnp.floor(drawn * count[label]).astype(jnp.int32)
    place = first[label] + jnp.minimum(place, count[label] - 1)
    return clients._replace(row=order[place])


def client_training(interval: Interval, key: PRNGKey) -> Callable[..., mapping.Trained]:
    """(the links' states of all clients, a client, its limit of steps) → its update."""
    parts, state, _, hparams, problem, inputs = interval
    links = parts.uplinks
    # Whether updates are measured against the models they started from, not w^t.
    is_own_start = any(r.mixing.deltas or r.mixing.combine for r in parts.rules)
    # Else links read what a client changes of its download, and the server adds what
    # the model of that lacks of w^t.
    is_older = bool(links) and parts.spec.snapshots > 0 and not is_own_start

    def train(states: Any, client: local.Client, limit: Any) -> mapping.Trained:
        start, number = start_of(interval, key, client), inputs.interval
        states = trees.take(states, client.place)
        older = start.variables
        downloaded = chain.download(links, older, hparams)
        variables = chain.start(links, downloaded, states, number, hparams)
        start = start._replace(variables=variables)
        model, result = local.train(
            parts, start, client, problem.samples, hparams, limit
        )
        version = downloaded if links else state.params
        version = variables if is_own_start else version
        info = LinkInfo(rng.fold(start.key, "uplink"), number, version, model)
        info = info._replace(client=client.id, frozen=parts.spec.frozen)
        if problem.attacker is not None:
            info = info._replace(is_attacker=problem.attacker[client.place])
        update, states = chain.send(links, states, info, hparams)
        if is_older:
            update["params"] = jax.tree.map(
                lambda u, base, w: u + (base - w),
                *(tree["params"] for tree in (update, older, state.params)),
            )
        return mapping.Trained(update, result._replace(uplinks=states))

    return train


def start_of(interval: Interval, key: PRNGKey, client: local.Client) -> local.Start:
    """What one client starts from: w^t, or the snapshot that it had downloaded."""
    rule, state = interval.parts.rule, interval.state
    variables, broadcast = state.params, broadcast_of(rule, state.server)
    if interval.parts.spec.snapshots:
        versions = state.snapshots, state.broadcast
        variables, broadcast = trees.take(versions, client.snapshot)
    added = None
    if correction := rule.clients.gradient_correction:
        added = correction(state.server, broadcast, client.place)
    stream = jax.random.fold_in(key, client.task)
    key = jax.random.fold_in(stream, client.id)
    return local.Start(variables, key, added, client.id)


def broadcast_of(rule: Aggregator, server: Any) -> Params:
    """What clients download with the model, (): nothing."""
    download = rule.clients.broadcast
    return download(server) if download else ()


class Arrived(NamedTuple):
    """What training gave, ready for the server's step."""

    mixed: Mixed
    results: local.LocalResult  # [K], of this device's clients
    regret: from_updates.Regret | None = None  # None: not measured


def train_and_combine(
    interval: Interval,
    train: Callable[..., mapping.Trained],
    on_device: mapping.DeviceClients,
    clients: local.Client,
    weights: Weights,
    received: Received,
) -> Arrived:
    """Train the clients and make one update of theirs.

    By weights: Σ_i ρ_i (w_i − w^t), or with the rule's `deltas` Σ_i ρ_i (w_i − base_i),
    base_i being the model that client i started from, as clients finish. By the rule's
    `combine`: Δ, made of all updates. By the rule's `from_updates`: as by weights, ρ
    chosen from what training gave. All that is of the parameters; other collections
    become a mean of the clients' own, `mean_values`.
    """
    spec, state = interval.parts.spec, interval.state
    links = interval.parts.uplinks
    colluding = [(link.collude, link.section) for link in links if link.collude]
    if interval.parts.rule.stacks or spec.regret or spec.waves > 1 or colluding:
        updates, results = stacked_updates(
            train, state.uplinks, on_device, clients, spec
        )
        stack = mapping.gathered(updates, results, on_device, received, spec.axis)
        for collude, section in colluding:
            attacks = cast(Array, interval.problem.attacker)[clients.place]
            seen = stack.updates, stack.received.present, attacks
            sent = collude(*seen, interval.hparams.of(section))
            stack = stack._replace(updates=sent)
            last = clients.tau.shape[0] - 1  # whatever it is of an empty entry
            updates = trees.take(stack.updates, jnp.minimum(on_device.place, last))
        if interval.parts.rule.stacks:
            mixed = _of_stack(interval, stack, weights)
        else:
            entries = updates, on_device, results, state.params, spec
            weighted = mapping.weighted_stack(*entries)
            mixed = Mixed(*weighted, weights, received, state.server)
        regret = _regret_of(interval, stack, mixed) if spec.regret else None
        return Arrived(mixed, results, regret)
    weighted, results = mapping.weighted_updates(
        functools.partial(train, state.uplinks),
        on_device,
        state.params,
        spec,
        state.uplinks,
    )
    return Arrived(Mixed(*weighted, weights, received, state.server), results)


def kept_states(
    spec: ProgramSpec,
    states: Any,
    results: local.LocalResult,
    on_device: mapping.DeviceClients,
    clients: local.Client,
) -> Any:
    """All clients' states ``[U, ...]``: the new ones where a model is finite.

    Of several deliveries of one of the K clients the last.
    """
    if not jax.tree.leaves(states):
        return states
    slots, count = clients.tau.shape[0], jax.tree.leaves(states)[0].shape[0]
    entries = results.uplinks, results.finite.astype(jnp.int32)
    new_states, finite = mapping.of_all(entries, on_device, slots, spec.axis)
    worked = (clients.tau > 0) & (finite > 0)
    return trees.put(states, trees.last_of(clients.place, worked, count), new_states)


def stacked_updates(
    train: Callable[..., mapping.Trained],
    states: Any,
    on_device: mapping.DeviceClients,
    clients: local.Client,
    spec: ProgramSpec,
) -> tuple[Params, local.LocalResult]:
    """`mapping.stacked_updates`, in wave j of the j-th tasks of clients in an update.

    So each starts from the state that its client's last task left.
    """
    if spec.waves == 1:
        with_states = functools.partial(train, states)
        return mapping.stacked_updates(with_states, on_device, spec)
    earlier = (clients.task[None] < clients.task[:, None]) & (clients.tau > 0)[None]
    turn = (earlier & (clients.place[None] == clients.place[:, None])).sum(axis=1)
    members, stacked = on_device.clients, cast(Any, None)
    for wave in range(spec.waves):
        in_wave = turn[on_device.place] == wave  # whatever it is of an empty entry
        workers = members._replace(tau=jnp.where(in_wave, members.tau, 0))
        workers = on_device._replace(clients=workers)
        with_states = functools.partial(train, states)
        trained = mapping.stacked_updates(with_states, workers, spec)
        of_wave = clients._replace(tau=jnp.where(turn == wave, clients.tau, 0))
        states = kept_states(spec, states, trained[1], on_device, of_wave)
        entry: Array = jnp.where(in_wave, jnp.arange(len(in_wave)), len(in_wave))
        stacked = trees.put(stacked or trained, entry, trained)
    return stacked


def _of_stack(interval: Interval, stack: mapping.Stack, weights: Weights) -> Mixed:
    """The update that the rule makes of all updates."""
    parts, state, _, hparams, problem, _ = interval
    objective = from_updates.objective(
        parts, state.params, stack.updates, problem.samples, problem.validation
    )
    moved, server_update = trees.parted(stack.updates)[0], None
    if parts.rule.mixing.trains_server:
        server_update = trained_by_server(interval, stack.received)
    return mix_stacked(
        parts.rule,
        stack.updates,
        state.params,
        weights,
        stack.received,
        state.server,
        ClientOutputs(stack.loss, objective, moved, server_update),
        hparams,
    )


def trained_by_server(interval: Interval, received: Received) -> Params:
    """The update of the parameters that the server trains on validation samples.

    From w^t, with as many mini-batch steps as the median client reports; the same on
    all devices.
    """
    parts, state, _, hparams, problem, _ = interval
    assert problem.validation, "checked before the run"
    steps = jnp.where(received.present, received.info.steps, jnp.nan)
    rows, mask = map(jnp.asarray, problem.validation)
    zero = jnp.int32(0)
    median = jnp.nan_to_num(jnp.nanmedian(steps)).astype(jnp.int32)
    samples = median, mask.sum(), rows.reshape(-1)
    server = local.Client(zero, *samples, place=zero, task=zero, snapshot=zero)
    parts = parts._replace(spec=dataclasses.replace(parts.spec, iteration="step"))
    start = local.Start(state.params, rng.fold(received.info.key, "server training"))
    model, _ = local.train(parts, start, server, problem.samples, hparams)
    moved, params = trees.parted(model)[0], trees.parted(state.params)[0]
    return jax.tree.map(jnp.subtract, moved, params)


def _regret_of(
    interval: Interval, stack: mapping.Stack, mixed: Mixed
) -> from_updates.Regret:
    """The regret of the weights that count."""
    parts, state, _, hparams, problem, _ = interval
    delta, validation = None, (problem.samples, problem.validation)
    if parts.rule.mixing.combine:
        delta = {**mixed.update, "others": trees.values(mixed.collections)}
    at = from_updates.objective(parts, state.params, stack.updates, *validation, delta)
    assert at, "checked before the run"
    rho, shares = mixed.received.rho, mixed.received.shares
    present = stack.received._replace(rho=rho, shares=shares)
    return from_updates.regret_of(at, present, not delta, hparams)


def of_sum(mixed: Mixed, number: int, frozen: tuple[str, ...]) -> SumInfo:
    """What links may see of the sum, with U clients."""
    info, zeros = mixed.received.info, jnp.zeros(number)
    exposure = zeros.at[info.places].add(jnp.abs(mixed.weights.rho)).max()
    count = zeros.at[info.places].max((info.tau > 0).astype(zeros.dtype)).sum()
    return SumInfo(rng.fold(info.key, "uplink"), exposure, count, frozen)


def advance(interval: Interval, arrived: Arrived, tally: Tally, sums: SumInfo) -> State:
    """w^{t+1} = update(Σ_i ρ_i w_i, w^t), or w^t without a finite model with weight."""
    parts, state, _, hparams, _, inputs = interval
    mixed, diverged = arrived.mixed, state.diverged
    if not parts.rule.mixing.combine:
        update = chain.receive(
            parts.uplinks, mixed.update, state.uplinks, sums, hparams
        )
        mixed = mixed._replace(update=update)
    in_step = not parts.spec.snapshots
    if in_step:  # else other clients are still at work on good models
        diverged |= (tally.discarded > 0) & (tally.survivors == 0)
    is_open = jnp.logical_not(diverged)
    params, server, is_finite = apply(
        parts.rules, mixed, state.params, state.server, hparams, is_open
    )
    diverged |= (mixed.kept > 0) & ~is_finite
    new = State(params, server, diverged)
    if in_step:
        return new
    version = new.params, broadcast_of(parts.rule, new.server)
    snapshots, broadcast = trees.put(
        (state.snapshots, state.broadcast), inputs.delivery.keep, version
    )
    return new._replace(snapshots=snapshots, broadcast=broadcast)


def evaluate_if_due(interval: Interval, new: State) -> evaluation.Scores:
    """Accuracy, loss and metrics of w^{t+1} on the test set; NaN if it is not due."""
    parts, _, _, hparams, problem, inputs = interval
    scored, data = problem.scored, (problem.samples, problem.test)
    grouped = parts.spec.axis, problem.group_size

    def score(params: Params) -> evaluation.Scores:
        return evaluation.evaluate(parts.model, params, *data, *grouped)

    def test(params: Params, states: Any) -> evaluation.Scores:
        if not scored:
            return score(params)
        return evaluation.evaluate_personal(
            parts, params, states, problem.client, scored, hparams, score
        )

    def nothing(*given: Any) -> evaluation.Scores:
        shapes = jax.eval_shape(test, *given)
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), shapes)

    return lax.cond(inputs.evaluate, test, nothing, new.params, new.uplinks)


def record(
    new: State,
    scores: evaluation.Scores,
    tally: Tally,
    arrived: Arrived,
    estimates: tuple[Constants, ClientGradients],
) -> History:
    """The record of an interval."""
    (constants, gradients), weights = estimates, arrived.mixed.weights
    measured = arrived.regret._asdict() if arrived.regret else {}
    return History(
        test_accuracy=scores.accuracy.astype(jnp.float32),
        test_loss=scores.loss.astype(jnp.float32),
        train_loss=tally.loss.astype(jnp.float32),
        threshold=weights.threshold,
        num_selected=weights.selected.sum(),
        weight_entropy=weight_entropy(weights.rho),
        **constants._asdict(),
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
