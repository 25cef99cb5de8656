"""One interval of all clients: train, aggregate, evaluate, record.

Algorithm 1 of Shao et al., "Robust Model Aggregation for Heterogeneous Federated
Learning: Analysis and Optimizations", is `run_interval`. In interval t of T-SFL every
client trains τ_i^t local iterations from w^t, the server forms w^{t+1} from
Σ_i ρ_i^t w_i^t, and the new model is evaluated. In asynchronous frameworks
(`types.Delivery`) an interval is one global update by the clients that deliver: each
started from the model it had downloaded, one of P snapshots of earlier global models.
Which clients take part, all or some in slots, is apart from that.
NOT done: nothing here communicates with the host.

Random streams are those of `rng`, by interval and client, so results do not depend on
how clients are grouped in blocks or ordered, nor on where a run was resumed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from tsfl_jax import rng, trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import (
    evaluation,
    from_updates,
    mapping,
    optimizers,
    own_layers,
)
from tsfl_jax.engine.estimates import estimate
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.engine.tally import Tally, count
from tsfl_jax.models.losses import weight_entropy
from tsfl_jax.rules.apply import Mixed, apply, decide, mix_stacked
from tsfl_jax.rules.base import ClientOutputs, Received, RoundInfo, Weights
from tsfl_jax.timeline.feedback import Known
from tsfl_jax.types import (
    Array,
    ClientGradients,
    Constants,
    Delivery,
    HParams,
    Lots,
    Params,
    PRNGKey,
)


class State(NamedTuple):
    """What one interval hands to the next."""

    params: Params  # w^t, the global model's Flax variables
    server: Any  # the aggregation rule's own state
    # No client's model was finite, or not the new global one; params: the last good.
    diverged: Bool[Array, ""]
    snapshots: Params | None = None  # [P, ...], earlier models that clients start from
    broadcast: Params | None = None  # [P, ...], what the rule had broadcast with them
    feedback: Known | None = None  # [U], of clients; None: Oort does not choose
    own: Any = None  # [U, ...], layers that stay with each client; None: none do


class Problem(NamedTuple):
    """Everything on the device that does not change during a run."""

    samples: local.Samples
    test: evaluation.TestSet
    # Of the clients that are ever in a slot; `Inputs.client` has places in these axes.
    rows: Int[Array, "U D"]  # which samples each client may use
    client: Int[Array, "U"]  # ids, which name the clients' random streams
    # Clients get new samples in every interval, of the classes of those in their rows.
    class_index: local.ClassIndex | None = None
    # Samples that no client holds; None: there are none. Lanes have their own.
    validation: evaluation.HeldOut | None = None
    # Test samples of each group that is scored by itself; None: no groups.
    group_size: Int[Array, "G"] | None = None
    # Whose models are tested, where layers stay with the clients. Lanes have their own.
    scored: own_layers.Scored | None = None


class Inputs(NamedTuple):
    """The schedule of interval t; a leading axis ``[R]`` makes a chunk of intervals."""

    interval: Int[Array, "..."]  # t = 0..T−1
    tau: Int[Array, "... N"]  # local iterations
    size: Int[Array, "... N"]  # samples held
    evaluate: Bool[Array, "..."]
    # Clients that this device trains; N marks an empty entry, see `devices.assign`.
    assigned: Int[Array, "... K"]
    # Local iterations that clients report; None: those they did, τ.
    reported: Int[Array, "... N"] | None = None
    # Which client is in slot k of N; None: client k.
    client: Int[Array, "... N"] | None = None
    delivery: Delivery | None = None  # None: all start from w^t
    threshold: Float[Array, "..."] | None = None  # K of DMS; NaN, None: the mean of τ
    share: Float[Array, "... N"] | None = None  # ρ of `weighting`; None: the rule's
    lots: Lots | None = None  # of candidates, in place of N; see `choosing`


# Fields of `History` that are None unless they were asked for.
REGRET = from_updates.Regret._fields
OPTIONAL = ("metrics", "group_accuracy", "group_loss", "chosen", *REGRET)


class History(NamedTuple):
    """The record of interval t; NaN if it does not apply or was not measured."""

    test_accuracy: Float[Array, "..."]  # in [0, 1]; NaN: the model does not classify
    test_loss: Float[Array, "..."]  # in nats, or the model's own unit
    train_loss: Float[Array, "..."]  # likewise, mean over all samples trained on
    threshold: Float[Array, "..."]  # K
    num_selected: Int[Array, "..."]
    weight_entropy: Float[Array, "..."]  # nats
    smoothness: Array | float  # L
    grad_sq_norm: Array | float  # G²
    grad_variance: Array | float  # σ²
    grad_square: Float[Array, "..."]  # ‖∇F(w^t)‖²
    coupling: Float[Array, "..."]  # c
    num_discarded: Int[Array, "..."]  # clients with τ > 0 whose model was not finite
    samples: Int[Array, "... N"]  # samples trained on; their sum needs 64 bits
    diverged: Bool[Array, "..."]  # from the interval on in which all models were lost
    rho: Float[Array, "... N"]
    selected: Bool[Array, "... N"]
    client_variance: Float[Array, "... N"]  # σ_i²
    client_dissimilarity: Float[Array, "... N"]  # ‖∇F_i − ∇F‖²
    # Of the user or of the network; None: there are none.
    metrics: Float[Array, "... m"] | None = None
    # By class or client of the test samples; None: not asked for.
    group_accuracy: Float[Array, "... G"] | None = None
    group_loss: Float[Array, "... G"] | None = None
    # See `from_updates.Regret`; None: not measured.
    validation_loss: Float[Array, "..."] | None = None
    regret: Float[Array, "..."] | None = None
    gap: Float[Array, "..."] | None = None
    slope: Float[Array, "... N"] | None = None
    # Who of the candidates is in a slot; None: those of the schedule.
    chosen: Int[Array, "... N"] | None = None

    def named(self, metrics: Sequence[str] = ()) -> dict[str, Any]:
        """All fields by name, the user's own metrics each under its own."""
        known = self._replace(chosen=None)._asdict()  # "client" says who that is
        found = {n: a for n, a in known.items() if a is not None}
        own = found.pop("metrics", None)
        return found | {name: own[..., i] for i, name in enumerate(metrics)}


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
    train_key, estimate_key, rule_key = jax.vmap(
        lambda stream: jax.random.fold_in(stream, inputs.interval)
    )(streams)
    clients = renewed(problem, key, inputs.interval, participants(problem, inputs))
    reported = inputs.tau if inputs.reported is None else inputs.reported
    claimed = clients._replace(tau=reported)
    sampled = estimate_key, claimed, problem.samples
    estimates = estimate(parts, state.params, *sampled, hparams)
    info = observe(parts.spec, rule_key, claimed, inputs, estimates)
    weights = decide(parts.rules, info, hparams)
    # Whether updates are measured against the models they started from, not w^t.
    moved = any(r.mixing.deltas or r.mixing.combine for r in parts.rules)

    def train(own: Any, client: local.Client, limit: Any) -> mapping.Trained:
        keys, begun = (streams[0], train_key), state._replace(own=own)
        start = start_of(parts, begun, keys, client, inputs.interval)
        found = local.train(parts, start, client, problem.samples, hparams, limit)
        origin = start.variables if moved else state.params
        sent, result = own_layers.withheld(parts.spec, *found, origin, inputs.interval)
        return mapping.Trained(sent, origin, result)

    counts = weights.rho, weights.shares
    on_device = mapping.device_clients(parts.spec, clients, inputs.assigned, *counts)
    broadcast = None
    if inputs.delivery is not None:
        broadcast = trees.take(state.broadcast, clients.snapshot)
    received = Received(info, weights.rho, info.tau > 0, broadcast, weights.shares)
    arrived = train_and_combine(
        parts, state, train, on_device, clients, received, hparams, (weights, problem)
    )
    tally = count(arrived.results, on_device, inputs.tau.shape[0], parts.spec.axis)
    new = advance(parts, state, arrived, tally, inputs.delivery, hparams)
    own = own_layers.kept(parts.spec, state.own, arrived.results, on_device, clients)
    new = new._replace(own=own)
    scores = evaluate_if_due(parts, new, problem, inputs.evaluate)
    return new, record(new, scores, tally, arrived, estimates)


def participants(problem: Problem, inputs: Inputs) -> local.Client:
    """All clients, or those in the slots; leading axis ``[N]``."""
    given = problem.client, problem.rows, inputs.tau, inputs.size
    ids, rows, tau, size = map(jnp.asarray, given)
    place = jnp.arange(len(ids), dtype=jnp.int32)
    if inputs.client is not None:
        place = jnp.asarray(inputs.client)
        ids, rows = ids[place], rows[place]
    found = local.Client(ids, tau, size, rows, place)
    if inputs.delivery is None:
        return found
    task, snapshot, *_ = map(jnp.asarray, inputs.delivery)
    return found._replace(task=task, snapshot=snapshot)


def observe(
    spec: ProgramSpec,
    key: PRNGKey,
    claimed: local.Client,
    inputs: Inputs,
    estimates: tuple[Constants, ClientGradients],
) -> RoundInfo:
    """What a rule may see: the work that clients claim, ages, and the estimates."""
    delivery, threshold = inputs.delivery, inputs.threshold
    per_iteration = local.steps_per_iteration(
        claimed.size, spec.batch_size, spec.iteration
    )
    return RoundInfo(
        key,
        claimed.id,
        claimed.tau,
        claimed.size,
        claimed.tau * per_iteration,
        jnp.zeros_like(claimed.tau) if delivery is None else jnp.asarray(delivery.lag),
        jnp.int32(0) if delivery is None else jnp.asarray(delivery.group),
        *estimates,
        interval=jnp.asarray(inputs.interval),
        threshold=jnp.float32(jnp.nan) if threshold is None else jnp.asarray(threshold),
        place=claimed.place,
        share=inputs.share,
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


def start_of(
    parts: Parts,
    state: State,
    keys: tuple[PRNGKey, PRNGKey],
    client: local.Client,
    interval: Int[Array, ""],
) -> local.Start:
    """What one client starts from: w^t, or the snapshot that it had downloaded.

    Args:
      parts: for the rule's gradient correction.
      state: w^t and the snapshots.
      keys: of training in the whole run, which a task's own key is folded from, and of
        training in this interval.
      client: one client.
      interval: t.
    """
    rule, variables = parts.rule.clients, state.params
    broadcast = None if rule.broadcast is None else rule.broadcast(state.server)
    stream = keys[1]
    if client.task is not None:
        stream = jax.random.fold_in(keys[0], client.task)
        variables, broadcast = trees.take(
            (state.snapshots, state.broadcast), client.snapshot
        )
    added = None
    if rule.gradient_correction is not None:
        assert client.place is not None, "of `participants`"
        added = rule.gradient_correction(state.server, broadcast, client.place)
    variables = own_layers.placed(parts.spec, variables, state.own, client, interval)
    return local.Start(variables, jax.random.fold_in(stream, client.id), added)


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
    received: Received,
    hparams: HParams,
    given: tuple[Weights, Problem],
) -> Arrived:
    """Train the clients and combine their models.

    By weights: Σ_i ρ_i w_i = (Σ ρ) w^t + Σ_i ρ_i (w_i − w^t), or with the rule's
    `deltas` w^t + Σ_i ρ_i (w_i − base_i), base_i being the model that client i started
    from. By the rule's `combine`: w^t + Δ, with Δ made of all updates. By the rule's
    `from_updates`: as by weights, ρ chosen from what training gave. All that is of the
    parameters; other collections become a mean of the clients' own, `mean_values`.
    """
    rule, spec = parts.rule, parts.spec
    weights, problem = given
    by_weights = not rule.stacks

    def of_sum(weighted: mapping.Weighted) -> Mixed:
        sums = weighted.moved, weighted.others, weighted.kept, weighted.asked
        return Mixed(*sums, weights, received, state.server)

    if by_weights and not spec.regret and spec.waves == 1:
        weighted, results = mapping.weighted_updates(
            functools.partial(train, state.own), on_device, state.params, spec
        )
        return Arrived(of_sum(weighted), results)
    own, results = own_layers.stacked_updates(
        train, state.own, on_device, clients, spec
    )
    updates, there = mapping.gathered(own, results, on_device, received, spec.axis)
    held = problem.samples, problem.validation
    objective = from_updates.objective(parts, state.params, updates, *held)
    delta = None
    if by_weights:
        weighted = mapping.weighted_stack(own, on_device, results, state.params, spec)
        mixed = of_sum(weighted)
    else:
        losses = mapping.losses_of(results, on_device, there, spec.axis)
        outputs = ClientOutputs(losses, objective)
        mixed = mix_stacked(
            rule, updates, state.params, weights, there, state.server, outputs, hparams
        )
        if rule.mixing.combine is not None:
            delta = {**mixed.update, "others": trees.values(mixed.collections)}
    regret = None
    if spec.regret:
        at = from_updates.objective(parts, state.params, updates, *held, delta)
        assert at is not None, "checked before the run"
        there = there._replace(rho=mixed.received.rho, shares=mixed.received.shares)
        regret = from_updates.regret_of(at, there, delta is None, hparams)
    return Arrived(mixed, results, regret)


def advance(
    parts: Parts,
    state: State,
    arrived: Arrived,
    tally: Tally,
    delivery: Delivery | None,
    hparams: HParams,
) -> State:
    """w^{t+1} = update(Σ_i ρ_i w_i, w^t), or w^t without a finite model with weight."""
    rule, mixed, diverged = parts.rule.clients, arrived.mixed, state.diverged
    if delivery is None:  # else other clients are still at work on good models
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
    if delivery is None:
        return new
    broadcast = None if rule.broadcast is None else rule.broadcast(new.server)
    snapshots, broadcast = trees.put(
        (state.snapshots, state.broadcast), delivery.keep, (new.params, broadcast)
    )
    return new._replace(snapshots=snapshots, broadcast=broadcast)


def evaluate_if_due(
    parts: Parts, new: State, problem: Problem, due: Bool[Array, ""]
) -> evaluation.Scores:
    """Accuracy, loss and metrics of w^{t+1} on the test set; NaN if it is not due."""
    axis, sizes, scored = parts.spec.axis, problem.group_size, problem.scored

    def score(params: Params) -> evaluation.Scores:
        given = problem.samples, problem.test
        return evaluation.evaluate(parts.model, params, *given, axis, sizes)

    def test(params: Params, own: Any) -> evaluation.Scores:
        if scored is None:
            return score(params)
        given = params, own, problem.client, scored
        return own_layers.evaluate(parts, *given, score)

    number = sizes if scored is None else scored.client
    return lax.cond(
        due,
        test,
        lambda *_: evaluation.nothing(parts.model, number),
        new.params,
        new.own,
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
