"""Tables and files of a sweep.

Runs that differ only in their seed are one group: a row of the table, and a curve with
its confidence band.
"""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tsfl_jax.config import SEEDS
from tsfl_jax.report import bands, files, table
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.statistics import OVER_SEEDS

if TYPE_CHECKING:
    import pandas
    import xarray

Row = dict[str, Any]  # one run: swept settings and results by name


def groups_table(swept: Sequence[str], rows: list[Row]) -> "pandas.DataFrame":
    """A line of text per group of runs: its swept values, and `table.summary`."""
    import pandas as pd

    groups = table.grouped(swept, rows)
    names = [name for name in swept if name not in SEEDS]
    points = [{n: rows[group[0]][n] for n in names} for group in groups.values()]
    results = table.summary(pd.DataFrame(rows), groups).drop(columns="group")
    return pd.concat([pd.DataFrame(points, dtype=object), results], axis=1)


def text(swept: Sequence[str], rows: list[Row]) -> str:
    """Two lines on a sweep: what it is, what one can do with it."""
    methods = ".rows .history .to_xarray() .to_pandas() .plot()"
    return f"SweepResult: {len(rows):,} runs over {', '.join(swept)}\n  {methods}"


def write(
    folder: pathlib.Path,
    swept: Sequence[str],
    rows: list[Row],
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
    head = f"# {title}\n\n{OVER_SEEDS.capitalize()}, of the runs that did not diverge."
    text = f"{head}\n\n{files.markdown(groups_table(swept, rows))}"
    files.write_text(folder / "summary.md", text)
    if runs is None:
        for name in ("sweep.json", "history.csv", "curves.png", "curves.pdf"):
            (folder / name).unlink(missing_ok=True)
        return
    files.write_csv(folder / "history.csv", table.to_pandas(runs))
    figure = bands.of_sweep(swept, rows, runs, title)
    plot_style.save_both(figure, folder / "curves")
