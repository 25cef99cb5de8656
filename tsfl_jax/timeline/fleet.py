"""Speeds of the clients and their online windows, drawn before anything runs.

A `Fleet` is in seconds; frameworks work with an `ExactFleet`. NOT done here: which
client starts which task when; see `synchronous` and `asynchronous`.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from tsfl_jax.timeline import distributions, measured, ticks
from tsfl_jax.timeline.measured import SLOWEST, UNITS, Measured
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.types import UserError, parts_of

Seconds = Float[np.ndarray, " N"]
Windows = tuple[Float[np.ndarray, "W 2"], ...]

_ALWAYS: tuple[tuple[Ticks, Ticks], ...] = ((0, math.inf),)
_END = itemgetter(1)  # of a window
# Least numbers other than 0, or that are excluded.
_LEAST = {"speed": (0, ">"), "online": (0, ">"), "online_from": (-math.inf, ">")}
# Watts of computing, transferring and idling. The first: Kaup, Gottschling, Hausheer,
# "PowerPi: Measuring and Modeling the Power Consumption of the Raspberry Pi", IEEE LCN
# 2014: idle 1.578, Wi-Fi 0.942, all of the CPU 0.181, 10 Mbit/s 0.112. The second:
# Geerling, github.com/geerlingguy/sbc-reviews/issues/4: idle 1.6, all of the CPU 5, at
# the wall; a transfer as of the first.
POWER = {"raspberry_pi": "2.7,2.63,2.52", "raspberry_pi_4": "5,1.71,1.6"}


class Fleet(NamedTuple):
    """Seconds of everything N clients do; draw j of a client wraps after J."""

    iteration: Float[np.ndarray, "N J"]  # > 0, of its j-th iteration in the whole run
    download: Float[np.ndarray, "N J"]  # ≥ 0, of task k = 0, 1, …
    upload: Float[np.ndarray, "N J"]  # ≥ 0, of task k
    lost: Bool[np.ndarray, "N J"]  # the delivery of task k never arrives
    # Of each client, disjoint sorted windows [start, end), end may be inf. A client
    # with W = 0 is always online, and so are all clients of ().
    online: Windows


def draw_fleet(
    num_clients: int,
    size: Int[np.ndarray, " N"],
    *,
    jitter: float,
    dropout: float,
    speeds_file: str,
    availability_file: str,
    transfer_bytes: tuple[float, float] | None = None,
    draws: int = 1024,
    rng: np.random.Generator,
    files: Mapping[str, Any] = {},
    **groups: tuple[str, ...],
) -> Fleet:
    """Draw each client's mean times, then every single time around its mean.

    Groups are contiguous and as equal as possible: client i is in group ⌊iG/N⌋. A
    client's mean seconds per iteration are those of `speed` · size_i / mean(size).
    Every kind of draw has its own stream of `rng`: changing one leaves the others as
    they were, and more `draws` extend fewer.

    Args:
      num_clients: N ≥ 1.
      size: ``[N]`` int ≥ 1, samples of each client.
      jitter: σ in [0, 10] of a lognormal factor of mean 1 for every single time.
      dropout: in [0, 1), chance that a delivery is lost.
      speeds_file: "" or a CSV file client,seconds[,download,…] of `UNITS` with every
        client once, in place of the draws of means; an empty cell keeps the draw.
      availability_file: "" or a CSV file client,start,end of online windows
        [start, end) in seconds, in place of drawn ones. Both may be JSON.
      transfer_bytes: of a download and an upload; None: not known.
      draws, rng: J ≥ 1, and the generator of all draws.
      files: other arguments of `measured.read`.
      **groups: see `means_of`; speed is at the mean data size.

    Raises:
      UserError: times not > 0, malformed distributions or files.

    Source: our own model; no paper fixes one.
    """
    N, size = num_clients, np.asarray(size)
    # Always all of them, so that what one draws does not shift the others.
    means_rng, jitter_rng, lost_rng = rng.spawn(3)
    streams = dict(zip(UNITS, means_rng.spawn(len(UNITS)), strict=True))

    def draw(name: str, texts: tuple[str, ...], group: np.ndarray) -> Seconds:
        flag = f"--config.timeline.{name}"
        return distributions.draw(texts, group, streams[name], flag=flag)

    ids, share = np.arange(N), size / size.mean()
    options = {"samples": float(size.mean()), **files}
    traces = measured.read(speeds_file, availability_file, N, **options)
    means = means_of(groups, ids, N, draw, share, traces, transfer_bytes)
    normal = [s.standard_normal((draws, N)).T for s in jitter_rng.spawn(3)]
    # Lognormal factors of mean 1, exactly 1 without jitter.
    factors = np.exp(jitter * np.array(normal) - jitter**2 / 2)
    iteration, downloads, uploads = means[:3, :, None] * factors
    lost = np.ascontiguousarray((lost_rng.random((draws, N)) < dropout).T)
    online = measured.online_of(traces, ids, *means[3:])
    return Fleet(iteration, downloads, uploads, lost, online)


class ClientTimes(NamedTuple):
    """A client's times in ticks: whole numbers, added and compared exactly."""

    work: Shaped[np.ndarray, "J1"]  # of the first 0, 1, …, J iterations, ascending
    download: Shaped[np.ndarray, "J"]
    upload: Shaped[np.ndarray, "J"]
    lost: Bool[np.ndarray, "J"]
    online: Sequence[tuple[Ticks, Ticks]]  # none: never


class ExactFleet(NamedTuple):
    """A `Fleet` or `crowd.Crowd` in ticks."""

    of: Callable[[int], ClientTimes]
    draws: int  # J
    clients: int  # N
    # To draw the times of several at once, where they are drawn when asked for.
    need: Callable[[Sequence[int]], None] = lambda ids: None


def exact(fleet: Fleet) -> ExactFleet:
    """Put a fleet in ticks; raises as `exact_clients`."""
    N, J = fleet.iteration.shape
    return ExactFleet(exact_clients(fleet, range(N)).__getitem__, J, N)


def exact_clients(fleet: Fleet, ids: Sequence[int]) -> list[ClientTimes]:
    """Put the clients of a fleet in ticks: every time is rounded once, here.

    Args:
      fleet: in seconds.
      ids: who they are, for messages.

    Raises:
      UserError: an iteration that takes no tick.
    """
    steps = ticks.of_array(fleet.iteration)
    if not steps.all():
        i, j = np.argwhere(steps == 0)[0]
        raise UserError(
            f"--config.timeline.speed: an iteration of client {ids[i]} takes "
            f"{fleet.iteration[i, j]:g} s; expected at least {1 / ticks.SECOND:g} s, "
            "the unit of virtual time; choose slower clients"
        )
    online = [
        [(a, b) for a, b in (map(ticks.of, w) for w in windows.tolist()) if a < b]
        if len(windows)
        else _ALWAYS
        for windows in fleet.online
    ]
    times = zip(
        np.insert(np.cumsum(steps, 1), 0, 0, 1),
        ticks.of_array(fleet.download),
        ticks.of_array(fleet.upload),
        fleet.lost,
        online or [_ALWAYS] * len(steps),
        strict=True,
    )
    return list(itertools.starmap(ClientTimes, times))


def work_of(fleet: ExactFleet, client: int, first: int, count: int) -> int:
    """Ticks of `count` of a client's iterations, from number `first` on."""
    work, J = fleet.of(client).work, fleet.draws
    (before, a), (after, b) = divmod(first, J), divmod(first + count, J)
    return (after - before) * work.item(J) + work.item(b) - work.item(a)


def expected(fleet: ExactFleet, client: int) -> tuple[int, int, int]:
    """J times a client's mean download, iteration and upload: whole numbers."""
    work, download, upload, *_ = fleet.of(client)
    return int(download.sum()), work.item(-1), int(upload.sum())


def finish(fleet: ExactFleet, client: int, start: Ticks, work: Ticks) -> Ticks:
    """When `work` ticks of a client's online time have passed since `start`.

    Args:
      fleet: its windows.
      client: in [0, N).
      start: ticks ≥ 0 since the beginning; inf is answered with inf.
      work: ticks ≥ 0 of work, which pauses offline.

    Returns:
      Ticks; for no work the first online moment ≥ start, inf if it never happens.
    """
    windows = fleet.of(client).online
    if windows is _ALWAYS:  # fast, for most fleets
        return start + work
    for begin, end in windows[bisect.bisect_right(windows, start, key=_END) :]:
        begin = max(begin, start)
        if begin + work <= end:
            return begin + work
        work -= end - begin
    return math.inf


def latest_start(fleet: ExactFleet, client: int, end: Ticks, work: Ticks) -> Ticks:
    """The latest moment from which on `work` ticks of online time end by `end`."""
    for first, last in fleet.of(client).online[::-1]:
        last = min(last, end)
        if first < last:
            if work <= last - first:
                return last - work
            work -= last - first
    return 0


def online_in(
    fleet: ExactFleet, client: int, start: Ticks, end: Ticks
) -> list[tuple[Ticks, Ticks]]:
    """A client's online windows within [start, end)."""
    windows = fleet.of(client).online
    if windows is _ALWAYS:
        return [(start, end)] if start < end else []
    later = windows[bisect.bisect_right(windows, start, key=_END) :]
    within = itertools.takewhile(lambda window: max(window[0], start) < end, later)
    return [(max(first, start), min(last, end)) for first, last in within]


def means_of(
    groups: Mapping[str, tuple[str, ...]],
    ids: Int[np.ndarray, "U"],
    num_clients: int,
    draw: Callable[[str, tuple[str, ...], Int[np.ndarray, "U"]], Seconds],
    share: Float[np.ndarray, "U"] | float,
    traces: Measured,
    transfer_bytes: tuple[float, float] | None,
) -> Float[np.ndarray, "5 U"]:
    """Mean seconds of some clients' iterations, downloads and uploads; hours online.

    A transfer takes the drawn seconds and its bytes over the client's bandwidth. The
    hours are how many of each day, and from which on, modulo 24.

    Args:
      groups: 1 ≤ G ≤ N distributions of some of `UNITS`, each of an equal group; see
        `distributions`, real: uniform(0.2,1) is allowed. None: 0 s, bandwidth without
        a limit, always online.
      ids: in [0, N).
      num_clients: N.
      draw: (name, distributions, group of each client) -> means.
      share: |D_i| over its mean, which drawn speeds are times.
      traces: means of files, in place of drawn ones.
      transfer_bytes: of a download and an upload; None: not known.

    Raises:
      UserError: more groups than clients, what is no time, bandwidth without bytes.
    """
    means = np.empty((len(UNITS), len(ids)))
    for k, (name, unit) in enumerate(UNITS.items()):
        texts, is_rate = groups.get(name, ()), unit == "B/s"
        distributions.check_groups(f"timeline.{name}", len(texts), num_clients)
        mean = np.full(len(ids), np.inf if is_rate or name == "online" else 0.0)
        if texts:
            mean = draw(name, texts, ids.astype(np.int64) * len(texts) // num_clients)
        mean = mean * share if name == "speed" else mean
        if traces.means is not None:
            values = traces.means[k, traces.rows(ids, traces.means.shape[1])]
            values = values * share if name == "speed" and traces.by_size else values
            mean = np.where(np.isnan(values), mean, values)
        _check_means(name, texts, ids, mean)
        means[k] = mean
    seconds, bandwidth = means[:3], means[3:5]
    if transfer_bytes is None:
        if np.isfinite(bandwidth).any():
            raise UserError(
                "--config.timeline.bandwidth_down, bandwidth_up: need the bytes of a "
                "transfer; pass transfer_bytes=(download, upload) to draw_workload"
            )
    else:
        seconds[1:] += np.array(transfer_bytes)[:, None] / bandwidth
    return np.concatenate([seconds, means[5:]])


def _check_means(
    name: str, texts: tuple[str, ...], ids: Int[np.ndarray, "U"], mean: Seconds
) -> None:
    is_rate = UNITS[name] == "B/s"
    low, sign = _LEAST.get(name, (SLOWEST if is_rate else 0.0, ">="))
    is_valid = mean > low if sign == ">" else mean >= low
    is_valid &= is_rate | (name == "online") | np.isfinite(mean)
    if not is_valid.all():
        i = int(np.argmin(is_valid))
        raise UserError(
            f"--config.timeline.{name}={','.join(texts)}: client {ids[i]} gets "
            f"{mean[i]:g} {UNITS[name]}, expected a finite number {sign} {low:g}; "
            "choose uniform(low,high) or lognormal(mean,sigma)"
        )


def watts(
    text: str, num_clients: int, ids: Int[np.ndarray, "U"]
) -> Float[np.ndarray, "U 3"]:
    """Watts of computing, transferring and idling of some clients.

    Args:
      text: `timeline.power`, "5,1.5,0.2; raspberry_pi" of two equal groups of clients,
        numbers or a name of `POWER`; "": unknown, NaN.
      num_clients: N; client i of G groups is in group ⌊iG/N⌋.
      ids: in [0, N).

    Raises:
      UserError: other than three numbers of a group, or more groups than clients.
    """
    groups = parts_of(text, ";")
    distributions.check_groups("timeline.power", len(groups), num_clients)
    texts = [[POWER.get(group, group)] for group in groups]
    rows = [np.genfromtxt(text, delimiter=",", ndmin=1) for text in texts]
    for group, row in zip(groups, rows, strict=True):  # NaN: no number
        if row.shape != (3,) or not ((row >= 0) & (row < np.inf)).all():
            raise UserError(
                f"--config.timeline.power={text}: {group!r}: expected watts of "
                'compute, transfer and idle, like "5,1.5,0.2" (finite and >= 0), '
                f"or one of {', '.join(POWER)}"
            )
    rows = rows or [np.full(3, np.nan)]
    return np.stack(rows)[ids.astype(np.int64) * len(rows) // num_clients]
