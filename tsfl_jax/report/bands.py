"""Curves of a sweep: a line and a confidence band for each group of runs.

Runs that differ only in their seed are one group. Up to four lines share one pair of
axes; more are spread over small panels with the same scales.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.statistics import confidence_interval
from tsfl_jax.report.table import Row, grouped

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import xarray

Curves = Mapping[str, np.ndarray]  # label → [n, T]
Settings = Mapping[str, Mapping[str, Any]]  # label → what distinguishes the line

MOST = 12  # lines that a reader can distinguish
_TOGETHER = 4  # lines in one pair of axes


def of_sweep(
    swept: Sequence[str], rows: Sequence[Row], runs: "xarray.Dataset", title: str
) -> "matplotlib.figure.Figure":
    """The figure of a sweep: accuracies, or test losses where no run has an accuracy.

    Args:
      swept: names of the swept settings.
      rows: results of each run.
      runs: from `table.of_sweep`.
      title: above the figure.
    """
    losses = bool(runs["test_accuracy"].isnull().all())
    measured = runs["test_loss" if losses else "test_accuracy"].values
    groups = grouped(swept, rows)
    curves = {label: measured[lanes] for label, lanes in groups.items()}
    settings = {
        label: {n: rows[lanes[0]][n] for n in swept if n not in SEEDS}
        for label, lanes in groups.items()
    }
    return bands(curves, title, settings, losses=losses)


def plot_bands(
    curves: Curves, path: pathlib.Path, title: str = ""
) -> list[pathlib.Path]:
    """Write the figure of accuracies as PNG and PDF; see `bands`.

    Args:
      curves: label → ``[n, T]``; a label may be the name of a rule or framework.
      path: without a suffix.
      title: above the figure.
    """
    settings = {label: {"line": label} for label in curves}
    return plot_style.save_both(bands(curves, title, settings), path)


@plot_style.styled
def bands(
    curves: Curves, title: str, settings: Settings, *, losses: bool = False
) -> "matplotlib.figure.Figure":
    """Plot test accuracy against the interval, one line and band per group.

    Args:
      curves: label → ``[n, T]`` accuracies in [0, 1], NaN where not evaluated. Of more
        groups than a reader can distinguish, those with the best end are shown.
      title: above the figure.
      settings: of each label, what distinguishes it.
      losses: the curves are test losses.
    """
    scale = 1.0 if losses else 100.0
    curves = {name: scale * values for name, values in curves.items()}
    means = {n: confidence_interval(v, omit=True)[0] for n, v in curves.items()}
    best = sorted(curves, key=lambda n: _end(means[n], losses), reverse=True)[:MOST]
    shown = {name: values for name, values in curves.items() if name in best}
    looks = plot_style.styles_of([settings[name] for name in shown])
    styles = dict(zip(shown, looks, strict=True))
    several = len(shown) > _TOGETHER
    panels = _panels_of({n: settings[n] for n in shown}) if several else {"": [*shown]}
    late = 0 if several else _late([means[name] for name in shown])
    figure, grid = _grid(panels, 2 if late else 1, len(shown))
    for axes, (heading, labels) in zip(grid, panels.items(), strict=False):
        for name in shown:
            if name not in labels:
                x = np.arange(1, len(means[name]) + 1)
                plot_style.plot_line(axes, x, means[name], plot_style.FAINT)
        _plot(axes, {name: shown[name] for name in labels}, styles)
        axes.set_title(plot_style.escape(heading), fontsize="small")
    if late:
        _plot(grid[1], shown, styles, late)
    for axes in grid if not losses else []:
        plot_style.accuracy_axis(axes)
    figure.supylabel("test loss" if losses else "test accuracy in %", fontsize="medium")
    most = max(map(len, curves.values()), default=0)
    notes = [f"mean and 95 % confidence of {most} lanes"] if most > 1 else []
    if len(curves) > len(shown):
        notes.append(f"the best {len(shown)} of {len(curves)}")
    known = {}  # each line once; panels of one line have it in their title
    for axes in grid if not several or len(panels) < len(shown) else []:
        lines, labels = axes.get_legend_handles_labels()
        known |= dict(zip(labels, lines, strict=True))
    plot_style.legend_below(figure, list(known.values()), [*known], "; ".join(notes))
    figure.suptitle(plot_style.title(title))
    return figure


def _end(mean: np.ndarray, losses: bool) -> float:
    """The last value of a mean, the better the larger."""
    seen = mean[np.isfinite(mean)]
    return (-1 if losses else 1) * float(seen[-1]) if len(seen) else -np.inf


def _grid(
    panels: Mapping[str, list[str]], number: int, lines: int
) -> "tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]":
    """A figure and the axes of its panels; `number` of them for a single panel."""
    if len(panels) == 1:
        figure, grid = plot_style.figure_of(3.4, ncols=number)
        return figure, list(np.ravel(grid))
    columns = min(len(panels), 3 if len(panels) <= 9 else 4)
    rows = -(-len(panels) // columns)
    legend = 0 if len(panels) == lines else 0.09 * lines
    above = 0.15 * max(title.count("\n") for title in panels)
    height = 1.3 + legend + ((1.9 if rows == 1 else 1.55) + above) * rows
    shape = {"nrows": rows, "ncols": columns, "sharex": True, "sharey": True}
    figure, grid = plot_style.figure_of(height, **shape)
    every = list(np.ravel(grid))
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    return figure, every[: len(panels)]


def _plot(
    axes: "matplotlib.axes.Axes",
    curves: Curves,
    styles: Mapping[str, plot_style.Style],
    first: int = 1,
) -> None:
    """Plot lines and bands of the groups from interval `first` on."""
    last = max((values.shape[1] for values in curves.values()), default=0)
    for name, values in curves.items():
        values = values[:, first - 1 :]
        interval = np.arange(first, first + values.shape[1])
        label = plot_style.name_of(name)
        plot_style.plot_mean(axes, interval, values, styles[name], label)
    plot_style.interval_axis(axes, np.arange(first, last + 1), first)
    axes.label_outer()


def _late(means: list[np.ndarray]) -> int:
    """The first interval of a closer look; 0: there is none.

    The last half of the intervals, where the rise before them hides the differences.
    """
    length = max(map(len, means), default=0)
    first = length // 2 + 1
    means = [mean for mean in means if np.isfinite(mean[first - 1 :]).any()]
    if length < 10 or not means:
        return 0
    whole = max(np.nanmax(mean) - np.nanmin(mean) for mean in means)
    end = np.concatenate([mean[first - 1 :] for mean in means])
    return first if np.nanmax(end) - np.nanmin(end) < whole / 3 else 0


def _panels_of(settings: Settings) -> dict[str, list[str]]:
    """Titles of panels and their lines, which have the same value of one setting.

    The setting is the one with the fewest values that leaves at most four lines in a
    panel; without one, each line has its own, titled with all of its settings.
    """
    differing = plot_style.varied(list(settings.values()))
    best: dict[str, list[str]] = {}
    for name, values in differing.items() if len(differing) > 1 else ():
        parts = {
            f"{name}={value}": [n for n, own in settings.items() if own[name] == value]
            for value in values
        }
        fits = max(map(len, parts.values())) <= _TOGETHER and len(parts) < len(settings)
        if fits and (not best or len(parts) < len(best)):
            best = parts
    alone = {plot_style.name_of(n).replace(", ", "\n"): [n] for n in settings}
    return best or alone
