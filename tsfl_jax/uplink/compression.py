"""What the links of compression share: one vector of an update, and error feedback.

A compressor C maps the parameters of an update u, as one vector of d numbers, to fewer
bits. What it leaves out is lost ("none"), or kept by the client:

    ef:    sends C(e + u),             e ← e + u − C(e + u)
    ef21:  sends g ← g + C(u − g)      where the server keeps the same g

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, and Karimireddy et
al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019;
Richtárik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback", NeurIPS 2021. Simplified: both are of gradients;
here u is what a client's whole training has changed. With SCAFFOLD the control variates
go as they are. Other collections than the parameters are not compressed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from tsfl_jax.components import setting
from tsfl_jax.types import Array, Params, PRNGKey
from tsfl_jax.uplink.link import LinkInfo, Traffic, Uplink

Compress = Callable[[Float[Array, "d"], PRNGKey, Any], Float[Array, "d"]]
Bits = Callable[[list[int], Any], float]  # (sizes of the leaves, settings) -> bits


def feedback() -> Any:
    """The setting that all links of compression have."""
    help_text = "what a compressed update leaves out: lost, or error feedback"
    return setting("none", help_text, ("none", "ef", "ef21"), static=True)


def fraction() -> Any:
    """The setting of links that send some entries only."""
    return setting(
        0.1, "k/d, share of an update's entries that are sent", above=0, high=1
    )


def init(params: Params, settings: Any) -> Any:
    """What the client keeps of its updates: nothing yet."""
    if settings.feedback == "none":
        return ()
    return jax.tree.map(jnp.zeros_like, params["params"])


def compressed(compress: Compress, bits: Bits, section: type) -> Uplink:
    """The link of a compressor, with a setting `feedback`.

    Args:
      compress: (vector ``[d]``, key, settings) → what the server reads, ``[d]``.
      bits: (sizes of the leaves, settings) → bits of one upload.
      section: the component with its settings.
    """

    def send(
        update: Params, kept: Any, info: LinkInfo, settings: Any
    ) -> tuple[Params, Any]:
        vector, to_params = ravel_pytree(update["params"])
        before = ravel_pytree(kept)[0] if settings.feedback != "none" else 0.0
        if settings.feedback == "ef21":
            sent = before + compress(vector - before, info.key, settings)
            kept = to_params(sent)
        else:
            total = vector + before
            sent = compress(total, info.key, settings)
            kept = to_params(total - sent) if settings.feedback == "ef" else ()
        return {**update, "params": to_params(sent)}, kept

    def upload(traffic: Traffic, params: Params, settings: Any) -> Traffic:
        sizes = [leaf.size for leaf in jax.tree.leaves(params["params"])]
        # Of what links before leave: layers that are not sent are not compressed.
        part = traffic.upload / (32.0 * sum(sizes))
        return traffic._replace(upload=np.ceil(part * bits(sizes, settings)))

    return Uplink(init=init, send=send, bits=upload, section=section)


def ranks(values: Float[Array, "d"]) -> Array:
    """The place of each number among all, 0 for the largest; int32 ``[d]``."""
    order = jnp.argsort(-values, stable=True)
    return jnp.zeros(values.shape, jnp.int32).at[order].set(jnp.arange(values.size))


def kept_count(size: int, fraction: Any, numpy: Any = jnp) -> Any:
    """k = ⌈fraction · d⌉, at least 1; in float32, also on the host with `numpy`."""
    product = numpy.float32(fraction) * numpy.float32(size)
    return numpy.maximum(numpy.ceil(product), 1)
