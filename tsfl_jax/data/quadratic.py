"""A federated problem with known constants: the loss of each client is a quadratic.

The clients share the curvatures λ and differ in their samples x_ij:

F_i(w) = (1/|D_i|) Σ_j ½ (w − x_ij)ᵀ Λ (w − x_ij) with Λ = diag(λ_1 … λ_d).
So w_i* is the mean of the client's samples, ∇F_i(w) = Λ (w − w_i*), F = Σ p_i F_i
with p_i = |D_i| / Σ|D_j| has its minimum at w* = Σ p_i w_i*, and the noise of a
mini-batch gradient does not depend on w: for B samples out of n, without replacement,

    E‖g − ∇F_i‖² = tr(Λ² S_i) / B · (n − B) / (n − 1),  S_i the covariance (1/n).

`exact` computes the constants of Theorem 1 from the samples that the clients hold;
`make_quadratic` makes samples that have the requested constants.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Real

from tsfl_jax import rng as random_streams
from tsfl_jax.components import checker, component, setting
from tsfl_jax.data import in_memory
from tsfl_jax.data.inputs import require
from tsfl_jax.timeline import distributions
from tsfl_jax.types import Dataset, UserError, parts_of

_MOST_CORRECTIONS = 10_000


@component("quadratic")
class QuadraticConfig:
    """data.name=quadratic: one quadratic per client, all constants known."""

    smoothness: float = setting(1.0, "L, the largest eigenvalue", above=0)
    convexity: float = setting(1.0, "the smallest eigenvalue, at most L", above=0)
    grad_variance: str = setting("constant(1)", "groups; σ_i² of a mini-batch gradient")
    dissimilarity: str = setting("constant(1)", "groups; Γ_i = ‖w* − w_i*‖²")
    distance: float = setting(1.0, "‖w⁰ − w*‖²", low=0)

    def check(self, config: Any, rule: Any) -> None:
        """Refuse curvatures and shapes that no quadratic has."""
        del rule
        L, shape = self.smoothness, tuple(config.data.shape)
        name, source = "quadratic.convexity", "quadratic.smoothness"
        checker(QuadraticConfig)(name, self.convexity, L, source)
        require(
            len(shape) == 1 and shape[0] > 0,
            f"--config.data.shape={shape}: quadratic data need the number of "
            "dimensions alone, like (8,)",
        )
        require(
            shape > (1,) or self.convexity == L,
            f"--config.{name}={self.convexity}: one dimension has one eigenvalue; set "
            f"it to --config.{source}",
        )


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


def _batch_variance(trace: float, n: int, batch: int) -> float:
    """E‖g − ∇F_i‖² of B out of n samples, of the trace tr(Λ² S_i)."""
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
    """Compute the constants of Theorem 1 from the samples that the clients hold.

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
        samples = np.sort(x[row[:n]].astype(np.float64), axis=0)  # each coordinate
        smallest = n % batch_size or min(batch_size, n)
        optima.append(samples.mean(0))
        trace = (lam**2 * samples.var(0)).sum()
        variance.append(_batch_variance(trace, n, smallest))
        low.append(samples[:smallest].mean(0))
        high.append(samples[-smallest:].mean(0))
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


def make_quadratic(
    num_clients: int,
    data_size: int,
    batch_size: int,
    settings: QuadraticConfig,
    curvature: Float[np.ndarray, "d"],
    seed: int,
) -> Dataset:
    """Make samples of N clients that have these constants, up to float32 rounding.

    The optima of clients i and i + N/2 lie in opposite directions from w*, those of the
    first half in similar ones, so that groups of τ, which are contiguous, disagree.
    Where their Γ differ, or N is odd, all directions are corrected until
    Σ (w_i* − w*) = 0. The noise is bounded: in each coordinate a random permutation of
    equally spaced numbers.

    Args:
      num_clients: N ≥ 2.
      data_size: n, samples of each client, a multiple of B.
      batch_size: B, for which `grad_variance` holds.
      settings: 1 ≤ G ≤ N distributions of σ_i² ≥ 0, see `distributions`; client i is in
        group ⌊iG/N⌋; 0 if n = B: a full batch has no noise. Likewise of Γ_i =
        ‖w* − w_i*‖² ≥ 0; and ‖w⁰ − w*‖² ≥ 0, with w⁰ = 0.
      curvature: λ > 0.
      seed: ≥ 0, of all random numbers.

    Returns:
      A `Dataset`: the label of a training sample is the number of its client. The test
      set is the single sample w*, so that the test loss is F(w) − F(w*).

    Raises:
      UserError: values out of range, or that no set of samples can have.
    """
    N, n, B, d = num_clients, data_size, batch_size, len(curvature)
    require(N > 1, f"--config.num_clients={N}: quadratic data need at least 2")
    require(
        n % B == 0,
        f"--config.schedule.data_size={n}: quadratic data need a multiple of "
        f"--config.batch_size={B}, so that all mini-batches are alike",
    )
    streams = random_streams.generator(seed, "quadratic data").spawn(5)
    variance = _per_client("grad_variance", settings, N, streams[0])
    gamma = _per_client("dissimilarity", settings, N, streams[1])
    optimum = np.sqrt(settings.distance) * _unit(streams[2].normal(size=d))
    optima = optimum + _offsets(np.sqrt(gamma), d, streams[3])
    x = optima[:, None] + _noise(variance, n, B, curvature, streams[4])
    return in_memory.make_dataset(
        x.reshape(N * n, d).astype(np.float32),
        np.repeat(np.arange(N), n),
        optimum[None].astype(np.float32),
        np.zeros(1, int),
        name=f"synthetic quadratic({d} dimensions, {N} clients)",
        num_classes=N,
    )


def _noise(
    variance: Float[np.ndarray, "N"],
    n: int,
    batch: int,
    curvature: Float[np.ndarray, "d"],
    rng: np.random.Generator,
) -> Float[np.ndarray, "N {n} d"]:
    """Deviations of the samples from w_i* that give the variances; 0 if n = B."""
    N, d = len(variance), len(curvature)
    if n == batch:
        require(
            not variance.any(),
            "--config.quadratic.grad_variance: a full batch (data_size = batch_size) "
            "has no noise; set it to constant(0), or take a smaller batch",
        )
        return np.zeros((N, n, d))
    # Each coordinate has the grid's variance, which the scale makes the requested one.
    grid = np.linspace(-1, 1, n)
    noise = rng.permuted(np.tile(grid[None, :, None], (N, 1, d)), axis=1)
    trace = (np.asarray(curvature, np.float64) ** 2).sum() * grid.var()
    scale = np.sqrt(variance / _batch_variance(trace, n, batch))
    return scale[:, None, None] * noise


def _per_client(
    name: str, settings: QuadraticConfig, N: int, rng: np.random.Generator
) -> Float[np.ndarray, "N"]:
    """Sample one number ≥ 0 per client from the distributions of contiguous groups."""
    flag, groups = f"--config.quadratic.{name}", parts_of(getattr(settings, name), ";")
    distributions.check_groups(f"quadratic.{name}", len(groups), N)
    group = np.arange(N) * len(groups) // N
    numbers = distributions.draw(groups, group, rng, flag=flag)
    i = int(np.argmin(numbers))
    require(numbers[i] >= 0, f"{flag}: client {i} gets {numbers[i]:g}; expected >= 0")
    return numbers


def _unit(v: Float[np.ndarray, "... d"]) -> Float[np.ndarray, "... d"]:
    """Scale vectors to length 1."""
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def _offsets(
    length: Float[np.ndarray, "N"], d: int, rng: np.random.Generator
) -> Float[np.ndarray, "N {d}"]:
    """The offsets w_i* − w* of the given lengths, with sum 0."""
    N, half = len(length), len(length) // 2
    common = _unit(rng.normal(size=d))
    single = _unit(rng.normal(size=(N - half, d)))
    first = _unit(common + 0.9 * single)  # 0.9: the sum is not 0 even in one dimension
    # With an odd N the middle client has no opposite.
    offsets = length[:, None] * np.concatenate([first, -first[:half]])
    for _ in range(_MOST_CORRECTIONS):
        mean = offsets.mean(0)
        if np.linalg.norm(mean) <= 1e-14 * length.mean():
            return offsets
        moved = offsets - mean
        norm = np.linalg.norm(moved, axis=1)
        offsets = moved * (length / np.where(norm > 0, norm, 1.0))[:, None]
    raise UserError(
        f"--config.quadratic.dissimilarity: no directions in {d} dimension(s) have "
        "Σ (w_i* − w*) = 0 with these Γ; use more dimensions, an even "
        "--config.num_clients, or Γ that differ less"
    )
