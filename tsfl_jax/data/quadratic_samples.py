"""Samples of a federated quadratic problem that has the requested constants.

The problem itself, its model and its exact constants are in `quadratic`.
"""

import numpy as np
from jaxtyping import Float

from tsfl_jax import rng as streams_of
from tsfl_jax.data.quadratic import batch_variance
from tsfl_jax.timeline import distributions
from tsfl_jax.types import Dataset, UserError

_MOST_CORRECTIONS = 10_000


def make(
    num_clients: int,
    data_size: int,
    *,
    batch_size: int,
    curvature: Float[np.ndarray, "d"],
    grad_variance: tuple[str, ...],
    dissimilarity: tuple[str, ...],
    distance: float,
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
      curvature: λ > 0.
      grad_variance: 1 ≤ G ≤ N distributions of σ_i² ≥ 0, see `distribution`; client i
        is in group ⌊iG/N⌋. 0 where n = B: a full batch has no noise.
      dissimilarity: likewise of Γ_i = ‖w* − w_i*‖² ≥ 0.
      distance: ‖w⁰ − w*‖² ≥ 0, with w⁰ = 0.
      seed: ≥ 0, of all random numbers.

    Returns:
      A `Dataset`: the label of a training sample is the number of its client. The test
      set is the single sample w*, so that the test loss is F(w) − F(w*).

    Raises:
      UserError: values out of range, or that no set of samples can have.
    """
    N, n, B, d = num_clients, data_size, batch_size, len(curvature)
    if N < 2:
        raise UserError(f"--config.num_clients={N}: quadratic data need at least 2")
    if n % B:
        raise UserError(
            f"--config.schedule.data_size={n}: quadratic data need a multiple of "
            f"--config.batch_size={B}, so that all mini-batches are alike"
        )
    streams = streams_of.generator(seed, "quadratic data").spawn(5)
    variance = _per_client("grad_variance", grad_variance, N, streams[0])
    gamma = _per_client("dissimilarity", dissimilarity, N, streams[1])
    if n == B and variance.any():
        raise UserError(
            "--config.quadratic.grad_variance: a full batch (data_size = batch_size) "
            "has no noise; set it to constant(0), or take a smaller batch"
        )
    optimum = np.sqrt(distance) * _unit(streams[2].normal(size=d))
    optima = optimum + _offsets(np.sqrt(gamma), d, streams[3])
    noise = _noise(variance, n, B, curvature, streams[4])
    x = optima[:, None] + noise
    return Dataset(
        name=f"synthetic quadratic({d} dimensions, {N} clients)",
        x_train=x.reshape(N * n, d).astype(np.float32),
        y_train=np.repeat(np.arange(N, dtype=np.int32), n),
        x_test=optimum[None].astype(np.float32),
        y_test=np.zeros(1, np.int32),
        num_classes=N,
        mean=np.zeros((), np.float32),
        std=np.ones((), np.float32),
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
        return np.zeros((N, n, d))
    # Each coordinate has the grid's variance, which the scale makes the requested one.
    grid = np.linspace(-1, 1, n)
    noise = rng.permuted(np.tile(grid[None, :, None], (N, 1, d)), axis=1)
    trace = (np.asarray(curvature, np.float64) ** 2).sum() * grid.var()
    scale = np.sqrt(variance / batch_variance(trace, n, batch))
    return scale[:, None, None] * noise


def _per_client(
    name: str, groups: tuple[str, ...], N: int, rng: np.random.Generator
) -> Float[np.ndarray, "N"]:
    """Sample one number ≥ 0 per client from the distributions of contiguous groups."""
    flag = f"--config.quadratic.{name}"
    if not 1 <= len(groups) <= N:
        raise UserError(
            f"{flag}: {len(groups)} groups; expected 1..{N} for {N} clients"
        )
    found = distributions.draw_real(
        groups, np.arange(N) * len(groups) // N, rng, flag=flag
    )
    if not (found >= 0).all():
        i = int(np.argmin(found))
        raise UserError(f"{flag}: client {i} gets {found[i]:g}; expected >= 0")
    return found


def _unit(v: Float[np.ndarray, "... d"]) -> Float[np.ndarray, "... d"]:
    """Scale vectors to length 1."""
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def _offsets(
    length: Float[np.ndarray, "N"], d: int, rng: np.random.Generator
) -> Float[np.ndarray, "N {d}"]:
    """The offsets w_i* − w* of the given lengths, with sum 0."""
    N, half = len(length), len(length) // 2
    common, own = _unit(rng.normal(size=d)), _unit(rng.normal(size=(N - half, d)))
    first = _unit(common + 0.9 * own)  # 0.9: the sum is not 0 even in one dimension
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
        "--config.quadratic.dissimilarity: no directions in "
        f"{d} dimension(s) have Σ (w_i* − w*) = 0 with these Γ; use more dimensions, "
        "an even --config.num_clients, or less different Γ"
    )
