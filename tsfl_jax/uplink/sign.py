"""The signs of an update, times the mean of its entries' absolute values.

    C(u) = (‖u‖₁/n) sgn(u)    with n entries that are not 0; of the paper d

Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019. Behind `topk` it is the sparse ternary compression of
Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID
Data", IEEE TNNLS 2020. Encoding: a bit for each entry and a float32. Simplified: an
entry of a whole update that is exactly 0, as of a unit that never fires, stays 0.
"""

import jax.numpy as jnp
from jaxtyping import Float

from tsfl_jax.components import component
from tsfl_jax.types import Array, PRNGKey
from tsfl_jax.uplink import compression
from tsfl_jax.uplink.link import Traffic


@component("sign")
class Sign:
    """Signs of an update's entries."""

    feedback: str = compression.feedback()


def compress(
    vector: Float[Array, "d"], key: PRNGKey, settings: Sign
) -> Float[Array, "d"]:
    """The scaled signs."""
    del key, settings
    count = jnp.maximum(jnp.count_nonzero(vector), 1)
    return jnp.sign(vector) * (jnp.abs(vector).sum() / count)


def bits(traffic: Traffic, settings: Sign) -> Traffic:
    """Values of one bit, and 32 bits."""
    del settings
    return traffic._replace(width=1.0, extra=traffic.extra + 32)


SIGN = compression.compressed(compression.of_vector(compress), bits, Sign)
