"""Curves of a sweep: a line and a confidence band for each group of runs.

Runs that differ only in their seed are one group. Up to four lines share one pair of
axes; more have small panels of their own, with the others in gray.
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
    shown = [name for name in curves if name in best]
    looks = plot_style.styles_of([settings[name] for name in shown])
    panels = [[n] for n in shown] if len(shown) > _TOGETHER else [shown]
    figure, grid = _grid(panels)
    for axes, labels in zip(grid, panels, strict=True):
        last = 0
        for name, look in zip(shown, looks, strict=True):
            x, last = np.arange(1, len(means[name]) + 1), max(last, len(means[name]))
            if name in labels:
                label = plot_style.name_of(name)
                plot_style.plot_mean(axes, x, curves[name], look, label)
            else:
                plot_style.plot_line(axes, x, means[name], plot_style.FAINT)
        plot_style.interval_axis(axes, np.arange(1, last + 1))
        axes.label_outer()
        if len(panels) > 1:
            axes.set_title(_heading(labels), fontsize="small")
        if not losses:
            plot_style.accuracy_axis(axes)
    figure.supylabel("test loss" if losses else "test accuracy in %", fontsize="medium")
    most = max(map(len, curves.values()), default=0)
    notes = [f"mean and 95 % confidence of {most} lanes"] if most > 1 else []
    if len(curves) > len(shown):
        notes.append(f"the best {len(shown)} of {len(curves)}")
    lines, labels = (
        grid[0].get_legend_handles_labels() if len(panels) == 1 else ([], [])
    )
    plot_style.legend_below(figure, lines, labels, "; ".join(notes))
    figure.suptitle(plot_style.title(title))
    return figure


def _heading(labels: Sequence[str]) -> str:
    """The settings of a panel's line, one below the other."""
    return "\n".join(map(plot_style.name_of, labels)).replace(", ", "\n")


def _end(mean: np.ndarray, losses: bool) -> float:
    """The last value of a mean, the better the larger."""
    seen = mean[np.isfinite(mean)]
    return (-1 if losses else 1) * float(seen[-1]) if len(seen) else -np.inf


def _grid(
    panels: Sequence[Sequence[str]],
) -> "tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]":
    """A figure and the axes of its panels, with the same scales."""
    columns = min(len(panels), 3 if len(panels) <= 9 else 4)
    rows = -(-len(panels) // columns)
    above = 0.15 * max(_heading(labels).count("\n") for labels in panels)
    height = (
        3.4 if len(panels) == 1 else 1.3 + (1.9 if rows == 1 else 1.55 + above) * rows
    )
    shape = {"nrows": rows, "ncols": columns, "sharex": True, "sharey": True}
    figure, grid = plot_style.figure_of(height, **shape, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    return figure, list(grid.flat[: len(panels)])
