"""The k = ⌈fraction · d⌉ largest entries of an update, in absolute value.

    C(u)_i = u_i where |u_i| is among the k largest, else 0

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017;
Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018. Of equal entries
the first ones count. Encoding: k float32 values, each with its index in ⌈log₂ d⌉ bits.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tsfl_jax.components import component
from tsfl_jax.types import Array, PRNGKey
from tsfl_jax.uplink import compression
from tsfl_jax.uplink.link import Traffic


@component("topk")
class TopK:
    """The largest entries of an update."""

    fraction: float = compression.fraction()
    feedback: str = compression.feedback()


def compress(
    vector: Float[Array, "d"], key: PRNGKey, settings: TopK
) -> Float[Array, "d"]:
    """The vector with zeros but for its k largest entries."""
    del key
    rank = compression.ranks(jnp.abs(vector))
    return jnp.where(
        rank < compression.kept_count(vector.size, settings.fraction), vector, 0.0
    )


def bits(traffic: Traffic, settings: TopK) -> Traffic:
    """k values and k ⌈log₂ d⌉ bits."""
    count = compression.kept_count(traffic.values, settings.fraction, np)
    indices = count * np.ceil(np.log2(traffic.values))
    return traffic._replace(values=count, extra=traffic.extra + indices)


TOPK = compression.compressed(compression.of_vector(compress), bits, TopK)
