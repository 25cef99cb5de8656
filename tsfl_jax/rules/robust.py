"""Robust rules: one model out of stacked client models, some of which may be wrong.

These rules look at the models, so all N are stacked: `models` is a pytree with floating
leaves ``[N, ...]``, finite where present. n of the N rows are `present`; the others may
hold anything, including NaN. Sums are made in float32 or better. Each function returns
leaves ``[...]`` of the same dtypes, zeros if n = 0; `trim` is ``[]`` in [0, 0.5), the
share of clients that may be wrong, f = ⌊trim·n⌋. All functions are pure and work under
jit and vmap; wrong shapes and dtypes are a `UserError`, values are not checked. In
each, `models` is such a pytree, `present` ``[N]`` bool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules.averages import Server, server_step
from tsfl_jax.rules.base import Aggregator, Mixing, Received, ServerSide
from tsfl_jax.types import HParams, Params, UserError


def _checked(
    models: Params, present: Bool[ArrayLike, "N"]
) -> tuple[Params, Bool[Array, "N"], Int[Array, ""]]:
    """Check and convert to JAX arrays: the models, who is present, n."""
    models, mask = jax.tree.map(jnp.asarray, models), jnp.asarray(present, bool)
    for path, x in jax.tree_util.tree_leaves_with_path(models):
        stacked = mask.ndim == 1 and x.shape[:1] == mask.shape
        if not (stacked and jnp.issubdtype(x.dtype, jnp.floating)):
            leaf = f"models{jax.tree_util.keystr(path)} is {x.dtype} {list(x.shape)}"
            raise UserError(f"{leaf}: expected floating, rows as {mask.shape}")
    return models, mask, mask.sum()


def _wide(x: Array) -> Array:
    """Convert to the dtype that sums are made in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _left_out(trim: ArrayLike, n: Int[Array, ""]) -> Int[Array, ""]:
    """f = ⌊trim·n⌋, at most (n − 1)/2: one is left between f below and f above."""
    # k/n in float32 can be just below the fraction, and so can its product with n:
    # roundings of eps/2 each, which 4·eps make good.
    share = jnp.asarray(trim, jnp.float32) * n * (1 + 4 * jnp.finfo(jnp.float32).eps)
    return jnp.clip(jnp.floor(share).astype(n.dtype), 0, jnp.maximum(n - 1, 0) // 2)


def average(
    models: Params, weight: Float[Array, "N"] | Bool[Array, "N"], origin: Params = None
) -> Params:
    """w + Σ v_i (w_i − w) / Σ v_i in float32 or better, w (None: 0) if all v = 0."""
    # A client at a time: XLA's reduction over them copies the whole stack on CPUs.
    share = weight / jnp.where(weight.sum() > 0, weight.sum(), 1)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], _wide(x).dtype), models)
    origin = zeros if origin is None else origin

    def add(total: Params, row: tuple[Params, Array]) -> tuple[Params, None]:
        x, part = row

        def term(t: Array, x: Array, w: Array) -> Array:
            # Subtracted before it is summed; absent ones may be NaN.
            return t + jnp.where(part > 0, part.astype(t.dtype) * (_wide(x) - w), 0)

        return jax.tree.map(term, total, x, origin), None

    total, _ = lax.scan(add, zeros, (models, share))
    return jax.tree.map(jnp.add, origin, total)


def _middle(models: Params, mask: Bool[Array, "N"], left_out: Int[Array, ""]) -> Params:
    """Mean at each coordinate without the `left_out` smallest and as many largest."""
    rank = jnp.arange(mask.size)
    middle = (rank >= left_out) & (rank < mask.sum() - left_out)

    def mean(x: Array) -> Array:
        here = mask.reshape(mask.shape + (1,) * (x.ndim - 1))
        rising = jnp.sort(jnp.where(here, x, jnp.inf), axis=0)
        return average(rising, middle).astype(x.dtype)

    return jax.tree.map(mean, models)


def coordinate_median(models: Params, present: Bool[ArrayLike, "N"]) -> Params:
    """The median of each coordinate; for an even n the mean of the middle two.

    w = med{w_i : i present}. Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust
    Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, Algorithm 1,
    Option I.
    """
    models, mask, n = _checked(models, present)
    return _middle(models, mask, jnp.maximum(n - 1, 0) // 2)


def trimmed_mean(
    models: Params, present: Bool[ArrayLike, "N"], trim: ArrayLike
) -> Params:
    """The mean of the n − 2f middle values of each coordinate.

    `trim` is the paper's β; 0 is the plain mean. Yin, Chen, Ramchandran, Bartlett,
    "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
    2018, Algorithm 1, Option II.
    """
    models, mask, n = _checked(models, present)
    return _middle(models, mask, _left_out(trim, n))


def _square(model: Params, other: Params) -> Float[Array, ""]:
    """‖w − w'‖² of two models."""
    pairs = zip(*map(jax.tree.leaves, (model, other)), strict=True)
    return jnp.asarray(sum(jnp.square(_wide(x) - _wide(y)).sum() for x, y in pairs))


def geometric_median(
    models: Params,
    present: Bool[ArrayLike, "N"],
    *,
    iterations: ArrayLike = 8,
    smoothing: ArrayLike = 1e-6,
) -> Params:
    """The model with the smallest sum of distances to the clients' models.

    argmin_w Σ‖w − w_i‖ by w ← Σ β_i w_i / Σ β_i, β_i = 1/max(ν, ‖w − w_i‖).
    Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE
    Transactions on Signal Processing, 2022, Algorithm 2, from the mean. The pull of
    outliers at any distance, a share q of all, shrinks by about q/(1 − q) per
    iteration; farther than 1e19, where float32's squares end, β = 0.

    Args:
      models, present: as in the other functions.
      iterations: ``[]`` ≥ 0, integer.
      smoothing: ν ``[]`` > 0, in the unit of ‖w‖.
    """
    models, mask, _ = _checked(models, present)
    alpha = jnp.where(mask, 1.0, 0.0)

    def iterate(_: Array, w: Params) -> Params:
        squares = lax.map(lambda row: _square(row, w), models)
        # Where a model is the median itself the root has no derivative.
        far = jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
        far = jnp.where(mask, jnp.where(squares > 0, far, 0.0), jnp.inf)
        return average(models, alpha / jnp.maximum(far, smoothing), w)

    w = lax.fori_loop(0, iterations, iterate, average(models, alpha))
    return jax.tree.map(lambda w, x: w.astype(x.dtype), w, models)


def geometric_mean(models: Params, present: Bool[ArrayLike, "N"]) -> Params:
    """A geometric mean of each coordinate that takes any sign.

    w = s·g⁻¹(1/n Σ g(w_i/s)), g(x) = sign(x) ln(1 + |x|), s the median of |w_i|. A
    value far above s counts by its logarithm, values far below as in the mean; 0 where
    s = 0. Unlike a median's, the pull of an outlier grows, with the n-th root of it.

    A reading of the "modified geometric mean over the local models' parameters" of
    reference 10316585 in Shao et al. (2023), of which no details could be found: the
    logarithm is that of the log-modulus transformation, since parameters have signs
    and zeros, and it is of the updates, as all robust means here.
    """
    models, mask, n = _checked(models, present)
    size = jax.tree.map(jnp.abs, models)
    typical = coordinate_median(size, mask)

    def mean(x: Array, s: Array) -> Array:
        here = mask.reshape(mask.shape + (1,) * (x.ndim - 1))
        ratio = jnp.where(here, _wide(x), 0.0) / jnp.where(s > 0, _wide(s), 1.0)[None]
        most = jnp.finfo(ratio.dtype).max / 2  # where 1 + |x| ends
        logs = jnp.sign(ratio) * jnp.log1p(jnp.minimum(jnp.abs(ratio), most))
        middle = logs.sum(axis=0) / jnp.maximum(n, 1)
        return (jnp.sign(middle) * jnp.expm1(jnp.abs(middle)) * s).astype(x.dtype)

    return jax.tree.map(mean, models, typical)


def _krum_order(
    models: Params, present: Bool[ArrayLike, "N"], trim: ArrayLike
) -> tuple[Params, Int[Array, "N"], Int[Array, ""]]:
    """The models, clients by their Krum sums, how many Multi-Krum takes (0 if n = 0).

    The sum of client i is Σ ‖w_i − w_j‖² over the n − f − 2 nearest others j; one
    other counts even if n − f − 2 < 1.
    """
    models, mask, n = _checked(models, present)
    near = jnp.maximum(n - _left_out(trim, n) - 2, 1)
    pairs = np.triu_indices(mask.size, 1)

    def square(pair: tuple[Array, Array]) -> Float[Array, ""]:
        # One pair at a time; a² − 2ab + b² would cancel.
        return _square(*(trees.take(models, i) for i in pair))

    table = jnp.full((mask.size, mask.size), jnp.inf)
    table = table.at[pairs].set(lax.map(square, pairs).astype(table.dtype))
    table = jnp.minimum(table, table.T)
    table = jnp.sort(jnp.where(mask[None] & mask[:, None], table, jnp.inf), axis=1)
    score = jnp.where((jnp.arange(mask.size) < near)[None], table, 0).sum(axis=1)
    # Stable; the absent last, even behind a present one whose distances overflow.
    return models, jnp.lexsort((score, ~mask)), jnp.minimum(near, n)


def krum(models: Params, present: Bool[ArrayLike, "N"], trim: ArrayLike) -> Params:
    """The one client's model that is nearest to the n − f − 2 nearest others.

    w = w_k, k = argmin_i Σ ‖w_i − w_j‖², of equal sums the first. If n − f − 2 < 2, two
    nearest neighbors have equal sums, so the first of them wins. Blanchard, El Mhamdi,
    Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NIPS 2017, section 4; it requires 2f + 2 < n.
    """
    models, order, count = _krum_order(models, present, trim)
    return jax.tree.map(lambda x: jnp.where(count > 0, x[order[0]], 0), models)


def multi_krum(
    models: Params, present: Bool[ArrayLike, "N"], trim: ArrayLike
) -> Params:
    """The mean of the m = max(n − f − 2, 1) clients with the smallest Krum sums.

    w = 1/m Σ w_i; of equal sums, the first clients. Source as in `krum`, Multi-Krum,
    which leaves m open.
    """
    models, order, count = _krum_order(models, present, trim)
    best = jnp.zeros(order.shape, bool).at[order].set(jnp.arange(order.size) < count)
    w = average(models, best)
    return jax.tree.map(lambda w, x: w.astype(x.dtype), w, models)


_SHARE = setting(0.1, "share of clients that may be wrong", low=0, below=0.5)


@component("trimmed_mean")
class TrimmedMean:
    """The mean without the largest and smallest values of each coordinate."""

    trim: float = _SHARE


@component("krum")
class Krum:
    """Krum and multi-Krum."""

    trim: float = _SHARE


def robust_mean(mean: Callable[..., Params], kind: type | None = None) -> Aggregator:
    """A rule w^{t+1} = w^t + η_g·mean of the updates.

    Other collections become that mean of the clients' own values, without η_g.

    Args:
      mean: (updates ``[N, ...]``, present ``[N]``) → update, with `kind` also of the
        share of clients that may be wrong.
      kind: component with that share, `trim`; None: `mean` takes none.
    """

    def combine(
        updates: Params, state: tuple, received: Received, hparams: HParams
    ) -> tuple[Params, tuple]:
        leaves, tree = jax.tree.flatten(updates)
        trim = (hparams.of(kind).trim,) if kind else ()
        # Integer leaves have no mean; their update is 0.
        floating = [u for u in leaves if trees.inexact(u)]
        means = iter(mean(floating, received.present, *trim))
        leaves = [next(means) if trees.inexact(u) else u[0] for u in leaves]
        return jax.tree.unflatten(tree, leaves), state

    return Aggregator(
        Mixing(combine=combine, combines_others=True),
        server=ServerSide(server_step),
        sections=(Server, kind) if kind else (Server,),
    )


MEDIAN = robust_mean(coordinate_median)
TRIMMED_MEAN = robust_mean(trimmed_mean, TrimmedMean)._replace(label="trimmed mean")
GEOMETRIC_MEDIAN = robust_mean(geometric_median)._replace(label="geometric median")
GEOMETRIC_MEAN = robust_mean(geometric_mean)._replace(label="geometric mean")
KRUM = robust_mean(krum, Krum)._replace(label="Krum")
MULTI_KRUM = robust_mean(multi_krum, Krum)._replace(label="multi-Krum")
