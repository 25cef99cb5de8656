"""k = ⌈fraction · d⌉ entries of an update, drawn anew for each upload.

    C(u)_i = (d/k) u_i with probability k/d, else 0;   E C(u) = u

Without `unbiased` the factor d/k is left out, as error feedback wants it. Wangni et
al., "Gradient Sparsification for Communication-Efficient Distributed Optimization",
NeurIPS 2018; Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
Encoding: k float32 values and the 64 bits of the key that both sides draw from.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, PRNGKey
from tsfl_jax.uplink import compression
from tsfl_jax.uplink.link import Traffic


@component("randk")
class RandK:
    """Random entries of an update."""

    unbiased: bool = setting(
        True, "entries times d/k, so that the mean is the update", static=True
    )
    fraction: float = compression.fraction()
    feedback: str = compression.feedback()


def compress(
    vector: Float[Array, "d"], key: PRNGKey, settings: RandK
) -> Float[Array, "d"]:
    """The vector with zeros but for k of its entries."""
    count = compression.kept_count(vector.size, settings.fraction)
    rank = compression.ranks(jax.random.uniform(key, vector.shape))
    factor = vector.size / count if settings.unbiased else 1.0
    return jnp.where(rank < count, factor * vector, 0.0)


def bits(traffic: Traffic, settings: RandK) -> Traffic:
    """k values and 64 bits."""
    count = compression.kept_count(traffic.values, settings.fraction, np)
    return traffic._replace(values=count, extra=traffic.extra + 64)


RANDK = compression.compressed(compression.of_vector(compress), bits, RandK)
