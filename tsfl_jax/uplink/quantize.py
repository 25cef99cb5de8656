"""Stochastic quantization of an update (QSGD) to s levels.

    Q(u)_i = ‖u‖ sgn(u_i) ξ_i,   ξ_i = (⌊s|u_i|/‖u‖⌋ + b_i) / s,   E Q(u) = u

where b_i is 1 with the probability that is left over, else 0. The norm, ‖·‖₂ or ‖·‖_∞,
is that of the update or of each leaf. Alistarh et al., "QSGD: Communication-Efficient
SGD via Gradient Quantization and Encoding", NeurIPS 2017. Encoding: a sign and a level
in ⌈log₂(s + 1)⌉ bits for each entry, and a float32 norm. Simplified: the paper's Elias
code, which is shorter in the mean, has a length that training decides; its bound,
Theorem 3.2 there, is not used.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, Params, PRNGKey
from tsfl_jax.uplink import compression
from tsfl_jax.uplink.link import Traffic


@component("quantize")
class Quantize:
    """Levels of an update's entries."""

    levels: int = setting(16, "s, levels above 0", low=1, high=2**15)
    norm: str = setting(
        "l2", "‖u‖, which the levels divide", ("l2", "max"), static=True
    )
    per: str = setting("update", "what has a norm", ("update", "leaf"), static=True)
    feedback: str = compression.feedback()


def quantized(
    vector: Float[Array, "d"], key: PRNGKey, settings: Quantize
) -> Float[Array, "d"]:
    """The vector on the levels of its norm."""
    size = jnp.abs(vector)
    norm = jnp.linalg.norm(vector) if settings.norm == "l2" else size.max()
    place = settings.levels * size / jnp.where(norm > 0, norm, 1.0)
    draws = jax.random.uniform(key, vector.shape)
    level = jnp.floor(place) + (draws < place - jnp.floor(place))
    return norm * jnp.sign(vector) * level / settings.levels


def compress(params: Params, key: PRNGKey, settings: Quantize) -> Params:
    """The parameters on the levels of the norm, or each leaf on those of its own."""
    one = compression.of_vector(quantized)
    if settings.per == "update":
        return one(params, key, settings)
    leaves, form = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return form.unflatten(
        [one(leaf, key, settings) for leaf, key in zip(leaves, keys, strict=True)]
    )


def width(levels: float) -> float:
    """1 + ⌈log₂(s + 1)⌉ bits of a sign and a level."""
    return 1.0 + np.ceil(np.log2(float(levels) + 1))


def bits(traffic: Traffic, settings: Quantize) -> Traffic:
    """Values of a sign and a level, and 32 bits of each norm."""
    norms = traffic.leaves if settings.per == "leaf" else 1
    extra = traffic.extra + 32.0 * norms
    return traffic._replace(width=width(settings.levels), extra=extra)


QUANTIZE = compression.compressed(compress, bits, Quantize)
