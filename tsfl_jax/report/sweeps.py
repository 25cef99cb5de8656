"""Files of a sweep: results.csv, results.jsonl, history.csv, summary.md, curves.

Lanes that differ only in their seed are one group: a row of the table, and a curve
with its confidence band.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.report import files, frames
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.statistics import confidence_interval, spread

if TYPE_CHECKING:
    import matplotlib.axes

Row = dict[str, Any]  # one lane: swept settings and results by name

_MOST = 12  # curves that a reader can distinguish


def grouped(swept: Sequence[str], rows: list[Row]) -> dict[str, list[int]]:
    """Lanes with the same swept values except for the seed, by label.

    A label is "lr=0.01, algorithm=dms", or "all" if only seeds differ.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        pairs = [f"{name}={row[name]}" for name in swept if name != "seed"]
        groups.setdefault(", ".join(pairs) or "all", []).append(index)
    return groups


def _accuracies(good: list[Row]) -> tuple[list[str], float]:
    """Table cells of lanes, and their mean of the best accuracies."""
    best = 100 * np.array([lane["best_test_accuracy"] for lane in good])
    final = 100 * np.array([lane["final_test_accuracy"] for lane in good])
    return [spread(best), spread(final), f"{best.max():.2f}"], float(best.mean())


def _losses(good: list[Row]) -> tuple[list[str], float]:
    """Table cells of lanes, and their mean of the final losses."""
    final = np.array([lane["final_test_loss"] for lane in good], float)
    return [spread(final, ".4g"), f"{final.min():.4g}"], float(final.mean())


def sweep_table(swept: Sequence[str], rows: list[Row]) -> str:
    """The Markdown table of summary.md; of losses where no lane has an accuracy."""
    names = [name for name in swept if name != "seed"]
    losses = np.isnan([row["best_test_accuracy"] for row in rows]).all()
    losses &= np.isfinite([row["final_test_loss"] for row in rows]).any()
    cells_of = _losses if losses else _accuracies
    results = ["best test accuracy, %", "final, %", "highest, %"]
    results = ["final test loss", "lowest"] if losses else results
    head = [*names, "lanes", *results, "diverged", "seconds per lane"]
    table, means = [], {}
    for label, indices in grouped(swept, rows).items():
        lanes = [rows[i] for i in indices]
        values = [lanes[0][name] for name in names]
        good = [lane for lane in lanes if lane["diverged_at"] is None]
        cells = ["–"] * len(results)
        if good:
            cells, means[label] = cells_of(good)
        seconds = np.mean([lane["seconds"] for lane in lanes])
        lost = len(lanes) - len(good)
        row = [*values, len(lanes), *cells, lost, f"{seconds:.1f}"]
        table.append(dict(zip(head, row, strict=True)))
    text = "Mean ± half of the 95 % confidence interval (Student's t) over the lanes "
    text += "that did not diverge"
    text += "" if losses else "; best is the highest of a lane's intervals"
    text += f".\n\n{files.markdown(table)}"
    if means and names:
        winner = (min if losses else max)(means, key=means.__getitem__)
        which = "Lowest mean of final" if losses else "Highest mean of best"
        text += f"\n{which}: {winner}.\n"
    return text


def write_tables(
    folder: pathlib.Path, swept: Sequence[str], rows: list[Row], about: str
) -> None:
    """Write results.jsonl, results.csv and summary.md of the lanes that have finished.

    Args:
      folder: exists already.
      swept: names of the settings that were swept.
      rows: results of each lane.
      about: title of the table.
    """
    plain: list[Row] = [files.plain(row) for row in rows]
    files.write_metrics(folder / "results.jsonl", plain)
    files.write_csv(folder / "results.csv", plain)
    files.write_text(folder / "summary.md", f"# {about}\n\n{sweep_table(swept, rows)}")


def write_sweep(
    folder: pathlib.Path,
    swept: Sequence[str],
    rows: list[Row],
    history: dict[str, np.ndarray],
    series: Sequence[dict[str, np.ndarray]],
    about: str,
) -> None:
    """Write every file of a finished sweep.

    Args:
      folder: exists already.
      swept: names of the settings that were swept.
      rows: results of each lane.
      history: arrays ``[lanes, T, …]`` by name.
      series: per lane, arrays ``[T]`` by name.
      about: title of the table and the figure.
    """
    write_tables(folder, swept, rows, about)
    files.write_columns(folder / "history.csv", frames.of_sweep(swept, rows, series))
    if "test_accuracy" in history:
        losses = bool(np.isnan(history["test_accuracy"]).all())
        measured = history["test_loss" if losses else "test_accuracy"]
        curves = {
            label: measured[lanes] for label, lanes in grouped(swept, rows).items()
        }
        plot_bands(curves, folder / "curves", about, losses=losses)


def _style(name: str, index: int, names: list[str]) -> plot_style.Style:
    """An algorithm's own style where only one of the curves is of that algorithm."""
    words = {other: re.split(r"[^\w]+", other) for other in names}
    for algorithm in plot_style.ALGORITHM_STYLE:
        having = [other for other in names if algorithm in words[other]]
        if having == [name]:
            return plot_style.style_of(algorithm, index)
    return plot_style.style_of(name, index)


def _plot_groups(
    axes: "matplotlib.axes.Axes", curves: Mapping[str, np.ndarray], first: int
) -> None:
    """Plot lines and bands of the groups from interval `first` on."""
    last = max((values.shape[1] for values in curves.values()), default=0)
    for index, (name, values) in enumerate(curves.items()):
        values = values[:, first - 1 :]
        interval = np.arange(first, first + values.shape[1])
        style = _style(name, index, list(curves))
        plot_style.plot_mean(axes, interval, values, style, plot_style.name_of(name))
    plot_style.interval_axis(axes, np.arange(first, last + 1), first)


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


@plot_style.styled
def plot_bands(
    curves: Mapping[str, np.ndarray],
    path: pathlib.Path,
    title: str = "",
    *,
    losses: bool = False,
) -> list[pathlib.Path]:
    """Plot test accuracy against the interval, one line and band per group.

    Args:
      curves: label → ``[n, T]`` accuracies in [0, 1], NaN where not evaluated. Of more
        groups than a reader can distinguish, those with the best end are shown.
      path: without a suffix; a PNG and a PDF are written.
      title: above the figure.
      losses: the curves are test losses.
    """
    scale, sign = (1.0, -1) if losses else (100.0, 1)
    curves = {name: scale * values for name, values in curves.items()}
    means = {n: confidence_interval(v, omit=True)[0] for n, v in curves.items()}

    def end(name: str) -> float:
        seen = means[name][np.isfinite(means[name])]
        return sign * seen[-1] if len(seen) else -np.inf

    best = sorted(curves, key=end, reverse=True)[:_MOST]
    shown = {name: values for name, values in curves.items() if name in best}
    late = _late([means[name] for name in shown])
    figure, panels = plot_style.figure_of(3.2, ncols=2 if late else 1)
    axes, *closer = np.ravel(panels)
    _plot_groups(axes, shown, 1)
    axes.set_ylabel("test loss" if losses else "test accuracy in %")
    for panel in closer:
        _plot_groups(panel, shown, late)
    if axes.lines:
        most = max(len(values) for values in curves.values())
        notes = [f"mean and 95 % confidence of {most} lanes"] if most > 1 else []
        if len(curves) > len(shown):
            notes.append(f"the best {len(shown)} of {len(curves)}")
        note = "; ".join(notes) or None
        axes.legend(title=note, fontsize="small", title_fontsize="small")
    figure.suptitle(plot_style.title(title))
    return plot_style.save_both(figure, path)
