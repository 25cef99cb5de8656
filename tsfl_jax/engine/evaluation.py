"""The global model on the test set, batch by batch inside the compiled program."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax.engine import exact_sums
from tsfl_jax.engine.client import Samples, scaled
from tsfl_jax.models import losses
from tsfl_jax.models.networks import Model
from tsfl_jax.types import Array, Params


class TestSet(NamedTuple):
    """Test samples cut into E equal batches, the last one padded."""

    x: Array  # [E, b, ...] as stored
    y: Array  # [E, b] int32
    mask: Array  # [E, b] bool, False on padding


def make_test_set(x: np.ndarray, y: np.ndarray, num_devices: int = 1) -> TestSet:
    """Samples ``[M, ...]`` and labels ``[M]`` in equal batches, as many per device.

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
    return TestSet(
        x=x[index].reshape(shape + x.shape[1:]),
        y=y[index].reshape(shape),
        mask=mask.reshape(shape),
    )


def evaluate(
    model: Model, variables: Params, samples: Samples, test: TestSet, axis: str | None
) -> tuple[Array, Array]:
    """(accuracy in [0, 1], mean loss) on the whole test set.

    The accuracy of a model that does not classify is NaN. `axis` names the mesh axis of
    devices that share the test set; None: one device.
    """

    def batch(item):
        x, y, mask = item
        outputs = model.predict(variables, scaled(samples, x))
        loss = jnp.where(mask, model.loss(outputs, y), 0.0)
        right = 0
        if model.classifies:
            right = jnp.where(mask, losses.correct(outputs, y), False).sum()
        return jnp.int32(right), loss.sum()

    right, loss = lax.map(batch, tuple(test))
    counts = right.sum(), test.mask.sum()
    right, count = counts if axis is None else lax.psum(counts, axis)
    accuracy = right / count if model.classifies else jnp.float32(jnp.nan)
    return accuracy, exact_sums.scalar(loss, axis) / count
