"""Outputs of a trained model on the whole test set, for scores of a set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Num

from tsfl_jax import trees
from tsfl_jax.config import Config
from tsfl_jax.data import in_memory, targets
from tsfl_jax.engine import client, evaluation
from tsfl_jax.prepare import backend, trained
from tsfl_jax.prepare.prepare import accepted, load_dataset, network_of
from tsfl_jax.types import Dataset, Params


def predict(
    config: Config, params: Params, *, model: Any = None, dataset: Dataset | None = None
) -> tuple[Float[np.ndarray, "M ..."], Num[np.ndarray, "M ..."]]:
    """Outputs of the network on the whole test set, with its labels or targets.

    For scores that are no means over the samples, such as macro-F1, AUC or calibration:
    hand both to a library such as scikit-learn.

    Args:
      config: that of the run.
      params: Flax variables, such as `Result.params`.
      model: as for `simulate`.
      dataset: as for `simulate`.

    Returns:
      float32 ``[M, O]``, logits where the network classifies (of tokens
      ``[M, S, O]``); int32 ``[M]``, or targets as float32 ``[M, ...]``.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    config, custom = accepted(config, model=model, dataset=dataset)
    backend.start_jax(config)
    data = load_dataset(config) if dataset is None else in_memory.check(dataset)
    network = network_of(config, data, custom)
    params = trained.fitted(trees.named(params), network.params, "params=")
    labels, model = targets.of(data)[1], network.model
    test = evaluation.make_test_set(data.x_test, labels)
    mean, scale = (jnp.asarray(a, jnp.float32) for a in (data.mean, 1.0 / data.std))
    samples = client.Samples(test.x, test.y, mean, scale)

    def outputs(params: Params, x: jax.Array) -> jax.Array:
        return lax.map(lambda b: model.predict(params, client.scaled(samples, b)), x)

    batches = np.asarray(jax.jit(outputs)(params, test.x), np.float32)
    return batches.reshape(-1, *batches.shape[2:])[: len(labels)], labels
