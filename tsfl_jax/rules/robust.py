"""Robust aggregates: one model out of stacked client models, some of them bad.

Unlike the rules of `aggregate`, these look at the models, so all N are there at once:
`models` is a pytree with leaves ``[N, ...]``, and `present` says whose rows count, n of
them; the others may hold anything, NaN included. Leaves are floating: integer ones, as
counters, are left to the caller. Sums are made in float32 or better. What is returned
has leaves ``[...]`` of the same dtypes, zeros with nobody present. All functions are
pure and work under jit and vmap; shapes are checked, values are not.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax.types import Array, Params, UserError


def _checked(models: Params, present: Array) -> tuple[Params, jax.Array, jax.Array]:
    """(JAX arrays, bool ``[N]``, n); raises `UserError` for what does not fit."""
    models, mask = jax.tree.map(jnp.asarray, models), jnp.asarray(present, bool)
    for path, x in jax.tree_util.tree_leaves_with_path(models):
        stacked = mask.ndim == 1 and x.shape[:1] == mask.shape
        if not (stacked and jnp.issubdtype(x.dtype, jnp.floating)):
            found = f"models{jax.tree_util.keystr(path)} is {x.dtype} {list(x.shape)}"
            raise UserError(f"{found}: expected floating, rows as {mask.shape}")
    return models, mask, mask.sum()


def _wide(x: Array) -> jax.Array:
    """In the dtype that sums are made in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _left_out(trim, n: Array) -> jax.Array:
    """f = ⌊trim·n⌋, at most (n − 1)/2: one is left between f below and f above."""
    # k/n in float32 can be just below the fraction, and so can its product with n:
    # roundings of eps/2 each, which 4·eps make good.
    share = jnp.asarray(trim, jnp.float32) * n * (1 + 4 * jnp.finfo(jnp.float32).eps)
    return jnp.clip(jnp.floor(share).astype(n.dtype), 0, jnp.maximum(n - 1, 0) // 2)


def _average(models: Params, weight: Array, origin: Params = None) -> Params:
    """w + Σ v_i (w_i − w) / Σ v_i in float32 or better, w (None: 0) if all v = 0."""
    # A client at a time: XLA's reduction over them copies the whole stack on CPUs.
    share = weight / jnp.where(weight.sum() > 0, weight.sum(), 1)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], _wide(x).dtype), models)
    origin = zeros if origin is None else origin

    def add(total, row):
        x, part = row

        def term(t, x, w):  # subtracted before it is summed; absent ones may be NaN
            return t + jnp.where(part > 0, part.astype(t.dtype) * (_wide(x) - w), 0)

        return jax.tree.map(term, total, x, origin), None

    total, _ = lax.scan(add, zeros, (models, share))
    return jax.tree.map(jnp.add, origin, total)


def _middle(models: Params, mask: Array, left_out: Array) -> Params:
    """Mean at each coordinate without the `left_out` smallest and as many largest."""
    rank = jnp.arange(mask.size)
    middle = (rank >= left_out) & (rank < mask.sum() - left_out)

    def mean(x):
        here = mask.reshape(mask.shape + (1,) * (x.ndim - 1))
        rising = jnp.sort(jnp.where(here, x, jnp.inf), axis=0)
        return _average(rising, middle).astype(x.dtype)

    return jax.tree.map(mean, models)


def coordinate_median(models: Params, present: Array) -> Params:
    """w = med{w_i : i present}, coordinate by coordinate.

    Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards
    Optimal Statistical Rates", ICML 2018, Algorithm 1, Option I.

    Args:
      models, present: ``[N, ...]`` floating, finite where present; ``[N]`` bool.

    Returns:
      w, leaves ``[...]``; for an even n the mean of the middle two.
    """
    models, mask, n = _checked(models, present)
    return _middle(models, mask, jnp.maximum(n - 1, 0) // 2)


def trimmed_mean(models: Params, present: Array, trim) -> Params:
    """w = 1/(n − 2f) Σ of the n − 2f middle values at each coordinate, f = ⌊trim·n⌋.

    Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards
    Optimal Statistical Rates", ICML 2018, Algorithm 1, Option II.

    Args:
      models, present: ``[N, ...]`` floating, finite where present; ``[N]`` bool.
      trim: ``[]`` in [0, 0.5), the paper's β; 0 is the plain mean. A product trim·n
        that is an integer up to float32 rounding counts as that integer.

    Returns:
      w, leaves ``[...]``.
    """
    models, mask, n = _checked(models, present)
    return _middle(models, mask, _left_out(trim, n))


def _square(apart: Params) -> jax.Array:
    """‖·‖² of a difference of models, the whole tree."""
    return sum(jnp.square(x).sum() for x in jax.tree.leaves(apart))


def geometric_median(
    models: Params, present: Array, weights=None, *, iterations=8, smoothing=1e-6
) -> Params:
    """argmin_w Σ α_i‖w − w_i‖ by w ← Σ β_i w_i / Σ β_i, β_i = α_i/max(ν, ‖w − w_i‖).

    Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE
    Transactions on Signal Processing, 2022, Algorithm 2, from the mean. The pull of
    outliers at any distance with a share q of Σα shrinks by about q/(1 − q) per
    iteration; farther than 1e19, where float32's squares end, β = 0.

    Args:
      models, present: ``[N, ...]`` floating, finite where present; ``[N]`` bool.
      weights: α ``[N]`` ≥ 0 of any sum, not read where absent; None for equal ones.
      iterations: ``[]`` ≥ 0, integer.
      smoothing: ν ``[]`` > 0, in the unit of ‖w‖.

    Returns:
      w, leaves ``[...]``; zeros also if all weights are 0.
    """
    models, mask, _ = _checked(models, present)
    alpha = jnp.where(mask, 1.0 if weights is None else weights, 0.0)

    def iterate(_, w):
        def square(row):
            return _square(jax.tree.map(lambda x, w: _wide(x) - w, row, w))

        far = jnp.where(mask, jnp.sqrt(lax.map(square, models)), jnp.inf)
        return _average(models, alpha / jnp.maximum(far, smoothing), w)

    w = lax.fori_loop(0, iterations, iterate, _average(models, alpha))
    return jax.tree.map(lambda w, x: w.astype(x.dtype), w, models)


def _krum_order(models: Params, present: Array, trim):
    """(models, clients by their Krum sums, how many Multi-Krum takes: 0 if n = 0)."""
    models, mask, n = _checked(models, present)
    near = jnp.maximum(n - _left_out(trim, n) - 2, 1)
    pairs = np.triu_indices(mask.size, 1)

    def square(pair):  # a pair at a time; a² − 2ab + b² would cancel
        i, j = pair
        return _square(jax.tree.map(lambda x: _wide(x[i]) - _wide(x[j]), models))

    table = jnp.full((mask.size, mask.size), jnp.inf)
    table = table.at[pairs].set(lax.map(square, pairs).astype(table.dtype))
    table = jnp.minimum(table, table.T)
    table = jnp.sort(jnp.where(mask[None] & mask[:, None], table, jnp.inf), axis=1)
    score = jnp.where((jnp.arange(mask.size) < near)[None], table, 0).sum(axis=1)
    # Stable; the absent last, even behind a present one whose distances overflow.
    return models, jnp.lexsort((score, ~mask)), jnp.minimum(near, n)


def krum(models: Params, present: Array, trim) -> Params:
    """w = w_k, k = argmin_i Σ ‖w_i − w_j‖² over the n − f − 2 nearest others j of i.

    Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries:
    Byzantine Tolerant Gradient Descent", NIPS 2017, section 4; it asks for 2f + 2 < n.

    Args:
      models, present: ``[N, ...]`` floating, finite where present; ``[N]`` bool.
      trim: ``[]`` in [0, 0.5), f = ⌊trim·n⌋. One other counts even if n − f − 2 < 1;
        as two nearest neighbours are equally far apart, the first of them then wins.

    Returns:
      w, leaves ``[...]``: one client's model as it is. Of equal sums, the first.
    """
    models, order, count = _krum_order(models, present, trim)
    return jax.tree.map(lambda x: jnp.where(count > 0, x[order[0]], 0), models)


def multi_krum(models: Params, present: Array, trim) -> Params:
    """w = 1/m Σ w_i over the m = max(n − f − 2, 1) clients with the least Krum sums.

    Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries:
    Byzantine Tolerant Gradient Descent", NIPS 2017, Multi-Krum.

    Args:
      models, present: ``[N, ...]`` floating, finite where present; ``[N]`` bool.
      trim: ``[]`` in [0, 0.5), f = ⌊trim·n⌋, as in `krum`.

    Returns:
      w, leaves ``[...]``. Of equal sums, the first clients.
    """
    models, order, count = _krum_order(models, present, trim)
    best = jnp.zeros(order.shape, bool).at[order].set(jnp.arange(order.size) < count)
    w = _average(models, best)
    return jax.tree.map(lambda w, x: w.astype(x.dtype), w, models)
