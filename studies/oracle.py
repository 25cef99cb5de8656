"""``python -m studies.oracle``: how much could any weights win?

The oracle sees validation samples and takes the weights of every interval whose model
has the lowest loss on them. What it wins over FedAvg is a yardstick for rules that only
weigh the clients' models, not a bound: it looks one interval ahead, fits a few samples,
and lowers a loss, not the error. All rules run with the same validation samples held
out, so that they have the same clients and data, and the regret of their weights is
measured in every interval. A run that diverged is scored at chance level; a rule with
such a run has no loss, regret and gap.
"""

import argparse
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from studies import study
from studies.differences import plot_differences
from studies.study import Case, Runs, Study
from tsfl_jax.config import Config, get
from tsfl_jax.report import style
from tsfl_jax.report.statistics import OVER_SEEDS, confidence_interval, spread
from tsfl_jax.rules import AGGREGATORS

RULES = ("fedavg", "dms", "oracle")
# Of each interval.
COLUMNS = (
    "accuracy − FedAvg",
    "half of its 95 % interval",
    "regret",
    "half of the regret's 95 % interval",
)


Fields = dict[str, Float[np.ndarray, "S T"]]  # of one rule


def points(config: Config, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The rules; FedAvg, which they are compared with, is always there."""
    names = dict.fromkeys(["fedavg", *given.rules])
    return {name: {"algorithm": name} for name in names}


def results_of(runs: Runs) -> dict[str, Fields]:
    """The results by rule; a run that diverged has no loss, regret and gap."""
    history = runs.result.history
    lost = history["diverged"].any(axis=1, keepdims=True)
    fields = {"accuracy": runs.accuracy()} | {
        name: runs.by_label(np.where(lost, np.nan, history[name]))
        for name in ("test_loss", "regret", "gap")
    }
    return {n: {f: of[n] for f, of in fields.items()} for n in runs.labels}


def _over(
    summary: Callable[..., np.ndarray], values: Float[np.ndarray, "S T"]
) -> Float[np.ndarray, "S"]:
    """A summary over the measured intervals of each run; NaN if a run has none."""
    if np.isnan(values).all(axis=1).any():
        return np.full(len(values), np.nan)
    return summary(values, axis=1)


def _shown(values: Float[np.ndarray, "S"], form: str = ".4f") -> str:
    return spread(values, form) if np.isfinite(values).all() else "–"


def rule_rows(results: Mapping[str, Fields]) -> list[dict[str, str]]:
    """The table as text: differences to FedAvg are paired by seed."""
    first, rows = results["fedavg"], []
    late = slice(2 * first["accuracy"].shape[1] // 3, None)
    columns = {  # factor, and what is compared
        "best": (1, lambda one: 100 * np.nanmax(one["accuracy"], axis=1)),
        "mean over the run": (100, lambda one: np.nanmean(one["accuracy"], axis=1)),
        "last third": (100, lambda one: np.nanmean(one["accuracy"][:, late], axis=1)),
    }
    for name, one in results.items():
        own = name == "fedavg"
        row = {"rule": style.name_of(name)}
        row["best accuracy, %"] = spread(columns["best"][1](one))
        for column, (factor, of) in columns.items():
            gain = spread(factor * (of(one) - of(first)), "+.2f")
            row[f"{column} − FedAvg"] = "–" if own else gain
        with np.errstate(invalid="ignore"):  # of infinite ones: not shown
            losses = _over(np.nanmin, one["test_loss"])
            losses = losses - _over(np.nanmin, first["test_loss"])
        row["lowest test loss − FedAvg"] = "–" if own else _shown(losses, "+.4f")
        row["regret"] = _shown(_over(np.nanmean, one["regret"]))
        row["regret, last third"] = _shown(_over(np.nanmean, one["regret"][:, late]))
        row["gap"] = _shown(_over(np.nanmean, one["gap"]))
        rows.append(row | {"seeds": str(len(one["accuracy"]))})
    return rows


def interval_rows(results: Mapping[str, Fields]) -> list[dict[str, Any]]:
    """Accuracy against FedAvg and regret at every interval, in long form.

    Means over the seeds and half of their 95 % confidence intervals, the accuracy
    paired and in points; empty where something is not finite.
    """
    first, rows = results["fedavg"], []
    for name, one in results.items():
        gain = confidence_interval(100 * (one["accuracy"] - first["accuracy"]))
        regret = confidence_interval(one["regret"])
        for t, values in enumerate(np.transpose((*gain, *regret))):
            found = [f"{v:.4g}" if np.isfinite(v) else "" for v in values]
            rows.append(
                {"rule": name, "interval": t + 1}
                | dict(zip(COLUMNS, found, strict=True))
            )
    return rows


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Add ``--rules``."""
    about = f"rules to compare with FedAvg (default: {' '.join(RULES)})"
    options = {"default": list(RULES), "choices": list(AGGREGATORS), "metavar": "RULE"}
    parser.add_argument("--rules", nargs="+", help=about, **options)


def table(runs: Runs, case: Case) -> tuple[list[dict[str, str]], str]:
    """The table of a case, and what is said above it."""
    held = get(case.config, "data.validation")
    head = f"{case.about}, {held} validation samples. Regret and gap: of the validation"
    head += f" loss, mean over intervals. Entries: {OVER_SEEDS}."
    return rule_rows(results_of(runs)), head


def figure(runs: Runs, case: Case) -> list[pathlib.Path]:
    """Plot accuracies minus FedAvg's."""
    return plot_differences(runs.accuracy(), "fedavg", case.path, case.about)


STUDY = Study(
    "oracle",
    __doc__,
    points,
    table,
    figure,
    taken=("measure_regret",),
    rows=lambda runs: interval_rows(results_of(runs)),
    add=add_rules,
    changes={"measure_regret": True},
)

if __name__ == "__main__":
    study.start("oracle", lambda texts: study.main(STUDY, texts))
