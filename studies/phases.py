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
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from studies import study
from studies.differences import plot_differences
from studies.significance import OPEN
from studies.study import Case, Runs, Study
from tsfl_jax.config import Config, get
from tsfl_jax.report.statistics import OVER_SEEDS, confidence_interval, spread
from tsfl_jax.types import UserError

REFERENCES = ("FedAvg", "DMS")
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


class Difference(NamedTuple):
    """A candidate against a reference, in points of test accuracy."""

    mean: Float[np.ndarray, "T"]
    half: Float[np.ndarray, "T"]  # half of the 95 % confidence interval
    thirds: list[Float[np.ndarray, "S"]]  # means over the thirds of the run, per seed

    def behind(self) -> int:
        """Intervals in which the whole confidence interval is below 0."""
        return int((self.mean + self.half < 0).sum())

    def ends(self) -> tuple[float, float]:
        """Lowest lower and lowest upper end of the thirds' confidence intervals."""
        mean, half = confidence_interval(np.stack(self.thirds, axis=1))
        return float((mean - half).min()), float((mean + half).min())

    def level(self) -> str:
        """Whether it is level with the reference at every interval, or ahead."""
        low, high = self.ends()
        if self.behind() > _CHANCE * len(self.mean) or high < 0:
            return BEHIND
        return LEVEL if low > -MARGIN else OPEN


def difference(
    one: Float[np.ndarray, "S T"], other: Float[np.ndarray, "S T"]
) -> Difference:
    """Compare two rules, paired by seed.

    Args:
      one, other: test accuracies in [0, 1]; NaN where not evaluated, left out.

    Returns:
      one − other in points. With one seed `half` is NaN and nothing is decided.
    """
    gain = 100 * (one - other)
    gain = gain[:, np.isfinite(gain).all(axis=0)]
    mean, half = confidence_interval(gain)
    thirds = [part.mean(axis=1) for part in np.array_split(gain, 3, axis=1)]
    return Difference(mean, half, thirds)


def points(config: Config, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
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


def candidate_rows(
    curves: Mapping[str, Float[np.ndarray, "S T"]],
) -> list[dict[str, str]]:
    """The table as text: the candidates, the one with the best worst third first."""
    found = []
    for name, accuracy in curves.items():
        several = {r: difference(accuracy, curves[r]) for r in REFERENCES if r != name}
        row = {"rule": name, "best accuracy, %": spread(100 * np.nanmax(accuracy, 1))}
        row["mean over the run, %"] = spread(100 * np.nanmean(accuracy, axis=1))
        for r in REFERENCES:
            known = several.get(r)
            for part, label in enumerate(("first", "middle", "last")):
                text = "–" if known is None else spread(known.thirds[part], "+.2f")
                row[f"− {r}, {label} third"] = text
            row[f"intervals behind {r}"] = "–" if known is None else str(known.behind())
        lowest = min(one.ends()[0] for one in several.values())
        row["lowest end over a third"] = (
            f"{lowest:+.2f}" if np.isfinite(lowest) else "–"
        )
        levels = {one.level() for one in several.values()}
        row["level"] = next(v for v in (BEHIND, OPEN, LEVEL) if v in levels)
        worst = min(t.mean() for one in several.values() for t in one.thirds)
        found.append(
            (name not in REFERENCES, -worst, row | {"seeds": str(len(accuracy))})
        )
    first = [row for candidate, _, row in found if not candidate]
    rest = sorted((item for item in found if item[0]), key=lambda item: item[1])
    return first + [row for *_, row in rest]


def interval_rows(
    curves: Mapping[str, Float[np.ndarray, "S T"]],
) -> list[dict[str, Any]]:
    """The paired differences at every interval, in long form."""
    rows = []
    for name, reference in itertools.product(curves, REFERENCES):
        if name == reference:
            continue
        gain = 100 * (curves[name] - curves[reference])
        mean, half = confidence_interval(gain)
        for t in np.flatnonzero(np.isfinite(mean)):
            row = {"rule": name, "reference": reference, "interval": int(t) + 1}
            row["difference"] = round(float(mean[t]), 4)
            rows.append(row | {"half of the 95 % interval": round(float(half[t]), 4)})
    return rows


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


def table(runs: Runs, case: Case) -> tuple[list[dict[str, str]], str]:
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
    study.start("phases", lambda texts: study.main(STUDY, texts))
