"""Stochastic quantization of an update (QSGD) to s levels.

    Q(u)_i = ‖u‖₂ sgn(u_i) ξ_i,   ξ_i = (⌊s|u_i|/‖u‖₂⌋ + b_i) / s,   E Q(u) = u

where b_i is 1 with the probability that is left over, else 0. The norm is that of the
update, or of each leaf. Alistarh et al., "QSGD: Communication-Efficient SGD via
Gradient Quantization and Encoding", NeurIPS 2017. Encoding: a sign and a level in
⌈log₂(s + 1)⌉ bits for each entry, and a float32 norm. Simplified: the paper's Elias
code, which is shorter in the mean, has a length that training decides; its bound,
Theorem 3.2 there, is not used.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float

from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, PRNGKey
from tsfl_jax.uplink import compression


@component("quantize")
class Quantize:
    """Levels of an update's entries."""

    levels: int = setting(16, "s, levels above 0", low=1)
    feedback: str = compression.feedback()


def compress(
    vector: Float[Array, "d"], key: PRNGKey, settings: Quantize
) -> Float[Array, "d"]:
    """The vector on the levels of its norm."""
    norm = jnp.linalg.norm(vector)
    place = settings.levels * jnp.abs(vector) / jnp.where(norm > 0, norm, 1.0)
    draws = jax.random.uniform(key, vector.shape)
    level = jnp.floor(place) + (draws < place - jnp.floor(place))
    return norm * jnp.sign(vector) * level / settings.levels


def bits(sizes: list[int], settings: Quantize) -> float:
    """d (1 + ⌈log₂(s + 1)⌉) + 32."""
    return sum(sizes) * (1 + math.ceil(math.log2(settings.levels + 1))) + 32.0


QUANTIZE = compression.compressed(compress, bits, Quantize)
