"""Table and figure of a comparison in virtual time."""

import pathlib
from typing import NamedTuple

import numpy as np

from tsfl_jax.report import files
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.statistics import confidence_interval, spread

_GRID = 200  # times at which curves of several seeds are averaged


class Outcome(NamedTuple):
    """One way to organize the clients, over its seeds."""

    label: str
    algorithm: str
    # (virtual seconds [E], test accuracy in [0, 1] [E]), one pair per seed
    curves: list[tuple[np.ndarray, np.ndarray]]
    updates: float  # of the global model, mean over the seeds
    iterations: float  # delivered local iterations, mean over the seeds
    staleness: float  # mean over deliveries and seeds, in updates
    seconds: float  # wall time of training and testing, all seeds
    data: str = ""  # name of the data set


def time_to(target: float, seconds: np.ndarray, accuracy: np.ndarray) -> float:
    """Virtual seconds until the accuracy was first reached; inf: never."""
    reached = np.flatnonzero(accuracy >= target)
    return float(seconds[reached[0]]) if len(reached) else np.inf


def at_times(grid: np.ndarray, seconds: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """Accuracy of the newest tested model at each time; NaN before the first one."""
    index = np.searchsorted(seconds, grid, "right") - 1
    return np.where(index >= 0, accuracy[np.maximum(index, 0)], np.nan)


def times_of(outcome: Outcome, target: float) -> np.ndarray:
    """Virtual seconds to the target accuracy ``[S]``, inf: never."""
    return np.array([time_to(target, *curve) for curve in outcome.curves])


def spread_of_times(times: np.ndarray) -> str:
    """Mean ± half its confidence interval, or how many seeds never reached it."""
    never = int(np.isinf(times).sum())
    if never:
        return f"never ({never} of {len(times)})"
    return spread(times)


def rows(outcomes: list[Outcome], target: float) -> list[dict[str, str]]:
    """The table as text; speed-up against the first outcome, paired by seed."""
    first = times_of(outcomes[0], target)
    found = []
    for outcome in outcomes:
        times = times_of(outcome, target)
        both = np.isfinite(times) & np.isfinite(first)
        name = plot_style.NAMES.get(outcome.label, outcome.label)
        best = np.array([100 * accuracy.max() for _, accuracy in outcome.curves])
        found.append(
            {
                "framework": name,
                "rule": plot_style.NAMES.get(outcome.algorithm, outcome.algorithm),
                "updates": f"{outcome.updates:.0f}",
                "local iterations": f"{outcome.iterations:.0f}",
                "mean staleness": f"{outcome.staleness:.1f}",
                "best accuracy, %": spread(best),
                f"s to {100 * target:g} %": spread_of_times(times),
                "speed-up": spread(first / times) if both.all() else "–",
                "wall time, s": f"{outcome.seconds:.0f}",
            }
        )
    return found


@plot_style.styled
def plot_outcomes(
    outcomes: list[Outcome], target: float, path: pathlib.Path, title: str
) -> list[pathlib.Path]:
    """Plot accuracy against virtual time, and the time to the target accuracy."""
    figure, (left, right) = plot_style.figure_of(
        3.4, ncols=2, gridspec_kw={"width_ratios": [1.7, 1]}
    )
    end = max(seconds[-1] for o in outcomes for seconds, _ in o.curves)
    grid = np.linspace(0, end, _GRID)
    names = [plot_style.name_of(outcome.label) for outcome in outcomes]
    for index, outcome in enumerate(outcomes):
        style = plot_style.style_of(outcome.label, index)
        values = np.array([at_times(grid, *curve) for curve in outcome.curves])
        plot_style.plot_mean(left, grid, 100 * values, style, names[index], alpha=0.15)
        times = times_of(outcome, target)
        if np.isfinite(times).all():
            mean, half = confidence_interval(times)
            look = {"color": style["color"], "edgecolor": "#333333", "linewidth": 0.6}
            right.barh(index, mean, xerr=half, **look)
        else:
            note = {"va": "center", "fontsize": "small"}
            right.text(0, index, " not reached by every seed", **note)
    tested = np.concatenate([accuracy for o in outcomes for _, accuracy in o.curves])
    # Bands of few seeds would decide the scale.
    left.set_ylim(100 * tested.min() - 3, 100 * tested.max() + 3)
    left.axhline(100 * target, color="#777777", linewidth=0.8)
    left.set_xlabel("virtual time in seconds")
    left.set_ylabel("test accuracy in %")
    left.legend(fontsize="small")
    right.set_yticks(range(len(outcomes)), names)
    right.invert_yaxis()
    right.set_xlim(left=0)
    right.set_xlabel(f"virtual seconds to {100 * target:g} %")
    figure.suptitle(plot_style.title(title))
    return plot_style.save_both(figure, path)


def write(
    folder: pathlib.Path, outcomes: list[Outcome], target: float, about: str
) -> list[pathlib.Path]:
    """Write compare.md, .csv, .png and .pdf; returns their paths."""
    table = rows(outcomes, target)
    text = f"{about}. Mean ± half of the 95 % confidence interval (Student's t) over "
    text += "the seeds; speed-up is the time to the target against the first line, "
    text += "paired by seed."
    paths = files.write_table(folder, "compare", table, text)
    return paths + plot_outcomes(outcomes, target, folder / "compare", about)
