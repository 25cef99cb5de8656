"""The global model on the test set, batch by batch inside the compiled program."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax import metrics
from tsfl_jax.client import Samples, scaled
from tsfl_jax.models import Model
from tsfl_jax.types import Array, Params

Total = Callable[[Params], Params]  # sum over devices


class TestSet(NamedTuple):
    """Test samples cut into E equal batches, the last one padded."""

    x: Array  # [E, b, ...] as stored
    y: Array  # [E, b] int32
    mask: Array  # [E, b] bool, False on padding


def make_test_set(x: np.ndarray, y: np.ndarray, num_devices: int = 1) -> TestSet:
    """Samples ``[M, ...]`` and labels ``[M]`` in equal batches, as many per device."""
    # Larger batches than 128 fall out of the CPU's cache.
    batches = -(-len(y) // (128 * num_devices)) * num_devices
    size = -(-len(y) // batches)
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
    model: Model, variables: Params, samples: Samples, test: TestSet, total: Total
) -> tuple[Array, Array]:
    """(accuracy in [0, 1], mean loss) on the whole test set.

    The accuracy of a model that does not classify is NaN.
    """

    def batch(item):
        x, y, mask = item
        outputs = model.predict(variables, scaled(samples, x))
        loss = jnp.where(mask, model.loss(outputs, y), 0.0)
        if not model.classifies:
            return jnp.float32(jnp.nan), loss.sum()
        right = jnp.where(mask, metrics.correct(outputs, y), False)
        return right.sum(), loss.sum()

    right, loss = lax.map(batch, tuple(test))
    count = test.mask.sum()
    right, loss, count = total((right.sum(), loss.sum(), count))
    return right / count, loss / count
