"""A federated problem in which everything is known: every client has its own quadratic.

F_i(w) = (1/|D_i|) Σ_j ½ (w − x_ij)ᵀ Λ (w − x_ij) with Λ = diag(λ_1 … λ_d), the same for
all. So w_i* is the mean of the client's samples, ∇F_i(w) = Λ (w − w_i*), F = Σ p_i F_i
with p_i = |D_i| / Σ|D_j| has its minimum at w* = Σ p_i w_i*, and the noise of a
mini-batch gradient does not depend on w: for B samples out of n, without replacement,

    E‖g − ∇F_i‖² = tr(Λ² S_i) / B · (n − B) / (n − 1),  S_i the covariance (1/n).

`exact` says what the constants of Theorem 1 are for the samples that the clients hold;
`quadratic_source` makes samples with constants as asked for.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tsfl_jax.types import Array


class Quadratic(nn.Module):
    """w, from 0 on: outputs ``[B, d]`` are w − x, the loss is half their Λ-norm."""

    curvature: tuple[float, ...]  # λ, [d]
    classifies = False

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        return self.param("w", nn.initializers.zeros, x.shape[1:])[None] - x

    def loss(self, outputs, labels):
        """½ (w − x)ᵀ Λ (w − x) per sample, whatever its label."""
        del labels
        # No matrix product: a GPU may round what goes into one.
        curvature = jnp.asarray(self.curvature, outputs.dtype)
        return 0.5 * jnp.sum(jnp.square(outputs) * curvature[None], axis=-1)


def curvature(dimensions: int, smoothness: float, convexity: float) -> np.ndarray:
    """λ ``[d]`` float32, from convexity to L in equal ratios; L alone for d = 1."""
    return np.geomspace(smoothness, convexity, dimensions)[::-1].astype(np.float32)


def batch_variance(trace: float, n: int, batch: int) -> float:
    """E‖g − ∇F_i‖² of `batch` samples out of n without replacement; tr(Λ² S_i)."""
    return trace / batch * (n - batch) / max(n - 1, 1)


class Exact(NamedTuple):
    """The constants of Theorem 1 of a quadratic problem, float64."""

    curvature: np.ndarray  # [d] λ
    shares: np.ndarray  # [N] p_i
    optima: np.ndarray  # [N, d] w_i*
    optimum: np.ndarray  # [d] w*
    dissimilarity: np.ndarray  # [N] Γ_i
    grad_variance: np.ndarray  # [N] σ_i², of the smallest mini-batch of a pass
    # G² ≥ E‖g_i(w)‖² for every w that plain local SGD with η ≤ 1/L and an average of
    # models can reach: in each coordinate, w stays between w⁰ and means of batches.
    grad_sq_norm: float
    smoothness: float  # L
    distance: float  # ‖w⁰ − w*‖²


def exact(
    x: Array, rows: Array, sizes: Array, curvature: Array, batch_size: int, start: Array
) -> Exact:
    """The constants, from the very samples that the clients hold.

    Args:
      x: ``[M, ...]`` training samples.
      rows: ``[N, D]`` int into x; client i holds the first ``sizes[i]`` of its row.
      sizes: ``[N]`` int ≥ 1.
      curvature: λ ``[d]``.
      batch_size: B ≥ 1.
      start: w⁰ ``[d]``.
    """
    lam, start = np.asarray(curvature, np.float64), np.asarray(start, np.float64)
    x = np.asarray(x).reshape(len(x), -1)
    optima, variance, low, high = [], [], [start], [start]
    for row, n in zip(np.asarray(rows), np.asarray(sizes).tolist(), strict=True):
        held = np.sort(x[row[:n]].astype(np.float64), axis=0)  # each coordinate
        smallest = n % batch_size or min(batch_size, n)
        optima.append(held.mean(0))
        trace = (lam**2 * held.var(0)).sum()
        variance.append(batch_variance(trace, n, smallest))
        low.append(held[:smallest].mean(0))
        high.append(held[-smallest:].mean(0))
    optima, variance = np.stack(optima), np.array(variance)
    shares = np.asarray(sizes, np.float64) / np.sum(sizes)
    optimum = shares @ optima
    corners = np.min(low, axis=0), np.max(high, axis=0)
    farthest = np.maximum(*(np.abs(corner - optima) for corner in corners))
    return Exact(
        curvature=lam,
        shares=shares,
        optima=optima,
        optimum=optimum,
        dissimilarity=((optima - optimum) ** 2).sum(1),
        grad_variance=variance,
        grad_sq_norm=float((((lam * farthest) ** 2).sum(1) + variance).max()),
        smoothness=float(lam.max()),
        distance=float(((start - optimum) ** 2).sum()),
    )


class Point(NamedTuple):
    """What is known at w, float64."""

    grad_sq_norms: np.ndarray  # [..., N] E‖g_i(w)‖² of a mini-batch drawn anew
    excess: np.ndarray  # [...] F(w) − F(w*)
    gradient_sq_norm: np.ndarray  # [...] ‖∇F(w)‖²


def at(known: Exact, w: Array) -> Point:
    """What is known at the models w ``[..., d]``."""
    w, lam = np.asarray(w, np.float64), known.curvature
    own = ((lam * (w[..., None, :] - known.optima)) ** 2).sum(-1)
    way = w - known.optimum
    return Point(
        own + known.grad_variance,
        0.5 * (lam * way**2).sum(-1),
        ((lam * way) ** 2).sum(-1),
    )
