"""Groups of runs: a line of a table, and a curve with its confidence band for each.

Runs that differ only in their seed are one group.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report import files, table
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.statistics import OVER_SEEDS
from tsfl_jax.report.table import Row, grouped

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas
    import xarray

MOST = 12  # lines that a reader can distinguish
_FEW = 4  # lines whose bands do not hide each other
INTERVAL, SECONDS = "interval", "virtual time in seconds"
ACCURACY = "test accuracy in %"


def groups_table(swept: Sequence[str], rows: Sequence[Row]) -> "pandas.DataFrame":
    """A line of text per group of runs: its swept values, and `table.summary`."""
    import pandas as pd

    groups = grouped(swept, rows)
    names = [name for name in swept if name not in SEEDS]
    points = [{n: rows[group[0]][n] for n in names} for group in groups.values()]
    results = table.summary(pd.DataFrame(rows), groups).drop(columns="group")
    return pd.concat([pd.DataFrame(points, dtype=object), results], axis=1)


def write_sweep(
    folder: pathlib.Path,
    swept: Sequence[str],
    rows: list[dict[str, Any]],
    title: str,
    runs: "xarray.Dataset | None" = None,
) -> None:
    """Write results.jsonl, results.csv and summary.md; then history.csv and the curves.

    Args:
      folder: exists already.
      swept: names of the settings that were swept.
      rows: results of each run that has finished.
      title: of the table and the figure.
      runs: from `table.of_sweep`; None while runs are missing: then the files of an
        earlier, smaller sweep in this folder go, whose runs count otherwise.
    """
    files.write_metrics(folder / "results.jsonl", rows)
    files.write_csv(folder / "results.csv", [files.plain(row) for row in rows])
    head = f"# {title}\n\nCells are {OVER_SEEDS}, of the runs that did not diverge."
    text = f"{head}\n\n{files.markdown(groups_table(swept, rows))}"
    files.write_text(folder / "summary.md", text)
    if runs is None:
        for name in ("sweep.json", "history.csv", "curves.png", "curves.pdf"):
            (folder / name).unlink(missing_ok=True)
        return
    files.write_csv(folder / "history.csv", table.to_pandas(runs))
    figure = of_sweep(swept, rows, runs, title)
    plot_style.save_both(figure, folder / "curves")


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
    groups = grouped(swept, rows).items()
    curves = {label: measured.iloc[:, places] for label, places in groups}
    return bands(curves, title, "test loss" if losses else ACCURACY)


@plot_style.styled
def bands(
    curves: "Mapping[str, pandas.DataFrame]",
    title: str,
    y: str = ACCURACY,
    x: str = INTERVAL,
    target: float | None = None,
) -> "matplotlib.figure.Figure":
    """Plot a quantity of groups of runs, a line per group, of few with its band.

    Args:
      curves: label → a column per run over the places x, NaN where not measured;
        accuracies in [0, 1]. Of more groups than a reader can distinguish, those with
        the best end are shown.
      title: above the figure.
      y: name of the quantity, `ACCURACY` or a loss.
      x: name of the places, `INTERVAL` or `SECONDS`.
      target: accuracy in [0, 1], a horizontal line.
    """
    percent = "%" in y
    best = _best(curves, percent)
    lines = len(best) / plot_style.legend_columns([plot_style.name_of(n) for n in best])
    figure, axes = plot_style.figure_of(3.2 + 0.17 * math.ceil(lines))
    for name, look in zip(best, plot_style.styles_of(best), strict=True):
        runs = (100 if percent else 1) * curves[name]
        values = (runs if len(best) <= _FEW else _mean(runs).to_frame()).to_numpy().T
        label, places = plot_style.name_of(name), runs.index.to_numpy(float)
        plot_style.plot_mean(axes, places, values, look, label, percent)
    if x == INTERVAL:
        places = np.concatenate([curves[name].index.to_numpy(float) for name in best])
        plot_style.interval_axis(axes, places)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if percent:
        plot_style.accuracy_axis(axes)
    if target is not None:
        axes.axhline(100 * target, color="#777777", linewidth=0.8)
    num_runs = max(frame.shape[1] for frame in curves.values())
    note = "mean and 95 % confidence" if len(best) <= _FEW else "mean"
    notes = [f"{note} of {num_runs} runs"] * (num_runs > 1)
    notes += [f"the best {len(best)} of {len(curves)}"] * (len(curves) > len(best))
    handles, labels = axes.get_legend_handles_labels()
    plot_style.legend_below(figure, handles, labels, "; ".join(notes))
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
