"""The signs of an update, times the mean of its entries' absolute values.

    C(u) = (‖u‖₁/d) sgn(u),   sgn(0) = 1

Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019. Encoding: a bit for each entry and a float32.
"""

import jax.numpy as jnp
from jaxtyping import Float

from tsfl_jax.components import component
from tsfl_jax.types import Array, PRNGKey
from tsfl_jax.uplink import compression


@component("sign")
class Sign:
    """Signs of an update's entries."""

    feedback: str = compression.feedback()


def compress(
    vector: Float[Array, "d"], key: PRNGKey, settings: Sign
) -> Float[Array, "d"]:
    """The scaled signs."""
    del key, settings
    return jnp.where(vector < 0, -1.0, 1.0) * jnp.abs(vector).mean()


def bits(sizes: list[int], settings: Sign) -> float:
    """d + 32."""
    del settings
    return sum(sizes) + 32.0


SIGN = compression.compressed(compress, bits, Sign)
