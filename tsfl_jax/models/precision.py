"""The arithmetic of a network: float32, TF32 or bfloat16, with float32 master weights.

Only what happens inside of the network changes. Parameters, gradients, the optimizer,
sums over clients and losses stay float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tsfl_jax.models.networks import Model
from tsfl_jax.types import Params, PRNGKey


def _cast(tree: Any) -> Any:
    """float32 leaves as bfloat16."""
    return jax.tree.map(
        lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, tree
    )


def _bfloat16(model: Model) -> Model:
    def lowered(variables: Params) -> Params:
        return {**variables, "params": _cast(variables["params"])}

    def train(
        variables: Params, x: Array, mask: Array, key: PRNGKey
    ) -> tuple[Array, Params]:
        outputs, changed = model.train(lowered(variables), _cast(x), mask, key)
        changed = {**changed, "params": variables["params"]}
        changed = jax.tree.map(lambda a, b: a.astype(b.dtype), changed, variables)
        return outputs.astype(jnp.float32), changed

    def predict(variables: Params, x: Array) -> Array:
        return model.predict(lowered(variables), _cast(x)).astype(jnp.float32)

    return model._replace(train=train, predict=predict)


@functools.lru_cache(maxsize=8)  # runs of a sweep share the network
def with_precision(model: Model, precision: str) -> Model:
    """A network that computes with another precision.

    Args:
      model: the network; integer inputs stay as they are.
      precision: "float32", on a GPU, too; "tf32": matrix products and convolutions of
        10-bit mantissas on GPUs that have it, float32 elsewhere and in the gradient of
        minimal filtering; "bfloat16": parameters and inputs are rounded to bfloat16,
        and all inside follows them.

    Returns:
      A network with the same variables; outputs are float32. `exact` is the given one.
    """
    if precision == "float32":  # around the network, too: `engine.scan.make_run`
        return model
    lower = _bfloat16(model) if precision == "bfloat16" else model
    # Read while tracing; gradients inherit it from the products.
    kind = {"tf32": "tensorfloat32"}.get(precision, precision)
    within = jax.default_matmul_precision(kind)
    train, predict = within(lower.train), within(lower.predict)
    return lower._replace(train=train, predict=predict, exact=model)
