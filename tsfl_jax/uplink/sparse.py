"""k = ⌈fraction · d⌉ entries of an update: the largest ones, or drawn anew.

    topk:   C(u)_i = u_i where |u_i| is among the k largest, else 0
    randk:  C(u)_i = (d/k) u_i with probability k/d, else 0;   E C(u) = u

Of equal entries `topk` takes the first ones: k float32 values, each with its index in
⌈log₂ d⌉ bits. `randk` sends k float32 values and the 64 bits of the key that both sides
draw from; without `unbiased` its factor d/k is left out, as error feedback wants it.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017;
Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed
Optimization", NeurIPS 2018; of both Stich, Cordonnier, Jaggi, "Sparsified SGD with
Memory", NeurIPS 2018.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, PRNGKey
from tsfl_jax.uplink import compression
from tsfl_jax.uplink.link import Traffic

_FRACTION: Any = setting(
    0.1, "k/d, share of an update's entries that are sent", above=0, high=1
)


@component("topk")
class TopK:
    """The largest entries of an update."""

    fraction: float = _FRACTION
    feedback: str = compression.feedback()


@component("randk")
class RandK:
    """Random entries of an update."""

    unbiased: bool = setting(
        True, "entries times d/k, so that the mean is the update", static=True
    )
    fraction: float = _FRACTION
    feedback: str = compression.feedback()


def _count(size: Any, settings: TopK | RandK, numpy: Any = jnp) -> Any:
    """k ≥ 1 of d = `size`; in float32, also on the host with `numpy`."""
    product = numpy.float32(settings.fraction) * numpy.asarray(size, numpy.float32)
    return numpy.maximum(numpy.ceil(product), 1)


def _ranks(values: Float[Array, "d"]) -> Array:
    """The place of each number among all, 0 for the largest; int32 ``[d]``."""
    order = jnp.argsort(-values, stable=True)
    return jnp.zeros(values.shape, jnp.int32).at[order].set(jnp.arange(values.size))


def topk(vector: Float[Array, "d"], key: PRNGKey, settings: TopK) -> Float[Array, "d"]:
    """The vector with zeros but for its k largest entries."""
    del key
    is_sent = _ranks(jnp.abs(vector)) < _count(vector.size, settings)
    return jnp.where(is_sent, vector, 0.0)


def randk(
    vector: Float[Array, "d"], key: PRNGKey, settings: RandK
) -> Float[Array, "d"]:
    """The vector with zeros but for k of its entries."""
    count = _count(vector.size, settings)
    is_sent = _ranks(jax.random.uniform(key, vector.shape)) < count
    factor = vector.size / count if settings.unbiased else 1.0
    return jnp.where(is_sent, factor * vector, 0.0)


def bits(traffic: Traffic, settings: TopK | RandK) -> Traffic:
    """k values, and k ⌈log₂ d⌉ bits or 64."""
    count = _count(traffic.values, settings, np)
    index = count * np.ceil(np.log2(traffic.values))
    extra = traffic.extra + (index if isinstance(settings, TopK) else 64)
    return traffic._replace(values=count, extra=extra)


TOPK = compression.compressed(compression.of_vector(topk), bits, TopK)
RANDK = compression.compressed(compression.of_vector(randk), bits, RandK)
