"""Results as they show themselves: three lines, a table of HTML, a figure."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.report import progress, runs, sweeps
from tsfl_jax.report.statistics import DIVERGED, STOPPED, left_out
from tsfl_jax.types import UserError

if TYPE_CHECKING:
    import matplotlib.figure

_MOST = 50  # lines of a table in a notebook


def _measured(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def run_text(summary: Mapping[str, Any]) -> str:
    """Three lines on a run.

    Args:
      summary: as in summary.json.
    """
    s, get = summary, summary.get
    first = (
        f"Result of {get('algorithm')} on {get('data')}: "
        f"{get('num_intervals'):,} intervals, seed {get('seed')}"
    )
    if _measured(get("best_test_accuracy")):
        best, final = s["best_test_accuracy"], s["final_test_accuracy"]
        second = f"test accuracy: best {100 * best:.1f} %, final {100 * final:.1f} %"
    else:
        loss = get("final_test_loss")
        known = _measured(loss) or loss == math.inf
        second = f"final test loss {loss:.4g}" if known else "not evaluated"
    if get("diverged_at") is not None:
        second += f"; every model was lost in interval {s['diverged_at']}"
    return f"{first}\n  {second}\n  .summary .history .params .to_pandas() .plot()"


def run_html(summary: Mapping[str, Any]) -> str:
    """The lines that a run prints at its end, as a table."""
    lines = progress.summary_text(dict(summary)).splitlines()
    cells = [(line[:15].strip(), line[15:]) for line in lines]
    return _table([{"": name, " ": text} for name, text in cells])


def run_figure(
    history: Mapping[str, np.ndarray], summary: Mapping[str, Any]
) -> "matplotlib.figure.Figure":
    """Accuracy and losses against the interval."""
    names = ("test_accuracy", "test_loss", "train_loss")
    measured = {name: np.asarray(history[name], float) for name in names}
    interval = np.arange(1, len(measured["test_loss"]) + 1, dtype=float)
    about = {n: str(summary.get(n, "")) for n in ("data", "algorithm", "seed")}
    return runs.curves_of({"interval": interval, **measured}, about)


def _best(rows: list[sweeps.Row], losses: bool) -> sweeps.Row | None:
    """The best lane that ran to its end."""
    name = "final_test_loss" if losses else "best_test_accuracy"
    good = [r for r in rows if not left_out(r) and _measured(r[name])]
    choose = min if losses else max
    return choose(good, key=lambda row: row[name]) if good else None


def sweep_text(swept: Sequence[str], rows: list[sweeps.Row]) -> str:
    """Three lines on a sweep.

    Args:
      swept: names of the swept settings.
      rows: results of each lane.
    """
    first = f"SweepResult: {len(rows):,} lanes over {', '.join(swept)}"
    losses = sweeps.has_losses(rows)
    best, second = _best(rows, losses), "no lane has a result"
    if best is not None:
        value = (
            f"lowest final test loss {best['final_test_loss']:.4g}"
            if losses
            else f"best test accuracy {100 * best['best_test_accuracy']:.1f} %"
        )
        point = ", ".join(f"{name}={best[name]}" for name in swept)
        second = f"{value} in lane {best['lane']} ({point})"
    reasons = [left_out(row) for row in rows]
    said = {DIVERGED: "; {} lanes diverged", STOPPED: "; a race stopped {}"}
    for why, text in said.items():
        second += text.format(reasons.count(why)) if why in reasons else ""
    return f"{first}\n  {second}\n  .rows .history .to_pandas() .plot()"


def sweep_html(swept: Sequence[str], rows: list[sweeps.Row]) -> str:
    """A table with a line per group of lanes that differ only in their seed."""
    table, _ = sweeps.group_rows(swept, rows)
    more = len(table) - _MOST
    note = f"<p>… and {more} more</p>" if more > 0 else ""
    return _table(table[:_MOST]) + note


def sweep_figure(
    swept: Sequence[str], rows: list[sweeps.Row], history: Mapping[str, np.ndarray]
) -> "matplotlib.figure.Figure":
    """Accuracy against the interval, a line per group.

    Raises:
      UserError: the lanes differ in their number of intervals.
    """
    if "test_accuracy" not in history:
        raise UserError(
            "plot(): the lanes differ in their number of intervals; plot the columns "
            "of to_pandas() instead"
        )
    about = ", ".join(dict.fromkeys(str(row["data"]) for row in rows))
    return sweeps.figure_of(swept, rows, dict(history), about)


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as HTML, escaped."""

    def line(cells: Any, tag: str) -> str:
        inner = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    head = line(rows[0], "th") if any(name.strip() for name in rows[0]) else ""
    body = "".join(line(row.values(), "td") for row in rows)
    return f"<table>{head}{body}</table>"
