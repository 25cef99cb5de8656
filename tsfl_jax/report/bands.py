"""Curves of groups of runs: a line and a confidence band for each group.

Runs that differ only in their seed are one group. Up to four lines share one pair of
axes; more have small panels of their own, with the others in gray.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.table import Row, grouped

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import pandas
    import xarray

Settings = Mapping[str, Mapping[str, Any]]  # label → what distinguishes the line

MOST = 12  # lines that a reader can distinguish
_TOGETHER = 4  # lines in one pair of axes
INTERVAL, SECONDS = "interval", "virtual time in seconds"
ACCURACY = "test accuracy in %"


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
    measured = runs["test_loss" if losses else "test_accuracy"].T.to_pandas()
    groups = grouped(swept, rows)
    curves = {label: measured.iloc[:, places] for label, places in groups.items()}
    settings = {
        label: {n: rows[places[0]][n] for n in swept if n not in SEEDS}
        for label, places in groups.items()
    }
    return bands(curves, title, settings, "test loss" if losses else ACCURACY)


def plot_bands(
    curves: Mapping[str, np.ndarray], path: pathlib.Path, title: str = ""
) -> list[pathlib.Path]:
    """Write the figure of accuracies as PNG and PDF; see `bands`.

    Args:
      curves: label → ``[n, T]``; a label may be the name of a rule or framework.
      path: without a suffix.
      title: above the figure.
    """
    import pandas

    frames = {
        name: pandas.DataFrame(values.T, np.arange(1, values.shape[1] + 1))
        for name, values in curves.items()
    }
    return plot_style.save_both(bands(frames, title), path)


@plot_style.styled
def bands(
    curves: "Mapping[str, pandas.DataFrame]",
    title: str,
    settings: Settings | None = None,
    y: str = ACCURACY,
    x: str = INTERVAL,
    target: float | None = None,
) -> "matplotlib.figure.Figure":
    """Plot a quantity of groups of runs, one line and band per group.

    Args:
      curves: label → a column per run over the places x, NaN where not measured;
        accuracies in [0, 1]. Of more groups than a reader can distinguish, those with
        the best end are shown.
      title: above the figure.
      settings: of each label, what distinguishes it; None: the label alone.
      y: name of the quantity, `ACCURACY` or a loss.
      x: name of the places, `INTERVAL` or `SECONDS`.
      target: accuracy in [0, 1], a horizontal line.
    """
    percent = "%" in y
    curves = {name: (100 if percent else 1) * frame for name, frame in curves.items()}
    best = _best(curves, percent)
    looks = plot_style.styles_of([(settings or {}).get(n, {"line": n}) for n in best])
    panels = [[n] for n in best] if len(best) > _TOGETHER else [best]
    all_places = np.concatenate([curves[name].index.to_numpy(float) for name in best])
    figure, grid = _grid(panels)
    for axes, labels in zip(grid, panels, strict=True):
        for name, look in zip(best, looks, strict=True):
            places, values = curves[name].index.to_numpy(float), curves[name].to_numpy()
            if name in labels:
                label = plot_style.name_of(name)
                plot_style.plot_mean(axes, places, values.T, look, label, percent)
            else:
                mean = _mean(curves[name]).to_numpy()
                plot_style.plot_line(axes, places, mean, plot_style.FAINT)
        if x == INTERVAL:
            plot_style.interval_axis(axes, all_places)
        axes.set_xlabel(x)
        axes.label_outer()
        if len(panels) > 1:
            axes.set_title(_heading(labels), fontsize="small")
        if percent:
            plot_style.accuracy_axis(axes)
        if target is not None:
            axes.axhline(100 * target, color="#777777", linewidth=0.8)
    figure.supylabel(y, fontsize="medium")
    num_runs = max(frame.shape[1] for frame in curves.values())
    notes = [f"mean and 95 % confidence of {num_runs} runs"] * (num_runs > 1)
    notes += [f"the best {len(best)} of {len(curves)}"] * (len(curves) > len(best))
    lines = grid[0].get_legend_handles_labels() if len(grid) == 1 else ([], [])
    plot_style.legend_below(figure, *lines, "; ".join(notes))
    figure.suptitle(plot_style.title(title))
    return figure


def _mean(curves: "pandas.DataFrame") -> "pandas.Series":
    """The mean of the finite values at each place."""
    return curves.where(np.isfinite(curves)).mean(axis=1)


def _best(curves: "Mapping[str, pandas.DataFrame]", larger: bool) -> list[str]:
    """The `MOST` labels whose means end best, in their order."""
    worst = -np.inf if larger else np.inf
    ends = {n: [worst, *_mean(frame).dropna()][-1] for n, frame in curves.items()}
    best = sorted(curves, key=lambda name: ends[name], reverse=larger)[:MOST]
    return [name for name in curves if name in best]


def _heading(labels: Sequence[str]) -> str:
    """The settings of a panel's line, one below the other."""
    return "\n".join(map(plot_style.name_of, labels)).replace(", ", "\n")


def _grid(
    panels: Sequence[Sequence[str]],
) -> "tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]":
    """A figure and the axes of its panels, with the same scales."""
    columns = min(len(panels), 3 if len(panels) <= 9 else 4)
    rows = -(-len(panels) // columns)
    above = 0.15 * max(_heading(labels).count("\n") for labels in panels)
    height = 1.3 + (1.9 if rows == 1 else 1.55 + above) * rows
    height = 3.4 if len(panels) == 1 else height
    shape = {"nrows": rows, "ncols": columns, "sharex": True, "sharey": True}
    figure, grid = plot_style.figure_of(height, **shape, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    return figure, list(grid.flat[: len(panels)])
