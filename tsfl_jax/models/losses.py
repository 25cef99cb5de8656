"""Losses of a batch, and checks of models and weights, as pure functions."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Num

from tsfl_jax.types import Params


def cross_entropy(
    logits: Float[Array, "B O"], labels: Num[Array, "B *O"]
) -> Float[Array, "B"]:
    """−Σ_o share_o log softmax(logits)_o of each sample, in nats.

    `labels` are in [0, O), or shares of the classes, ``[B, O]``.
    """
    if labels.ndim == logits.ndim:
        return optax.softmax_cross_entropy(logits, labels)
    # One-hot instead of integer labels: the gradient of a gather is a scatter, which
    # XLA's CPU backend runs element by element.
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return optax.softmax_cross_entropy(logits, hot)


def squared_error(
    outputs: Float[Array, "B ..."], targets: Float[Array, "B ..."]
) -> Float[Array, "B"]:
    """(outputs − targets)² of each sample, the mean over its numbers."""
    error = jnp.square(outputs.reshape(targets.shape) - targets)
    return error.reshape(len(error), -1).mean(axis=1)


def correct(
    logits: Float[Array, "B O"], labels: Num[Array, "B *O"]
) -> Bool[Array, "B"]:
    """Whether the largest logit is the label's; False where one is NaN."""
    if labels.ndim == logits.ndim:
        labels = jnp.argmax(labels, axis=-1)
    is_number = ~jnp.isnan(logits).any(axis=-1)  # argmax takes the first NaN
    return is_number & (jnp.argmax(logits, axis=-1) == labels)


def all_finite(tree: Params) -> Bool[Array, ""]:
    """Whether no leaf has a NaN or an infinity; random keys have none."""
    leaves = [w for w in jax.tree.leaves(tree) if jnp.issubdtype(w.dtype, jnp.inexact)]
    # w − w is 0 or NaN. XLA's CPU backend adds numbers up twice as fast as flags.
    return jnp.asarray(sum(jnp.sum(w - w) for w in leaves) == 0)


def weight_entropy(rho: Float[Array, "N"]) -> Float[Array, ""]:
    """−Σ ρ_i log ρ_i in nats: log N for equal weights, 0 for a single client."""
    positive = rho > 0
    return -jnp.sum(
        jnp.where(positive, rho * jnp.log(jnp.where(positive, rho, 1.0)), 0.0)
    )
