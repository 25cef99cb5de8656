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

import numpy as np
import pandas
import xarray

from studies import arguments, study
from studies.differences import plot_differences
from studies.study import Case, Changes, Row, Runs, Study, texts
from studies.verdicts import over
from tsfl_jax.config import Config, get
from tsfl_jax.report.statistics import OVER_SEEDS
from tsfl_jax.rules import AGGREGATORS

RULES = ("fedavg", "dms", "oracle")


def points(config: Config, given: argparse.Namespace) -> dict[str, Changes]:
    """The rules; FedAvg, which they are compared with, is always there."""
    names = dict.fromkeys(["fedavg", *given.rules])
    return {name: {"algorithm": name} for name in names}


def results_of(runs: Runs) -> xarray.Dataset:
    """``[rule, seed, interval]``; a run that diverged has no loss, regret and gap."""
    history = runs.result.history
    lost = history["diverged"].any(axis=1, keepdims=True)
    fields = {
        name: runs.labelled(np.where(lost, np.nan, history[name]))
        for name in ("test_loss", "regret", "gap")
    }
    return xarray.Dataset({"accuracy": runs.accuracy()} | fields)


def rule_rows(results: xarray.Dataset) -> list[Row]:
    """The table as text: differences to FedAvg are paired by seed."""
    late = results.isel(interval=slice(2 * results.sizes["interval"] // 3, None))
    best = 100 * results["accuracy"].max("interval")
    scores = {
        "best": best,
        "mean over the run": 100 * results["accuracy"].mean("interval"),
        "last third": 100 * late["accuracy"].mean("interval"),
        "lowest test loss": results["test_loss"].min("interval"),
    }
    columns = {"rule": study.named(results["rule"]), "best accuracy, %": texts(best)}
    for name, score in scores.items():
        form = "+.4f" if "loss" in name else "+.2f"
        with np.errstate(invalid="ignore"):  # of infinite ones: not shown
            gain = texts(score - score.sel(rule="fedavg"), form)
        columns[f"{name} − FedAvg"] = gain.where(gain["rule"] != "fedavg", "–")
    columns["regret"] = texts(results["regret"].mean("interval"), ".4f")
    columns["regret, last third"] = texts(late["regret"].mean("interval"), ".4f")
    columns["gap"] = texts(results["gap"].mean("interval"), ".4f")
    columns["seeds"] = [str(results.sizes["seed"])] * results.sizes["rule"]
    return study.rows_of(columns)


def interval_rows(results: xarray.Dataset) -> pandas.DataFrame:
    """Accuracy against FedAvg and regret at every interval, in long form.

    Means over the seeds and half of their 95 % confidence intervals, the accuracy
    paired and in points; empty where something is not finite.
    """
    gain = 100 * (results["accuracy"] - results["accuracy"].sel(rule="fedavg"))
    columns = {}
    for name, half, values in (
        ("accuracy − FedAvg", "half of its 95 % interval", gain),
        ("regret", "half of the regret's 95 % interval", results["regret"]),
    ):
        both = over(values)
        columns[name] = both.sel(statistic="mean", drop=True)
        columns[half] = both.sel(statistic="half", drop=True)
    frame = xarray.Dataset(columns).to_dataframe(dim_order=["rule", "interval"])
    return frame.map(lambda v: f"{v:.4g}" if abs(v) < np.inf else "").reset_index()


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Add ``--rules``."""
    about = f"rules to compare with FedAvg (default: {' '.join(RULES)})"
    options = {"default": list(RULES), "choices": list(AGGREGATORS), "metavar": "RULE"}
    parser.add_argument("--rules", nargs="+", help=about, **options)


def table(runs: Runs, case: Case) -> tuple[list[Row], str]:
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
    arguments.start("oracle", lambda texts: study.main(STUDY, texts))
