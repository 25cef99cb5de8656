"""N clients of whom only those asked for are computed, whatever N is.

What a client has and does are inverted distributions of `rng.uniforms`, random bits of
(seed, client, number): they do not depend on who else is asked, and others cost
nothing but their sizes. NOT done here: who is asked; see `cohort`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.timeline import distributions, fleet, measured, schedule
from tsfl_jax.timeline.fleet import ExactFleet, Fleet
from tsfl_jax.timeline.measured import Measured
from tsfl_jax.types import Schedule

_DRAWS = 256  # of a client's times, where they differ; then they repeat
_KEPT = 10_000  # clients whose times are kept
_PART = 2**18  # clients at a time where all N are counted
_VARYING = "client iterations", "client downloads", "client uploads"
_ONE = {"speed": ("constant(1)",), "download": (), "upload": ()}  # second

Ids = Int[np.ndarray, "*shape"]


class Crowd(NamedTuple):
    """What is known of N clients, none of whom is drawn yet."""

    num_clients: int  # N
    seed: int
    num_samples: Int[np.ndarray, "N"]  # int32, |D_i|: all of them, 4 bytes each
    mean_size: float
    seconds: Mapping[str, tuple[str, ...]]  # distributions, see `fleet.means_of`
    jitter: float = 0.0  # σ of a lognormal factor of mean 1 on every single time
    dropout: float = 0.0  # chance that a delivery is lost, or a client away
    by_size: bool = True  # an iteration takes longer where there are more samples
    traces: Measured = Measured()  # what files say, in place of what is drawn
    transfer_bytes: tuple[float, float] | None = None  # of a download and an upload


def make_crowd(
    num_clients: int,
    seed: int,
    *,
    sizes: tuple[str, ...] = (),
    num_samples: Int[np.ndarray, "N"] | None = None,
    seconds: Mapping[str, tuple[str, ...]] = _ONE,
    speeds_file: str = "",
    availability_file: str = "",
    files: Mapping[str, Any] = {},
    **fields: Any,
) -> Crowd:
    """What is known of N clients.

    Args:
      num_clients: N ≥ 1.
      seed: of all draws.
      sizes: distributions of |D_i|, client i's that of i mod G; see `distributions`.
      num_samples: ``[N]`` int ≥ 1, sizes in their place.
      seconds: distributions of speed, download, …, see `fleet.means_of`.
      speeds_file, availability_file, files: as in `fleet.draw_fleet`.
      **fields: jitter, dropout, by_size and transfer_bytes of `Crowd`.

    Raises:
      UserError: malformed distributions or files.
    """
    if num_samples is None:
        drawn = [_drawn_sizes(seed, sizes, ids) for ids in parts(num_clients)]
        num_samples = np.concatenate(drawn)
    mean = float(num_samples.mean())
    names = speeds_file, availability_file
    fields["traces"] = measured.read(*names, num_clients, **{"samples": mean, **files})
    return Crowd(num_clients, seed, num_samples, mean, seconds, **fields)


def _drawn_sizes(seed: int, texts: tuple[str, ...], ids: Ids) -> Ids:
    group, uniform = ids % len(texts), rng.uniforms(seed, "client size", ids)
    drawn = distributions.quantiles(texts, group, uniform, least=1, flag=schedule.SIZES)
    return schedule.cut_off(drawn, texts, group).astype(np.int32)


def parts(N: int) -> list[Int[np.ndarray, "V"]]:
    """All N clients in parts, so that what is computed of many does not pile up."""
    edges = [*range(0, N, _PART), N]
    return [np.arange(a, b, dtype=np.int32) for a, b in itertools.pairwise(edges)]


def task_seconds(crowd: Crowd, iterations: int) -> Float[np.ndarray, "N"]:
    """Mean seconds of all clients' tasks of so many iterations."""
    means = [means_of(crowd, part) for part in parts(crowd.num_clients)]
    return np.concatenate([d + iterations * s + u for s, d, u, *_ in means])


def means_of(crowd: Crowd, ids: Int[np.ndarray, "U"]) -> Float[np.ndarray, "5 U"]:
    """Mean seconds of some clients' work, hours online; see `fleet.means_of`."""

    def draw(
        name: str, texts: tuple[str, ...], group: Int[np.ndarray, "U"]
    ) -> Float[np.ndarray, "U"]:
        uniform = rng.uniforms(crowd.seed, f"client {name}", ids)
        flag = f"--config.timeline.{name}"
        return distributions.quantiles(texts, group, uniform, flag=flag)

    share = crowd.num_samples[ids] / crowd.mean_size if crowd.by_size else 1.0
    options = draw, share, crowd.traces, crowd.transfer_bytes
    return fleet.means_of(crowd.seconds, ids, crowd.num_clients, *options)


def fleet_of(crowd: Crowd, ids: Int[np.ndarray, "U"], draws: int) -> Fleet:
    """The times of some clients, which depend on nobody else; raises as `means_of`."""
    means = means_of(crowd, ids)
    speed, download, upload = means[:3, :, None] + np.zeros(draws)
    client, number = ids[:, None], np.arange(draws)
    if crowd.jitter:
        # Lognormal factors of mean 1.
        text, flag = f"lognormal(1,{crowd.jitter!r})", "--config.timeline.jitter"
        uniforms = (rng.uniforms(crowd.seed, n, client, number) for n in _VARYING)
        speed, download, upload = (
            mean * distributions.quantiles((text,), np.zeros(1, int), u, flag=flag)
            for mean, u in zip((speed, download, upload), uniforms, strict=True)
        )
    online = measured.online_of(crowd.traces, ids, *means[3:])
    return Fleet(speed, download, upload, lost(crowd, client, number), online)


def exact_of(crowd: Crowd) -> ExactFleet:
    """All clients' times in ticks, drawn when they are asked for."""
    drawn: dict[int, fleet.ClientTimes] = {}
    draws = _DRAWS if crowd.jitter or crowd.dropout else 1

    def need(ids: Sequence[int]) -> None:
        if len(drawn) > _KEPT:
            drawn.clear()
        new = [i for i in dict.fromkeys(ids) if i not in drawn]
        if new:
            times = fleet_of(crowd, np.array(new, np.int64), draws)
            drawn.update(zip(new, fleet.exact_clients(times, new), strict=True))

    def of(client: int) -> fleet.ClientTimes:
        if client not in drawn:
            need([client])
        return drawn[client]

    return ExactFleet(of, draws, crowd.num_clients, need)


def lost(crowd: Crowd, ids: Ids, number: Ids) -> np.ndarray:
    """Whether a delivery does not arrive, or a client is away, bool."""
    if not crowd.dropout:
        return np.zeros(np.broadcast_shapes(ids.shape, number.shape), bool)
    return rng.uniforms(crowd.seed, "client lost", ids, number) < crowd.dropout


def schedule_of(
    crowd: Crowd,
    client: Int[np.ndarray, "T K"],
    is_asked: np.ndarray,
    *,
    kind: str,
    tau: tuple[int | float, ...] = (),
    tau_groups: tuple[str, ...] = (),
) -> Schedule:
    """τ of those who are asked in each interval, by cases.

    Args:
      crowd: of N clients.
      client: in [0, N), who is in slot k of interval t.
      is_asked: ``[T, K]`` bool, whether there is someone in it.
      kind, tau, tau_groups: as in `schedule.make_schedule`.

    Returns:
      A `Schedule` of ``[T, K]`` arrays.

    Raises:
      UserError: a malformed distribution.
    """
    texts = schedule.tau_texts(kind, tau, tau_groups, crowd.num_clients)
    group = client.astype(np.int64) * len(texts) // crowd.num_clients
    interval = np.arange(len(client))[:, None]
    uniform = rng.uniforms(crowd.seed, "client tau", client, interval)
    flag = "--config.schedule.tau_groups"
    drawn = distributions.quantiles(texts, group, uniform, least=0, flag=flag)
    away = ~is_asked | lost(crowd, client, interval)
    tau_done = np.where(away, 0, drawn).astype(np.int32)
    return schedule.complete(tau_done, crowd.num_samples[client], client=client)
