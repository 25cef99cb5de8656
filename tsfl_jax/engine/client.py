"""Local training of ONE client; `mapping` runs it for all.

Client i starts from the global model w^t and makes τ_i local iterations of SGD on its
own mini-batches, then stops: α_{i,h} = 1 for h < τ_i, else 0. A local iteration is one
pass over the client's data or one mini-batch step. The gradient of FedProx's
μ/2‖w − w^t‖² is added to the client's own; μ = 0 is FedAvg's client.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from tsfl_jax import rng
from tsfl_jax.engine.recipe import Parts
from tsfl_jax.models import losses
from tsfl_jax.models.networks import Model
from tsfl_jax.types import HParams, Params, PRNGKey, Scalar


class Samples(NamedTuple):
    """Training samples, stored once on the device for all clients."""

    x: Shaped[Array, "M ..."]  # as stored, uint8 for images
    y: Int[Array, "M"]  # int32
    mean: Float[Array, "..."]  # [C] or []: (x − mean) · inverse_std is the input
    inverse_std: Float[Array, "..."]  # [C] or []


class Client(NamedTuple):
    """One client in one interval; with a leading axis, all of them."""

    id: Int[Array, "..."]  # names the random stream, independent of the position
    tau: Int[Array, "..."]  # local iterations τ_i ≥ 0
    size: Int[Array, "..."]  # samples held |D_i| ≥ 1
    row: Int[Array, "... D"]  # indices into Samples; the first `size` are held
    # Of asynchronous frameworks: the task, which names the stream instead of the
    # interval, and which of the P snapshots the client starts from; else w^t.
    task: Int[Array, "..."] | None = None
    snapshot: Int[Array, "..."] | None = None


class Start(NamedTuple):
    """What one client starts a task from."""

    variables: Params  # the global model it downloaded
    key: PRNGKey  # of its random streams
    correction: Params | None = None  # added to each gradient (SCAFFOLD)


class LocalResult(NamedTuple):
    """What a client reports besides its model."""

    loss: Float[Array, "..."]  # sum of the sample losses during training
    samples: Int[Array, "..."]  # samples trained on
    finite: Bool[Array, "..."]  # the model has no NaN and no infinity


def scaled(
    samples: Samples, x: Shaped[Array, "B ..."] | Shaped[np.ndarray, "B ..."]
) -> Float[Array, "B ..."]:
    """Stored samples as float32 network input: (x − mean) / std."""
    shape = (1,) * (x.ndim - samples.mean.ndim) + samples.mean.shape
    mean, inverse_std = samples.mean.reshape(shape), samples.inverse_std.reshape(shape)
    return (jnp.asarray(x, jnp.float32) - mean) * inverse_std


class Batch(NamedTuple):
    """One mini-batch."""

    x: Float[Array, "B ..."]  # scaled network input
    y: Int[Array, "B"]
    mask: Bool[Array, "B"]  # False on padding
    key: PRNGKey  # for dropout


def batch_of(
    samples: Samples, rows: Int[Array, "B"], mask: Bool[Array, "B"], key: PRNGKey
) -> Batch:
    """The mini-batch of the stored samples `rows`."""
    return Batch(scaled(samples, samples.x[rows]), samples.y[rows], mask, key)


def batch_gradient(
    model: Model, variables: Params, batch: Batch
) -> tuple[tuple[Float[Array, ""], tuple[Params, Float[Array, ""]]], Params]:
    """The model's loss on a batch and its gradient.

    Args:
      model: the network.
      variables: Flax variables.
      batch: the loss is the mean over its valid rows.

    Returns:
      (loss, (new variables, sum of the sample losses)), and the gradient with respect
      to ``variables["params"]``.
    """

    def loss(params: Params) -> tuple[Float[Array, ""], Any]:
        x, y, mask, key = batch
        outputs, changed = model.train({**variables, "params": params}, x, mask, key)
        total = jnp.sum(jnp.where(mask, model.loss(outputs, y), 0.0))
        return total / jnp.maximum(mask.sum(), 1), (changed, total)

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


def steps_per_iteration(size: Any, batch_size: int, iteration: str) -> Any:
    """Mini-batch steps of a local iteration: ⌈|D_i|/B⌉ for "pass", 1 for "step".

    Args:
      size: |D_i| ≥ 1, an integer array of any shape, of JAX or NumPy.
      batch_size: B ≥ 1.
      iteration: "pass" or "step".

    Returns:
      An array like `size`.
    """
    return -(-size // batch_size) if iteration == "pass" else size * 0 + 1


def most_passes(
    tau: Int[np.ndarray, "T N"],
    size: Int[np.ndarray, "T N"],
    batch_size: int,
    iteration: str,
) -> int:
    """Passes ≥ 1, complete or begun, of the client that makes most of them."""
    tau, size = tau.astype(np.int64), size.astype(np.int64)
    steps = tau * steps_per_iteration(size, batch_size, iteration)
    return max(int((-(-steps // -(-size // batch_size))).max()), 1)


def _orders(
    key: PRNGKey, size: Int[Array, ""], passes: int, capacity: int
) -> Int[Array, "H D"]:
    """In each of H = `passes` rows a random order of 0..size−1, then the rest."""
    scores = jax.vmap(
        lambda h: jax.random.uniform(jax.random.fold_in(key, h), (capacity,))
    )(jnp.arange(passes))
    held = jnp.arange(capacity)[None] < size
    return jnp.argsort(jnp.where(held, scores, 2.0), axis=1).astype(jnp.int32)


class _Carry(NamedTuple):
    """What one mini-batch step hands to the next."""

    variables: Params
    optimizer: optax.OptState
    loss: Float[Array, ""]
    samples: Int[Array, ""]


def _batch(
    step: Int[Array, ""], client: Client, orders: Int[Array, "H D"], batch_size: int
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """The samples of a mini-batch, and which rows are not padding."""
    batches = -(-client.size // batch_size)  # in one pass
    position = (step % batches) * batch_size + jnp.arange(batch_size)
    order = orders[jnp.minimum(step // batches, orders.shape[0] - 1)]
    # A short last batch is filled up with the first samples of the pass, masked out:
    # real rows keep every activation finite.
    return client.row[order[position % client.size]], position < client.size


def _step(
    model: Model,
    optimizer: optax.GradientTransformation,
    start: Start,
    mu: Scalar,
    carry: _Carry,
    batch: Batch,
) -> _Carry:
    """One step of SGD on ∇F_i + μ(w − w^t), plus the rule's correction if any."""
    (_, (changed, loss)), gradient = batch_gradient(model, carry.variables, batch)
    params, anchor = carry.variables["params"], start.variables["params"]
    gradient = jax.tree.map(
        lambda g, w, w0: g + mu * (w - w0), gradient, params, anchor
    )
    if start.correction is not None:
        gradient = optax.tree.add(gradient, start.correction)
    updates, state = optimizer.update(gradient, carry.optimizer, params)
    changed = {**changed, "params": optax.apply_updates(params, updates)}
    return _Carry(changed, state, carry.loss + loss, carry.samples + batch.mask.sum())


def train(
    parts: Parts,
    start: Start,
    client: Client,
    samples: Samples,
    hparams: HParams,
    limit: ArrayLike | None = None,
) -> tuple[Params, LocalResult]:
    """Trains one client for τ_i local iterations.

    Args:
      parts: the network, the optimizer and what shapes the loop.
      start: model, random stream and correction.
      client: one client, without a leading axis.
      samples: the training samples.
      hparams: η, μ and what else the optimizer takes from them.
      limit: None: the loop ends with this client's own work. Else a number of steps
        shared by all clients of a `vmap`: all run that many in lock-step, and α
        freezes those that have finished.

    Returns:
      The client's variables, which may hold NaN, and its `LocalResult`.
    """
    recipe, optimizer = parts.recipe, parts.optimizer(hparams)
    work = client.tau * steps_per_iteration(
        client.size, recipe.batch_size, recipe.iteration
    )
    order_key, dropout_key = rng.keys(start.key, "sample order", "training dropout")
    orders = _orders(order_key, client.size, recipe.passes, client.row.shape[0])

    def step(k: Int[Array, ""], carry: _Carry) -> _Carry:
        rows, mask = _batch(k, client, orders, recipe.batch_size)
        batch = batch_of(samples, rows, mask, jax.random.fold_in(dropout_key, k))
        return _step(parts.model, optimizer, start, hparams.mu, carry, batch)

    def step_or_freeze(k: Int[Array, ""], carry: _Carry) -> _Carry:
        # `where`, never α·update: a NaN in the frozen branch must not leak.
        return optax.tree.where(k < work, step(k, carry), carry)

    state = optimizer.init(start.variables["params"])
    carry = _Carry(start.variables, state, jnp.float32(0), jnp.int32(0))
    if limit is None:
        carry = lax.fori_loop(0, work, step, carry)
    else:
        carry = lax.fori_loop(0, limit, step_or_freeze, carry)
    finite = jnp.asarray(losses.all_finite(carry.variables))
    return carry.variables, LocalResult(carry.loss, carry.samples, finite)
