"""Local training of ONE client; `mapping` runs it for all.

Client i starts from the global model w^t and makes τ_i local iterations of SGD on its
own mini-batches, then stops: α_{i,h} = 1 for h < τ_i, else 0. A local iteration is one
pass over the client's data or one mini-batch step. FedProx's μ/2‖w − w^t‖² is added to
the gradient; μ = 0 is FedAvg's client.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tsfl_jax import rng
from tsfl_jax.models import losses
from tsfl_jax.models.networks import Model
from tsfl_jax.types import Array, HParams, Params, PRNGKey


class Samples(NamedTuple):
    """Training samples, once on the device for all clients."""

    x: Array  # [M, ...] as stored, uint8 for images
    y: Array  # [M] int32
    mean: Array  # [C] or [], (x - mean) * inverse_std is what a model sees
    inverse_std: Array  # [C] or []


class Client(NamedTuple):
    """One client in one interval; with a leading axis, all of them."""

    id: Array  # int32, names its random stream wherever it stands in the array
    tau: Array  # int32, local iterations τ_i ≥ 0
    size: Array  # int32, samples held |D_i| ≥ 1
    row: Array  # [D] int32, indices into Samples; the first `size` are held
    task: Array | None = None  # int32, names the stream instead of the interval
    base: Array | None = None  # int32, which of the kept models it starts from


class LocalResult(NamedTuple):
    """What a client reports beside its model."""

    loss: Array  # sum of the sample losses met on the way, float32
    samples: Array  # number of samples trained on, int32
    finite: Array  # bool, the model has no NaN and no infinity


def scaled(samples: Samples, x: Array) -> Array:
    """Stored samples as float32 network input: (x − mean) / std."""
    shape = (1,) * (x.ndim - samples.mean.ndim) + samples.mean.shape
    mean, inverse_std = samples.mean.reshape(shape), samples.inverse_std.reshape(shape)
    return (x.astype(jnp.float32) - mean) * inverse_std


def batch_loss(model: Model, variables: Params, x, y, mask, key) -> tuple:
    """Mean of the model's loss over the valid rows of a batch, and the new variables.

    Args:
      variables: Flax variables.
      x: ``[B, ...]`` float32.
      y: ``[B]`` int32.
      mask: ``[B]`` bool, False on padding.
      key: for dropout.

    Returns:
      loss, (new variables, sum of the sample losses).
    """
    outputs, changed = model.train(variables, x, mask, key)
    total = jnp.sum(jnp.where(mask, model.loss(outputs, y), 0.0))
    return total / jnp.maximum(mask.sum(), 1), (changed, total)


def batch_gradient(model: Model, variables: Params, x, y, mask, key) -> tuple:
    """((loss, aux), gradient with respect to ``variables["params"]``)."""

    def loss(params):
        return batch_loss(model, {**variables, "params": params}, x, y, mask, key)

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


def steps_per_iteration(size: Array, batch_size: int, iteration: str) -> Array:
    """Mini-batch steps in one local iteration: ⌈|D_i|/B⌉ for "pass", 1 for "step"."""
    return -(-size // batch_size) if iteration == "pass" else size * 0 + 1


def most_passes(tau, size, batch_size: int, iteration: str) -> int:
    """Passes, whole or begun, of the client that makes most; ``[T, N]`` in, ≥ 1 out."""
    tau, size = tau.astype(np.int64), size.astype(np.int64)
    steps = tau * steps_per_iteration(size, batch_size, iteration)
    return max(int((-(-steps // -(-size // batch_size))).max()), 1)


def _orders(key: PRNGKey, size: Array, passes: int, capacity: int) -> Array:
    """``[passes, D]``: in each row a random order of 0..size−1, then the rest."""
    scores = jax.vmap(
        lambda h: jax.random.uniform(jax.random.fold_in(key, h), (capacity,))
    )(jnp.arange(passes))
    held = jnp.arange(capacity)[None] < size
    return jnp.argsort(jnp.where(held, scores, 2.0), axis=1).astype(jnp.int32)


def make_local_training(
    model: Model,
    optimizer: Callable[[HParams], optax.GradientTransformation],
    *,
    batch_size: int,
    iteration: str,
    passes: int,
) -> Callable:
    """Builds the local training of one client.

    Args:
      model: the network.
      optimizer: hyper-parameters → optax transformation, fresh in every interval.
      batch_size: B.
      iteration: "pass" or "step".
      passes: most passes over its data, whole or begun, that a client may make.

    Returns:
      ``train(variables, key, client, samples, hparams, limit=None, correction=None)
      -> (variables, LocalResult)``. `limit` None: the loop ends with this client's own
      work, so frozen steps cost nothing. `limit` an integer shared by all clients of a
      `vmap`: all run that many steps in lock-step and α freezes whoever has finished.
      `correction` is added to every gradient (SCAFFOLD).
    """

    def train(
        variables: Params,
        key: PRNGKey,
        client: Client,
        samples: Samples,
        hparams: HParams,
        limit: Array | int | None = None,
        correction: Params | None = None,
    ) -> tuple[Params, LocalResult]:
        transformation = optimizer(hparams)
        start = variables["params"]
        batches = -(-client.size // batch_size)  # in one pass
        work = client.tau * steps_per_iteration(client.size, batch_size, iteration)
        order_key, step_key = rng.keys(key, "sample order", "training dropout")
        orders = _orders(order_key, client.size, passes, client.row.shape[0])

        def step(k, carry):
            variables, opt_state, loss, count = carry
            position = (k % batches) * batch_size + jnp.arange(batch_size)
            mask = position < client.size
            order = orders[jnp.minimum(k // batches, passes - 1)]
            # A short last batch is filled up with the first samples of the pass,
            # masked out: real rows keep every activation finite.
            rows = client.row[order[position % client.size]]
            (_, (changed, total)), grads = batch_gradient(
                model,
                variables,
                scaled(samples, samples.x[rows]),
                samples.y[rows],
                mask,
                jax.random.fold_in(step_key, k),
            )
            params = variables["params"]
            grads = jax.tree.map(
                lambda g, w, w0: g + hparams.mu * (w - w0), grads, params, start
            )
            if correction is not None:
                grads = jax.tree.map(jnp.add, grads, correction)
            updates, opt_state = transformation.update(grads, opt_state, params)
            changed = {**changed, "params": optax.apply_updates(params, updates)}
            return changed, opt_state, loss + total, count + mask.sum()

        def masked_step(k, carry):
            # `where`, never α·update: a NaN in the frozen branch must not leak.
            alpha = k < work
            new = step(k, carry)
            return jax.tree.map(lambda n, o: jnp.where(alpha, n, o), new, carry)

        carry = (variables, transformation.init(start), jnp.float32(0), jnp.int32(0))
        if limit is None:
            carry = lax.fori_loop(0, work, step, carry)
        else:
            carry = lax.fori_loop(0, limit, masked_step, carry)
        variables, _, loss, count = carry
        return variables, LocalResult(loss, count, losses.all_finite(variables))

    return train
