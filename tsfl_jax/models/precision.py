"""The arithmetic of a network: float32, TF32 or bfloat16, with float32 master weights.

Tensor cores of a GPU multiply float32 matrices as `BF16_BF16_F32_X6`: each number is
the sum of three of bfloat16, a = a₁ + a₂ + a₃, |a₂| ≤ 2⁻⁸ |a|, |a₃| ≤ 2⁻¹⁷ |a|, and a·b
that of the six products a_i b_j with i + j ≤ 4, added up in float32. What is left out,
a₂b₃ + a₃b₂ + a₃b₃, is at most 2⁻²⁴ (1 + 2⁻¹⁰) |a b|, about half a unit in the last
place, or 2⁻²¹ (1 + 2⁻⁹) |a b| if terms are truncated and not rounded.

Only what happens inside of the network changes. Parameters, gradients, the optimizer,
sums over clients and losses stay float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from tsfl_jax.models import replay
from tsfl_jax.models.flop import bodies
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


def _only_float32(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        name, kinds = equation.primitive.name, {v.aval.dtype for v in equation.invars}
        other = name == "dot_general" and kinds != {jnp.dtype("float32")}
        inside = map(_only_float32, bodies(equation.params))
        if name == "conv_general_dilated" or other or not all(inside):
            return False
    return True


def takes_algorithm(model: Model, variables: Params, x: jax.ShapeDtypeStruct) -> bool:
    """Whether all products of a network may take an algorithm of float32 matrices.

    JAX ignores it in convolutions of `lax`, which a GPU would round to TF32, and casts
    products of other types. `variables` and `x` are shapes, as for `replay.replay`.
    """
    return _only_float32(replay.traced_training(model, variables, x))


@functools.lru_cache(maxsize=8)  # runs of a sweep share the network
def with_precision(
    model: Model, precision: str, algorithm: lax.DotAlgorithmPreset | None = None
) -> Model:
    """A network that computes with another precision.

    Args:
      model: the network; integer inputs stay as they are.
      precision: "float32", on a GPU, too; "highest": the same without an algorithm;
        "tf32": matrix products and convolutions of 10-bit mantissas on GPUs that have
        it, float32 elsewhere and in the gradient of minimal filtering; "bfloat16":
        parameters and inputs are rounded to bfloat16, and all inside follows them.
      algorithm: of products in float32, but for custom gradients; None: FP32 cores.

    Returns:
      A network with the same variables; outputs are float32. `exact` is the given one.
    """
    if precision in ("float32", "highest"):  # as around the network: `scan.make_run`
        if algorithm is None:
            return model
        within = jax.default_matmul_precision(algorithm.name)
        return model._replace(train=within(model.train), predict=within(model.predict))
    lower = _bfloat16(model) if precision == "bfloat16" else model
    # Read while tracing; gradients inherit it from the products.
    kind = {"tf32": "tensorfloat32"}.get(precision, precision)
    within = jax.default_matmul_precision(kind)
    train, predict = within(lower.train), within(lower.predict)
    return lower._replace(train=train, predict=predict, exact=model)
