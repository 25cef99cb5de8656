"""Runs one-client code for all clients and adds up their weighted models.

Weights are known before training, so Σ ρ_i w_i accumulates as clients finish and
memory does not grow with N. A client whose model is not finite is left out of the sum
and the others' weights are scaled up to Σ ρ = 1.

- ``sequential``: one client after another; a client's loop ends after its own work.
- ``vmap``: `chunk` clients side by side in lock-step, α freezing those that finished.
  All clients in one chunk run the longest client's steps of the whole schedule, a
  number known to the compiler, so that the interval has a static structure; several
  chunks stop at their own longest client.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax.client import Client, LocalResult
from tsfl_jax.types import Array, Params

# (client, limit) -> (variables, result); limit None ends with the client's own work
TrainOne = Callable[[Client, Array | int | None], tuple[Params, LocalResult]]


def _add(total: Params, weight: Array, model: Params) -> Params:
    return jax.tree.map(lambda a, w: a + weight.astype(a.dtype) * w, total, model)


def _sequential(train: TrainOne, clients: Client, rho: Array, zeros: Params):
    def one(carry, item):
        total, kept = carry
        client, weight = item
        model, result = train(client, None)
        weight = jnp.where(result.finite, weight, 0.0)
        # 0·NaN is NaN: the model itself has to go as well.
        model = jax.tree.map(lambda w: jnp.where(result.finite, w, 0), model)
        return (_add(total, weight, model), kept + weight), result

    return lax.scan(one, (zeros, jnp.float32(0)), (clients, rho))


def _vmapped(train, clients, rho, zeros, chunk, work, most):
    num_clients = rho.shape[0]
    chunks = -(-num_clients // chunk)

    def several(carry, item):
        total, kept = carry
        part, weights, limit = item
        limit = most if most is not None and chunks == 1 else limit
        models, results = jax.vmap(lambda client: train(client, limit))(part)
        finite = results.finite
        weights = jnp.where(finite, weights, 0.0)

        def add(a, w):
            w = jnp.where(finite.reshape((-1,) + (1,) * (w.ndim - 1)), w, 0)
            return a + jnp.tensordot(weights.astype(a.dtype), w, 1)

        return (jax.tree.map(add, total, models), kept + weights.sum()), results

    # Clients that fill up the last chunk repeat the first one without any work.
    index = jnp.arange(chunks * chunk)
    real = index < num_clients
    index = jnp.where(real, index, 0)
    padded = jax.tree.map(lambda a: a[index], clients)
    padded = padded._replace(tau=jnp.where(real, padded.tau, 0))

    def split(a):
        return a.reshape((chunks, chunk) + a.shape[1:])

    weights = split(jnp.where(real, rho[index], 0.0))
    limits = split(jnp.where(real, work[index], 0)).max(axis=1)
    carry, results = lax.scan(
        several,
        (zeros, jnp.float32(0)),
        (jax.tree.map(split, padded), weights, limits),
    )
    flat = jax.tree.map(lambda a: a.reshape((-1,) + a.shape[2:])[:num_clients], results)
    return carry, flat


def weighted_models(
    train: TrainOne,
    clients: Client,
    rho: Array,
    template: Params,
    work: Array,
    *,
    mapping: str,
    chunk: int,
    most: int | None = None,
    total: Callable[[Params], Params] = lambda tree: tree,
) -> tuple[Params, Array, LocalResult]:
    """Trains every client and returns Σ ρ_i w_i over those that stayed finite.

    Args:
      train: local training of one client.
      clients: leading axis ``[N]``.
      rho: ``[N]`` float32 weights, Σ ρ = 1 or all 0.
      template: the global model, for shapes and dtypes.
      work: ``[N]`` int32 mini-batch steps each client has to do.
      mapping: "sequential" or "vmap".
      chunk: clients side by side under "vmap".
      most: mini-batch steps of the longest client of the whole schedule, None: not
        known before the program runs.
      total: sum over devices of what this one has added up.

    Returns:
      the weighted mean, the share Σ ρ of the clients kept in it (0: none, the mean is
      then all zeros), and every client's `LocalResult` ``[N]``.
    """
    zeros = jax.tree.map(jnp.zeros_like, template)
    if mapping == "sequential":
        (mean, kept), results = _sequential(train, clients, rho, zeros)
    else:
        (mean, kept), results = _vmapped(train, clients, rho, zeros, chunk, work, most)
    dropped = jnp.any(~results.finite & (rho > 0))
    mean, kept, dropped = total((mean, kept, dropped.astype(jnp.int32)))
    # Only a dropped client makes a rescaling necessary; else keep the very bits.
    rescale = (dropped > 0) & (kept > 0)
    scale = jnp.where(rescale, 1.0 / jnp.where(kept > 0, kept, 1.0), 1.0)

    def finish(a, w):  # counters and other whole numbers have no mean: w^t's stay
        return a * scale.astype(a.dtype) if jnp.issubdtype(a.dtype, jnp.inexact) else w

    return jax.tree.map(finish, mean, template), kept, results
