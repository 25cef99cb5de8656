"""N clients of whom only those asked for are computed, whatever N is.

What a client has and does are inverted distributions of `rng.uniforms`, random bits of
(seed, client, number of its task): they do not depend on who else is asked, and the
others cost nothing. NOT done here: who is asked; see `cohort`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.timeline import distributions, fleet, schedule
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.timeline.settings import check
from tsfl_jax.types import Schedule

_DRAWS = 1024  # most of a task's iterations that differ; then they repeat
_TASK = 2**20  # numbers of a task's draws are apart by this
_PART = 2**18  # clients at a time where all N are counted

Ids = Int[np.ndarray, "*shape"]


class Crowd(NamedTuple):
    """What is known of N clients, none of whom is drawn yet."""

    num_clients: int  # N
    seed: int
    sizes: tuple[str, ...]  # distributions of |D_i|; client i has that of i mod G
    held: Int[np.ndarray, "N"] | None = None  # |D_i|, where they are given
    # Distributions of mean seconds: speed, download, upload; of equal groups.
    seconds: Mapping[str, tuple[str, ...]] = {}
    jitter: float = 0.0  # σ of a lognormal factor of mean 1 on every single time
    dropout: float = 0.0  # chance that a delivery is lost, or a client away
    by_size: bool = True  # an iteration takes longer where there are more samples
    measured: Float[np.ndarray, "3 N"] | None = None  # means of a file; NaN: drawn
    windows: Mapping[int, Float[np.ndarray, "W 2"]] = {}  # others: always online


def make_crowd(
    num_clients: int,
    seed: int,
    *,
    data_size: int,
    kind: str = "distribution",
    size_groups: tuple[str, ...] = (),
    held: Int[np.ndarray, "N"] | None = None,
    speed: tuple[str, ...] = ("constant(1)",),
    download: tuple[str, ...] = (),
    upload: tuple[str, ...] = (),
    jitter: float = 0.0,
    dropout: float = 0.0,
    by_size: bool = True,
    speeds_file: str = "",
    availability_file: str = "",
) -> Crowd:
    """Check what N clients are like, without drawing any.

    Args:
      num_clients: N ≥ 1.
      seed: of all draws.
      data_size, kind, size_groups: as in `schedule.make_schedule`; but a client has
        the same size all the time.
      held: ``[N]`` int ≥ 1, sizes in their place.
      speed, download, upload, jitter, dropout, speeds_file, availability_file: as in
        `fleet.draw_fleet`; the mean size is that of the distributions.
      by_size: whether the speed is of an iteration at the mean size, else at any.

    Raises:
      UserError: a value out of range, malformed distributions or files.
    """
    N, groups = num_clients, {"speed": speed, "download": download, "upload": upload}
    check("num_clients", N)
    check("timeline.jitter", jitter)
    check("schedule.dropout", dropout)
    fleet.check_groups(groups, N)
    measured = None
    if speeds_file:
        measured = np.full((3, N), np.nan)
        fleet.read_means(list(measured), speeds_file)
    return Crowd(
        N,
        seed,
        schedule.size_texts(kind, size_groups, data_size, N),
        held,
        {name: texts or ("constant(0)",) for name, texts in groups.items()},
        jitter,
        dropout,
        by_size,
        measured,
        fleet.read_windows(availability_file, N) if availability_file else {},
    )


def sizes_of(crowd: Crowd, ids: Ids) -> Ids:
    """Samples of some clients, int64 ≥ 1, in the shape of `ids`."""
    if crowd.held is not None:
        return crowd.held[ids].astype(np.int64)
    group = ids % len(crowd.sizes)
    uniform = rng.uniforms(crowd.seed, "client size", ids)
    drawn = distributions.whole_at(
        crowd.sizes, group, uniform, least=1, flag=schedule.SIZES
    )
    return schedule.cut_off(drawn, crowd.sizes, group)


def all_sizes(crowd: Crowd) -> Int[np.ndarray, "N"]:
    """Samples of all N clients, int32; takes about 0.1 s for a million."""
    parts = _parts(np.arange(crowd.num_clients, dtype=np.int32))
    return np.concatenate([sizes_of(crowd, part).astype(np.int32) for part in parts])


def size_edges(crowd: Crowd, ids: Int[np.ndarray, "U"]) -> Int[np.ndarray, "U"]:
    """Samples of the first 1, 2, …, U of some clients together, int64."""
    return np.concatenate([sizes_of(crowd, part) for part in _parts(ids)]).cumsum()


def task_seconds(
    crowd: Crowd, ids: Int[np.ndarray, "U"], iterations: int
) -> Float[np.ndarray, "U"]:
    """Mean seconds of some clients' tasks of so many iterations."""
    means = [means_of(crowd, part) for part in _parts(ids)]
    return np.concatenate([d + iterations * s + u for s, d, u in means])


def _parts(ids: Int[np.ndarray, "U"]) -> list[Int[np.ndarray, "V"]]:
    """The clients in parts, so that what is computed of many does not pile up."""
    return [ids[start : start + _PART] for start in range(0, len(ids), _PART)]


def means_of(crowd: Crowd, ids: Int[np.ndarray, "U"]) -> Float[np.ndarray, "3 U"]:
    """Mean seconds of some clients' iterations, downloads and uploads.

    Raises:
      UserError: a distribution gave what is no time.
    """
    draws = {
        "speed": rng.uniforms(crowd.seed, "client speed", ids),
        "download": rng.uniforms(crowd.seed, "client download", ids),
        "upload": rng.uniforms(crowd.seed, "client upload", ids),
    }
    means = np.empty((3, len(ids)))
    for mean, (name, texts) in zip(means, crowd.seconds.items(), strict=True):
        group, flag = ids * len(texts) // crowd.num_clients, f"--config.timeline.{name}"
        mean[:] = distributions.real_at(texts, group, draws[name], flag=flag)
    if crowd.by_size:
        means[0] *= sizes_of(crowd, ids) / _mean_size(crowd)
    if crowd.measured is not None:
        given = crowd.measured[:, ids]
        means = np.where(np.isnan(given), means, given)
    fleet.check_means(dict(crowd.seconds), list(means), ids)
    return means


def fleet_of(
    crowd: Crowd,
    ids: Int[np.ndarray, "U"],
    number: int | Int[np.ndarray, "U"],
    iterations: int,
) -> Fleet:
    """The times of one task of each of some clients.

    Args:
      crowd: all of them.
      ids: in [0, N).
      number: ≥ 0, of the task: the same client and number are the same times.
      iterations: that the task has, at most.

    Returns:
      A `Fleet` of U clients, in which this task is their task 0.

    Raises:
      UserError: as of `means_of`.
    """
    speed, download, upload = means_of(crowd, ids)[:, :, None]
    first = np.broadcast_to(np.asarray(number, np.int64) * _TASK, len(ids))[:, None]
    client, draws = ids[:, None], 1
    if crowd.jitter:
        draws = min(iterations, _DRAWS)
        number_of = first + np.arange(draws)
        of_each = rng.uniforms(crowd.seed, "client iterations", client, number_of)
        speed = speed * _factor(crowd.jitter, of_each)
        both = first[:, :, None] + np.arange(2)
        of_each = rng.uniforms(crowd.seed, "client transfers", client[:, :, None], both)
        download = download * _factor(crowd.jitter, of_each[:, :, 0])
        upload = upload * _factor(crowd.jitter, of_each[:, :, 1])
    always = np.empty((0, 2))
    online = tuple(crowd.windows.get(i, always) for i in ids.tolist())
    return Fleet(speed, download, upload, lost(crowd, client, first // _TASK), online)


def lost(crowd: Crowd, ids: Ids, number: Ids | int) -> np.ndarray:
    """Whether a delivery does not arrive, or a client is away, bool like `ids`."""
    if not crowd.dropout:
        return np.zeros(ids.shape, bool)
    return rng.uniforms(crowd.seed, "client lost", ids, number) < crowd.dropout


def schedule_of(
    crowd: Crowd,
    client: Int[np.ndarray, "T K"],
    there: np.ndarray,
    *,
    kind: str,
    tau: tuple[int | float, ...] = (),
    tau_groups: tuple[str, ...] = (),
    upload_above: int = 0,
    all_work: bool = False,
) -> Schedule:
    """τ of those who are asked in each interval, by cases.

    Args:
      crowd: of N clients.
      client: in [0, N), who is in slot k of interval t.
      there: ``[T, K]`` bool, whether there is someone in it.
      kind, tau, tau_groups, upload_above, all_work: as in `schedule.make_schedule`;
        K of DMS is the mean over the cohort.

    Returns:
      A `Schedule` of ``[T, K]`` arrays.

    Raises:
      UserError: a value out of range, a malformed distribution.
    """
    texts = schedule.tau_texts(kind, tau, tau_groups, crowd.num_clients)
    group = client.astype(np.int64) * len(texts) // crowd.num_clients
    interval = np.arange(len(client))[:, None]
    uniform = rng.uniforms(crowd.seed, "client tau", client, interval)
    flag = "--config.schedule.tau_groups"
    drawn = distributions.whole_at(texts, group, uniform, least=0, flag=flag)
    away = ~there | lost(crowd, client, interval)
    threshold = None
    if all_work:
        count = np.maximum(there.sum(1), 1)
        threshold = np.where(away, 0, drawn).sum(1) / count
    away |= schedule.cannot_upload(drawn, upload_above)
    size = sizes_of(crowd, client).astype(np.int32)
    done = np.where(away, 0, drawn).astype(np.int32)
    return Schedule(done, size, client=client, threshold=threshold)


def _mean_size(crowd: Crowd) -> float:
    if crowd.held is not None:
        return float(crowd.held.mean())
    return distributions.mean_of(crowd.sizes, flag=schedule.SIZES)


def _factor(
    jitter: float, uniform: Float[np.ndarray, "U J"]
) -> Float[np.ndarray, "U J"]:
    """Lognormal factors of mean 1."""
    text, group = f"lognormal(1,{jitter!r})", np.zeros(1, int)
    return distributions.real_at(
        (text,), group, uniform, flag="--config.timeline.jitter"
    )
