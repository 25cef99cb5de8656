"""``python -m studies.phases``: a rule ahead early and not behind late?

DMS is ahead of FedAvg in the first intervals and behind in later ones. Candidates let c
and the drop probability of DMS fall with time, at a fixed pace or by the loss on
validation samples; one more has the weights of `studies.learned`, which fade with
time as well. Each is compared with FedAvg and with DMS at every interval, paired
by seed: same clients, split, schedule and mini-batches.

A candidate is *behind* a reference at an interval if the 95 % confidence interval of
the paired difference of test accuracy lies below 0. It is *level* if it is behind at no
more than 5 % of the intervals (by chance 2.5 % are expected), and if in each third of
the run the confidence interval of its mean difference ends above −0.5 points. It is not
if it is behind more often, or over a third of the run; else the result is inconclusive.
A run that diverged is scored at chance level. Choose on one data set
(``--data mnist``), confirm on another with the chosen candidates alone
(``--candidates``).
"""

import argparse
import pathlib
from typing import Any

import numpy as np
import pandas
import xarray

from studies import arguments, study
from studies.differences import plot_differences
from studies.study import Case, Changes, Row, Runs, Study, texts
from studies.verdicts import OPEN, over
from tsfl_jax.config import Config, get
from tsfl_jax.report.statistics import OVER_SEEDS
from tsfl_jax.types import UserError

REFERENCES = ("FedAvg", "DMS")
THIRDS = ("first", "middle", "last")
MARGIN = 0.5  # points that a level rule may lose in a third of the run
LEVEL, BEHIND = "yes", "no"  # or OPEN
_CHANCE = 0.05  # of the intervals in which a level rule may look behind


def _decay(kind: str, time: float) -> dict[str, Any]:
    return {"dms.decay": kind, "dms.decay_time": time}


_LATE = {"dms.drop_late": 0.0, "dms.coupling_late": 0.0}
_SIZED = {"dms.by_size": True}
# Candidate → settings. Both factors fall together; "by size": to FedAvg's weights, not
# to equal ones, which differ where clients hold different numbers of samples.
CANDIDATES: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": "fedavg"},
    "DMS": {},
    "selection alone": {"dms.coupling": 0.0},
    "equal from 10 on": {"dms.late": 10} | _LATE,
    "equal from 20 on": {"dms.late": 20} | _LATE,
    "exponential, 6": _decay("exponential", 6.0),
    "exponential, 12": _decay("exponential", 12.0),
    "inverse, 1": _decay("inverse", 1.0),
    "inverse, 3": _decay("inverse", 3.0),
    "equal from 10 on, by size": {"dms.late": 10} | _LATE | _SIZED,
    "exponential, 3, by size": _decay("exponential", 3.0) | _SIZED,
    "exponential, 6, by size": _decay("exponential", 6.0) | _SIZED,
    "exponential, 12, by size": _decay("exponential", 12.0) | _SIZED,
    "inverse, 1, by size": _decay("inverse", 1.0) | _SIZED,
    "adaptive, 1.5": {"algorithm": "dms_adaptive", "dms_adaptive.adapt": 1.5},
    "adaptive, 2": {"algorithm": "dms_adaptive", "dms_adaptive.adapt": 2.0},
    "adaptive, 4": {"algorithm": "dms_adaptive", "dms_adaptive.adapt": 4.0},
    "learned weights": {"algorithm": "learned"},
}


def gains_of(accuracy: xarray.DataArray) -> xarray.DataArray:
    """Each rule minus each reference, paired by seed, in points.

    Args:
      accuracy: ``[rule, seed, interval]`` in [0, 1]; NaN where not tested.

    Returns:
      ``[rule, reference, seed, interval]`` of the tested intervals, with the third of
      the run that each is in; NaN for a reference against itself.
    """
    seen = accuracy.dropna("interval")
    gains = 100 * (seen - seen.sel(rule=list(REFERENCES)).rename(rule="reference"))
    gains = gains.where(gains["rule"] != gains["reference"])
    parts = np.array_split(np.arange(seen.sizes["interval"]), 3)
    third = np.repeat(THIRDS, [len(part) for part in parts])
    dims = ("rule", "reference", "seed", "interval")
    return gains.transpose(*dims).assign_coords(third=("interval", third))


def compared(gains: xarray.DataArray) -> xarray.Dataset:
    """Whether each rule is level with each reference, and why.

    Args:
      gains: from `gains_of`.

    Returns:
      ``[rule, reference]``: "behind", the intervals in which the whole confidence
      interval is below 0; "low", the lowest end of the thirds' intervals; "level", one
      of LEVEL, BEHIND and OPEN, which is all that one seed can give. "thirds", the
      means over the thirds of the run, ``[rule, reference, seed, third]``.
    """
    mean, half = over(gains)
    behind = (mean + half < 0).sum("interval")
    thirds = gains.groupby("third").mean().sel(third=list(THIRDS))
    mean, half = over(thirds)
    low, high = (mean - half).min("third"), (mean + half).min("third")
    lost = (behind > _CHANCE * gains.sizes["interval"]) | (high < 0)
    level = xarray.where(lost, BEHIND, xarray.where(low > -MARGIN, LEVEL, OPEN))
    fields = {"behind": behind, "low": low, "level": level, "thirds": thirds}
    return xarray.Dataset(fields)


def points(config: Config, given: argparse.Namespace) -> dict[str, Changes]:
    """The references and the candidates that were asked for.

    Raises:
      UserError: fewer than three tested intervals.
    """
    intervals, every = get(config, "num_intervals"), get(config, "eval_every")
    tested = -(-intervals // every)
    if tested < 3:
        raise UserError(
            f"--set eval_every={every}: the model is tested {tested} times in "
            f"{intervals} intervals, expected at least 3, one for each third of a run"
        )
    names = dict.fromkeys([*REFERENCES, *given.candidates])
    return {name: {"algorithm": "dms"} | CANDIDATES[name] for name in names}


def candidate_rows(accuracy: xarray.DataArray) -> list[Row]:
    """The table as text: the candidates, the one with the best worst third first."""
    found = compared(gains_of(accuracy))
    rules, low = accuracy["rule"].values.tolist(), found["low"].min("reference")
    columns = {"rule": rules, "best accuracy, %": texts(100 * accuracy.max("interval"))}
    columns["mean over the run, %"] = texts(100 * accuracy.mean("interval"))
    shown = texts(found["thirds"], "+.2f")
    for r in REFERENCES:
        for third in THIRDS:
            columns[f"− {r}, {third} third"] = shown.sel(reference=r, third=third)
        behind = found["behind"].sel(reference=r).astype(object)
        columns[f"intervals behind {r}"] = behind.where(behind["rule"] != r, "–")
    columns["lowest end over a third"] = [
        f"{v:+.2f}" if np.isfinite(v) else "–" for v in low.values
    ]
    others = found["level"].where(found["rule"] != found["reference"], "")
    columns["level"] = [
        next(v for v in (BEHIND, OPEN, LEVEL) if v in several)
        for several in others.values.tolist()
    ]
    columns["seeds"] = [str(accuracy.sizes["seed"])] * len(rules)
    worst = found["thirds"].mean("seed").min(["reference", "third"]).values
    worst[: len(REFERENCES)] = np.inf  # they are first
    rows = study.rows_of(columns)
    return [rows[i] for i in np.argsort(-worst, kind="stable")]


def interval_rows(accuracy: xarray.DataArray) -> pandas.DataFrame:
    """The paired differences at every interval, in long form."""
    names = {"mean": "difference", "half": "half of the 95 % interval"}
    both = over(gains_of(accuracy)).drop_vars("third").round(4)
    frame = both.to_dataset("statistic").to_dataframe().rename(columns=names)
    return frame[frame["difference"].notna()].reset_index()


def add_candidates(parser: argparse.ArgumentParser) -> None:
    """Add ``--candidates``."""
    about = f"only these: {', '.join(CANDIDATES)}"
    parser.add_argument(
        "--candidates",
        nargs="+",
        metavar="NAME",
        help=about,
        default=list(CANDIDATES),
        choices=list(CANDIDATES),
    )


def table(runs: Runs, case: Case) -> tuple[list[Row], str]:
    """The table of a case, and what is said above it."""
    head = f"{case.about}. Test accuracy, differences in points: {OVER_SEEDS}, paired."
    head += f" Level: no third's interval ends below −{MARGIN:g}, not corrected for the"
    head += " number of candidates."
    return candidate_rows(runs.accuracy()), head


def figure(runs: Runs, case: Case) -> list[pathlib.Path]:
    """Plot accuracies minus FedAvg's."""
    return plot_differences(runs.accuracy(), "FedAvg", case.path, case.about)


STUDY = Study(
    "phases",
    __doc__,
    points,
    table,
    figure,
    taken={name for changes in CANDIDATES.values() for name in changes},
    rows=lambda runs: interval_rows(runs.accuracy()),
    add=add_candidates,
)

if __name__ == "__main__":
    arguments.start("phases", lambda texts: study.main(STUDY, texts))
