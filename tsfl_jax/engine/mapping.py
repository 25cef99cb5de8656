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
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int

from tsfl_jax import trees
from tsfl_jax.engine import devices, exact_sums
from tsfl_jax.engine.client import Client, LocalResult, mini_batch_steps
from tsfl_jax.engine.program_spec import ProgramSpec
from tsfl_jax.rules.base import Received
from tsfl_jax.types import Array, Params, UserError


class DeviceClients(NamedTuple):
    """The K clients that a device trains; empty entries are clients without work."""

    clients: Client
    place: Int[Array, "K"]  # of each among all N; N: an empty entry
    # Weights; most rules have Σ ρ = 1 over all devices. Some may be negative, as those
    # of DMS without its projection.
    rho: Float[Array, "K"]
    shares: Float[Array, "K"]  # base shares p_i; ρ where a rule has none
    work: Int[Array, "K"]  # mini-batch steps
    # Clients that are not trained as they have no weight, τ above is 0.
    skipped: Bool[Array, "K"] | bool = False
    group: Int[Array, ""] | int = 1  # consecutive entries that are added up as floats


def _counts(rho: Float[Array, "K"], shares: Float[Array, "K"]) -> Bool[Array, "K"]:
    """Whether a client's model matters; the ρ of a very late one can be 0."""
    return (rho != 0) | (shares != 0)


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
    number, grouped = rho.shape[0], spec.mapping == "sequential"
    shares = rho if shares is None else shares
    skipped, work = jnp.zeros(number, bool), mini_batch_steps(spec, clients)
    if not spec.train_all:
        counts = _counts(rho, shares)
        counts |= ~counts.any()  # weights of 0 alone are a mistake, which a run notes
        skipped = ~counts & (clients.tau > 0)
        clients = clients._replace(tau=jnp.where(skipped, 0, clients.tau))
        work, places = mini_batch_steps(spec, clients), len(assigned)
        assigned = devices.assign_again(work, places, spec.axis, grouped=grouped)
    is_client = assigned < number
    index = jnp.where(is_client, assigned, 0)

    def of_device(values: Array) -> Array:
        return jnp.where(is_client, values[index], jnp.zeros((), values.dtype))

    members = trees.take(clients, index)
    return DeviceClients(
        clients=members._replace(tau=jnp.where(is_client, members.tau, 0)),
        place=jnp.where(is_client, assigned, number),
        rho=of_device(rho),
        shares=of_device(shares),
        work=of_device(work),
        skipped=of_device(skipped),
        group=devices.group_size((work > 0).sum()) if grouped else 1,
    )


class Trained(NamedTuple):
    """One client after its work."""

    update: Params  # w_i − start_i, and the values of other collections
    result: LocalResult


# (client, limit of `client.train`) -> what came out
TrainOne = Callable[[Client, Array | int | None], Trained]


def _terms(client: Trained, weight: Float[Array, ""]) -> Any:
    """ρ_i (w_i − start_i), and max(ρ_i, 0) w_i of other collections; 0: not finite."""
    moved, collections = trees.parted(client.update)
    finite = client.result.finite

    def term(factor: Float[Array, ""], value: Array) -> Array:
        # 0·NaN is NaN: the model itself must be masked as well, also before the
        # product, which has it as a factor in its derivative.
        value = value.astype(jnp.float32)
        return jnp.where(finite, factor * jnp.where(finite, value, 0.0), 0.0)

    moved = jax.tree.map(lambda u: term(weight, u), moved)
    positive = jnp.where(weight > 0, weight, 0.0)
    return moved, [term(positive, w) for w in trees.values(collections)]


def _vector(terms: Any) -> Float[Array, "m"]:
    """All leaves in one: exact sums are long code, compiled once for all leaves."""
    return ravel_pytree(terms)[0]


def _no_terms(template: Params) -> Any:
    """`_terms` of no client."""
    params, collections = trees.parted(template)
    return optax.tree.zeros_like((params, trees.values(collections)))


# (entry, limit of `client.train`) -> what came out; for `_by_block`, terms and a result
_TrainEntry = Callable[[Array, Array | int | None], Any]


def _by_block(
    train: _TrainEntry,
    on_device: DeviceClients,
    spec: ProgramSpec,
    add: Callable[[Any, Any], Any],
    total: Any,
) -> tuple[Any, Any]:
    """`total` with the terms of all blocks added, and all results ``[K]``."""
    entries = len(on_device.place)
    block = min(spec.block, entries)  # a device may have fewer clients than a block
    # Those beyond the last entry fill up the last block.
    blocks = jnp.arange(-(-entries // block) * block).reshape(-1, block)
    limits = jnp.where(blocks < entries, on_device.work[blocks], 0).max(axis=1)
    # One block runs the longest client of the whole schedule.
    longest = spec.longest if len(blocks) == 1 else None

    def one_block(total: Any, item: tuple[Array, Array]) -> tuple[Any, Any]:
        index, limit = item
        limit = longest or limit
        terms, results = jax.vmap(lambda entry: train(entry, limit))(index)
        return add(total, terms), results

    total, results = lax.scan(one_block, total, (blocks, limits))
    return total, jax.tree.map(
        lambda a: a.reshape((-1,) + a.shape[2:])[:entries], results
    )


def _client(on_device: DeviceClients, index: Array) -> Client:
    """One entry; without work beyond the last one."""
    client = trees.take(on_device.clients, index)
    is_entry = index < len(on_device.place)
    return client._replace(tau=jnp.where(is_entry, client.tau, 0))


def stacked_updates(
    train: TrainOne, on_device: DeviceClients, spec: ProgramSpec
) -> tuple[Params, LocalResult]:
    """Train every client and return every update ``[K, ...]``: memory grows with K.

    For rules that no weights can express (medians, Krum, control variates). Beside the
    parameters' w_i − start_i are "others", the values of other collections (see
    `trees.values`), if there are any; 0 where a model is not finite.
    """

    def entry(index: Array, limit: Array | int | None) -> tuple[tuple, Any]:
        update, result = train(_client(on_device, index), limit)
        update, collections = trees.parted(update)
        if values := trees.values(collections):
            update = {**update, "others": values}
        update = jax.tree.map(
            lambda u: jnp.where(result.finite, u, jnp.zeros_like(u)), update
        )
        return (), (update, result)

    if spec.mapping == "sequential":
        entries = jnp.arange(len(on_device.place))
        return lax.map(lambda index: entry(index, None)[1], entries)
    return _by_block(entry, on_device, spec, lambda total, _: total, ())[1]


def of_all(
    entries: Any, on_device: DeviceClients, number: int, axis: str | None
) -> Any:
    """Leaves ``[number, ...]`` on every device of the ``[K, ...]`` of each of them."""
    return devices.total(trees.scattered(entries, on_device.place, number), axis)


class Stack(NamedTuple):
    """All clients' updates, on every device."""

    updates: Params  # [N, ...]
    received: Received  # of the interval, with who is present
    loss: Float[Array, "N"]  # mean sample loss of each one's training; NaN: not present


def gathered(
    updates: Params,
    results: LocalResult,
    on_device: DeviceClients,
    received: Received,
    axis: str | None,
) -> Stack:
    """All clients' updates of those of this device's clients ``[K, ...]``."""
    losses = jnp.where(results.finite, results.loss, 0.0)
    entries = updates, results.finite.astype(jnp.int32), losses, results.samples
    number = received.rho.shape[0]
    updates, finite, loss, samples = of_all(entries, on_device, number, axis)
    present = (finite > 0) & received.present
    loss = jnp.where(present, loss / jnp.maximum(samples, 1), jnp.nan)
    return Stack(updates, received._replace(present=present), loss)


class Tally(NamedTuple):
    """The work of an interval over all devices."""

    loss: Float[Array, ""]  # mean sample loss of the clients with finite models
    samples: Int[Array, "N"]  # samples trained on
    discarded: Int[Array, ""]  # clients that worked and whose model was not finite
    survivors: Int[Array, ""]  # with a finite model, or not trained for lack of weight


def count(
    results: LocalResult,
    on_device: DeviceClients,
    number: int,
    axis: str | None,
) -> Tally:
    """Sum over the clients of all devices; N = `number`."""
    worked = on_device.clients.tau > 0
    usable = results.finite & worked
    losses = jnp.where(usable, results.loss, 0.0)
    samples = jnp.where(usable, results.samples, 0).astype(jnp.float32)
    loss, total = exact_sums.scalars(axis, losses, samples)
    return Tally(
        loss / total,
        samples=of_all(results.samples, on_device, number, axis),
        discarded=devices.total(jnp.sum(~results.finite & worked), axis),
        survivors=devices.total((usable | on_device.skipped).sum(), axis),
    )


def _in_turn(
    train: _TrainEntry,
    on_device: DeviceClients,
    template: Params,
    states: Any,
    total: exact_sums.Sum,
) -> tuple[exact_sums.Sum, LocalResult]:
    """Add the terms of all entries that matter, one after another."""
    # Those of a group are added up as they are: an exact sum costs as much as a few
    # mini-batch steps of a small network.
    rho, entries = on_device.rho, len(on_device.place)
    active = _counts(rho, on_device.shares) | (on_device.work > 0)
    active = active.astype(jnp.int32)
    order = jnp.flatnonzero(active, size=entries, fill_value=0)
    number = jnp.arange(entries) // on_device.group
    members = jnp.zeros_like(active).at[number].add(active)
    ends = jnp.cumsum(members)
    groups = jnp.flatnonzero(members, size=entries, fill_value=0)

    def add_client(j: Array, carry: tuple[Any, LocalResult]) -> tuple[Any, LocalResult]:
        sums, results = carry
        trained = train(order[j], None)
        sums = jax.tree.map(jnp.add, sums, _terms(trained, rho[order[j]]))
        return sums, trees.put(results, order[j], trained.result)

    def add_group(
        i: Array, carry: tuple[exact_sums.Sum, LocalResult]
    ) -> tuple[exact_sums.Sum, LocalResult]:
        total, results = carry
        end, count = ends[groups[i]], members[groups[i]]
        start = _no_terms(template), results
        sums, results = lax.fori_loop(end - count, end, add_client, start)
        return exact_sums.add_all(total, _vector(sums)[None]), results

    results = LocalResult(
        loss=jnp.zeros(entries),
        samples=jnp.zeros(entries, jnp.int32),
        finite=jnp.ones(entries, bool),
        uplinks=jax.tree.map(
            lambda s: jnp.zeros((entries, *s.shape[1:]), s.dtype), states
        ),
    )
    return lax.fori_loop(0, jnp.sum(members > 0), add_group, (total, results))


def _side_by_side(
    train: _TrainEntry,
    on_device: DeviceClients,
    spec: ProgramSpec,
    total: exact_sums.Sum,
) -> tuple[exact_sums.Sum, LocalResult]:
    """Add the terms of all entries, in blocks."""
    entries = len(on_device.place)
    group = devices.group_size(entries)

    def entry(index: Array, limit: Any) -> tuple[Array, LocalResult]:
        trained = train(index, limit)
        rho = jnp.where(index < entries, on_device.rho[index], 0.0)
        return _vector(_terms(trained, rho)), trained.result

    def add(total: exact_sums.Sum, terms: Array) -> exact_sums.Sum:
        return exact_sums.add_all(total, _grouped(terms, group))

    return _by_block(entry, on_device, spec, add, total)


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


class Weighted(NamedTuple):
    """Σ_i ρ_i (w_i − start_i), and how much of Σ ρ is in it."""

    moved: Params  # as the parameters
    # Other collections: Σ v_i w_i/Σ v_i with v_i = max(ρ_i, 0); w^t's if all v are 0.
    collections: Params
    kept: Float[Array, ""]  # part of Σ ρ with finite models; 0: none, `moved` is 0
    total_rho: Float[Array, ""]  # Σ ρ over all devices


def _summed(
    train: _TrainEntry,
    on_device: DeviceClients,
    template: Params,
    states: Any,
    spec: ProgramSpec,
) -> tuple[Weighted, LocalResult]:
    """Σ ρ_i (w_i − start_i) over all devices, renormalized where models are lost."""
    total = exact_sums.zeros(_vector(_no_terms(template)).shape)
    if spec.mapping == "sequential":
        total, results = _in_turn(train, on_device, template, states, total)
    else:
        total, results = _side_by_side(train, on_device, spec, total)
    finite, rho, shares = results.finite, on_device.rho, on_device.shares
    kept, total_rho, part, whole, positive = exact_sums.scalars(
        spec.axis,
        jnp.where(finite, rho, 0.0),
        rho,
        jnp.where(finite, shares, 0.0),
        shares,
        jnp.where(finite & (rho > 0), rho, 0.0),
    )
    # Only a discarded model makes rescaling necessary; otherwise keep the exact bits.
    discarded = devices.total(jnp.sum(~finite & _counts(rho, shares)), spec.axis)
    rescale = (discarded > 0) & (part > 0)
    scale = jnp.where(rescale, whole / jnp.where(part > 0, part, 1.0), 1.0)
    if not spec.renormalizes:
        kept, scale = total_rho, jnp.float32(1.0)
    params, collections = trees.parted(template)
    sums = exact_sums.value(exact_sums.over_devices(total, spec.axis))
    number = sum(w.size for w in jax.tree.leaves(params))
    # Without the barrier the sum's digits are put together again in the code of every
    # leaf, which takes long to compile.
    moved, mean = lax.optimization_barrier(
        (sums[:number] * scale, sums[number:] / jnp.where(positive > 0, positive, 1.0))
    )
    (_, to_params), (_, to_values) = map(
        ravel_pytree, (params, trees.values(collections))
    )
    means = trees.with_values(collections, to_values(mean))
    collections = optax.tree.where(positive > 0, means, collections)
    return Weighted(to_params(moved), collections, kept, total_rho), results


def weighted_stack(
    updates: Params,
    on_device: DeviceClients,
    results: LocalResult,
    template: Params,
    spec: ProgramSpec,
) -> Weighted:
    """Σ ρ_i (w_i − start_i) of `stacked_updates`, as `weighted_updates` has it."""

    def read(index: Array, limit: Any) -> Trained:
        del limit
        return Trained(*trees.take((updates, results), index))

    return _summed(read, on_device, template, results.uplinks, spec)[0]


def weighted_updates(
    train: TrainOne,
    on_device: DeviceClients,
    template: Params,
    spec: ProgramSpec,
    states: Any = (),
) -> tuple[Weighted, LocalResult]:
    """Train every client and return Σ ρ_i (w_i − start_i) over the finite models.

    One after another, the sum has the same bits on any number of devices: clients of a
    group (`devices.group_size`) are on one device and are added up in order, groups
    exactly (`exact_sums`). A client that did not move adds exactly 0. The template (the
    global model) and the links' states ``[U, ...]`` give shapes and dtypes.

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

    def entry(index: Array, limit: Array | int | None) -> Trained:
        return train(_client(on_device, index), limit)

    return _summed(entry, on_device, template, states, spec)
