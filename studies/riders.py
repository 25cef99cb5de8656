"""``python -m studies.riders``: how aggregation rules perform with free riders.

A quarter of the clients are free riders, of one kind at a time.
"""

import argparse
import pathlib
from typing import Any

import numpy as np
import xarray

from studies import arguments, study
from studies.study import Case, Changes, Row, Runs, Study
from studies.verdicts import over
from tsfl_jax.config import Config, get
from tsfl_jax.report import style
from tsfl_jax.report.statistics import OVER_SEEDS

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


def points(config: Config, given: argparse.Namespace) -> dict[tuple[str, str], Changes]:
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


def _about(runs: Runs, case: Case) -> str:
    return study.noted(case.about, runs, f"{count(case.config)} free riders")


def free_rider_rows(best: xarray.DataArray) -> list[Row]:
    """The table; changes against honest clients are paired by seed.

    Args:
      best: highest test accuracies in %, ``[rule, kind, seed]``.
    """
    shown = study.texts(best)
    change = study.texts(best - best.sel(kind="honest"), "+.2f")
    columns: dict[str, Any] = {"rule": study.named(best["rule"])}
    for kind in KINDS:
        columns[kind] = shown.sel(kind=kind)
        if kind != "honest":
            columns[f"{kind}, change"] = change.sel(kind=kind)
    return study.rows_of(columns)


def table(runs: Runs, case: Case) -> tuple[list[Row], str]:
    """The table, and what is said above it."""
    text = f"{_about(runs, case)}. Highest test accuracy in %: {OVER_SEEDS}; changes "
    return free_rider_rows(runs.best()), text + "are paired by seed."


@style.styled
def figure(runs: Runs, case: Case) -> list[pathlib.Path]:
    """Plot grouped bars: a group per rule, a bar per kind of free rider."""
    page, plot = style.figure_of(3.2)
    width, x = 0.8 / len(KINDS), np.arange(len(ALGORITHMS))
    for index, bars in enumerate(over(runs.best()).transpose("kind", ...)):
        look = {"color": _COLORS[index], "hatch": _HATCHES[index], "linewidth": 0.6}
        look |= {"edgecolor": "#333333", "capsize": 2, "label": bars["kind"].item()}
        shift, (mean, half) = index - (len(KINDS) - 1) / 2, bars.values
        plot.bar(x + shift * width, mean, width, yerr=half, **look)
    plot.set_xticks(x, study.named(ALGORITHMS))
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
    dims=("rule", "kind"),
    any_case=False,
)

if __name__ == "__main__":
    arguments.start("riders", lambda texts: study.main(STUDY, texts))
