"""Runs one-client code for all clients and adds up their weighted updates.

Weights are known before training, so Σ ρ_i (w_i − w^t) accumulates as clients finish
and memory does not grow with N. A client whose model is not finite is left out of the
sum and the others' weights are scaled up in its place.

- ``sequential``: one client after another; a client's loop ends after its own work.
- ``vmap``: `chunk` clients side by side in lock-step, α freezing those that finished.
  All clients in one chunk run the longest client's steps of the whole schedule, a
  number known to the compiler, so that the interval has a static structure; several
  chunks stop at their own longest client.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax.engine import exact_sums
from tsfl_jax.engine.client import Client, LocalResult
from tsfl_jax.types import Array, Params, UserError

# (client, limit) -> (variables, result); limit None ends with the client's own work
TrainOne = Callable[[Client, Array | int | None], tuple[Params, LocalResult]]


StartOf = Callable[[Client], Params]  # the model that a client's update is from


class _Totals(NamedTuple):
    """What clients add up to; every part is the same in any order of the clients."""

    moved: list[exact_sums.Sum]  # Σ ρ_i (w_i − start_i), a leaf each that has a mean
    kept: exact_sums.Sum  # Σ ρ_i of clients whose model stayed finite
    asked: exact_sums.Sum  # Σ ρ_i
    dropped: Array  # int32, clients with weight whose model was not finite


def _inexact(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _nothing(template: Params) -> _Totals:
    leaves = [w for w in jax.tree.leaves(template) if _inexact(w)]
    moved = [exact_sums.zeros(w.shape) for w in leaves]
    return _Totals(moved, exact_sums.zeros(()), exact_sums.zeros(()), jnp.int32(0))


def _terms(model: Params, start: Params, weight: Array, finite: Array) -> list[Array]:
    """ρ_i (w_i − start_i) of one client in float32, 0 where it is not finite."""
    leaves = zip(jax.tree.leaves(model), jax.tree.leaves(start), strict=True)
    # 0·NaN is NaN: the model itself has to go as well.
    return [
        jnp.where(finite, weight * (w - w0).astype(jnp.float32), 0.0)
        for w, w0 in leaves
        if _inexact(w)
    ]


def _added(totals: _Totals, terms: list, rho: Array, finite: Array) -> _Totals:
    """Totals with more clients; leading axes ``[n]``."""
    add = exact_sums.add_all
    return _Totals(
        [add(s, t) for s, t in zip(totals.moved, terms, strict=True)],
        add(totals.kept, jnp.where(finite, rho, 0.0)),
        add(totals.asked, rho),
        totals.dropped + jnp.sum(~finite & (rho > 0)),
    )


def _sequential(train: TrainOne, start_of: StartOf, clients, rho, totals: _Totals):
    def one(totals, item):
        client, weight = item
        model, result = train(client, None)
        terms = _terms(model, start_of(client), weight, result.finite)
        several = jax.tree.map(lambda a: a[None], (terms, weight, result.finite))
        return _added(totals, *several), result

    return lax.scan(one, totals, (clients, rho))


class _Chunks(NamedTuple):
    """Clients in chunks, leading axes ``[chunks, chunk]``; the last is filled up."""

    clients: Client
    rho: Array
    limit: Array  # [chunks], steps of each chunk's longest client


def _in_chunks(clients: Client, rho: Array, work: Array, chunk: int) -> _Chunks:
    num_clients = rho.shape[0]
    chunk = min(chunk, num_clients)  # a device may have fewer places than a chunk
    chunks = -(-num_clients // chunk)
    # Clients that fill up the last chunk repeat the first one without any work.
    index = jnp.arange(chunks * chunk)
    real = index < num_clients
    index = jnp.where(real, index, 0)
    padded = jax.tree.map(lambda a: a[index], clients)
    padded = padded._replace(tau=jnp.where(real, padded.tau, 0))

    def split(a):
        return a.reshape((chunks, chunk) + a.shape[1:])

    return _Chunks(
        jax.tree.map(split, padded),
        split(jnp.where(real, rho[index], 0.0)),
        split(jnp.where(real, work[index], 0)).max(axis=1),
    )


def _flat(tree: Params, num_clients: int) -> Params:
    """Chunks back to one client axis."""
    return jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:num_clients], tree)


def _chunk_limit(most: int | None, chunks: _Chunks, limit: Array) -> Array | int:
    """The number known to the compiler where all clients are in one chunk."""
    return most if most is not None and chunks.limit.shape[0] == 1 else limit


def _vmapped(train, start_of, clients, rho, totals, chunk, work, most):
    chunks = _in_chunks(clients, rho, work, chunk)

    def several(totals, item):
        limit = _chunk_limit(most, chunks, item.limit)

        def one(client, weight):
            model, result = train(client, limit)
            return _terms(model, start_of(client), weight, result.finite), result

        terms, results = jax.vmap(one)(item.clients, item.rho)
        return _added(totals, terms, item.rho, results.finite), results

    totals, results = lax.scan(several, totals, chunks)
    return totals, _flat(results, rho.shape[0])


def all_models(
    train: TrainOne,
    clients: Client,
    work: Array,
    *,
    mapping: str,
    chunk: int,
    most: int | None = None,
) -> tuple[Params, LocalResult]:
    """Trains every client and returns every model: memory grows with N.

    For rules that no weights can express (medians, Krum, control variates). Arguments
    as in `weighted_models`.

    Returns:
      models and `LocalResult`, leaves ``[N, ...]``; a model may hold NaN.
    """
    if mapping == "sequential":
        return lax.map(lambda client: train(client, None), clients)
    chunks = _in_chunks(clients, jnp.zeros(work.shape), work, chunk)

    def several(item):
        limit = _chunk_limit(most, chunks, item.limit)
        return jax.vmap(lambda client: train(client, limit))(item.clients)

    return _flat(lax.map(several, chunks), work.shape[0])


def _check_number(clients: int) -> None:
    if clients > exact_sums.MOST_TERMS:
        raise UserError(
            f"{clients:,} clients in one interval: their updates are added up exactly "
            f"for at most {exact_sums.MOST_TERMS:,}; use fewer --config.num_clients"
        )


class Weighted(NamedTuple):
    """Σ_i ρ_i (w_i − start_i) and what became of Σ ρ."""

    moved: Params  # as the model; whole numbers are 0
    kept: Array  # part of Σ ρ whose models were finite; 0: none, and `moved` is 0
    asked: Array  # Σ ρ over all devices


def weighted_models(
    train: TrainOne,
    start_of: StartOf,
    clients: Client,
    rho: Array,
    template: Params,
    work: Array,
    *,
    mapping: str,
    chunk: int,
    most: int | None = None,
    axis: str | None = None,
) -> tuple[Weighted, LocalResult]:
    """Trains every client and returns Σ ρ_i (w_i − start_i) over the finite models.

    The sum has the same bits in every order of the clients and on any number of
    devices (see `exact_sums`). A client that did not move adds exactly 0.

    Args:
      train: local training of one client.
      start_of: the model against which a client's update is measured.
      clients: leading axis ``[N]``, N ≤ `exact_sums.MOST_TERMS` over all devices.
      rho: ``[N]`` float32 weights ≥ 0; most rules have Σ ρ = 1 over all devices.
      template: the global model, for shapes and dtypes.
      work: ``[N]`` int32 mini-batch steps each client has to do.
      mapping: "sequential" or "vmap".
      chunk: clients side by side under "vmap".
      most: mini-batch steps of the longest client of the whole schedule, None: not
        known before the program runs.
      axis: name of the mesh axis of devices that share the clients; None: one device.

    Raises:
      UserError: more clients than that.

    Returns:
      `Weighted`, scaled to the Σ ρ that was asked for where clients were dropped, and
      every client's `LocalResult` ``[N]``.
    """
    _check_number(rho.shape[0] * (1 if axis is None else lax.axis_size(axis)))
    totals = _nothing(template)
    if mapping == "sequential":
        totals, results = _sequential(train, start_of, clients, rho, totals)
    else:
        totals, results = _vmapped(
            train, start_of, clients, rho, totals, chunk, work, most
        )

    def whole(part):
        return exact_sums.value(exact_sums.over_devices(part, axis))

    kept, asked = whole(totals.kept), whole(totals.asked)
    dropped = totals.dropped if axis is None else lax.psum(totals.dropped, axis)
    # Only a dropped client makes a rescaling necessary; else keep the very bits.
    rescale = (dropped > 0) & (kept > 0)
    scale = jnp.where(rescale, asked / jnp.where(kept > 0, kept, 1.0), 1.0)
    moved = iter(totals.moved)

    def finish(w):
        if not _inexact(w):  # counters and other whole numbers have no mean
            return jnp.zeros_like(w)
        return (whole(next(moved)) * scale).astype(w.dtype)

    return Weighted(jax.tree.map(finish, template), kept, asked), results
