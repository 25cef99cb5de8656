"""N clients of whom only those asked for are computed, whatever N is.

What a client has and does are inverted distributions of `rng.uniforms`, random bits of
(seed, client, number): they do not depend on who else is asked, and others cost
nothing but their sizes. NOT done here: who is asked; see `cohort`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.timeline import distributions, fleet, schedule
from tsfl_jax.timeline.fleet import ExactFleet, Fleet
from tsfl_jax.timeline.settings import check
from tsfl_jax.types import Schedule

_DRAWS = 256  # of a client's times, where they differ; then they repeat
_KEPT = 10_000  # clients whose times are kept
_PART = 2**18  # clients at a time where all N are counted
_VARYING = "client iterations", "client downloads", "client uploads"

Ids = Int[np.ndarray, "*shape"]


class Crowd(NamedTuple):
    """What is known of N clients, none of whom is drawn yet."""

    num_clients: int  # N
    seed: int
    held: Int[np.ndarray, "N"]  # int32, |D_i|: all of them, 4 bytes each
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
    texts = schedule.size_texts(kind, size_groups, data_size, N)
    if held is None:
        parts = [_drawn_sizes(seed, texts, part) for part in _parts(N)]
        held = np.concatenate(parts)
    return Crowd(
        N,
        seed,
        held,
        {name: texts or ("constant(0)",) for name, texts in groups.items()},
        jitter,
        dropout,
        by_size,
        measured,
        fleet.read_windows(availability_file, N) if availability_file else {},
    )


def _drawn_sizes(seed: int, texts: tuple[str, ...], ids: Ids) -> Ids:
    group, uniform = ids % len(texts), rng.uniforms(seed, "client size", ids)
    drawn = distributions.quantiles(texts, group, uniform, least=1, flag=schedule.SIZES)
    return schedule.cut_off(drawn, texts, group).astype(np.int32)


def _parts(N: int) -> list[Int[np.ndarray, "V"]]:
    """All N clients in parts, so that what is computed of many does not pile up."""
    edges = [*range(0, N, _PART), N]
    return [np.arange(a, b, dtype=np.int32) for a, b in itertools.pairwise(edges)]


def task_seconds(crowd: Crowd, iterations: int) -> Float[np.ndarray, "N"]:
    """Mean seconds of all clients' tasks of so many iterations."""
    means = [means_of(crowd, part) for part in _parts(crowd.num_clients)]
    return np.concatenate([d + iterations * s + u for s, d, u in means])


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
        mean[:] = distributions.quantiles(texts, group, draws[name], flag=flag)
    if crowd.by_size:
        means[0] *= crowd.held[ids] / crowd.held.mean()
    if crowd.measured is not None:
        given = crowd.measured[:, ids]
        means = np.where(np.isnan(given), means, given)
    fleet.check_means(dict(crowd.seconds), list(means), ids)
    return means


def fleet_of(crowd: Crowd, ids: Int[np.ndarray, "U"], draws: int) -> Fleet:
    """The times of some clients, which depend on nobody else; raises as `means_of`."""
    speed, download, upload = means_of(crowd, ids)[:, :, None] + np.zeros(draws)
    client, number = ids[:, None], np.arange(draws)
    if crowd.jitter:
        speed, download, upload = (
            mean * _factor(crowd.jitter, rng.uniforms(crowd.seed, name, client, number))
            for mean, name in zip((speed, download, upload), _VARYING, strict=True)
        )
    always = np.empty((0, 2))
    online = tuple(crowd.windows.get(i, always) for i in ids.tolist())
    return Fleet(speed, download, upload, lost(crowd, client, number), online)


def exact_of(crowd: Crowd) -> ExactFleet:
    """All clients' times in ticks, drawn when they are asked for."""
    known: dict[int, fleet.Client] = {}
    draws = _DRAWS if crowd.jitter or crowd.dropout else 1

    def need(ids: Sequence[int]) -> None:
        if len(known) > _KEPT:
            known.clear()
        new = [i for i in dict.fromkeys(ids) if i not in known]
        if new:
            times = fleet_of(crowd, np.array(new, np.int64), draws)
            known.update(zip(new, fleet.exact_clients(times, new), strict=True))

    def of(client: int) -> fleet.Client:
        if client not in known:
            need([client])
        return known[client]

    return ExactFleet(of, draws, crowd.num_clients, need)


def lost(crowd: Crowd, ids: Ids, number: Ids) -> np.ndarray:
    """Whether a delivery does not arrive, or a client is away, bool."""
    if not crowd.dropout:
        return np.zeros(np.broadcast_shapes(ids.shape, number.shape), bool)
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
    drawn = distributions.quantiles(texts, group, uniform, least=0, flag=flag)
    away = ~there | lost(crowd, client, interval)
    threshold = None
    if all_work:
        count = np.maximum(there.sum(1), 1)
        threshold = np.where(away, 0, drawn).sum(1) / count
    away |= schedule.cannot_upload(drawn, upload_above)
    done = np.where(away, 0, drawn).astype(np.int32)
    return Schedule(done, crowd.held[client], client=client, threshold=threshold)


def _factor(
    jitter: float, uniform: Float[np.ndarray, "U J"]
) -> Float[np.ndarray, "U J"]:
    """Lognormal factors of mean 1."""
    text, group = f"lognormal(1,{jitter!r})", np.zeros(1, int)
    return distributions.quantiles(
        (text,), group, uniform, flag="--config.timeline.jitter"
    )
