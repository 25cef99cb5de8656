"""Numbers on few levels: of an update on s levels or one, of a model when it goes down.

    quantize:  Q(u)_i = ‖u‖ sgn(u_i) ξ_i,  ξ_i = (⌊s|u_i|/‖u‖⌋ + b_i)/s,  E Q(u) = u
    sign:      C(u) = (‖u‖₁/n) sgn(u)    with n entries that are not 0
    model_download:  Q(w)_i = m round(s w_i/m)/s    with m = max_j |w_j| of a leaf

b_i is 1 with the probability that is left over, else 0. The norm, ‖·‖₂ or ‖·‖_∞, is
that of the update or of each leaf. A model is on the nearest level, not on a drawn one,
so that all clients of a version get the same. A client's update is what it changes of
Q(w); the server, which keeps w, reads its model as w + u, so that what is rounded away
is not lost. Encoding: a sign and a level in ⌈log₂(s + 1)⌉ bits for each entry, and a
float32 for each norm and m; of `sign` a bit for each entry and a float32.

QSGD: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017. Simplified: the paper's Elias code, which is shorter in the
mean, has a length that training decides; its bound, Theorem 3.2 there, is not used.
Signs: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019; behind `topk` the sparse ternary compression
of Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID
Data", IEEE TNNLS 2020. Simplified: an entry of a whole update that is exactly 0, as of
a unit that never fires, stays 0; the paper's n is d. Models: the symmetric form of
Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", CVPR 2018.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, Params, PRNGKey
from tsfl_jax.uplink import compression
from tsfl_jax.uplink.link import Traffic, Uplink


@component("quantize")
class Quantize:
    """Levels of an update's entries."""

    levels: int = setting(16, "s, levels above 0", low=1, high=2**15)
    norm: str = setting(
        "l2", "‖u‖, which the levels divide", ("l2", "max"), static=True
    )
    per: str = setting("update", "what has a norm", ("update", "leaf"), static=True)
    feedback: str = compression.feedback()


@component("sign")
class Sign:
    """Signs of an update's entries."""

    feedback: str = compression.feedback()


@component("model_download")
class ModelDownload:
    """Levels of the model's entries."""

    levels: int = setting(127, "s, levels above 0", low=1, high=2**15)


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
    keys = optax.tree.split_key_like(key, params)
    return jax.tree.map(lambda leaf, key: one(leaf, key, settings), params, keys)


def signs(vector: Float[Array, "d"], key: PRNGKey, settings: Sign) -> Float[Array, "d"]:
    """The scaled signs."""
    del key, settings
    count = jnp.maximum(jnp.count_nonzero(vector), 1)
    return jnp.sign(vector) * (jnp.abs(vector).sum() / count)


def download(variables: Params, settings: ModelDownload) -> Params:
    """The parameters on their nearest levels."""

    def rounded(leaf: Array) -> Array:
        step = jnp.abs(leaf).max() / settings.levels
        return step * jnp.round(leaf / jnp.where(step > 0, step, 1.0))

    return {**variables, "params": trees.map_inexact(rounded, variables["params"])}


def _width(levels: float) -> float:
    """1 + ⌈log₂(s + 1)⌉ bits of a sign and a level."""
    return 1.0 + np.ceil(np.log2(float(levels) + 1))


def _bits(traffic: Traffic, settings: Quantize) -> Traffic:
    norms = traffic.leaves if settings.per == "leaf" else 1
    extra = traffic.extra + 32.0 * norms
    return traffic._replace(width=_width(settings.levels), extra=extra)


def _download_bits(traffic: Traffic, settings: ModelDownload) -> Traffic:
    values = traffic.download / 32 * _width(settings.levels)
    return traffic._replace(download=values + 32 * traffic.leaves)


QUANTIZE = compression.compressed(compress, _bits, Quantize)
SIGN = compression.compressed(
    compression.of_vector(signs),
    lambda traffic, _: traffic._replace(width=1.0, extra=traffic.extra + 32),
    Sign,
)
MODEL_DOWNLOAD = Uplink(download=download, bits=_download_bits, section=ModelDownload)
