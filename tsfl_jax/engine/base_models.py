"""The models that clients start from: w^t, or earlier ones kept in a pool.

A client that is not in step with the others trains from the global model as it was when
it downloaded it. The pool ``[P, ...]`` holds those that somebody still works on, and
updates are measured against them. `base` None everywhere means w^t.
"""

import jax
import jax.numpy as jnp

from tsfl_jax.types import Array, Params


def _inexact(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def one(pool: Params, base: Array) -> Params:
    """The model in place `base`, a scalar; those in several places ``[K, ...]``."""
    return jax.tree.map(lambda kept: kept[base], pool)


def kept(pool: Params, params: Params, keep: Array) -> Params:
    """The pool with a model put in place `keep`; P: nowhere."""
    return jax.tree.map(lambda p, w: p.at[keep].set(w, mode="drop"), pool, params)


def mean(params: Params, moved: Params, total_rho: Array) -> Params:
    """Σ_i ρ_i w_i = (Σ ρ) w^t + Σ_i ρ_i (w_i − w^t); whole numbers stay.

    Args:
      params: w^t.
      moved: the second term.
      total_rho: Σ ρ over all devices.
    """
    # Σ ρ = 1 but for rounding where nothing is stale: then w^t must not drift.
    share = jnp.where(jnp.abs(total_rho - 1) < 1e-5, 1.0, total_rho)

    def combined(w, m):
        return share.astype(w.dtype) * w + m if _inexact(w) else w

    return jax.tree.map(combined, params, moved)


def moved(params: Params, end: Params, start: Params) -> Params:
    """w^t + (end − start); whole numbers stay."""
    return jax.tree.map(
        lambda w, e, s: w + (e - s) if _inexact(w) else w, params, end, start
    )


def updates(
    models: Params,
    finite: Array,
    base: Array | None,
    params: Params,
    pool: Params | None,
) -> Params:
    """w_i − base_i ``[K, ...]``; 0 where a model is not finite, and for whole numbers.

    Args:
      models: ``[K, ...]``.
      finite: ``[K]`` bool.
      base: ``[K]`` int32 places in the pool.
      params: w^t.
      pool: ``[P, ...]``.
    """

    def update(model, w, earlier):
        start = w[None] if base is None else earlier[base]
        good = finite.reshape((-1,) + (1,) * (model.ndim - 1))
        moved = model - start if _inexact(w) else jnp.zeros_like(model)
        return jnp.where(good, moved, jnp.zeros_like(moved))

    return jax.tree.map(update, models, params, params if base is None else pool)


def scattered(values: Array, place: Array, count: int) -> Array:
    """Rows of `values` in their places of ``[count, ...]``, 0 elsewhere.

    Args:
      values: ``[K, ...]``.
      place: ``[K]`` int32; `count`: nowhere.
      count: rows of the result.
    """
    zeros = jnp.zeros((count,) + values.shape[1:], values.dtype)
    return zeros.at[place].set(values, mode="drop")
