"""``python -m studies.sensitivity``: what the paper leaves open, and when DMS helps.

One case is run with one choice changed at a time. DMS and FedAvg have the same clients,
data and schedule in every run, so their difference is paired by seed.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import xarray

from studies import arguments, reproduce, study
from studies.study import Case, Changes, Row, Runs, Study
from studies.verdicts import over, tested
from tsfl_jax.config import Config, get
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS


class Choice(NamedTuple):
    """One way to fill a gap in the paper."""

    open: str  # what the paper leaves open
    choice: str  # what is done here
    changes: dict  # the settings that do it
    only_dms: bool = False  # no effect on FedAvg: its standard run is used


def given_coupling(
    lr: float, num_clients: int, coupling: float, longest: int = 4
) -> dict:
    """Settings under which Corollary 1's c = ηL(H−1)G²/(2Nσ²) is this number.

    Args:
      lr: η.
      num_clients: N.
      coupling: c > 0.
      longest: H, which is 4 in every interval of Case 1.
    """
    smoothness = 2 * num_clients * coupling / (lr * (longest - 1))
    return {
        "constants.smoothness": smoothness,
        "constants.grad_sq_norm": 1.0,
        "constants.grad_variance": 1.0,
    }


def choices(lr: float, num_clients: int) -> list[Choice]:
    """All choices, for this η and N; the first one is the standard."""
    split, kind = "non-IID split", "partition.kind"
    found = [
        Choice("–", "standard: momentum 0.9, Dirichlet(0.5), c estimated", {}),
        Choice("momentum", "0", {"momentum": 0.0}),
        Choice(split, "Dirichlet(0.1)", {"partition.alpha": 0.1}),
        Choice(split, "Dirichlet(1)", {"partition.alpha": 1.0}),
        Choice(split, "IID", {kind: "iid"}),
        Choice(split, "shards, 2 classes per client", {kind: "shards"}),
    ]
    found += [
        Choice("L, G², σ²", f"c = {c:g}", given_coupling(lr, num_clients, c), True)
        for c in (0.001, 0.003, 0.01, 0.03, 0.1)
    ]
    return [
        *found,
        Choice("weight limit", "θ = 2", {"dms.weight_limit": 2.0}, True),
        Choice("iteration", "one mini-batch", {"schedule.iteration": "step"}),
    ]


def choices_of(config: Config) -> list[Choice]:
    """All choices, under these settings."""
    return choices(get(config, "lr"), get(config, "num_clients"))


def points(config: Config, given: argparse.Namespace) -> dict[tuple[str, str], Changes]:
    """DMS with every choice, FedAvg where it makes a difference."""
    return {
        (choice.choice, algorithm): choice.changes | {"algorithm": algorithm}
        for choice in choices_of(config)
        for algorithm in (("dms",) if choice.only_dms else ("dms", "fedavg"))
    }


def choice_rows(several: Sequence[Choice], best: xarray.DataArray) -> list[Row]:
    """The table as text, a row per choice; Holm's correction counts all of them."""
    gains = best.sel(rule="dms") - best.sel(rule="fedavg")
    p, verdicts = tested(gains, "choice", words=("DMS helps", "DMS hurts"))
    shown = study.texts(best)
    columns = {
        "open in the paper": [choice.open for choice in several],
        "choice": best["choice"],
        "FedAvg, %": shown.sel(rule="fedavg"),
        "DMS, %": shown.sel(rule="dms"),
        "DMS − FedAvg, paired": study.texts(gains, "+.2f"),
        "p": p,
        "verdict": verdicts,
        "seeds": [str(best.sizes["seed"])] * len(several),
    }
    return study.rows_of(columns)


def completed(best: xarray.DataArray) -> xarray.DataArray:
    """``[choice, rule, seed]``; a choice of DMS alone has FedAvg's standard run."""
    return best.fillna(best.isel(choice=0, drop=True))


def table(runs: Runs, case: Case) -> tuple[list[Row], str]:
    """The table, and what is said above it; writes it in LaTeX as well."""
    rows = choice_rows(choices_of(case.config), completed(runs.best()))
    files.write_text(case.path.with_suffix(".tex"), reproduce.latex(rows))
    about = f"mnist_case1, {get(case.config, 'num_intervals')} intervals"
    about += f" ({case.changed})" * bool(case.changed)
    about = study.noted(about, runs, f"training time {runs.minutes():.1f} min")
    head = f"Highest test accuracy in %: {OVER_SEEDS}; DMS − FedAvg is paired by seed. "
    return rows, f"{head}{about}. Device: {arguments.device_text()}."


@style.styled
def figure(runs: Runs, case: Case) -> list[pathlib.Path]:
    """Plot differences with their confidence intervals, one line per choice."""
    several, best = choices_of(case.config), completed(runs.best())
    gain, half = over(best.sel(rule="dms") - best.sel(rule="fedavg")).values
    page, axes = style.figure_of(0.8 + 0.25 * len(several))
    look = {"fmt": "o", "color": "#0072B2", "markersize": 4}
    axes.errorbar(gain, range(len(several)), xerr=half, **look)
    axes.axvline(0, color="#333333", linewidth=1)
    axes.set_xscale("symlog", linthresh=1, linscale=2)  # tenths of a point and tens
    axes.xaxis.set_major_formatter("{x:g}")
    names = [f"{c.open}: {c.choice}" if c.changes else "standard" for c in several]
    axes.set_yticks(range(len(names)), [style.escape(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("DMS − FedAvg in points of best accuracy, 95 % confidence")
    page.suptitle("What the paper leaves open: one choice changed at a time")
    return style.save_both(page, case.path)


# Settings that a run sets itself, or on which c = … depends.
TAKEN = frozenset(name for c in choices(1.0, 1) for name in c.changes) | {
    *("algorithm", "dms.coupling", "dms.unit"),
    *("schedule.kind", "schedule.tau", "schedule.tau_groups", "schedule.trace"),
}
STUDY = Study(
    "sensitivity",
    __doc__,
    points,
    table,
    figure,
    taken=TAKEN,
    dims=("choice", "rule"),
    any_case=False,
)

if __name__ == "__main__":
    arguments.start("sensitivity", lambda texts: study.main(STUDY, texts))
