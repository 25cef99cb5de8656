"""Local iterations τ[T, N] and data sizes [T, N] of all clients, drawn before training.

Cases 1 to 3 of Shao et al., "Robust Model Aggregation for Heterogeneous Federated
Learning: Analysis and Optimizations", section V; any distributions; a measured trace
from a CSV file. NOT done here: when results arrive, in seconds.

Groups of τ are contiguous and as equal as possible: client i is in group ⌊iG/N⌋.
Groups of sizes are interleaved, client i in group i mod G, so that size and τ are
nearly independent (the paper does not say how they go together). τ, sizes and dropouts
come from separate streams: a longer run extends a shorter one, and changing one of the
three leaves the others as they were.
"""

import functools
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from tsfl_jax.components import Part
from tsfl_jax.timeline import distributions
from tsfl_jax.timeline.csv_tables import CsvColumn, read_table
from tsfl_jax.timeline.timeline_settings import check
from tsfl_jax.types import INT32_MAX, Delivery, Schedule, UserError

_CASES = {  # τ of the clients, in equal groups; case 3 draws anew in each interval
    "case1": ("constant(1)", "constant(4)"),
    "case2": ("constant(1)", "constant(2)", "constant(3)", "constant(4)"),
    "case3": ("normal(2,0.4)", "normal(3,0.6)", "normal(4,0.8)", "normal(5,1)"),
}
_SIZES = "schedule.size_groups"
# By `ScheduleConfig.kind`; a trace has sizes of its own.
SCHEDULES = {kind: Part(reads=(_SIZES,)) for kind in _CASES} | {
    "explicit": Part(reads=(_SIZES, "schedule.tau")),
    "distribution": Part(reads=(_SIZES, "schedule.tau_groups")),
    "trace": Part(reads=("schedule.trace",)),
}
# (mean, std) of the fifths' sizes in case 3, shares of data_size = 1024: 512 and 100,
# 768 and 150, …, 1536 and 300.
_CASE3_SIZES = [(256 * k / 1024, 50 * k / 1024) for k in range(2, 7)]
_TRACE = "--config.schedule.trace"
SIZES = "--config.schedule.size_groups"

Table = Int[np.ndarray, "T N"]
Notes = tuple[str, ...]


def make_schedule(
    kind: str,
    *,
    num_intervals: int,
    num_clients: int,
    data_size: int,
    tau: tuple[int | float, ...] = (),
    tau_groups: tuple[str, ...] = (),
    size_groups: tuple[str, ...] = (),
    trace: str = "",
    dropout: float = 0.0,
    rng: np.random.Generator,
) -> Schedule:
    """Draw τ and data sizes of all clients in all intervals.

    Args:
      kind: case1, case2, case3 (see `_CASES`), explicit, distribution or trace.
      num_intervals, num_clients: T ≥ 1, N ≥ 1.
      data_size: samples per client ≥ 1; the mean over the fifths of case 3.
      tau: explicit only, G ≤ N numbers ≥ 0, one per client or group.
      tau_groups: distribution only, G ≤ N texts, see `distributions`; floored, ≥ 0.
      size_groups: likewise, instead of the kind's own sizes, ≥ 1; not for trace.
      trace: trace only, a CSV file with the columns interval, client, tau and,
        optionally, size; counting starts at 0. A client is away in an interval without
        a row, and keeps its largest size, so that its absence never asks for more data.
      dropout: in [0, 1), chance that a client is away in an interval (τ = 0).
      rng: generator of all draws.

    Returns:
      A `Schedule` of int32 ``[T, N]`` arrays; its notes report cut-off sizes and the
      pairs that a trace leaves out.

    Raises:
      UserError: a malformed distribution or trace.

    Source: section V, Cases 1–3; the second parameter of N is a standard deviation.
    """
    shape = num_intervals, num_clients
    tau_rng, size_rng, dropout_rng = rng.spawn(3)
    if kind == "trace":
        drawn, size, notes = _read_trace(trace, *shape, data_size)
    else:
        groups, N = tau_texts(kind, tau, tau_groups, num_clients), num_clients
        group = np.arange(N) * len(groups) // N
        flag, options = "--config.schedule.tau_groups", {"least": 0, "rows": shape[:1]}
        drawn = distributions.draw(groups, group, tau_rng, flag=flag, **options)
        size, notes = _draw_sizes(kind, size_groups, data_size, shape, size_rng)
    # Drawn always, so that a dropout rate of 0 changes nothing else.
    away = dropout_rng.random(shape) < dropout
    tau_done = np.where(away, 0, drawn).astype(np.int32)
    return complete(tau_done, size.astype(np.int32), notes=notes)


def complete(
    tau: Int[np.ndarray, "T K"],
    size: Int[np.ndarray, "T K"],
    client: Int[np.ndarray, "T K"] | None = None,
    **fields: Any,
) -> Schedule:
    """A schedule in which what is not given is the same for all.

    Clients in order that start from the newest model and report what they did, K of DMS
    the mean of τ, updates one second apart. Arguments are fields of `Schedule`.
    """
    intervals = np.arange(len(tau), dtype=np.int32)
    # Views of one number or row each: they take no memory.
    zeros, everyone = np.int32(0), np.arange(tau.shape[1], dtype=np.int32)
    of_slots = functools.partial(np.broadcast_to, shape=tau.shape)
    of_updates = functools.partial(np.broadcast_to, shape=intervals.shape)
    in_step = Delivery(
        task=of_slots(intervals[:, None]),
        snapshot=of_slots(zeros),
        lag=of_slots(zeros),
        keep=of_updates(zeros),
        group=of_updates(zeros),
    )
    schedule = Schedule(
        tau=tau,
        size=size,
        seconds=1.0 + intervals,
        client=of_slots(everyone) if client is None else client,
        in_order=client is None,
        delivery=in_step,
        snapshots=0,
        reported=of_slots(np.int32(-1)),
        threshold=of_updates(np.nan),
        share=of_slots(np.float32(np.nan)),
    )
    return schedule._replace(**fields)


def _read_trace(
    path: str, T: int, N: int, data_size: int
) -> tuple[Table, Table, Notes]:
    """τ ``[T, N]`` int64, 0 where a client is away, sizes likewise, ≥ 1, and notes."""
    if not path:
        raise UserError(f"--config.schedule.kind=trace needs {_TRACE}")
    columns = {
        "interval": CsvColumn(high=T - 1, whole=True),
        "client": CsvColumn(high=N - 1, whole=True),
        "tau": CsvColumn(high=INT32_MAX, whole=True),
        "size": CsvColumn(1, INT32_MAX, whole=True, optional=True),
    }
    table = read_table(path, columns, key=["interval", "client"], flag=_TRACE)
    table = table.fillna({"size": data_size}).astype(np.int64)
    tau, size = np.zeros((2, T, N), np.int64)
    place = table["interval"], table["client"]
    tau[place], size[place] = table["tau"], table["size"]
    largest = size.max(axis=0)
    # A client that is always away has no size of its own.
    size = np.where(size > 0, size, np.where(largest > 0, largest, data_size))
    note = (
        f"{path}: {(tau == 0).sum()} of {tau.size} pairs of interval and client have "
        "no row, or tau 0: those clients are away"
    )
    return tau, size, () if tau.all() else (note,)


def tau_texts(
    kind: str, tau: tuple[int | float, ...], tau_groups: tuple[str, ...], N: int
) -> tuple[str, ...]:
    """The distributions of τ of equal groups of N clients, as in `make_schedule`.

    Raises:
      UserError: none, or more than clients.
    """
    if kind in _CASES:  # their groups may stay empty
        return _CASES[kind]
    name = "tau" if kind == "explicit" else "tau_groups"
    constants = tuple(f"constant({int(value)})" for value in tau)
    groups = constants if kind == "explicit" else tau_groups
    if not groups:
        raise UserError(f"--config.schedule.kind={kind} needs --config.schedule.{name}")
    distributions.check_groups(f"schedule.{name}", len(groups), N)
    return groups


def _draw_sizes(
    kind: str,
    groups: tuple[str, ...],
    data_size: int,
    shape: tuple[int, int],
    rng: np.random.Generator,
) -> tuple[Table, Notes]:
    """Sizes up to their distribution's limit, and a note on those cut off."""
    # Without the limit a longer run would ask for ever more data.
    T, N = shape
    groups = size_texts(kind, groups, data_size, N)
    group = np.arange(N) % len(groups)
    drawn = distributions.draw(groups, group, rng, flag=SIZES, least=1, rows=(T,))
    size = cut_off(drawn, groups, group)
    over = int((drawn > size).sum())
    note = (
        f"{over} of {size.size} drawn data sizes were cut off at three standard "
        "deviations above the mean: harmless, so that few outliers do not decide how "
        "much data there must be"
    )
    return size, (note,) if over else ()


def size_texts(
    kind: str, groups: tuple[str, ...], data_size: int, N: int
) -> tuple[str, ...]:
    """The distributions of the sizes of N clients, client i's that of i mod G.

    Raises:
      UserError: more than clients.
    """
    distributions.check_groups("schedule.size_groups", len(groups), N)
    if not groups and kind == "case3":
        return tuple(
            f"normal({m * data_size!r},{s * data_size!r})" for m, s in _CASE3_SIZES
        )
    return groups or (f"constant({data_size})",)


def cut_off(
    size: Int[np.ndarray, "*shape"],
    groups: tuple[str, ...],
    group: Int[np.ndarray, "*shape"],
) -> Int[np.ndarray, "*shape"]:
    """Drawn sizes, int64, those above their distribution's limit cut off."""
    most = np.maximum(np.floor(distributions.limits(groups, flag=SIZES)), 1)
    return np.minimum(size, most.clip(max=INT32_MAX).astype(np.int64)[group])


def make_free_riders(
    tau: Int[np.ndarray, "T K"],
    kind: str,
    number: int,
    rng: np.random.Generator,
    period: int = 5,
    client: Int[np.ndarray, "T K"] | None = None,
    num_clients: int = 0,
) -> tuple[Int[np.ndarray, "T K"], Int[np.ndarray, "T K"], Bool[np.ndarray, " N"]]:
    """Turn some clients into free riders, which report work they did not do.

    What a client does and what it reports are two arrays, so that a rule may see
    either.

    Args:
      tau: ``[T, N]`` local iterations of honest clients; ``[T, K]`` with `client`.
      kind: "claim": does one iteration and reports as many as the busiest client,
        H_t. "echo": does none, sends the global model back and reports H_t. "visit":
        honest, but away in every second period of `period` intervals.
      number: of free riders, in [0, N].
      rng: draws which clients.
      period: intervals ≥ 1, visit only.
      client: ``[T, K]`` int32 in [0, N), of each delivery; None: all N in order.
      num_clients: N, with `client` only.

    Returns:
      Iterations done and reported, int32 like `tau`, and free riders ``[N]`` bool.

    Raises:
      UserError: more free riders than clients.
    """
    intervals = len(tau)
    clients = tau.shape[1] if client is None else num_clients
    check("schedule.free_riders", number, clients, "num_clients")
    free_rider = np.zeros(clients, bool)
    free_rider[rng.permutation(clients)[:number]] = True
    here = free_rider if client is None else free_rider[client]
    if kind == "visit":
        away = (np.arange(intervals) // period) % 2 == 1
        tau = np.where(away[:, None] & here, 0, tau).astype(np.int32)
        return tau, tau, free_rider
    busiest = tau.max(axis=1, keepdims=True)
    idles = here & (tau > 0)  # an absent client reports nothing
    least = np.minimum(tau, 1) if kind == "claim" else 0
    reported = np.where(idles, busiest, tau).astype(np.int32)
    return np.where(idles, least, tau).astype(np.int32), reported, free_rider
