"""Fig. 2 of the paper: the cost of unequal computing power, in accuracy and in time.

Clients are in equal groups that finish τ_g local iterations in an interval Δ; all
patterns have the same mean of 2.5, so that only the heterogeneity degree δ differs. For
Fig. 2b the same speeds are used on the virtual clock: T-SFL aggregates every Δ,
conventional SFL waits for H iterations of the slowest, AFL takes every arrival.
"""

import pathlib
from typing import IO, NamedTuple

import numpy as np

from tsfl_jax.config import Config, get
from tsfl_jax.experiment import grid, sweeps
from tsfl_jax.report import files, style
from tsfl_jax.report.bands import plot_bands
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    confidence_interval,
    curves_of,
    diverged_note,
    spread,
)
from tsfl_jax.studies import compare, settings
from tsfl_jax.theory.bounds import heterogeneity_degree
from tsfl_jax.timeline import read

PATTERNS = ((2, 3), (1, 2, 3, 4), (1, 4), (1, 1, 1, 7))  # τ of equal groups, mean 2.5
# Iterations of a task of SFL and AFL: those of the slowest client's two intervals.
LOCAL_ITERATIONS = 2
ENTRIES = {  # label → settings, see `compare`
    "sfl": {"timeline.framework": "sfl", "algorithm": "fedavg"},
    "afl": {
        "timeline.framework": "afl",
        "algorithm": "fedasync",
        "server.staleness": "polynomial",
    },
    "tsfl": {"timeline.framework": "tsfl", "algorithm": "fedavg"},
    "tsfl_dms": {"timeline.framework": "tsfl", "algorithm": "dms"},
}

# Settings that runs of the studies set themselves.
CHANGED = {
    "fig2a": frozenset({"algorithm", "schedule.kind", "schedule.tau_groups"}),
    "fig2b": frozenset(name for own in ENTRIES.values() for name in own)
    | {"schedule.kind", "timeline.speed", "timeline.local_iterations"},
}


def degree(pattern: tuple[int, ...]) -> float:
    """δ = (1/N) Σ_i (τ_i − τ̄)² of equal groups."""
    return float(heterogeneity_degree(np.array(pattern)))


def groups(pattern: tuple[int, ...]) -> str:
    """ "constant(1); constant(4)", the pattern as ``schedule.tau_groups``."""
    return "; ".join(f"constant({tau})" for tau in pattern)


def speeds(pattern: tuple[int, ...], interval: float) -> str:
    """Seconds per iteration, as ``timeline.speed``: τ_g iterations per interval."""
    return "; ".join(f"constant({interval / tau!r})" for tau in pattern)


def run_patterns(
    config: Config, seeds: int, workdir: pathlib.Path, stream: IO[str]
) -> tuple[dict[tuple[int, ...], dict[str, np.ndarray]], str]:
    """Run Fig. 2a: T-SFL's accuracy ``[S, T]`` by pattern and algorithm, and a note."""
    lanes = [
        {
            "schedule.kind": "distribution",
            "schedule.tau_groups": groups(pattern),
            "algorithm": algorithm,
            "seed": seed,
        }
        for pattern in PATTERNS
        for algorithm in ("fedavg", "dms")
        for seed in range(seeds)
    ]
    result = sweeps.run(config, lanes, workdir=workdir, stream=stream)
    found = curves_of(result.history, settings.CLASSES)
    found = found.reshape(len(PATTERNS), 2, seeds, -1)
    curves = {
        pattern: {"fedavg": one[0], "dms": one[1]}
        for pattern, one in zip(PATTERNS, found, strict=True)
    }
    return curves, diverged_note(result.history)


def plot_accuracy(found: dict, folder: pathlib.Path, about: str) -> list[pathlib.Path]:
    """Plot Fig. 2a, one figure per algorithm."""
    paths = []
    for algorithm in ("fedavg", "dms"):
        curves = {
            f"δ = {degree(pattern):g}, τ in {pattern}": one[algorithm]
            for pattern, one in found.items()
        }
        title = f"T-SFL with {style.NAMES[algorithm]}, {about}"
        paths += plot_bands(curves, folder / f"fig2a_{algorithm}", title)
    return paths


class Time(NamedTuple):
    """One framework at one δ."""

    pattern: tuple[int, ...]
    result: compare.FrameworkResult
    round_seconds: float  # between two updates of the global model


def run_frameworks(
    config: Config, seeds: int, workdir: pathlib.Path, stream: IO[str]
) -> list[Time]:
    """Run Fig. 2b: every framework at every δ, on the virtual clock."""
    interval = get(config, "schedule.interval_seconds")
    end = get(config, "num_intervals") * interval
    found = []
    for pattern in PATTERNS:
        clients = {
            "timeline.speed": speeds(pattern, interval),
            "timeline.local_iterations": LOCAL_ITERATIONS,
            "schedule.kind": "case3",  # without effect: τ comes from the clock
        }
        entries = [
            compare.Entry(label, grid.changed(config, read(clients | own)))
            for label, own in ENTRIES.items()
        ]
        folder = workdir / "-".join(map(str, pattern))
        for result in compare.run_frameworks(entries, seeds, folder, stream):
            found.append(Time(pattern, result, end / result.updates))
    return found


def time_rows(found: list[Time], target: float) -> list[dict[str, str]]:
    """The table of Fig. 2b; savings against SFL at the same δ, paired by seed."""
    table = []
    first: np.ndarray = np.zeros(0)
    for pattern, result, seconds in found:
        reached = compare.times_of(result, target)
        if result.label == "sfl":
            first, first_round = reached, seconds
        whole = np.isfinite(reached).all() and np.isfinite(first).all()
        saved = spread(100 * (1 - reached / first)) if whole else "–"
        table.append(
            {
                "δ": f"{degree(pattern):g}",
                "τ of the groups": str(pattern),
                "framework": style.NAMES[result.label],
                "s per update": f"{seconds:.2f}",
                "saved per round, %": f"{100 * (1 - seconds / first_round):.0f}",
                f"s to {100 * target:g} %": compare.spread_of_times(reached),
                "saved, %": saved,
                "best accuracy, %": compare.best_accuracy(result),
            }
        )
    return table


@style.styled
def plot_times(
    found: list[Time], target: float, path: pathlib.Path, about: str
) -> list[pathlib.Path]:
    """Plot Fig. 2b: virtual seconds to the target accuracy against δ."""
    figure, plot = style.figure_of(3.2)
    for index, label in enumerate(ENTRIES):
        ours = [t for t in found if t.result.label == label]
        x = np.array([degree(t.pattern) for t in ours])
        reached = [compare.times_of(t.result, target) for t in ours]
        seen = np.array([np.isfinite(times).all() for times in reached])
        if not seen.any():
            continue
        times = np.array(reached)[seen]
        mean, half = confidence_interval(times.T)
        look = style.style_of(label, index) | {"markersize": 4}
        error = None if np.isnan(half).all() else half  # else the legend shows bars
        plot.errorbar(x[seen], mean, yerr=error, label=style.NAMES[label], **look)
    plot.set_xlabel("heterogeneity degree δ")
    plot.set_ylabel(f"virtual seconds to {100 * target:g} %")
    plot.set_ylim(bottom=0)
    style.legend_below(figure, *plot.get_legend_handles_labels())
    plot.set_title(style.title(about))
    return style.save_both(figure, path)


def write_times(
    found: list[Time], target: float, folder: pathlib.Path, about: str
) -> list[pathlib.Path]:
    """Write fig2b.md, .csv, .png and .pdf."""
    table = time_rows(found, target)
    text = f"{about}; {OVER_SEEDS}; savings against SFL at the same δ, "
    text += f"paired by seed.{compare.lost_text([t.result for t in found])}"
    paths = files.write_table(folder, "fig2b", table, text)
    return paths + plot_times(found, target, folder / "fig2b", about)
