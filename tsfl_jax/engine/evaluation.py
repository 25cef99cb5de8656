"""The global model on the test set, batch by batch inside the compiled program."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

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


def make_test_set(
    x: Shaped[np.ndarray, "M ..."], y: Int[np.ndarray, "M"], num_devices: int = 1
) -> TestSet:
    """Cuts samples and labels into equal batches, the same number for each device.

    The size of a batch does not depend on the number of devices, so that no sum does;
    some devices may get one batch without samples.
    """
    # Larger batches than 128 fall out of the CPU's cache.
    batches = -(-len(y) // 128)
    size = -(-len(y) // batches)
    batches = -(-batches // num_devices) * num_devices
    index = np.arange(batches * size)
    mask = index < len(y)
    index = np.where(mask, index, 0)
    shape = (batches, size)
    x, y = x[index].reshape(shape + x.shape[1:]), y[index].reshape(shape)
    return TestSet(jnp.asarray(x), jnp.asarray(y), jnp.asarray(mask.reshape(shape)))


def evaluate(
    model: Model, variables: Params, samples: Samples, test: TestSet, axis: str | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Evaluates a model on the whole test set.

    Args:
      model: the network.
      variables: its Flax variables.
      samples: for their scale.
      test: this device's batches.
      axis: mesh axis of devices that share the test set; None: one device.

    Returns:
      Accuracy in [0, 1], NaN if the model does not classify; and mean loss.
    """

    def batch(item: TestSet) -> tuple[Int[Array, ""], Float[Array, ""]]:
        outputs = model.predict(variables, scaled(samples, item.x))
        loss = jnp.where(item.mask, model.loss(outputs, item.y), 0.0)
        right = jnp.int32(0)
        if model.classifies:
            correct = losses.correct(outputs, item.y)
            right = jnp.where(item.mask, correct, False).sum()
        return right, loss.sum()

    right, loss = lax.map(batch, test)
    right, count = devices.total((right.sum(), test.mask.sum()), axis)
    accuracy = right / count if model.classifies else jnp.float32(jnp.nan)
    return accuracy, exact_sums.scalar(loss, axis) / count
