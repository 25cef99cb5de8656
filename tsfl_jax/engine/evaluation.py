"""Models on the test set, batch by batch inside the compiled program.

The global one, or where layers stay with the clients each client's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from tsfl_jax import trees, types
from tsfl_jax.engine import devices, exact_sums
from tsfl_jax.engine.client import Samples, scaled
from tsfl_jax.engine.program_spec import Parts
from tsfl_jax.models import losses
from tsfl_jax.models.networks import Model
from tsfl_jax.types import HParams, Params
from tsfl_jax.uplink import chain


class TestSet(NamedTuple):
    """Test samples cut into E equal batches, the last one padded."""

    x: Shaped[Array, "E b ..."]  # as stored
    y: Num[Array, "E b ..."]  # int32 labels, or float32 targets
    mask: Bool[Array, "E b"]  # False on padding
    # int32 in [0, G), the client or class that a sample counts for; None: no groups
    group: Int[Array, "E b"] | None = None


class HeldOut(NamedTuple):
    """Validation samples in E equal batches, the last one padded."""

    rows: Int[types.Array, "*lanes E b"]  # int32, indices into the training samples
    mask: Bool[types.Array, "*lanes E b"]  # False on padding


class Scores(NamedTuple):
    """A model on the test set, float32."""

    accuracy: Float[types.Array, ""]  # in [0, 1]; NaN: the model does not classify
    loss: Float[types.Array, ""]  # mean; inf: not a number. NaN: not measured
    metrics: Float[Array, "m"] | None  # of the model, see `Model`; None: it has none
    # The same by group of test samples; None: there are no groups.
    group_accuracy: Float[types.Array, "G"] | None = None
    group_loss: Float[types.Array, "G"] | None = None


class Scored(NamedTuple):
    """Clients whose models are tested."""

    client: Int[types.Array, "m"]  # ids; −1 fills up
    # What each group of test samples counts for a client; rows of 0 fill up.
    share: Float[types.Array, "m G"]


def make_test_set(
    x: Shaped[np.ndarray, "M ..."],
    y: Num[np.ndarray, "M ..."],
    num_devices: int = 1,
    group: Int[np.ndarray, "M"] | None = None,
) -> TestSet:
    """Cut samples, labels and groups into equal batches, as many for each device.

    The size of a batch does not depend on the number of devices, so that no sum does;
    some devices may get one batch without samples.
    """
    index, mask = _in_batches(len(y), num_devices)
    x, y = x[index.ravel()].reshape(index.shape + x.shape[1:]), y[index]
    groups = None if group is None else jnp.asarray(group[index], jnp.int32)
    return TestSet(jnp.asarray(x), jnp.asarray(y), jnp.asarray(mask), groups)


def _in_batches(
    count: int, num_devices: int
) -> tuple[Int[np.ndarray, "E b"], Bool[np.ndarray, "E b"]]:
    """Indices of `count` samples in equal batches, and which are no padding."""
    # Larger batches than 128 fall out of the CPU's cache.
    batches = -(-count // 128)
    size = -(-count // batches)
    batches = -(-batches // num_devices) * num_devices
    index = np.arange(batches * size).reshape(batches, size)
    mask = index < count
    return np.where(mask, index, 0), mask


def make_held_out(rows: Int[np.ndarray, "V"]) -> HeldOut:
    """Cut validation samples into equal batches, on the host."""
    index, mask = _in_batches(len(rows), 1)
    return HeldOut(rows[index].astype(np.int32), mask)


def evaluate(
    model: Model,
    variables: Params,
    samples: Samples,
    test: TestSet,
    axis: str | None,
    group_size: Int[types.Array, "G"] | None = None,
) -> Scores:
    """Evaluate a model on the whole test set, of which a device has its own batches.

    A group without samples has NaN; `samples` give the scale.
    """

    def value(metric: Any, outputs: Array, item: TestSet) -> Any:
        if isinstance(metric, types.OnChanged):
            x = scaled(samples, metric.change(item.x))
            return metric.metric(model.predict(variables, x), item.y)
        return metric(outputs, item.y)

    def batch(item: TestSet) -> tuple[Any, Array, list[Any], tuple[Array, ...]]:
        outputs = model.predict(variables, scaled(samples, item.x))
        loss = jnp.where(item.mask, model.loss(outputs, item.y), 0.0)
        pairs = [value(metric, outputs, item) for _, metric in model.metrics]
        pairs = [m if isinstance(m, tuple) else (m, item.mask) for m in pairs]
        pairs = jax.tree.map(
            lambda a: jnp.where(item.mask, a, 0).sum(dtype=jnp.float32), pairs
        )
        right, number = _counts(model, outputs, item)
        by_group = ()
        if group_size is not None:
            # Not a scatter, whose sums have another order in every run on a GPU.
            group = cast(Array, item.group)[:, None]
            in_group = group == jnp.arange(len(group_size))[None]
            summed = (right, loss, number)[: 2 if model.accuracy is None else 3]
            by_group = tuple(
                jnp.where(in_group, values[:, None], 0).sum(axis=0, dtype=jnp.float32)
                for values in summed
            )
        return (right.sum(), number.sum()), loss.sum(), pairs, by_group

    counts, loss, pairs, by_group = lax.map(batch, test)
    right, number, count = devices.total(
        (*(a.sum() for a in counts), test.mask.sum()), axis
    )
    loss, *sums = exact_sums.scalars(axis, loss, *jax.tree.leaves(pairs))
    means = [a / weight for a, weight in zip(sums[::2], sums[1::2], strict=True)]
    scores = Scores(
        _accuracy(model, right / number),
        _loss(loss / count),
        jnp.stack(means) if means else None,
    )
    if group_size is None:
        return scores
    right, loss, *numbers = (exact_sums.scalar(sums, axis) for sums in by_group)
    (number,) = numbers or [group_size]  # a sample counts once
    shares = _accuracy(model, right / number), _loss(loss / group_size)
    accuracy, loss = (jnp.where(group_size > 0, a, jnp.nan) for a in shares)
    return scores._replace(group_accuracy=accuracy, group_loss=loss)


def _counts(model: Model, outputs: Array, item: TestSet) -> tuple[Array, Array]:
    """What is right in each sample of a batch, and of how much."""
    if model.accuracy is not None:
        counts = model.accuracy(outputs, item.y)
        right, number = (jnp.where(item.mask, a, 0).astype(int) for a in counts)
        return right, number
    if model.classifies:
        return losses.correct(outputs, item.y) & item.mask, item.mask
    return jnp.zeros_like(item.mask), item.mask


def _accuracy(
    model: Model, share: Float[types.Array, "*G"]
) -> Float[types.Array, "*G"]:
    """NaN where the model has none."""
    has_accuracy = model.classifies or model.accuracy is not None
    return share if has_accuracy else jnp.full_like(share, jnp.nan)


def _loss(mean: Float[types.Array, "*G"]) -> Float[types.Array, "*G"]:
    """NaN stands for "not measured", after which the loss before would be the last."""
    return jnp.where(jnp.isnan(mean), jnp.inf, mean)


def evaluate_personal(
    parts: Parts,
    params: Params,
    states: Any,
    ids: Int[types.Array, "U"],
    scored: Scored,
    hparams: HParams,
    score: Callable[[Params], Scores],
) -> Scores:
    """Test the clients' own models, one after another, of the U clients `ids`.

    Means over the clients of each score on the whole test set. By group are scores of
    the clients: ``[m]``, NaN for one without test samples. `score` makes `Scores` by
    group of a model's variables.
    """

    def one(client: Scored) -> tuple[Any, Array, Array]:
        layers = trees.take(states, jnp.argmax(ids == client.client))
        scores = score(chain.start(parts.uplinks, params, layers, -1, hparams))
        accuracy = _mixed(client.share, cast(Array, scores.group_accuracy))
        loss = _mixed(client.share, cast(Array, scores.group_loss))
        return scores[:3], accuracy, loss

    whole, accuracy, loss = lax.map(one, scored)
    is_client = scored.client >= 0

    def mean(values: Float[Array, "m ..."]) -> Float[Array, "..."]:
        mask = is_client.reshape((-1,) + (1,) * (values.ndim - 1))
        return jnp.where(mask, values, 0.0).sum(axis=0) / is_client.sum()

    whole = jax.tree.map(mean, whole)
    return Scores(*whole, group_accuracy=accuracy, group_loss=loss)


def _mixed(
    share: Float[types.Array, "G"], score: Float[types.Array, "G"]
) -> Float[Array, ""]:
    """A client's score: the mean over the groups that count; NaN: none is tested."""
    share = jnp.where(jnp.isnan(score), 0.0, share)
    return jnp.where(share > 0, share * score, 0.0).sum() / share.sum()
