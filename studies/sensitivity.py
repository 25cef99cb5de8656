"""``python -m studies.sensitivity``: what the paper leaves open, and when DMS helps.

One case is run with one choice changed at a time. DMS and FedAvg have the same clients,
data and schedule in every run, so their difference is paired by seed.
"""

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from studies import study
from studies.significance import holm, p_text, paired_p, verdict
from studies.study import Case, Runs, Study
from tsfl_jax.config import Config, get
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS, confidence_interval, spread
from tsfl_jax.studies import arguments, reproduce


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


def points(
    config: Config, given: argparse.Namespace
) -> dict[tuple[str, str], dict[str, Any]]:
    """DMS with every choice, FedAvg where it makes a difference."""
    return {
        (choice.choice, algorithm): choice.changes | {"algorithm": algorithm}
        for choice in choices_of(config)
        for algorithm in (("dms",) if choice.only_dms else ("dms", "fedavg"))
    }


class ChoiceResult(NamedTuple):
    """Best test accuracies in [0, 1] under one choice, by seed."""

    choice: Choice
    fedavg: Float[np.ndarray, "S"]
    dms: Float[np.ndarray, "S"]


def by_choice(
    several: Sequence[Choice], best: Mapping[tuple[str, str], Float[np.ndarray, "S"]]
) -> list[ChoiceResult]:
    """The results by choice; FedAvg's standard run where a choice is of DMS alone."""
    standard = best[several[0].choice, "fedavg"]
    return [
        ChoiceResult(c, best.get((c.choice, "fedavg"), standard), best[c.choice, "dms"])
        for c in several
    ]


def choice_rows(several: Sequence[ChoiceResult]) -> list[dict[str, str]]:
    """The table as text, one row per choice; Holm's correction counts all of them."""
    found = []
    gains = [100 * (dms - fedavg) for _, fedavg, dms in several]
    corrected = holm([paired_p(gain) for gain in gains])
    for (choice, fedavg, dms), gain, p in zip(several, gains, corrected, strict=True):
        found.append(
            {
                "open in the paper": choice.open,
                "choice": choice.choice,
                "FedAvg, %": spread(100 * fedavg),
                "DMS, %": spread(100 * dms),
                "DMS − FedAvg, paired": spread(gain, "+.2f"),
                "p": p_text(p),
                "verdict": verdict(gain, p, ("DMS helps", "DMS hurts")),
                "seeds": str(len(gain)),
            }
        )
    return found


def table(runs: Runs, case: Case) -> tuple[list[dict[str, str]], str]:
    """The table, and what is said above it; writes it in LaTeX as well."""
    rows = choice_rows(by_choice(choices_of(case.config), runs.best()))
    files.write_text(case.path.with_suffix(".tex"), reproduce.latex(rows))
    about = f"mnist_case1, {get(case.config, 'num_intervals')} intervals"
    about += f" ({case.changed})" * bool(case.changed)
    about = study.noted(about, runs, f"training time {runs.minutes():.1f} min")
    head = f"Highest test accuracy in %: {OVER_SEEDS}; DMS − FedAvg is paired by seed. "
    return rows, f"{head}{about}. Device: {arguments.device_text()}."


@style.styled
def figure(runs: Runs, case: Case) -> list[pathlib.Path]:
    """Plot differences with their confidence intervals, one line per choice."""
    several = by_choice(choices_of(case.config), runs.best())
    page, axes = style.figure_of(0.8 + 0.25 * len(several))
    for row, (_, fedavg, dms) in enumerate(several):
        gain, half = confidence_interval(100 * (dms - fedavg))
        look = {"fmt": "o", "color": "#0072B2", "markersize": 4}
        axes.errorbar(gain, row, xerr=half, **look)
    axes.axvline(0, color="#333333", linewidth=1)
    axes.set_xscale("symlog", linthresh=1, linscale=2)  # tenths of a point and tens
    axes.xaxis.set_major_formatter("{x:g}")
    names = [
        f"{choice.open}: {choice.choice}" if choice.changes else "standard"
        for choice, _, _ in several
    ]
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
STUDY = Study("sensitivity", __doc__, points, table, figure, TAKEN, any_case=False)

if __name__ == "__main__":
    study.start("sensitivity", lambda texts: study.main(STUDY, texts))
