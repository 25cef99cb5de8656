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
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from tsfl_jax import rng, trees
from tsfl_jax.engine import optimizers
from tsfl_jax.engine.program_spec import (
    BatchGradient,
    Parts,
    ProgramSpec,
    Step,
    Stepped,
)
from tsfl_jax.models import losses
from tsfl_jax.models.networks import Model
from tsfl_jax.types import Array as AnyArray
from tsfl_jax.types import HParams, Params, PRNGKey, user_code


class Samples(NamedTuple):
    """Training samples, stored once on the device for all clients."""

    x: Shaped[Array, "M ..."]  # as stored, uint8 for images
    y: Num[Array, "M ..."]  # int32 labels, or float32 targets
    mean: Float[Array, "..."]  # [], [C] or [F]: (x − mean) · inverse_std
    inverse_std: Float[Array, "..."]  # like mean


class ClassIndex(NamedTuple):
    """All training samples by class, for clients that get new ones."""

    first: Int[AnyArray, "C"]  # place of a class's first sample in `order`
    count: Int[AnyArray, "C"]  # samples of the class
    order: Int[AnyArray, "M"]  # indices into Samples, sorted by class
    label: Int[AnyArray, "M"]  # class of each of Samples


class Client(NamedTuple):
    """One client in one interval; with a leading axis, all of them."""

    id: Int[Array, "..."]  # names the random stream, independent of the position
    tau: Int[Array, "..."]  # local iterations τ_i ≥ 0
    size: Int[Array, "..."]  # samples held |D_i| ≥ 1
    row: Int[Array, "... D"]  # indices into Samples; the first `size` are held
    place: Int[Array, "..."]  # in a state of all clients
    task: Int[Array, "..."]  # names the random stream, as in `types.Delivery`
    snapshot: Int[Array, "..."]  # which of the P that it starts from; P = 0: w^t


class Start(NamedTuple):
    """What one client starts a task from."""

    variables: Params  # the global model it downloaded
    key: PRNGKey  # of its random streams
    gradient_correction: Params | None = None  # added to each gradient (SCAFFOLD)
    client: Int[Array, ""] | int = 0  # its id


class LocalResult(NamedTuple):
    """What a client reports besides its model."""

    loss: Float[Array, "..."]  # sum of the sample losses during training
    samples: Int[Array, "..."]  # samples trained on
    finite: Bool[Array, "..."]  # the model has no NaN and no infinity
    uplinks: Any = ()  # new states of the links of `Parts.uplinks`


def scaled(
    samples: Samples, x: Shaped[Array, "B ..."] | Shaped[np.ndarray, "B ..."]
) -> Num[Array, "B ..."]:
    """Stored samples as network input: (x − mean) / std in float32, tokens as int32."""
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.uint8:
        return jnp.asarray(x, jnp.int32)
    shape = (1,) * (x.ndim - samples.mean.ndim) + samples.mean.shape
    mean, inverse_std = samples.mean.reshape(shape), samples.inverse_std.reshape(shape)
    return (jnp.asarray(x, jnp.float32) - mean) * inverse_std


class Batch(NamedTuple):
    """One mini-batch."""

    x: Num[Array, "B ..."]  # scaled network input
    y: Num[Array, "B ..."]
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
    """The mean loss on a batch, and its gradient in ``variables["params"]``.

    ((loss, (new variables, sum of the sample losses)), gradient).
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
    """
    return -(-size // batch_size) if iteration == "pass" else size * 0 + 1


def mini_batch_steps(spec: ProgramSpec, clients: Client) -> Int[Array, "..."]:
    """Steps of one client, or of all along a leading axis, in an interval."""
    per_iteration = steps_per_iteration(clients.size, spec.batch_size, spec.iteration)
    return clients.tau * per_iteration


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


_FEW = 128  # XLA's CPU backend sorts so few slower than it compares all pairs


def _argsort(scores: Float[Array, "D"]) -> Int[Array, "D"]:
    """Indices in order of the scores; equal ones keep theirs."""

    def sort(scores: Float[Array, "D"]) -> Int[Array, "D"]:
        return jnp.argsort(scores).astype(jnp.int32)

    def count(scores: Float[Array, "D"]) -> Int[Array, "D"]:
        index = jnp.arange(len(scores), dtype=jnp.int32)
        before = scores[:, None] < scores[None]
        before |= (scores[:, None] == scores[None]) & (index[:, None] < index[None])
        ranks = before.sum(axis=0, dtype=jnp.int32)
        return jnp.zeros_like(index).at[ranks].set(index, unique_indices=True)

    if len(scores) > _FEW:
        return sort(scores)
    return lax.platform_dependent(scores, cpu=count, default=sort)


def pass_order(
    key: PRNGKey, client: Client, number: Int[Array, ""] | int
) -> Int[Array, "D"]:
    """Places of a client's row in the random order of a pass, those held first.

    How much longer the row is than its samples, as in a lane of a sweep, does not
    change their order.
    """
    capacity = client.row.shape[0]
    scores = jax.random.uniform(jax.random.fold_in(key, number), (capacity,))
    return _argsort(jnp.where(jnp.arange(capacity) < client.size, scores, 2.0))


def _draw_pass(
    key: PRNGKey, client: Client, number: Int[Array, ""] | int, batch_size: int
) -> Int[Array, "b B"]:
    """The mini-batches of one pass in random order; the first ⌈|D_i|/B⌉ are used."""
    order = pass_order(key, client, number)
    batches = -(-client.row.shape[0] // batch_size)
    # The first samples fill up a short last batch: real rows keep activations finite.
    places = jnp.arange(batches * batch_size) % client.size
    return client.row[order[places]].reshape(batches, batch_size)


class _Carry(NamedTuple):
    """What one mini-batch step hands to the next."""

    variables: Params
    optimizer: optax.OptState
    loss: Float[Array, ""]
    samples: Int[Array, ""]


def _step(
    parts: Parts,
    optimizer: optax.GradientTransformation,
    start: Start,
    hparams: HParams,
    carry: _Carry,
    batch: Batch,
    k: Int[Array, ""] | int,
) -> _Carry:
    """Step k of a client, with the user's augmentation and kind of step if any."""
    variables, anchor = carry.variables, start.variables["params"]
    if parts.hooks.augment:
        key = jax.random.fold_in(rng.fold(start.key, "augmentation"), k)
        x, y = parts.hooks.augment(key, batch.x, batch.y)
        batch = batch._replace(x=x, y=y)

    def gradient(params: Params) -> BatchGradient:
        at = {**variables, "params": params}
        (_, (changed, loss)), gradient = batch_gradient(parts.model, at, batch)
        if parts.spec.proximal:
            gradient = jax.tree.map(
                lambda g, w, w0: g + hparams.mu * (w - w0), gradient, params, anchor
            )
        if jax.tree.leaves(start.gradient_correction):
            gradient = optax.tree.add(gradient, start.gradient_correction)
        return BatchGradient(gradient, changed, loss)

    def apply(at_batch: BatchGradient) -> Stepped:
        gradient, changed, loss = at_batch
        params = variables["params"]
        updates, state = optimizer.update(gradient, carry.optimizer, params)
        changed = {**changed, "params": optax.apply_updates(params, updates)}
        return Stepped(changed, state, loss)

    if parts.hooks.client_step:
        key = jax.random.fold_in(rng.fold(start.key, "own step"), k)
        inputs = variables, carry.optimizer, batch.x, batch.y, batch.mask, key
        functions = gradient, apply
        step = Step(*inputs, start.variables, hparams, k, start.client, *functions)
        with user_code("client_step fails", "expected a function of a Step -> Stepped"):
            stepped = Stepped(*parts.hooks.client_step(step))
    else:
        stepped = apply(gradient(variables["params"]))
    loss, samples = carry.loss + stepped.loss, carry.samples + batch.mask.sum()
    return _Carry(stepped.variables, stepped.optimizer, loss, samples)


def _first_carry(optimizer: optax.GradientTransformation, start: Start) -> _Carry:
    """A client before its first step, with random keys of its own."""
    # Those in a user's optimizer and collections are the same for all clients.
    state = optimizer.init(start.variables["params"])
    state = trees.folded(state, rng.fold(start.key, "optimizer keys"))
    variables = trees.folded(start.variables, rng.fold(start.key, "collection keys"))
    return _Carry(variables, state, jnp.float32(0), jnp.int32(0))


def train(
    parts: Parts,
    start: Start,
    client: Client,
    samples: Samples,
    hparams: HParams,
    limit: ArrayLike | None = None,
) -> tuple[Params, LocalResult]:
    """Train one client for τ_i local iterations; its variables may hold NaN.

    Without a limit the loop ends with this client's own work. Else it has the steps
    that all clients of a `vmap` run in lock-step; α freezes those that have finished.
    """
    spec, optimizer = parts.spec, parts.optimizer(hparams)
    optimizer = optimizers.without(optimizer, spec.frozen)
    work = mini_batch_steps(spec, client)
    order_key, dropout_key = rng.keys(start.key, "sample order", "training dropout")
    batches = -(-client.size // spec.batch_size)  # in one pass

    def step(k: Any, place: Any, rows: Int[Array, "B"], carry: _Carry) -> _Carry:
        mask = place * spec.batch_size + jnp.arange(spec.batch_size) < client.size
        batch = batch_of(samples, rows, mask, jax.random.fold_in(dropout_key, k))
        return _step(parts, optimizer, start, hparams, carry, batch, k)

    def one_pass(number: Int[Array, ""] | int, carry: _Carry) -> _Carry:
        rows = _draw_pass(order_key, client, number, spec.batch_size)
        first = number * batches
        count = jnp.minimum(batches, work - first)
        return lax.fori_loop(
            0, count, lambda b, c: step(first + b, b, rows[b], c), carry
        )

    def in_step(k: Int[Array, ""], carry: _Carry) -> _Carry:
        number, place = jnp.minimum(k // batches, spec.passes - 1), k % batches
        new = step(k, place, orders[number, place], carry)
        # `where`, never α·update: a NaN in the frozen branch must not leak.
        return new if spec.even else optax.tree.where(k < work, new, carry)

    carry = _first_carry(optimizer, start)
    if limit is None:  # only the passes that this client makes are drawn
        carry = lax.fori_loop(0, -(-work // batches), one_pass, carry)
    else:
        orders = jax.vmap(_draw_pass, (None, None, 0, None))(
            order_key, client, jnp.arange(spec.passes), spec.batch_size
        )
        carry = lax.fori_loop(0, limit, in_step, carry)
    finite = jnp.asarray(losses.all_finite(carry.variables))
    return carry.variables, LocalResult(carry.loss, carry.samples, finite)
