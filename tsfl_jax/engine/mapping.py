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
from tsfl_jax.engine.program_spec import ProgramSpec
from tsfl_jax.rules.base import Received
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
    shares: Float[Array, "K"] | None = None  # base shares; None: ρ
    # Clients that are not trained as they have no weight, τ above is 0; None: none.
    skipped: Bool[Array, "K"] | None = None
    group: Int[Array, ""] | int = 1  # consecutive entries that are added up as floats

    @property
    def weight(self) -> ClientWeight:
        """How much each client counts."""
        return ClientWeight(self.rho, self.shares)


def device_clients(
    spec: ProgramSpec,
    clients: Client,
    assigned: Int[Array, "K"],
    rho: Float[Array, "N"],
    shares: Float[Array, "N"] | None = None,
) -> DeviceClients:
    """The clients that this device trains; see `devices.assign` for `assigned`.

    Without `train_all` clients without weight get τ = 0, if any client has some,
    and all clients are assigned to the devices anew.
    """
    number, skipped = rho.shape[0], None
    if not spec.train_all:
        counts = ClientWeight(rho, shares).counts
        counts |= ~counts.any()  # weights of 0 alone are a mistake, which a run notes
        skipped = ~counts & (clients.tau > 0)
        clients = clients._replace(tau=jnp.where(skipped, 0, clients.tau))
    work, grouped = jnp.asarray(_work(spec, clients)), spec.mapping == "sequential"
    if skipped is not None:
        axis, places = spec.axis, len(assigned)
        assigned = devices.assign_again(work, places, axis, grouped=grouped)
    real = assigned < number
    here = jnp.where(real, assigned, 0)
    own = trees.take(clients, here)
    own = own._replace(tau=jnp.where(real, own.tau, 0))
    return DeviceClients(
        own,
        jnp.where(real, assigned, number),
        jnp.where(real, rho[here], 0.0),
        _work(spec, own),
        None if shares is None else jnp.where(real, shares[here], 0.0),
        None if skipped is None else real & skipped[here],
        devices.group_size((work > 0).sum()) if grouped else 1,
    )


def _work(spec: ProgramSpec, clients: Client) -> Int[Array, "K"]:
    """Mini-batch steps of each client."""
    return clients.tau * steps_per_iteration(
        clients.size, spec.batch_size, spec.iteration
    )


class Trained(NamedTuple):
    """One client after its work."""

    update: Params  # w_i − start_i, and the values of other collections
    result: LocalResult


# (client, limit of `client.train`) -> what came out
TrainOne = Callable[[Client, Array | int | None], Trained]


def _terms(client: Trained, weight: Float[Array, ""]) -> Any:
    """One client's terms in float32, 0 where its model is not finite.

    ρ_i (w_i − start_i) of the parameters, and v_i w_i of the values of other
    collections with v_i = max(ρ_i, 0).
    """
    moved, others = trees.parted(client.update)
    finite = client.result.finite

    def term(factor: Float[Array, ""], value: Array) -> Array:
        # 0·NaN is NaN: the model itself must be masked as well, also before the
        # product, which has it as a factor in its derivative.
        value = value.astype(jnp.float32)
        return jnp.where(finite, factor * jnp.where(finite, value, 0.0), 0.0)

    moved = jax.tree.map(lambda u: term(weight, u), moved)
    positive = jnp.where(weight > 0, weight, 0.0)
    return moved, [term(positive, w) for w in trees.values(others)]


def _vector(terms: Any) -> Float[Array, "m"]:
    """All leaves in one: exact sums are long code, compiled once for all leaves."""
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(terms)]
    return jnp.concatenate(leaves) if leaves else jnp.zeros(0)


def _no_terms(template: Params) -> Any:
    """`_terms` of no client."""
    params, others = trees.parted(template)
    leaves = params, trees.values(others)
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), leaves)


class _Blocks(NamedTuple):
    """Entries of a device in blocks, leading axes ``[blocks, block]``."""

    index: Int[Array, "blocks block"]
    real: Bool[Array, "blocks block"]  # False: fills up the last block
    limit: Int[Array, "blocks"]  # mini-batch steps of each block's longest client


def _in_blocks(on_device: DeviceClients, block: int) -> _Blocks:
    entries = on_device.rho.shape[0]
    block = min(block, entries)  # a device may have fewer clients than a block
    index = jnp.arange(-(-entries // block) * block).reshape(-1, block)
    real = index < entries
    # Clients that fill up the last block repeat the first one without any work.
    index = jnp.where(real, index, 0)
    work = jnp.where(real, on_device.work[index], 0)
    return _Blocks(index, real, work.max(axis=1))


def _client(on_device: DeviceClients, index: Array, real: Any) -> Client:
    """One entry, without work if it is not real."""
    found = trees.take(on_device.clients, index)
    return found._replace(tau=jnp.where(real, found.tau, 0))


def _limit(blocks: _Blocks, own: Array, spec: ProgramSpec) -> Array | int:
    """The number known to the compiler if all clients are in one block, else `own`."""
    if spec.longest is not None and blocks.limit.shape[0] == 1:
        return spec.longest
    return own


def _flat(tree: Any, num_clients: int) -> Any:
    """Blocks back to one client axis."""
    return jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:num_clients], tree)


def stacked_updates(
    train: TrainOne, on_device: DeviceClients, spec: ProgramSpec
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
        update, result = train(client, limit)
        update, others = trees.parted(update)
        if values := trees.values(others):
            update = {**update, "others": values}
        update = jax.tree.map(
            lambda u: jnp.where(result.finite, u, jnp.zeros_like(u)), update
        )
        return update, result

    if spec.mapping == "sequential":
        return lax.map(lambda client: one(client, None), on_device.clients)
    blocks = _in_blocks(on_device, spec.block)

    def several(block: _Blocks) -> tuple[Params, LocalResult]:
        limit = _limit(blocks, block.limit, spec)
        return jax.vmap(lambda i, real: one(_client(on_device, i, real), limit))(
            block.index, block.real
        )

    return _flat(lax.map(several, blocks), on_device.rho.shape[0])


def gathered(
    own: Params,
    results: LocalResult,
    on_device: DeviceClients,
    received: Received,
    axis: str | None,
) -> tuple[Params, Received]:
    """All clients' updates ``[N, ...]`` on every device, and who is present.

    Args:
      own: updates of this device's clients ``[K, ...]``.
      results: likewise.
      on_device: which clients they are.
      received: of the interval; N of its weights.
      axis: mesh axis of the devices; None: one.
    """
    # Every device gets what each has: its own in their places and 0 elsewhere.
    there = own, results.finite.astype(jnp.int32)
    there = trees.scattered(there, on_device.place, received.rho.shape[0])
    updates, finite = devices.total(there, axis)
    return updates, received._replace(present=(finite > 0) & received.present)


def losses_of(
    results: LocalResult,
    on_device: DeviceClients,
    received: Received,
    axis: str | None,
) -> Float[Array, "N"]:
    """The mean sample loss of each client's training; NaN: not present."""
    own = jnp.where(results.finite, results.loss, 0.0), results.samples
    own = trees.scattered(own, on_device.place, received.rho.shape[0])
    loss, samples = devices.total(own, axis)
    return jnp.where(received.present, loss / jnp.maximum(samples, 1), jnp.nan)


# (entry, whether it is real, limit of `client.train`) -> what came out
_TrainEntry = Callable[[Array, Any, Array | int | None], Trained]


def _in_turn(
    train: _TrainEntry, on_device: DeviceClients, template: Params, states: Any
) -> tuple[exact_sums.Sum, LocalResult]:
    """The sum of the terms of all entries that matter, one after another.

    Those of a group are added up as they are, so that the exact sum, which costs as
    much as a few mini-batch steps of a small network, is paid once for a group.
    """
    weight, entries = on_device.weight, len(on_device.place)
    active = (weight.counts | (on_device.work > 0)).astype(jnp.int32)
    order = jnp.flatnonzero(active, size=entries, fill_value=0)
    number = jnp.arange(entries) // on_device.group
    held = jnp.zeros_like(active).at[number].add(active)
    ends = jnp.cumsum(held)
    groups = jnp.flatnonzero(held, size=entries, fill_value=0)

    def add_client(j: Array, carry: tuple[Any, LocalResult]) -> tuple[Any, LocalResult]:
        sums, results = carry
        trained = train(order[j], True, None)
        terms = _terms(trained, weight.rho[order[j]])
        sums = jax.tree.map(jnp.add, sums, terms)
        return sums, trees.put(results, order[j], trained.result)

    def add_group(
        i: Array, carry: tuple[exact_sums.Sum, LocalResult]
    ) -> tuple[exact_sums.Sum, LocalResult]:
        total, results = carry
        end, count = ends[groups[i]], held[groups[i]]
        start = _no_terms(template), results
        sums, results = lax.fori_loop(end - count, end, add_client, start)
        return exact_sums.add_all(total, _vector(sums)[None]), results

    counts = jnp.zeros(entries), jnp.zeros(entries, jnp.int32)
    new_states = jax.tree.map(
        lambda s: jnp.zeros((entries, *s.shape[1:]), s.dtype), states
    )
    nothing = LocalResult(*counts, jnp.ones(entries, bool), new_states)
    start = exact_sums.zeros(_vector(_no_terms(template)).shape), nothing
    return lax.fori_loop(0, jnp.sum(held > 0), add_group, start)


def _side_by_side(
    train: _TrainEntry, on_device: DeviceClients, template: Params, spec: ProgramSpec
) -> tuple[exact_sums.Sum, LocalResult]:
    """The sum of the terms of all entries, in blocks."""
    blocks = _in_blocks(on_device, spec.block)
    group = devices.group_size(on_device.place.shape[0])

    def several(
        total: exact_sums.Sum, block: _Blocks
    ) -> tuple[exact_sums.Sum, LocalResult]:
        limit = _limit(blocks, block.limit, spec)

        def one(i: Array, real: Bool[Array, ""]) -> tuple[Array, LocalResult]:
            trained = train(i, real, limit)
            rho = jnp.where(real, on_device.rho[i], 0.0)
            return _vector(_terms(trained, rho)), trained.result

        terms, results = jax.vmap(one)(block.index, block.real)
        return exact_sums.add_all(total, _grouped(terms, group)), results

    start = exact_sums.zeros(_vector(_no_terms(template)).shape)
    total, results = lax.scan(several, start, blocks)
    return total, _flat(results, on_device.rho.shape[0])


def _grouped(terms: Float[Array, "n m"], size: int) -> Float[Array, "g m"]:
    """Sums of `size` consecutive rows each; the last may have fewer."""
    if size == 1:
        return terms
    terms = jnp.pad(terms, ((0, -len(terms) % size), (0, 0)))

    def in_turn(terms: Array) -> Array:
        return lax.fori_loop(1, size, lambda j, sums: sums + terms[:, j], terms[:, 0])

    # XLA's CPU backend does not vectorize reductions over leading axes; a loop on a GPU
    # would be a launch of its own.
    return lax.platform_dependent(
        terms.reshape(-1, size, terms.shape[1]),
        cpu=in_turn,
        default=lambda terms: terms.sum(axis=1),
    )


def _summed(
    train: _TrainEntry,
    on_device: DeviceClients,
    template: Params,
    states: Any,
    spec: ProgramSpec,
) -> tuple["Weighted", LocalResult]:
    """Σ ρ_i (w_i − start_i) over all devices."""
    if spec.mapping == "sequential":
        total, results = _in_turn(train, on_device, template, states)
    else:
        total, results = _side_by_side(train, on_device, template, spec)
    found = _finished(total, results.finite, on_device.weight, template, spec.axis)
    return found, results


def weighted_stack(
    updates: Params,
    on_device: DeviceClients,
    results: LocalResult,
    template: Params,
    spec: ProgramSpec,
) -> "Weighted":
    """Σ ρ_i (w_i − start_i) of updates that are stacked, as `weighted_updates` has it.

    Args:
      updates: of this device's clients, from `stacked_updates`.
      on_device, template, spec: as in `weighted_updates`.
      results: of the clients.
    """

    def read(index: Array, real: Any, limit: Array | int | None) -> Trained:
        del real, limit
        return Trained(*trees.take((updates, results), index))

    return _summed(read, on_device, template, results.uplinks, spec)[0]


class Weighted(NamedTuple):
    """Σ_i ρ_i (w_i − start_i), and how much of Σ ρ is in it."""

    moved: Params  # as the parameters
    kept: Float[Array, ""]  # part of Σ ρ with finite models; 0: none, `moved` is 0
    asked: Float[Array, ""]  # Σ ρ over all devices
    # Other collections: Σ v_i w_i/Σ v_i with v_i = max(ρ_i, 0); w^t's if all v are 0.
    others: Params


def _finished(
    total: exact_sums.Sum,
    finite: Bool[Array, "K"],
    weight: ClientWeight,
    template: Params,
    axis: str | None,
) -> Weighted:
    """Sum over all devices, renormalized where clients' models were discarded."""

    def over_devices(total: exact_sums.Sum) -> Array:
        return exact_sums.value(exact_sums.over_devices(total, axis))

    def scalar(terms: Float[Array, "K"]) -> Array:
        return over_devices(exact_sums.add_all(exact_sums.zeros(()), terms))

    rho, share = weight
    kept, asked = scalar(jnp.where(finite, rho, 0.0)), scalar(rho)
    part, full = kept, asked
    if share is not None:
        part, full = scalar(jnp.where(finite, share, 0.0)), scalar(share)
    # Only a discarded model makes rescaling necessary; otherwise keep the exact bits.
    discarded = devices.total(jnp.sum(~finite & weight.counts), axis)
    rescale = (discarded > 0) & (part > 0)
    scale = jnp.where(rescale, full / jnp.where(part > 0, part, 1.0), 1.0)
    params, others = trees.parted(template)
    whole = over_devices(total)
    # Without the barrier the sum's digits are put together again in the code of every
    # leaf, which takes long to compile.
    if not trees.values(others):
        moved = lax.optimization_barrier(whole * scale)
        return Weighted(_like(params, moved), kept, asked, others)
    number = sum(w.size for w in jax.tree.leaves(params))
    positive = scalar(jnp.where(finite & (rho > 0), rho, 0.0))
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
    train: TrainOne,
    on_device: DeviceClients,
    template: Params,
    spec: ProgramSpec,
    states: Any = (),
) -> tuple[Weighted, LocalResult]:
    """Train every client and return Σ ρ_i (w_i − start_i) over the finite models.

    Other collections than parameters are a mean of the clients' own values.

    One after another, the sum has the same bits on any number of devices: clients of a
    group (`devices.group_size`) are on one device and are added up in order, groups
    exactly (`exact_sums`). A client that did not move adds exactly 0.

    Args:
      train: local training of one client.
      on_device: this device's clients, at most `exact_sums.MOST_TERMS` over all
        devices.
      template: the global model, for shapes and dtypes.
      spec: mapping, block, longest client and mesh axis.
      states: of the links for all clients, leaves ``[U, ...]``, for shapes and dtypes.

    Returns:
      `Weighted` and every client's `LocalResult` ``[K]``.

    Raises:
      UserError: too many clients.
    """
    number = on_device.rho.shape[0] * devices.count(spec.axis)
    if number > exact_sums.MOST_TERMS:
        raise UserError(
            f"{number:,} clients in one interval: their updates are added up exactly "
            f"for at most {exact_sums.MOST_TERMS:,}; use fewer --config.num_clients"
        )
    on_device = jax.tree.map(jnp.asarray, on_device)

    def entry(index: Array, real: Any, limit: Array | int | None) -> Trained:
        return train(_client(on_device, index, real), limit)

    return _summed(entry, on_device, template, states, spec)
