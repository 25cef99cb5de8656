"""A model that is downloaded with few bits: each leaf on s levels of its maximum.

    Q(w)_i = m round(s w_i/m)/s    with m = max_j |w_j| of the leaf

The nearest level, not a drawn one, so that all clients of a version get the same model.
A client's update is what it changes of Q(w); the server, which keeps w, reads its model
as w + u, so that what is rounded away is not lost. Encoding: a sign and a level in
⌈log₂(s + 1)⌉ bits for each entry, and a float32 for each leaf. Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", CVPR 2018, have its symmetric form.
"""

from typing import Any

import jax.numpy as jnp

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, Params
from tsfl_jax.uplink import quantize
from tsfl_jax.uplink.link import Traffic, Uplink


@component("model_download")
class ModelDownload:
    """Levels of the model's entries."""

    levels: int = setting(127, "s, levels above 0", low=1, high=2**15)


def download(variables: Params, settings: ModelDownload) -> Params:
    """The parameters on their nearest levels."""

    def rounded(leaf: Array) -> Array:
        step = jnp.abs(leaf).max() / settings.levels
        return step * jnp.round(leaf / jnp.where(step > 0, step, 1.0))

    return {**variables, "params": trees.map_inexact(rounded, variables["params"])}


def bits(traffic: Traffic, settings: Any) -> Traffic:
    """Values of a sign and a level, and 32 bits of each leaf."""
    values = traffic.download / 32 * quantize.width(settings.levels)
    return traffic._replace(download=values + 32 * traffic.leaves)


MODEL_DOWNLOAD = Uplink(download=download, bits=bits, section=ModelDownload)
