"""What the links of compression share: one vector of an update, and error feedback.

A compressor C maps the parameters of an update u, as one vector of d numbers, to fewer
bits. What it leaves out is lost ("none"), or kept by the client:

    ef:    sends C(e + u),             e ← e + u − C(e + u)
    ef21:  sends g ← g + C(u − g)      where the server keeps the same g

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, and Karimireddy et
al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019;
Richtárik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback", NeurIPS 2021. Simplified: both are of gradients;
here u is what a client's whole training has changed. A client whose upload is lost
knows it and keeps its e; so does one whose model is not finite. SCAFFOLD's control
variates are made of u as the server reads it. Other collections than the parameters are
not compressed. In a chain each link keeps what it left out itself.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from tsfl_jax import trees
from tsfl_jax.components import setting
from tsfl_jax.types import Array, Params, PRNGKey
from tsfl_jax.uplink.link import LinkInfo, Traffic, Uplink

Compress = Callable[[Params, PRNGKey, Any], Params]


def feedback() -> Any:
    """The setting that all links of compression have."""
    help_text = "what a compressed update leaves out: lost, or error feedback"
    return setting("none", help_text, ("none", "ef", "ef21"), static=True)


def init(params: Params, settings: Any) -> Any:
    """What the client keeps of its updates: nothing yet."""
    if settings.feedback == "none":
        return ()
    return jax.tree.map(jnp.zeros_like, params["params"])


def compressed(
    compress: Compress, bits: Callable[[Traffic, Any], Traffic], section: type
) -> Uplink:
    """The link of a compressor, with a setting `feedback`.

    Args:
      compress: (parameters, key, settings) → what the server reads of them.
      bits: (traffic, settings) → what is sent after the link.
      section: the component with its settings.
    """

    def send(
        update: Params, kept: Any, info: LinkInfo, settings: Any
    ) -> tuple[Params, Any]:
        params = update["params"]  # None where a leaf stays with the client
        if settings.feedback == "none":
            return {**update, "params": compress(params, info.key, settings)}, kept
        before = trees.where_none(params, params, kept)
        is_ef21 = settings.feedback == "ef21"
        vector = (optax.tree.sub if is_ef21 else optax.tree.add)(params, before)
        sent = compress(vector, info.key, settings)
        after = optax.tree.sub(vector, sent)
        if is_ef21:
            after = sent = optax.tree.add(before, sent)
        return {**update, "params": sent}, trees.where_none(after, kept, after)

    return Uplink(init=init, send=send, bits=bits, section=section)


def of_vector(
    compress: Callable[[Float[Array, "d"], PRNGKey, Any], Float[Array, "d"]],
) -> Compress:
    """A compressor of parameters of one of a vector ``[d]``."""

    def of_params(params: Params, key: PRNGKey, settings: Any) -> Params:
        vector, to_params = ravel_pytree(params)
        return to_params(jnp.asarray(compress(vector, key, settings)))

    return of_params
