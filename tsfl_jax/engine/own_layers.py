"""Layers that stay on the client, always or for some intervals.

Their leaves of the variables, named by parts of their paths (``spec.local``), are never
sent: each client starts from its own of its last delivery, and what it would upload of
them is 0. The global model keeps those of w^0, so that only clients can be scored. That
is FedBN and FedPer.

With ``spec.local_period`` P > 0 they are sent in every P-th interval, and downloaded at
the beginning of the next one: deep layers that are sent less often than shallow ones,
the layerwise updates of Chen, Sun and Jin. Simplified: in the paper 5 of 15 rounds, one
after another, have all layers. Who is away in the interval in which these are
downloaded goes on from its own, which it trained last.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021. Arivazhagan et al., "Federated Learning with Personalization
Layers", 2019. Y. Chen, X. Sun, Y. Jin, "Communication-Efficient Federated Deep Learning
with Layerwise Asynchronous Model Update and Temporally Weighted Aggregation", IEEE
TNNLS 2020.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from tsfl_jax import trees, types
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, evaluation, mapping
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.types import Params


class Scored(NamedTuple):
    """Clients whose models are tested."""

    client: Int[types.Array, "m"]  # ids; −1 fills up
    # What each group of test samples counts for a client; rows of 0 fill up.
    share: Float[types.Array, "m G"]


def downloaded(interval: Any, period: int) -> Any:
    """Whether the layers are downloaded in an interval: those that follow an upload."""
    return (interval % period == 0) & (interval > 0)


def uploaded(interval: Any, period: int) -> Any:
    """Whether the layers are uploaded in an interval: every P-th."""
    return (interval + 1) % period == 0


def placed(
    spec: ProgramSpec,
    variables: Params,
    own: Any,
    client: local.Client,
    interval: Int[types.Array, ""],
) -> Params:
    """What a client starts from, with its own layers in place of the global ones."""
    if not spec.local:
        return variables
    mine = trees.take(own, client.place)
    if spec.local_period:
        given = trees.picked(variables, spec.local)
        new = downloaded(interval, spec.local_period)
        mine = optax.tree.where(new, given, mine)
    return trees.replaced(variables, spec.local, mine)


def withheld(
    spec: ProgramSpec,
    model: Params,
    result: local.LocalResult,
    origin: Params,
    interval: Int[types.Array, ""],
) -> tuple[Params, local.LocalResult]:
    """The model without the client's own layers, and these in its result.

    In their place are those of `origin`, which the model's update is measured against:
    the update is 0 there, and no mean changes.
    """
    if not spec.local:
        return model, result
    mine, sent = (trees.picked(tree, spec.local) for tree in (model, origin))
    if spec.local_period:
        sent = optax.tree.where(uploaded(interval, spec.local_period), mine, sent)
    model = trees.replaced(model, spec.local, sent)
    return model, result._replace(own=mine)


def kept(
    spec: ProgramSpec,
    own: Any,
    results: local.LocalResult,
    on_device: mapping.DeviceClients,
    clients: local.Client,
) -> Any:
    """All clients' own layers after an interval; where a model is finite.

    Args:
      spec: with the mesh axis.
      own: leaves ``[U, ...]``; None: there are none.
      results: of this device's clients ``[K]``.
      on_device: which clients they are.
      clients: all of the interval ``[N]``; of several deliveries of one the last.
    """
    if not spec.local:
        return own
    number, count = clients.tau.shape[0], jax.tree.leaves(own)[0].shape[0]
    there = results.own, results.finite.astype(jnp.int32)
    there = trees.scattered(there, on_device.place, number)
    mine, finite = devices.total(there, spec.axis)
    assert clients.place is not None, "of `participants`"
    worked = (clients.tau > 0) & (finite > 0)
    return trees.put(own, trees.last_of(clients.place, worked, count), mine)


def stacked_updates(
    train: Callable[..., mapping.Trained],
    own: Any,
    on_device: mapping.DeviceClients,
    clients: local.Client,
    spec: ProgramSpec,
) -> tuple[Params, local.LocalResult]:
    """`mapping.stacked_updates`, in wave j of the j-th tasks of clients in an update.

    So each starts from the layers that its client's last task left. `train` takes those
    of all clients before a client; arguments as of `kept`.
    """
    if spec.waves == 1:
        return mapping.stacked_updates(functools.partial(train, own), on_device, spec)
    assert clients.place is not None and clients.task is not None, "of a timeline"
    earlier = (clients.task[None] < clients.task[:, None]) & (clients.tau > 0)[None]
    turn = (earlier & (clients.place[None] == clients.place[:, None])).sum(axis=1)
    mine, stacked = on_device.clients, cast(Any, None)
    for wave in range(spec.waves):
        here = turn[on_device.place] == wave  # whatever it is of an empty entry
        part = mine._replace(tau=jnp.where(here, mine.tau, 0))
        part = on_device._replace(clients=part)
        trained = mapping.stacked_updates(functools.partial(train, own), part, spec)
        workers = clients._replace(tau=jnp.where(turn == wave, clients.tau, 0))
        own = kept(spec, own, trained[1], on_device, workers)
        entry = jnp.where(here, jnp.arange(len(here)), len(here))
        stacked = trees.put(stacked or trained, entry, trained)
    return stacked


def evaluate(
    parts: Parts,
    params: Params,
    own: Any,
    ids: Int[types.Array, "U"],
    scored: Scored,
    score: Any,
) -> evaluation.Scores:
    """Test the clients' own models, one after another.

    Args:
      parts: with the spec.
      params: the global model.
      own: leaves ``[U, ...]``.
      ids: of the U clients.
      scored: whom to test, and on what.
      score: a model's variables → `evaluation.Scores` with scores by group.

    Returns:
      Means over the clients of each score on the whole test set. By group are scores of
      the clients: ``[m]``, NaN for one without test samples.
    """

    def one(client: Scored) -> tuple[Any, Array, Array]:
        mine = trees.take(own, jnp.argmax(ids == client.client))
        found = score(trees.replaced(params, parts.spec.local, mine))
        by_group = found.group_accuracy, found.group_loss
        accuracy, loss = (_mixed(client.share, values) for values in by_group)
        return (found.accuracy, found.loss, found.metrics), accuracy, loss

    whole, accuracy, loss = lax.map(one, scored)
    real = scored.client >= 0

    def mean(values: Float[Array, "m ..."]) -> Float[Array, "..."]:
        there = real.reshape((-1,) + (1,) * (values.ndim - 1))
        return jnp.where(there, values, 0.0).sum(axis=0) / real.sum()

    whole = jax.tree.map(mean, whole)
    return evaluation.Scores(*whole, group_accuracy=accuracy, group_loss=loss)


def _mixed(
    share: Float[types.Array, "G"], score: Float[types.Array, "G"]
) -> Float[Array, ""]:
    """A client's score: the mean over the groups that count; NaN: none is tested."""
    share = jnp.where(jnp.isnan(score), 0.0, share)
    return jnp.where(share > 0, share * score, 0.0).sum() / share.sum()
