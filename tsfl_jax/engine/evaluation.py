"""The global model on the test set, batch by batch inside the compiled program."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from tsfl_jax import types
from tsfl_jax.engine import devices, exact_sums
from tsfl_jax.engine.client import Samples, scaled
from tsfl_jax.models import losses
from tsfl_jax.models.networks import Model
from tsfl_jax.types import Params


class TestSet(NamedTuple):
    """Test samples cut into E equal batches, the last one padded."""

    x: Shaped[Array, "E b ..."]  # as stored
    y: Int[Array, "E b"]  # int32
    mask: Bool[Array, "E b"]  # False on padding


class HeldOut(NamedTuple):
    """Validation samples in E equal batches, the last one padded."""

    rows: Int[types.Array, "*lanes E b"]  # int32, indices into the training samples
    mask: Bool[types.Array, "*lanes E b"]  # False on padding


class Scores(NamedTuple):
    """A model on the test set, float32."""

    accuracy: Float[Array, ""]  # in [0, 1]; NaN: the model does not classify
    loss: Float[Array, ""]  # mean; inf: not a number. NaN: not measured
    metrics: Float[Array, "m"] | None  # means of the model's metrics; None: it has none


def make_test_set(
    x: Shaped[np.ndarray, "M ..."], y: Int[np.ndarray, "M"], num_devices: int = 1
) -> TestSet:
    """Cut samples and labels into equal batches, the same number for each device.

    The size of a batch does not depend on the number of devices, so that no sum does;
    some devices may get one batch without samples.
    """
    index, mask = _in_batches(len(y), num_devices)
    x, y = x[index.ravel()].reshape(index.shape + x.shape[1:]), y[index]
    return TestSet(jnp.asarray(x), jnp.asarray(y), jnp.asarray(mask))


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
    model: Model, variables: Params, samples: Samples, test: TestSet, axis: str | None
) -> Scores:
    """Evaluate a model on the whole test set.

    Args:
      model: the network.
      variables: its Flax variables.
      samples: for their scale.
      test: this device's batches.
      axis: mesh axis of devices that share the test set; None: one device.

    Returns:
      `Scores`.
    """

    def batch(item: TestSet) -> tuple[Int[Array, ""], Float[Array, ""], list[Array]]:
        outputs = model.predict(variables, scaled(samples, item.x))
        loss = jnp.where(item.mask, model.loss(outputs, item.y), 0.0)
        own = [
            jnp.where(item.mask, metric(outputs, item.y), 0).sum(dtype=jnp.float32)
            for _, metric in model.metrics
        ]
        right = jnp.int32(0)
        if model.classifies:
            correct = losses.correct(outputs, item.y)
            right = jnp.where(item.mask, correct, False).sum()
        return right, loss.sum(), own

    right, loss, own = lax.map(batch, test)
    right, count = devices.total((right.sum(), test.mask.sum()), axis)
    accuracy = right / count if model.classifies else jnp.float32(jnp.nan)
    means = [exact_sums.scalar(sums, axis) / count for sums in own]
    metrics = jnp.stack(means) if means else None
    mean = exact_sums.scalar(loss, axis) / count
    # NaN stands for "not measured", after which the loss before would be the last one.
    mean = jnp.where(jnp.isnan(mean), jnp.inf, mean)
    return Scores(jnp.asarray(accuracy, jnp.float32), mean, metrics)


def nothing(model: Model) -> Scores:
    """Scores that were not measured."""
    missing, number = jnp.float32(jnp.nan), len(model.metrics)
    return Scores(missing, missing, jnp.full(number, jnp.nan) if number else None)
