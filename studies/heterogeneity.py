"""``python -m studies.heterogeneity``: Fig. 2, the cost of unequal speeds.

Clients are in equal groups that finish τ_g local iterations in an interval Δ; all
patterns have the same mean of 2.5, so that only the heterogeneity degree δ differs. For
Fig. 2b the same speeds are used on the virtual clock: T-SFL aggregates every Δ,
conventional SFL waits for H iterations of the slowest, AFL takes every arrival.
"""

import argparse
import pathlib
import sys
from typing import IO, Any, NamedTuple

import numpy as np

from studies import arguments, compare, study
from studies.differences import plot_bands
from studies.study import Case, Changes, Runs, Study
from tsfl_jax.config import Config, get, replace, unread
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS, confidence_interval, spread
from tsfl_jax.run import grid
from tsfl_jax.theory.bounds import heterogeneity_degree
from tsfl_jax.types import UserError

PATTERNS = ((2, 3), (1, 2, 3, 4), (1, 4), (1, 1, 1, 7))  # τ of equal groups, mean 2.5
# Iterations of a task of SFL and AFL: those of the slowest client's two intervals.
LOCAL_ITERATIONS = 2
ENTRIES = {  # label → settings, see `compare`
    "sfl": {"timeline.framework": "sfl", "algorithm": "fedavg"},
    "afl": {
        "timeline.framework": "afl",
        "algorithm": "fedasync",
        "staleness.kind": "polynomial",
    },
    "tsfl": {"timeline.framework": "tsfl", "algorithm": "fedavg"},
    "tsfl_dms": {"timeline.framework": "tsfl", "algorithm": "dms"},
}


def read(values: dict[str, Any]) -> dict[str, Any]:
    """Settings by flat name, without those that only other components read."""
    ignored = unread(replace(Config(), values))
    return {name: value for name, value in values.items() if name not in ignored}


def degree(pattern: tuple[int, ...]) -> float:
    """δ = (1/N) Σ_i (τ_i − τ̄)² of equal groups."""
    return float(heterogeneity_degree(np.array(pattern)))


def groups(pattern: tuple[int, ...]) -> str:
    """ "constant(1); constant(4)", the pattern as ``schedule.tau_groups``."""
    return "; ".join(f"constant({tau})" for tau in pattern)


def speeds(pattern: tuple[int, ...], interval: float) -> str:
    """Seconds per iteration, as ``timeline.speed``: τ_g iterations per interval."""
    return "; ".join(f"constant({interval / tau!r})" for tau in pattern)


def points(config: Config, given: argparse.Namespace) -> dict[tuple[str, str], Changes]:
    """Fig. 2a: T-SFL on each pattern with FedAvg and DMS."""
    kind = {"schedule.kind": "distribution"}
    return {
        (f"δ = {degree(pattern):g}, τ in {pattern}", algorithm): kind
        | {"schedule.tau_groups": groups(pattern), "algorithm": algorithm}
        for pattern in PATTERNS
        for algorithm in ("fedavg", "dms")
    }


def plot_accuracy(runs: Runs, case: Case) -> list[pathlib.Path]:
    """Plot Fig. 2a, one figure per algorithm."""
    paths, about = [], study.noted(case.about, runs)
    for each in runs.accuracy().transpose("rule", "pattern", ...):
        rule = each["rule"].item()
        curves = {one["pattern"].item(): one.values for one in each}
        title = f"T-SFL with {style.name_of(rule)}, {about}"
        path = case.path.with_name(f"{case.path.name}_{rule}")
        paths += plot_bands(curves, path, title)
    return paths


FIG2A = Study(
    "fig2a",
    __doc__,
    points,
    None,
    plot_accuracy,
    taken=("algorithm", "schedule.kind", "schedule.tau_groups"),
    dims=("pattern", "rule"),
    any_case=False,
)


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
        time = compare.spread_of_known(reached, is_time=True)
        saved = spread(100 * (1 - reached / first)) if whole else "–"
        table.append(
            {
                "δ": f"{degree(pattern):g}",
                "τ of the groups": str(pattern),
                "framework": style.name_of(result.label),
                "s per update": f"{seconds:.2f}",
                "saved per round, %": f"{100 * (1 - seconds / first_round):.0f}",
                f"s to {100 * target:g} %": time,
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
        plot.errorbar(x[seen], mean, yerr=error, label=style.name_of(label), **look)
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


def run_times(given: argparse.Namespace) -> list[pathlib.Path]:
    """Run or resume Fig. 2b; its files."""
    case = study.case_of(FIG2A._replace(name="fig2b"), given, "1")
    workdir = given.out / "cells" / "fig2b"
    try:
        found = run_frameworks(case.config, given.seeds, workdir, sys.stderr)
    except UserError as error:
        print(f"fig2b: not available: {error}", file=sys.stderr)
        return []
    return write_times(found, given.accuracy, given.out, case.about)


TAKEN = {
    "fig2a": FIG2A.taken,
    "fig2b": {name for own in ENTRIES.values() for name in own}
    | {"schedule.kind", "timeline.speed", "timeline.local_iterations"},
}


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = arguments.make_parser("heterogeneity", __doc__)
    study.add_problem(parser, any_case=False)
    about = "fig2a: accuracy against δ; fig2b: time to --accuracy"
    parser.add_argument("target", nargs="+", choices=[*TAKEN], help=about)
    about = "fig2b: time until this test accuracy (default: %(default)s)"
    parser.add_argument("--accuracy", type=arguments.SHARE, default=0.9, help=about)
    given = study.parse_problem(parser, texts)
    for target in given.target:
        study.check_free(given.set, TAKEN[target], target)
    return given


def main(texts: list[str]) -> None:
    """Run or resume the figures that were asked for."""
    given = parse(texts)
    given.out = files.prepare_workdir(given.out, "--out")
    made = study.carry_out(FIG2A, given, "1") if "fig2a" in given.target else []
    made += run_times(given) if "fig2b" in given.target else []
    if not made:
        raise UserError("study heterogeneity: nothing could be run; see above")
    for path in made:
        print(path)


if __name__ == "__main__":
    arguments.start("heterogeneity", main)
