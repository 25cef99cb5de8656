"""``python -m studies.riders``: how aggregation rules perform with free riders.

A quarter of the clients are free riders, of one kind at a time.
"""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from studies import study
from studies.study import Case, Runs, Study
from tsfl_jax.config import Config, get
from tsfl_jax.report import style
from tsfl_jax.report.statistics import OVER_SEEDS, confidence_interval, spread

ALGORITHMS = ("dms", "fedavg", "fednova", "median", "trimmed_mean", "krum")
KINDS = {  # label → schedule.free_riding; None: all clients are honest
    "honest": None,
    "claims more": "claim",
    "echoes the model": "echo",
    "comes and goes": "visit",
}
_HATCHES = ("", "//", "..", "xx")
_COLORS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73")


def count(config: Config) -> int:
    """How many clients are free riders."""
    return max(get(config, "num_clients") // 4, 1)


def points(
    config: Config, given: argparse.Namespace
) -> dict[tuple[str, str], dict[str, Any]]:
    """Each rule with each kind of free riders."""
    return {
        (algorithm, label): {
            "algorithm": algorithm,
            "schedule.free_riders": 0 if kind is None else count(config),
            "schedule.free_riding": kind or "claim",
        }
        for algorithm in ALGORITHMS
        for label, kind in KINDS.items()
    }


def free_rider_rows(
    best: Mapping[tuple[str, str], Float[np.ndarray, "S"]],
) -> list[dict[str, str]]:
    """The table in %; changes against honest clients are paired by seed."""
    rows = []
    for algorithm in ALGORITHMS:
        row = {"rule": style.name_of(algorithm)}
        for label in KINDS:
            values = 100 * best[algorithm, label]
            row[label] = spread(values)
            if label != "honest":
                change = values - 100 * best[algorithm, "honest"]
                row[f"{label}, change"] = spread(change, "+.2f")
        rows.append(row)
    return rows


def _about(runs: Runs, case: Case) -> str:
    return study.noted(case.about, runs, f"{count(case.config)} free riders")


def table(runs: Runs, case: Case) -> tuple[list[dict[str, str]], str]:
    """The table, and what is said above it."""
    text = f"{_about(runs, case)}. Highest test accuracy in %: {OVER_SEEDS}; changes "
    return free_rider_rows(runs.best()), text + "are paired by seed."


@style.styled
def figure(runs: Runs, case: Case) -> list[pathlib.Path]:
    """Plot grouped bars: a group per rule, a bar per kind of free rider."""
    page, plot = style.figure_of(3.2)
    best, width = runs.best(), 0.8 / len(KINDS)
    for index, label in enumerate(KINDS):
        mean, half = confidence_interval(
            np.stack([100 * best[rule, label] for rule in ALGORITHMS], axis=1)
        )
        x = np.arange(len(ALGORITHMS)) + (index - (len(KINDS) - 1) / 2) * width
        look = {"color": _COLORS[index], "hatch": _HATCHES[index], "linewidth": 0.6}
        look |= {"edgecolor": "#333333", "capsize": 2}
        plot.bar(x, mean, width, yerr=half, label=label, **look)
    names = [style.name_of(rule) for rule in ALGORITHMS]
    plot.set_xticks(range(len(names)), names)
    plot.set_ylabel("best test accuracy in %")
    plot.set_ylim(0, 112)
    look = {"fontsize": "small", "loc": "upper center", "handlelength": 2}
    plot.legend(ncols=len(KINDS), **look)
    plot.set_title(style.title(_about(runs, case)))
    return style.save_both(page, case.path)


STUDY = Study(
    "riders",
    __doc__,
    points,
    table,
    figure,
    taken=("algorithm", "schedule.free_riders", "schedule.free_riding"),
    any_case=False,
)

if __name__ == "__main__":
    study.start("riders", lambda texts: study.main(STUDY, texts))
