"""A federated problem with known constants: the loss of each client is a quadratic.

F_i(w) = (1/|D_i|) Σ_j ½ (w − x_ij)ᵀ Λ (w − x_ij) with Λ = diag(λ_1 … λ_d), the same for
all. So w_i* is the mean of the client's samples, ∇F_i(w) = Λ (w − w_i*), F = Σ p_i F_i
with p_i = |D_i| / Σ|D_j| has its minimum at w* = Σ p_i w_i*, and the noise of a
mini-batch gradient does not depend on w: for B samples out of n, without replacement,

    E‖g − ∇F_i‖² = tr(Λ² S_i) / B · (n − B) / (n − 1),  S_i the covariance (1/n).

`exact` computes the constants of Theorem 1 from the samples that the clients hold;
`quadratic_source` makes samples that have the requested constants.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Real


class Quadratic(nn.Module):
    """A model with the parameters w, initially 0, and the outputs w − x."""

    curvature: tuple[float, ...]  # λ, [d]
    classifies = False

    @nn.compact
    def __call__(self, x: Float[Array | np.ndarray, "B ..."]) -> Float[Array, "B d"]:
        """Return w − x for each sample of a batch."""
        x = x.reshape(x.shape[0], -1)
        return self.param("w", nn.initializers.zeros, x.shape[1:])[None] - x

    def loss(
        self, outputs: Float[Array, "B d"], labels: Int[Array, "B"]
    ) -> Float[Array, "B"]:
        """The loss ½ (w − x)ᵀ Λ (w − x) of each sample; labels are ignored."""
        del labels
        # No matrix product: a GPU may round its inputs.
        curvature = jnp.asarray(self.curvature, outputs.dtype)
        return 0.5 * jnp.sum(jnp.square(outputs) * curvature[None], axis=-1)


def curvature(
    dimensions: int, smoothness: float, convexity: float
) -> Float[np.ndarray, "d"]:
    """The curvatures λ, from convexity to L in equal ratios, float32; L if d = 1."""
    return np.geomspace(smoothness, convexity, dimensions)[::-1].astype(np.float32)


def batch_variance(trace: float, n: int, batch: int) -> float:
    """The variance of a mini-batch gradient, drawn without replacement.

    E‖g − ∇F_i‖² = tr(Λ² S_i) / B · (n − B) / (n − 1).

    Args:
      trace: tr(Λ² S_i).
      n: samples of the client.
      batch: B ≤ n.
    """
    return trace / batch * (n - batch) / max(n - 1, 1)


class Exact(NamedTuple):
    """The constants of Theorem 1 of a quadratic problem, float64."""

    curvature: Float[np.ndarray, "d"]  # λ
    shares: Float[np.ndarray, "N"]  # p_i
    optima: Float[np.ndarray, "N d"]  # w_i*
    optimum: Float[np.ndarray, "d"]  # w*
    dissimilarity: Float[np.ndarray, "N"]  # Γ_i
    grad_variance: Float[np.ndarray, "N"]  # σ_i², of the smallest batch of a pass
    # G² ≥ E‖g_i(w)‖² for every w that plain local SGD with η ≤ 1/L and an average of
    # models can reach: in each coordinate, w stays between w⁰ and means of batches.
    grad_sq_norm: float
    smoothness: float  # L
    distance: float  # ‖w⁰ − w*‖²


def exact(
    x: Real[np.ndarray, "M ..."],
    rows: Int[np.ndarray, "N D"],
    sizes: Int[np.ndarray, "N"],
    curvature: Real[np.ndarray, "d"],
    batch_size: int,
    start: Real[np.ndarray, "d"],
) -> Exact:
    """The constants of Theorem 1, computed from the samples that the clients hold.

    Args:
      x: training samples.
      rows: indices into x; client i holds the first ``sizes[i]`` of its row.
      sizes: samples of each client, ≥ 1.
      curvature: λ.
      batch_size: B ≥ 1.
      start: w⁰.
    """
    lam, start = np.asarray(curvature, np.float64), np.asarray(start, np.float64)
    x = x.reshape(len(x), -1)
    optima, variance, low, high = [], [], [start], [start]
    for row, n in zip(rows, sizes.tolist(), strict=True):
        held = np.sort(x[row[:n]].astype(np.float64), axis=0)  # each coordinate
        smallest = n % batch_size or min(batch_size, n)
        optima.append(held.mean(0))
        trace = (lam**2 * held.var(0)).sum()
        variance.append(batch_variance(trace, n, smallest))
        low.append(held[:smallest].mean(0))
        high.append(held[-smallest:].mean(0))
    optima, variance = np.stack(optima), np.array(variance)
    shares = sizes.astype(np.float64) / sizes.sum()
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
