"""Tables and files of a sweep.

Runs that differ only in their seed are one group: a row of the table, and a curve with
its confidence band.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report import bands, files, table
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.statistics import (
    DIVERGED,
    left_out,
    spread,
    spread_of_known,
)

if TYPE_CHECKING:
    import xarray

Row = dict[str, Any]  # one run: swept settings and results by name
# Heading → result of a run, and the cell for the values ``[n]`` of a group's runs.
_Columns = dict[str, tuple[str, Callable[[np.ndarray], str]]]

_ACCURACIES: _Columns = {
    "best test accuracy, %": ("best_test_accuracy", lambda v: spread(100 * v)),
    "final, %": ("final_test_accuracy", lambda v: spread(100 * v)),
    "highest, %": ("best_test_accuracy", lambda v: f"{100 * v.max():.2f}"),
}
_LOSSES: _Columns = {
    "final test loss": ("final_test_loss", lambda v: spread(v, ".4g")),
    "lowest": ("final_test_loss", lambda v: f"{v.min():.4g}"),
}
_REGRET: _Columns = {"mean regret": ("mean_regret", lambda v: _known(v))}


def _known(values: np.ndarray) -> str:
    return spread_of_known(values.tolist(), ".3g")


def has_losses(rows: Sequence[Row]) -> bool:
    """Whether runs are judged by their test loss: none has an accuracy."""
    losses = np.isnan([row["best_test_accuracy"] for row in rows]).all()
    return bool(losses and np.isfinite([row["final_test_loss"] for row in rows]).any())


def group_rows(
    swept: Sequence[str], rows: list[Row]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A line per group of runs as text; and the means of those that lost no run."""
    import pandas

    names = [name for name in swept if name not in SEEDS]
    frame, columns = pandas.DataFrame(rows), _LOSSES
    if not has_losses(rows):
        columns = _ACCURACIES
    (score, _), *_ = columns.values()
    columns = columns | (_REGRET if "mean_regret" in frame else {})
    frame["reason"] = [left_out(row) for row in rows]
    lines, means = [], {}
    for label, indices in table.grouped(swept, rows).items():
        group = frame.iloc[indices]
        good = group[group["reason"] == ""]
        line = {name: rows[indices[0]][name] for name in names} | {"lanes": len(group)}
        for heading, (name, cell) in columns.items():
            line[heading] = cell(good[name].to_numpy(float)) if len(good) else "–"
        if len(good) == len(group):  # else it is of a selection, which cannot win
            means[label] = float(good[score].mean(skipna=False))
        line["diverged"] = int((group["reason"] == DIVERGED).sum())
        lines.append(line | {"seconds per lane": f"{group['seconds'].mean():.1f}"})
    return lines, means


def sweep_table(swept: Sequence[str], rows: list[Row]) -> str:
    """The Markdown table of summary.md; of losses where no run has an accuracy."""
    losses, (lines, means) = has_losses(rows), group_rows(swept, rows)
    text = "Mean ± half of the 95 % confidence interval (Student's t) over the lanes "
    text += "that did not diverge"
    text += "" if losses else "; best is the highest of a lane's intervals"
    text += f".\n\n{files.markdown(lines)}"
    means = {label: mean for label, mean in means.items() if np.isfinite(mean)}
    if means and not set(swept) <= set(SEEDS):
        winner = (min if losses else max)(means, key=means.__getitem__)
        which = "Lowest mean of final" if losses else "Highest mean of best"
        text += f"\n{which}: {winner}.\n"
    return text


def write_tables(
    folder: pathlib.Path,
    swept: Sequence[str],
    rows: list[Row],
    about: str,
    notes: Sequence[str] = (),
) -> None:
    """Write results.jsonl, results.csv and summary.md of the runs that have finished.

    Args:
      folder: exists already.
      swept: names of the settings that were swept.
      rows: results of each run.
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
    """`write_tables` while runs are missing.

    Files of an earlier, smaller sweep in this folder go: they count the runs
    otherwise, and their curves would be those of other runs.
    """
    for name in ("sweep.json", "history.csv", "curves.png", "curves.pdf"):
        (folder / name).unlink(missing_ok=True)
    write_tables(folder, swept, rows, about)


def write_sweep(
    folder: pathlib.Path,
    swept: Sequence[str],
    rows: list[Row],
    runs: "xarray.Dataset",
    about: str,
    notes: Sequence[str] = (),
) -> None:
    """Write every file of a finished sweep.

    Args:
      folder: exists already.
      swept: names of the settings that were swept.
      rows: results of each run.
      runs: from `table.of_sweep`.
      about: title of the table and the figure.
      notes: below the table.
    """
    write_tables(folder, swept, rows, about, notes)
    files.write_csv(folder / "history.csv", table.to_pandas(runs))
    figure = bands.of_sweep(swept, rows, runs, about)
    plot_style.save_both(figure, folder / "curves")
