"""``tsfl study oracle``: how much could any weights win?

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
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tsfl_jax.config import Config, get
from tsfl_jax.experiment import grid, sweeps
from tsfl_jax.report import files, style
from tsfl_jax.report.differences import plot_differences
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    confidence_interval,
    curves_of,
    spread,
)
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.studies import arguments, problems_of, settings
from tsfl_jax.studies.problems_of import Case

RULES = ("fedavg", "dms", "oracle")
# Of each interval.
COLUMNS = (
    "accuracy − FedAvg",
    "half of its 95 % interval",
    "regret",
    "half of the regret's 95 % interval",
)


class RuleResult(NamedTuple):
    """One rule, ``[S, T]`` each."""

    accuracy: Float[np.ndarray, "S T"]  # on the test set, in [0, 1]
    loss: Float[np.ndarray, "S T"]  # on the test set
    regret: Float[np.ndarray, "S T"]  # of the validation loss
    gap: Float[np.ndarray, "S T"]


def run_rules(
    config: Config, rules: Sequence[str], seeds: int, workdir: pathlib.Path
) -> dict[str, RuleResult]:
    """Run or reuse the rules; FedAvg, which they are compared with, is always there."""
    names = list(dict.fromkeys(["fedavg", *rules]))
    points = [{"algorithm": n, "seed": s} for n in names for s in range(seeds)]
    result = sweeps.run(config, points, workdir=workdir, stream=sys.stderr)
    fields = ("test_accuracy", "test_loss", "regret", "gap")
    curves = dict(result.history)
    curves["test_accuracy"] = curves_of(result.history, settings.CLASSES)
    lost = result.history["diverged"].any(axis=1, keepdims=True)
    for field in fields[1:]:  # of the intervals before it would flatter such a run
        curves[field] = np.where(lost, np.nan, curves[field])
    found = [curves[f].reshape(len(names), seeds, -1) for f in fields]
    return {n: RuleResult(*(part[i] for part in found)) for i, n in enumerate(names)}


def _best(result: RuleResult) -> Float[np.ndarray, "S"]:
    return 100 * np.nanmax(result.accuracy, axis=1)


def _over(
    summary: Callable[..., np.ndarray], values: Float[np.ndarray, "S T"]
) -> Float[np.ndarray, "S"]:
    """A summary over the measured intervals of each run; NaN if a run has none."""
    if np.isnan(values).all(axis=1).any():
        return np.full(len(values), np.nan)
    return summary(values, axis=1)


def _shown(values: Float[np.ndarray, "S"], form: str = ".4f") -> str:
    return spread(values, form) if np.isfinite(values).all() else "–"


def rule_rows(results: Mapping[str, RuleResult]) -> list[dict[str, str]]:
    """The table as text: differences to FedAvg are paired by seed."""
    first, rows = results["fedavg"], []
    for name, one in results.items():
        late = slice(2 * one.accuracy.shape[1] // 3, None)
        gains = {
            "best − FedAvg": _best(one) - _best(first),
            "mean over the run − FedAvg": 100
            * (np.nanmean(one.accuracy, 1) - np.nanmean(first.accuracy, 1)),
            "last third − FedAvg": 100
            * (
                np.nanmean(one.accuracy[:, late], 1)
                - np.nanmean(first.accuracy[:, late], 1)
            ),
        }
        with np.errstate(invalid="ignore"):  # of infinite ones: not shown
            losses = _over(np.nanmin, one.loss) - _over(np.nanmin, first.loss)
        own = name == "fedavg"
        rows.append(
            {
                "rule": style.NAMES.get(name, name),
                "best accuracy, %": spread(_best(one)),
                **{n: "–" if own else spread(v, "+.2f") for n, v in gains.items()},
                "lowest test loss − FedAvg": "–" if own else _shown(losses, "+.4f"),
                "regret": _shown(_over(np.nanmean, one.regret)),
                "regret, last third": _shown(_over(np.nanmean, one.regret[:, late])),
                "gap": _shown(_over(np.nanmean, one.gap)),
                "seeds": str(len(one.accuracy)),
            }
        )
    return rows


def interval_rows(results: Mapping[str, RuleResult]) -> list[dict[str, Any]]:
    """Accuracy against FedAvg and regret at every interval, in long form.

    Means over the seeds and half of their 95 % confidence intervals, the accuracy
    paired and in points; empty where something is not finite.
    """
    first, rows = results["fedavg"], []
    for name, one in results.items():
        gain = confidence_interval(100 * (one.accuracy - first.accuracy))
        regret = confidence_interval(one.regret)
        for t, values in enumerate(np.transpose((*gain, *regret))):
            found = [f"{v:.4g}" if np.isfinite(v) else "" for v in values]
            rows.append(
                {"rule": name, "interval": t + 1}
                | dict(zip(COLUMNS, found, strict=True))
            )
    return rows


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = arguments.make_parser("study oracle", __doc__, 5, "runs/oracle")
    problems_of.add_problem(parser)
    parser.add_argument(
        "--rules",
        nargs="+",
        default=list(RULES),
        choices=list(AGGREGATORS),
        metavar="RULE",
        help=f"rules to compare with FedAvg (default: {' '.join(RULES)})",
    )
    return problems_of.parse(parser, texts)


def write(case: Case, results: Mapping[str, RuleResult]) -> list[pathlib.Path]:
    """Write the table and the figure of a case."""
    held, path = get(case.config, "data.validation"), case.path
    head = f"{case.about}, {held} validation samples. Regret and gap: of the validation"
    head += f" loss, mean over intervals. Entries: {OVER_SEEDS}."
    made = files.write_table(path.parent, path.name, rule_rows(results), head)
    long = path.with_name(f"{path.name}_intervals.csv")
    files.write_csv(long, interval_rows(results))
    made.append(long)
    curves = {n: r.accuracy for n, r in results.items()}
    return made + plot_differences(curves, "fedavg", path, case.about)


def main(texts: list[str]) -> None:
    """Run or resume the study; tables and figures of each case are written anew."""
    given = parse(texts)
    arguments.check_free(given.set, ("measure_regret",), "oracle")

    def run(config: Config, workdir: pathlib.Path) -> dict[str, RuleResult]:
        config = grid.changed(config, {"measure_regret": True})
        return run_rules(config, given.rules, given.seeds, workdir)

    problems_of.run_cases(given, "oracle", run, write)
