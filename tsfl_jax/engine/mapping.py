"""Run the code of one client for all clients and add up their weighted updates.

Where weights are known before training, Σ ρ_i (w_i − start_i) accumulates as clients
finish and memory does not grow with N; that of `stacked_updates`, for rules that need
all updates at once, does. A client whose model is not finite is left out of the sum,
and its share of the whole goes to the others in proportion to theirs.

- ``sequential``: one client after another; a client's loop ends after its own work.
- ``vmap``: blocks of clients side by side in lock-step, α freezing those that finished.
  If all clients are in one block, they run the steps of the longest client of the whole
  schedule, a number known to the compiler, so that the interval has a static structure;
  several blocks stop at their own longest client.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Bool, Float, Int

from tsfl_jax import trees
from tsfl_jax.engine import devices, exact_sums
from tsfl_jax.engine.client import Client, LocalResult, steps_per_iteration
from tsfl_jax.engine.recipe import Recipe
from tsfl_jax.rules.base import Event
from tsfl_jax.types import Array, Params, UserError


class ClientWeight(NamedTuple):
    """How much clients count: ``[]``, or with leading axes."""

    rho: Float[Array, "..."]
    share: Float[Array, "..."] | None  # of the whole; None: ρ

    @property
    def counts(self) -> Bool[Array, "..."]:
        """Whether a client's model matters."""
        counts = self.rho != 0
        # The ρ of a very late client can be 0 in float32.
        return counts if self.share is None else counts | (self.share != 0)


class DeviceClients(NamedTuple):
    """The K clients that a device trains; empty entries are clients without work."""

    clients: Client
    place: Int[Array, "K"]  # of each among all N; N: an empty entry
    # Weights; most rules have Σ ρ = 1 over all devices. Some may be negative, as those
    # of DMS without its projection.
    rho: Float[Array, "K"]
    work: Int[Array, "K"]  # mini-batch steps
    shares: Float[Array, "K"] | None = None  # of the whole; None: ρ
    # Clients that are not trained as they have no weight, τ above is 0; None: none.
    skipped: Bool[Array, "K"] | None = None

    @property
    def weight(self) -> ClientWeight:
        """How much each client counts."""
        return ClientWeight(self.rho, self.shares)


def device_clients(
    recipe: Recipe,
    clients: Client,
    assigned: Int[Array, "K"],
    rho: Float[Array, "N"],
    shares: Float[Array, "N"] | None = None,
) -> DeviceClients:
    """The clients that this device trains; see `devices.deal` for `assigned`.

    Without `Recipe.train_all` clients without weight get τ = 0, if any client has some,
    and all clients are dealt to the devices anew.
    """
    number, skipped = rho.shape[0], None
    if not recipe.train_all:
        counts = ClientWeight(rho, shares).counts
        counts |= ~counts.any()  # weights of 0 alone are a mistake, which a run notes
        skipped = ~counts & (clients.tau > 0)
        clients = clients._replace(tau=jnp.where(skipped, 0, clients.tau))
        work = jnp.asarray(_work(recipe, clients))
        assigned = devices.dealt(work, len(assigned), recipe.axis)
    real = assigned < number
    here = jnp.where(real, assigned, 0)
    own = trees.take(clients, here)
    own = own._replace(tau=jnp.where(real, own.tau, 0))
    return DeviceClients(
        own,
        jnp.where(real, assigned, number),
        jnp.where(real, rho[here], 0.0),
        _work(recipe, own),
        None if shares is None else jnp.where(real, shares[here], 0.0),
        None if skipped is None else real & skipped[here],
    )


def _work(recipe: Recipe, clients: Client) -> Int[Array, "K"]:
    """Mini-batch steps of each client."""
    return clients.tau * steps_per_iteration(
        clients.size, recipe.batch_size, recipe.iteration
    )


class Trained(NamedTuple):
    """One client after its work."""

    model: Params  # w_i
    start: Params  # the model that its update is measured against
    result: LocalResult


# (client, limit of `client.train`) -> what came out
TrainOne = Callable[[Client, Array | int | None], Trained]


class _Totals(NamedTuple):
    """Sums over clients; each is the same in any order of the clients."""

    # Σ ρ_i (w_i − start_i) of the parameters, then Σ v_i w_i of other collections with
    # v_i = max(ρ_i, 0); all leaves in one vector.
    moved: exact_sums.Sum
    kept: exact_sums.Sum  # Σ ρ_i of clients whose model stayed finite
    asked: exact_sums.Sum  # Σ ρ_i
    dropped: Int[Array, ""]  # clients with weight whose model was not finite
    # Σ of the shares, of finite models and of all; None: shares are ρ.
    shares: tuple[exact_sums.Sum, exact_sums.Sum] | None
    # Σ v_i of finite models; None: there are no other collections.
    positive: exact_sums.Sum | None


def _zeros(template: Params, on_device: DeviceClients) -> _Totals:
    params, others = trees.parted(template)
    values = trees.values(others)
    size = sum(w.size for w in [*jax.tree.leaves(params), *values])
    zeros = exact_sums.zeros(())
    shares = None if on_device.shares is None else (zeros, zeros)
    positive = zeros if values else None
    return _Totals(
        exact_sums.zeros((size,)), zeros, zeros, jnp.int32(0), shares, positive
    )


def _terms(client: Trained, weight: Float[Array, ""]) -> Float[Array, "m"]:
    """One client's terms of `_Totals.moved` in float32, 0 where it is not finite.

    All leaves in one vector: exact sums are long code, compiled once and not for each
    leaf.
    """
    (params, others), (start, _) = map(trees.parted, (client.model, client.start))
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(start), strict=True)
    moved = [(w - w0).astype(jnp.float32).ravel() for w, w0 in leaves]
    values = [w.ravel() for w in trees.values(others)]
    finite = client.result.finite

    def terms(factor: Float[Array, ""], parts: list[Array]) -> Float[Array, "m"]:
        # 0·NaN is NaN: the model itself must be masked as well, also before the
        # product, which has it as a factor in its derivative.
        whole = jnp.concatenate(parts) if parts else jnp.zeros(0)
        return jnp.where(finite, factor * jnp.where(finite, whole, 0.0), 0.0)

    found = terms(weight, moved)
    if not values:
        return found
    return jnp.concatenate([found, terms(jnp.where(weight > 0, weight, 0.0), values)])


def _added(
    totals: _Totals,
    terms: Float[Array, "n m"],
    weight: ClientWeight,
    finite: Bool[Array, "n"],
) -> _Totals:
    """Totals with n more clients."""
    add, shares = exact_sums.add_all, totals.shares
    rho, share = weight
    if shares is not None:
        assert share is not None
        kept, asked = shares
        shares = add(kept, jnp.where(finite, share, 0.0)), add(asked, share)
    positive = totals.positive
    if positive is not None:
        positive = add(positive, jnp.where(finite & (rho > 0), rho, 0.0))
    return _Totals(
        add(totals.moved, terms),
        add(totals.kept, jnp.where(finite, rho, 0.0)),
        add(totals.asked, rho),
        totals.dropped + jnp.sum(~finite & weight.counts),
        shares,
        positive,
    )


class _Blocks(NamedTuple):
    """Clients in blocks, leading axes ``[blocks, block]``; the last is filled up."""

    clients: Client
    weight: ClientWeight
    limit: Int[Array, "blocks"]  # mini-batch steps of each block's longest client


def _in_blocks(on_device: DeviceClients, block: int) -> _Blocks:
    num_clients = on_device.rho.shape[0]
    block = min(block, num_clients)  # a device may have fewer clients than a block
    blocks = -(-num_clients // block)
    # Clients that fill up the last block repeat the first one without any work.
    index = jnp.arange(blocks * block)
    real = index < num_clients
    index = jnp.where(real, index, 0)
    padded = trees.take(on_device.clients, index)
    padded = padded._replace(tau=jnp.where(real, padded.tau, 0))

    def split(leaf: Array) -> Array:
        return leaf.reshape((blocks, block) + leaf.shape[1:])

    return _Blocks(
        jax.tree.map(split, padded),
        jax.tree.map(lambda a: split(jnp.where(real, a[index], 0.0)), on_device.weight),
        split(jnp.where(real, on_device.work[index], 0)).max(axis=1),
    )


def _limit(blocks: _Blocks, own: Array, recipe: Recipe) -> Array | int:
    """The number known to the compiler if all clients are in one block, else `own`."""
    if recipe.longest is not None and blocks.limit.shape[0] == 1:
        return recipe.longest
    return own


def _flat(tree: Any, num_clients: int) -> Any:
    """Blocks back to one client axis."""
    return jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:num_clients], tree)


def stacked_updates(
    train: TrainOne, on_device: DeviceClients, recipe: Recipe
) -> tuple[Params, LocalResult]:
    """Train every client and return every update: memory grows with K.

    For rules that no weights can express (medians, Krum, control variates). Arguments
    as in `weighted_updates`.

    Returns:
      The parameters' w_i − start_i with leaves ``[K, ...]``, beside them "others", the
      values of other collections (see `trees.values`), if there are any; 0 where a
      model is not finite. And `LocalResult` ``[K]``.
    """

    def one(client: Client, limit: Array | int | None) -> tuple[Params, LocalResult]:
        model, start, result = train(client, limit)
        (params, others), (start, _) = trees.parted(model), trees.parted(start)
        made = jax.tree.map(jnp.subtract, params, start)
        if values := trees.values(others):
            made = {**made, "others": values}
        made = jax.tree.map(
            lambda u: jnp.where(result.finite, u, jnp.zeros_like(u)), made
        )
        return made, result

    if recipe.mapping == "sequential":
        return lax.map(lambda client: one(client, None), on_device.clients)
    blocks = _in_blocks(on_device, recipe.block)

    def several(block: _Blocks) -> tuple[Params, LocalResult]:
        limit = _limit(blocks, block.limit, recipe)
        return jax.vmap(lambda client: one(client, limit))(block.clients)

    return _flat(lax.map(several, blocks), on_device.rho.shape[0])


def gathered(
    own: Params,
    results: LocalResult,
    on_device: DeviceClients,
    event: Event,
    axis: str | None,
) -> tuple[Params, Event]:
    """All clients' updates ``[N, ...]`` on every device, and who is present.

    Args:
      own: updates of this device's clients ``[K, ...]``.
      results: likewise.
      on_device: which clients they are.
      event: of the interval; N of its weights.
      axis: mesh axis of the devices; None: one.
    """
    # Every device gets what each has: its own in their places and 0 elsewhere.
    there = own, results.finite.astype(jnp.int32)
    there = trees.scattered(there, on_device.place, event.rho.shape[0])
    updates, finite = devices.total(there, axis)
    return updates, event._replace(present=(finite > 0) & event.present)


def _sequential(
    train: TrainOne, on_device: DeviceClients, totals: _Totals
) -> tuple[_Totals, LocalResult]:
    def one(
        totals: _Totals, item: tuple[Client, ClientWeight]
    ) -> tuple[_Totals, LocalResult]:
        client, weight = item
        trained = train(client, None)
        result = trained.result
        several = _terms(trained, weight.rho), weight, result.finite
        return _added(totals, *jax.tree.map(lambda a: a[None], several)), result

    return lax.scan(one, totals, (on_device.clients, on_device.weight))


def _vmapped(
    train: TrainOne, blocks: _Blocks, totals: _Totals, recipe: Recipe
) -> tuple[_Totals, LocalResult]:
    def several(totals: _Totals, block: _Blocks) -> tuple[_Totals, LocalResult]:
        limit = _limit(blocks, block.limit, recipe)

        def one(
            client: Client, rho: Float[Array, ""]
        ) -> tuple[Float[Array, "m"], LocalResult]:
            trained = train(client, limit)
            return _terms(trained, rho), trained.result

        terms, results = jax.vmap(one)(block.clients, block.weight.rho)
        return _added(totals, terms, block.weight, results.finite), results

    return lax.scan(several, totals, blocks)


def weighted_stack(
    updates: Params,
    on_device: DeviceClients,
    results: LocalResult,
    template: Params,
    recipe: Recipe,
) -> "Weighted":
    """Σ ρ_i (w_i − start_i) of updates that are stacked, as `weighted_updates` has it.

    Args:
      updates: of this device's clients, from `stacked_updates`.
      on_device, template, recipe: as in `weighted_updates`.
      results: of the clients.
    """

    def one(
        totals: _Totals, item: tuple[Params, ClientWeight, jax.Array]
    ) -> tuple[_Totals, None]:
        update, weight, finite = item
        nothing = jax.tree.map(jnp.zeros_like, update)
        zero = jnp.zeros((), jnp.int32)
        result = LocalResult(jnp.float32(0), zero, finite)
        terms = _terms(Trained(update, nothing, result), weight.rho)
        several = jax.tree.map(lambda a: a[None], (terms, weight, finite))
        return _added(totals, *several), None

    items = updates, on_device.weight, results.finite
    totals, _ = lax.scan(one, _zeros(template, on_device), items)
    return _finished(totals, template, recipe.axis)


class Weighted(NamedTuple):
    """Σ_i ρ_i (w_i − start_i), and how much of Σ ρ is in it."""

    moved: Params  # as the parameters
    kept: Float[Array, ""]  # part of Σ ρ with finite models; 0: none, `moved` is 0
    asked: Float[Array, ""]  # Σ ρ over all devices
    # Other collections: Σ v_i w_i/Σ v_i with v_i = max(ρ_i, 0); w^t's if all v are 0.
    others: Params


def _finished(totals: _Totals, template: Params, axis: str | None) -> Weighted:
    """Sum over all devices; the others have the shares of clients that were dropped."""

    def over_devices(part: exact_sums.Sum) -> Array:
        return exact_sums.value(exact_sums.over_devices(part, axis))

    kept, asked = over_devices(totals.kept), over_devices(totals.asked)
    part, full = kept, asked
    if totals.shares is not None:
        part, full = map(over_devices, totals.shares)
    # Only a dropped client makes rescaling necessary; otherwise keep the exact bits.
    rescale = (devices.total(totals.dropped, axis) > 0) & (part > 0)
    scale = jnp.where(rescale, full / jnp.where(part > 0, part, 1.0), 1.0)
    params, others = trees.parted(template)
    whole = over_devices(totals.moved)
    # Without the barrier the sum's digits are put together again in the code of every
    # leaf, which takes long to compile.
    if totals.positive is None:
        moved = lax.optimization_barrier(whole * scale)
        return Weighted(_like(params, moved), kept, asked, others)
    number = sum(w.size for w in jax.tree.leaves(params))
    positive = over_devices(totals.positive)
    some = positive > 0
    moved, mean = lax.optimization_barrier(
        (whole[:number] * scale, whole[number:] / jnp.where(some, positive, 1.0))
    )
    found = _like(trees.values(others), mean)
    found = trees.with_values(others, found)
    return Weighted(
        _like(params, moved), kept, asked, optax.tree.where(some, found, others)
    )


def _like(template: Params, whole: Float[Array, "m"]) -> Params:
    """The numbers of a vector in the shapes and dtypes of a tree's leaves."""
    leaves, form = jax.tree.flatten(template)
    ends = np.cumsum([w.size for w in leaves])[:-1]
    parts = jnp.split(whole, ends)
    return form.unflatten(
        [p.reshape(w.shape).astype(w.dtype) for p, w in zip(parts, leaves, strict=True)]
    )


def weighted_updates(
    train: TrainOne, on_device: DeviceClients, template: Params, recipe: Recipe
) -> tuple[Weighted, LocalResult]:
    """Train every client and return Σ ρ_i (w_i − start_i) over the finite models.

    Other collections than parameters are a mean of the clients' own values.

    The sum has the same bits in every order of the clients and on any number of
    devices (see `exact_sums`). A client that did not move adds exactly 0.

    Args:
      train: local training of one client.
      on_device: this device's clients, at most `exact_sums.MOST_TERMS` over all
        devices.
      template: the global model, for shapes and dtypes.
      recipe: mapping, block, longest client and mesh axis.

    Returns:
      `Weighted` and every client's `LocalResult` ``[K]``.

    Raises:
      UserError: too many clients.
    """
    number = on_device.rho.shape[0] * devices.count(recipe.axis)
    if number > exact_sums.MOST_TERMS:
        raise UserError(
            f"{number:,} clients in one interval: their updates are added up exactly "
            f"for at most {exact_sums.MOST_TERMS:,}; use fewer --config.num_clients"
        )
    totals = _zeros(template, on_device)
    if recipe.mapping == "sequential":
        totals, results = _sequential(train, on_device, totals)
    else:
        blocks = _in_blocks(on_device, recipe.block)
        totals, results = _vmapped(train, blocks, totals, recipe)
        results = _flat(results, on_device.rho.shape[0])
    return _finished(totals, template, recipe.axis), results
