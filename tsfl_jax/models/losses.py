"""Pure functions that measure models and weights."""

import jax
import jax.numpy as jnp

from tsfl_jax.types import Array, Params


def cross_entropy(logits: Array, labels: Array) -> Array:
    """−log softmax(logits)[label] per sample.

    Args:
      logits: ``[B, K]`` float.
      labels: ``[B]`` int in [0, K).

    Returns:
      ``[B]`` float, nats.
    """
    # One-hot product instead of a gather: its gradient is no scatter, which XLA's
    # CPU backend runs element by element.
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -jnp.sum(jax.nn.log_softmax(logits) * hot, axis=-1)


def correct(logits: Array, labels: Array) -> Array:
    """``[B]`` bool: the largest logit ``[B, K]`` is the label's ``[B]``."""
    return jnp.argmax(logits, axis=-1) == labels


def all_finite(tree: Params) -> Array:
    """Scalar bool: no NaN and no infinity in any leaf."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(finite).all()


def weight_entropy(rho: Array) -> Array:
    """−Σ ρ_i log ρ_i in nats: log N for uniform weights ``[N]``, 0 for one client."""
    positive = rho > 0
    return -jnp.sum(
        jnp.where(positive, rho * jnp.log(jnp.where(positive, rho, 1.0)), 0.0)
    )
