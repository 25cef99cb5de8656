"""Fleets of eight numbers: who works how fast, when, and on which data.

A fleet becomes a table τ[T, N] with data sizes, kept as the CSV trace that
``schedule.kind=trace`` reads, so that the usual commands can run each one again.
All draws have their own streams and do not depend on the numbers: fleets whose numbers
are near each other have nearly the same clients.
"""

import pathlib
from typing import NamedTuple

import numpy as np
import pandas
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.config import Config, get, seeds_of
from tsfl_jax.prepare import splits
from tsfl_jax.report import files
from tsfl_jax.types import Dataset

SLOW = 0.1  # pace of a straggler, as a share of its own
LARGEST = 4  # times the mean, samples of a client
MOST = 12  # local iterations of an interval, so that no client decides the run time


class FleetNumbers(NamedTuple):
    """What distinguishes fleets; the defaults are equal clients that never rest."""

    pace: float = 2.5  # mean local iterations per interval, > 0
    spread: float = 0.0  # σ ≥ 0 of the logarithm of a client's pace
    stragglers: float = 0.0  # share in [0, 1] of clients, the slowest, slower by `SLOW`
    labels: float = 0.0  # in [−1, 1], correlation of the log pace with the labels
    away: float = 0.0  # share in [0, 1) of a period that a client is offline
    period: float = 10.0  # intervals > 0
    sizes: float = 0.0  # σ ≥ 0 of the logarithm of a client's data size
    jitter: float = 0.0  # σ ≥ 0 of the logarithm of a client's pace in one interval


# Least and largest of each number, for a search. Slower fleets only need longer runs.
BOUNDS: dict[str, tuple[float, float]] = {
    "pace": (1.0, 4.0),
    "spread": (0.0, 1.5),
    "stragglers": (0.0, 0.5),
    "labels": (-1.0, 1.0),
    "away": (0.0, 0.7),
    "period": (2.0, 20.0),
    "sizes": (0.0, 1.0),
    "jitter": (0.0, 1.0),
}


class DrawnFleet(NamedTuple):
    """How much each client works, and on how many samples."""

    tau: Int[np.ndarray, "T N"]
    size: Int[np.ndarray, "N"]


class _Draws(NamedTuple):
    """Standard normal and uniform draws of N clients, the same for all numbers."""

    pace: Float[np.ndarray, "N"]
    size: Float[np.ndarray, "N"]
    phase: Float[np.ndarray, "N"]  # in [0, 1)
    jitter: Float[np.ndarray, "T N"]


def _draw(config: Config) -> _Draws:
    N, T = get(config, "num_clients"), get(config, "num_intervals")
    streams = rng.generator(seeds_of(config).fleet, "fleet of numbers").spawn(4)
    return _Draws(
        streams[0].standard_normal(N),
        streams[1].standard_normal(N),
        streams[2].random(N),
        streams[3].standard_normal((T, N)),
    )


def _sizes(mean: int, least: int, spread: float, normal: np.ndarray) -> np.ndarray:
    """Samples of each client; together at most N times the mean, each a whole batch."""
    factor = np.exp(spread * normal)
    free = max(mean - least, 0)  # on average above a batch
    size = least + np.floor(free * factor / factor.mean()).astype(np.int64)
    return np.minimum(size, LARGEST * mean)


def shares_of(
    config: Config, dataset: Dataset, size: Int[np.ndarray, "N"]
) -> Float[np.ndarray, "N C"]:
    """Shares of the classes in each client's samples, of the split that a run draws."""
    labels, seed = dataset.y_train, seeds_of(config).split
    held_out = splits.hold_out(dataset, config.data.validation, seed)
    fixed, size = splits.FixedSamples(held_out), np.asarray(size)
    drawn = splits.draw_split(config.partition, dataset, fixed, size, seed)
    counts = np.zeros((len(size), dataset.num_classes))
    for i, held in enumerate(drawn.capacity):
        counts[i] = np.bincount(
            labels[drawn.indices[i, :held]], minlength=dataset.num_classes
        )
    return counts / counts.sum(axis=1, keepdims=True)


def _label_scores(shares: Float[np.ndarray, "N C"]) -> Float[np.ndarray, "N"]:
    """Normal scores of the clients' mean class index: mean 0, variance about 1."""
    from scipy import stats

    mean = shares @ np.arange(shares.shape[1])
    # Equal clients in order of their number.
    rank = stats.rankdata(mean, method="ordinal")
    return stats.norm.ppf((rank - 0.5) / len(rank))


def make_fleet(config: Config, numbers: FleetNumbers, dataset: Dataset) -> DrawnFleet:
    """Draw a fleet.

    log pace_i = log pace + σ(r s_i + √(1 − r²) z_i) − σ²/2 with s_i the score of the
    client's labels and z_i a normal draw. τ_i^t is the whole part of what the pace adds
    up to: an unfinished local iteration continues in the next interval.

    Args:
      config: N, T, data size, batch size, seeds and the split.
      numbers: of the fleet.
      dataset: whose labels the clients hold.
    """
    draws, n = _draw(config), numbers
    N = get(config, "num_clients")
    size = _sizes(
        get(config, "schedule.data_size"),
        get(config, "batch_size"),
        n.sizes,
        draws.size,
    )
    latent = draws.pace
    if n.labels:
        score = _label_scores(shares_of(config, dataset, size))
        latent = n.labels * score + np.sqrt(1 - n.labels**2) * draws.pace
    pace = n.pace * np.exp(n.spread * latent - n.spread**2 / 2)
    slowest = np.argsort(latent, kind="stable")[: round(n.stragglers * N)]
    pace[slowest] *= SLOW
    interval = np.arange(len(draws.jitter))[:, None]
    online = ((interval + 0.5) / n.period + draws.phase) % 1 >= n.away
    done = np.exp(n.jitter * draws.jitter - n.jitter**2 / 2) * pace * online
    # Rounding errors of a sum must not take an iteration away.
    whole = np.floor(np.cumsum(done, axis=0) + 1e-9).astype(np.int64)
    tau = np.minimum(np.diff(whole, axis=0, prepend=0), MOST)
    return DrawnFleet(tau, size)


def write_fleet(path: pathlib.Path, fleet: DrawnFleet) -> pathlib.Path:
    """Write a fleet as a CSV trace, interval,client,tau,size."""

    T, N = fleet.tau.shape
    interval, client = np.indices((T, N)).reshape(2, -1)
    columns = {"interval": interval, "client": client, "tau": fleet.tau.ravel()}
    columns["size"] = np.tile(fleet.size, T)
    files.write_csv(path, pandas.DataFrame(columns))
    return path


def settings_of(path: pathlib.Path) -> dict[str, str]:
    """The settings that run the fleet of a file."""
    return {"schedule.kind": "trace", "schedule.trace": str(path)}
