"""Files of a sweep: results.csv, results.jsonl, history.csv, summary.md, curves.

Lanes that differ only in their seed are one group: a row of the table, and a curve
with its confidence band.
"""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report import bands, files, frames, variance
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.bands import grouped
from tsfl_jax.report.statistics import (
    DIVERGED,
    STOPPED,
    left_out,
    spread,
    spread_of_known,
)

if TYPE_CHECKING:
    import matplotlib.figure

Row = dict[str, Any]  # one lane: swept settings and results by name


def _accuracies(good: list[Row]) -> tuple[list[str], float]:
    """Table cells of lanes, and their mean of the best accuracies."""
    best = 100 * np.array([lane["best_test_accuracy"] for lane in good])
    final = 100 * np.array([lane["final_test_accuracy"] for lane in good])
    return [spread(best), spread(final), f"{best.max():.2f}"], float(best.mean())


def _losses(good: list[Row]) -> tuple[list[str], float]:
    """Table cells of lanes, and their mean of the final losses."""
    final = np.array([lane["final_test_loss"] for lane in good], float)
    return [spread(final, ".4g"), f"{final.min():.4g}"], float(final.mean())


def _regret(good: list[Row]) -> str:
    """Table cell of the mean regret of lanes over their intervals."""
    values = [lane.get("mean_regret", np.nan) for lane in good]
    return spread_of_known([np.nan if v is None else v for v in values], ".3g")


def has_losses(rows: list[Row]) -> bool:
    """Whether lanes are judged by their test loss: none has an accuracy."""
    losses = np.isnan([row["best_test_accuracy"] for row in rows]).all()
    return bool(losses and np.isfinite([row["final_test_loss"] for row in rows]).any())


def group_rows(
    swept: Sequence[str], rows: list[Row]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A line per group of lanes as text; and the means of those that lost no lane."""
    names = [name for name in swept if name not in SEEDS]
    losses = has_losses(rows)
    cells_of = _losses if losses else _accuracies
    results = ["best test accuracy, %", "final, %", "highest, %"]
    results = ["final test loss", "lowest"] if losses else results
    regrets = any("mean_regret" in row for row in rows)
    head = [*names, "lanes", *results, *["mean regret"] * regrets]
    race = any("stopped_at" in row for row in rows)
    head += ["diverged", *[STOPPED] * race, "seconds per lane"]
    table, means = [], {}
    for label, indices in grouped(swept, rows).items():
        lanes = [rows[i] for i in indices]
        values = [lanes[0][name] for name in names]
        reasons = [left_out(lane) for lane in lanes]
        good = [lane for lane, why in zip(lanes, reasons, strict=True) if not why]
        cells = ["–"] * len(results)
        if good:
            cells, mean = cells_of(good)
            if len(good) == len(lanes):  # else it is of a selection, which cannot win
                means[label] = mean
        cells = cells + [_regret(good)] * regrets
        seconds = np.mean([lane["seconds"] for lane in lanes])
        lost = [reasons.count(DIVERGED), *[reasons.count(STOPPED)] * race]
        row = [*values, len(lanes), *cells, *lost, f"{seconds:.1f}"]
        table.append(dict(zip(head, row, strict=True)))
    return table, means


def sweep_table(swept: Sequence[str], rows: list[Row]) -> str:
    """The Markdown table of summary.md; of losses where no lane has an accuracy."""
    losses, (table, means) = has_losses(rows), group_rows(swept, rows)
    text = "Mean ± half of the 95 % confidence interval (Student's t) over the lanes "
    stopped = [left_out(row) for row in rows].count(STOPPED)
    text += "that ran to their end" if stopped else "that did not diverge"
    text += "" if losses else "; best is the highest of a lane's intervals"
    text += f".\n\n{files.markdown(table)}"
    means = {label: mean for label, mean in means.items() if np.isfinite(mean)}
    if means and not set(swept) <= set(SEEDS):
        winner = (min if losses else max)(means, key=means.__getitem__)
        which = "Lowest mean of final" if losses else "Highest mean of best"
        text += f"\n{which}: {winner}.\n"
    if stopped:
        text += f"\nNote: a race stopped {stopped} of {len(rows)} lanes before their "
        text += "end; they are in no mean.\n"
    return text + variance.text_of(swept, rows, losses)


def write_tables(
    folder: pathlib.Path,
    swept: Sequence[str],
    rows: list[Row],
    about: str,
    notes: Sequence[str] = (),
) -> None:
    """Write results.jsonl, results.csv and summary.md of the lanes that have finished.

    Args:
      folder: exists already.
      swept: names of the settings that were swept.
      rows: results of each lane.
      about: title of the table.
      notes: below the table.
    """
    plain: list[Row] = [files.plain(row) for row in rows]
    files.write_metrics(folder / "results.jsonl", plain)
    files.write_csv(folder / "results.csv", plain)
    text = f"# {about}\n\n{sweep_table(swept, rows)}"
    text += "".join(f"\nNote: {note}.\n" for note in notes)
    files.write_text(folder / "summary.md", text)


def write_partial(
    folder: pathlib.Path, swept: Sequence[str], rows: list[Row], about: str
) -> None:
    """`write_tables` while lanes are missing.

    Files of an earlier, smaller sweep in this folder go: they count the lanes
    otherwise, and their curves would be those of other lanes.
    """
    for name in ("sweep.json", "history.csv", "curves.png", "curves.pdf"):
        (folder / name).unlink(missing_ok=True)
    write_tables(folder, swept, rows, about)


def write_sweep(
    folder: pathlib.Path,
    swept: Sequence[str],
    rows: list[Row],
    history: dict[str, np.ndarray],
    series: Sequence[dict[str, np.ndarray]],
    about: str,
    notes: Sequence[str] = (),
) -> None:
    """Write every file of a finished sweep.

    Args:
      folder: exists already.
      swept: names of the settings that were swept.
      rows: results of each lane.
      history: arrays ``[lanes, T, …]`` by name.
      series: per lane, arrays ``[T]`` by name.
      about: title of the table and the figure.
      notes: below the table.
    """
    write_tables(folder, swept, rows, about, notes)
    files.write_columns(folder / "history.csv", frames.of_sweep(swept, rows, series))
    if "test_accuracy" in history:
        figure = figure_of(swept, rows, history, about)
        plot_style.save_both(figure, folder / "curves")


def figure_of(
    swept: Sequence[str], rows: list[Row], history: dict[str, np.ndarray], about: str
) -> "matplotlib.figure.Figure":
    """The curves of a sweep; of losses where no lane has an accuracy."""
    losses = bool(np.isnan(history["test_accuracy"]).all())
    measured = history["test_loss" if losses else "test_accuracy"]
    return bands.of_sweep(swept, rows, measured, about, losses=losses)
