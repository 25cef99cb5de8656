"""Who works how much on how many samples, drawn before training: τ[T, N], size[T, N].

Cases 1 to 3 of Shao et al., "Robust Model Aggregation for Heterogeneous Federated
Learning: Analysis and Optimizations", section V; any distributions; measured traces
(`trace`). NOT done here: when results arrive, in seconds.
"""

import numpy as np

from tsfl_jax.timeline import distributions
from tsfl_jax.timeline.schedule_csv import read_trace
from tsfl_jax.types import Schedule, UserError
from tsfl_jax.validate import check

_CASES = {  # τ of the clients, in equal groups; case 3 draws anew in each interval
    "case1": ("constant(1)", "constant(4)"),
    "case2": ("constant(1)", "constant(2)", "constant(3)", "constant(4)"),
    "case3": ("normal(2,0.4)", "normal(3,0.6)", "normal(4,0.8)", "normal(5,1)"),
}
# (mean, std) of the fifths' sizes in case 3, as shares of data_size = 1024.
_CASE3_SIZES = (
    (512 / 1024, 100 / 1024),
    (768 / 1024, 150 / 1024),
    (1024 / 1024, 200 / 1024),
    (1280 / 1024, 250 / 1024),
    (1536 / 1024, 300 / 1024),
)


def make_schedule(
    kind: str,
    *,
    num_intervals: int,
    num_clients: int,
    data_size: int,
    tau: tuple[int, ...] = (),
    tau_groups: tuple[str, ...] = (),
    size_groups: tuple[str, ...] = (),
    trace: str = "",
    upload_above: int = 0,
    dropout: float = 0.0,
    rng: np.random.Generator,
) -> Schedule:
    """Draws τ and data sizes of all clients in all intervals.

    G groups of τ are contiguous and as equal as possible: client i is in group
    ⌊iG/N⌋. Groups of sizes are interleaved, client i in group i mod G, so that size
    and τ are nearly independent (the paper does not say how they go together).
    τ, sizes and drop-outs come from separate streams of `rng`: a longer run extends
    a shorter one, and changing one of the three leaves the others as they were.
    Sizes are cut off at three standard deviations, see `distribution.most`: else a
    longer run would ask for ever more data.

    Args:
      kind: case1 (half 1, half 4), case2 (quarters 1, 2, 3, 4), case3 (quarters
        ⌊N(2,.4)⌋, ⌊N(3,.6)⌋, ⌊N(4,.8)⌋, ⌊N(5,1)⌋ and sizes in fifths
        ⌊N(512,100)⌋, ⌊N(768,150)⌋, ⌊N(1024,200)⌋, ⌊N(1280,250)⌋, ⌊N(1536,300)⌋
        times data_size/1024, anew in each interval), explicit, distribution or trace.
      num_intervals: T ≥ 1.
      num_clients: N ≥ 1.
      data_size: samples a client ≥ 1; the mean over the fifths of case 3.
      tau: explicit only, G ≤ N numbers ≥ 0, one a client or a group.
      tau_groups: distribution only, G ≤ N of normal(mean,std), uniform(low,high),
        lognormal(mean,sigma), constant(k); see `distribution`. Floored, at least 0.
      size_groups: likewise, instead of the kind's own sizes; at least 1. Not for
        trace.
      trace: trace only, a CSV file; see `trace`.
      upload_above: a client with τ ≤ this cannot upload: its τ becomes 0.
      dropout: in [0, 1), chance that a client is away in an interval (τ = 0).
      rng: decides every draw.

    Returns:
      A `Schedule` of int32 [T, N] arrays; its notes say what was cut off, and which
      pairs a trace leaves out.

    Raises:
      UserError: a value out of range, a malformed distribution or trace.

    Source: section V, Cases 1–3; the second parameter of N is a standard deviation.
    """
    _check(kind, num_intervals, num_clients, data_size, upload_above, dropout)
    T, N = num_intervals, num_clients
    tau_rng, size_rng, dropout_rng = rng.spawn(3)
    if kind == "trace":
        if size_groups:
            raise UserError(
                "--config.schedule.size_groups cannot go with "
                "--config.schedule.kind=trace; put the sizes into the trace"
            )
        drawn, size = read_trace(trace, T, N, data_size)
        notes = _absent(trace, drawn)
    else:
        if kind == "explicit":
            drawn = _explicit(tau, T, N)
        else:
            given = kind == "distribution"
            groups = tau_groups if given else _CASES[kind]
            group = _contiguous(len(groups), N, "tau_groups" if given else "")
            flag = "--config.schedule.tau_groups"
            drawn = distributions.draw(groups, group, T, tau_rng, least=0, flag=flag)
        if not size_groups:
            size_groups = (f"constant({data_size})",)
            if kind == "case3":
                size_groups = tuple(
                    f"normal({m * data_size!r},{s * data_size!r})"
                    for m, s in _CASE3_SIZES
                )
        elif len(size_groups) > N:
            raise _too_many("size_groups", len(size_groups), N)
        group = np.arange(N) % len(size_groups)
        flag = "--config.schedule.size_groups"
        size = distributions.draw(size_groups, group, T, size_rng, least=1, flag=flag)
        size, notes = _cut(size, distributions.most(size_groups, flag=flag)[group])
    if upload_above and drawn.max() <= upload_above:
        raise UserError(
            f"--config.schedule.upload_above={upload_above}: no client ever does more "
            f"than {drawn.max()} local iterations, so nobody would upload"
        )
    # Drawn always, so that a drop-out rate of 0 changes nothing else.
    away = dropout_rng.random((T, N)) < dropout
    drawn = np.where((drawn <= upload_above) | away, 0, drawn)
    return Schedule(drawn.astype(np.int32), size.astype(np.int32), notes=notes)


def _cut(size: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Sizes [T, N] that are at most the clients' largest [N], and a note on it."""
    most = np.maximum(np.floor(most), 1)
    over = int((size > most).sum())
    if not over:
        return size, ()
    note = (
        f"{over} of {size.size} drawn data sizes were cut off at three standard "
        "deviations above the mean"
    )
    return np.minimum(size, most), (note,)


def _absent(trace: str, tau: np.ndarray) -> tuple[str, ...]:
    """A note on the pairs that a trace leaves out."""
    missing = int((tau == 0).sum())
    if not missing:
        return ()
    return (
        f"{trace}: {missing} of {tau.size} pairs of interval and client have no row, "
        "or tau 0: those clients are away",
    )


def _check(kind, num_intervals, num_clients, data_size, upload_above, dropout):
    check("schedule.kind", kind)
    check("num_intervals", num_intervals)
    check("num_clients", num_clients)
    check("schedule.data_size", data_size)
    check("schedule.upload_above", upload_above)
    check("schedule.dropout", dropout)


def _explicit(tau: tuple[int, ...], T: int, N: int) -> np.ndarray:
    group = _contiguous(len(tau), N, "tau")
    for value in tau:
        if not (float(value).is_integer() and 0 <= value < 2**31):
            raise UserError(
                f"--config.schedule.tau={tuple(tau)}: {value} is not a whole number "
                ">= 0"
            )
    return np.tile(np.asarray(tau, np.int64)[group], (T, 1))


def _contiguous(groups: int, N: int, flag: str) -> np.ndarray:
    """Group of each client, [N] int; no `flag`: some groups may stay empty."""
    if groups == 0:
        kind = "explicit" if flag == "tau" else "distribution"
        raise UserError(f"--config.schedule.kind={kind} needs --config.schedule.{flag}")
    if groups > N and flag:
        raise _too_many(flag, groups, N)
    return np.arange(N) * groups // N


def _too_many(flag: str, groups: int, N: int) -> UserError:
    return UserError(
        f"--config.schedule.{flag} has {groups} entries for "
        f"--config.num_clients={N}; expected at most one a client"
    )
