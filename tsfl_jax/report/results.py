"""Results as they show themselves: three lines, a table of HTML, a figure."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.report import progress, runs, sweeps
from tsfl_jax.report.statistics import left_out

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
    methods = ".summary .history .params .to_xarray() .to_pandas() .plot()"
    return f"{first}\n  {second}\n  {methods}"


def run_html(summary: Mapping[str, Any]) -> str:
    """The lines that a run prints at its end."""
    return f"<pre>{html.escape(progress.summary_text(dict(summary)))}</pre>"


def run_figure(
    history: Mapping[str, np.ndarray], summary: Mapping[str, Any]
) -> "matplotlib.figure.Figure":
    """Accuracy and losses against the interval."""
    names = ("test_accuracy", "test_loss", "train_loss")
    measured = {name: np.asarray(history[name], float) for name in names}
    interval = np.arange(1, len(measured["test_loss"]) + 1, dtype=float)
    about = {n: str(summary.get(n, "")) for n in ("data", "algorithm", "seed")}
    return runs.curves_of({"interval": interval, **measured}, about)


def sweep_text(swept: Sequence[str], rows: list[sweeps.Row]) -> str:
    """Three lines on a sweep.

    Args:
      swept: names of the swept settings.
      rows: results of each run.
    """
    first = f"SweepResult: {len(rows):,} lanes over {', '.join(swept)}"
    losses = sweeps.has_losses(rows)
    name = "final_test_loss" if losses else "best_test_accuracy"
    good = [row for row in rows if not left_out(row) and _measured(row[name])]
    second = "no lane has a result"
    if good:
        best = (min if losses else max)(good, key=lambda row: row[name])
        value = f"best test accuracy {100 * best[name]:.1f} %"
        value = f"lowest final test loss {best[name]:.4g}" if losses else value
        point = ", ".join(f"{n}={best[n]}" for n in swept)
        second = f"{value} in lane {best['lane']} ({point})"
    lost = sum(bool(left_out(row)) for row in rows)
    second += f"; {lost} lanes diverged" if lost else ""
    return f"{first}\n  {second}\n  .rows .history .to_xarray() .to_pandas() .plot()"


def sweep_html(swept: Sequence[str], rows: list[sweeps.Row]) -> str:
    """A table with a line per group of runs that differ only in their seed."""
    import pandas

    lines, _ = sweeps.group_rows(swept, rows)
    with pandas.option_context("display.max_colwidth", None):
        frame = pandas.DataFrame(lines)
        return frame.to_html(index=False, max_rows=_MOST, show_dimensions=True)
