"""Files of a sweep: results.csv, results.jsonl, summary.md, curves."""

import csv
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from tsfl_jax import report, sweep_plots


def interval_of_mean(values: Sequence[float], level: float = 0.95) -> tuple:
    """(mean, half the width of its confidence interval), Student's t.

    Args:
      values: n independent measurements; NaN half width for n = 1.
      level: of confidence, in (0, 1).
    """
    values = np.asarray(values, float)
    mean = float(values.mean())
    if len(values) < 2:
        return mean, float("nan")
    error = values.std(ddof=1) / np.sqrt(len(values))
    return mean, float(stats.t.ppf(0.5 + level / 2, len(values) - 1) * error)


def grouped(swept: list[str], rows: list[dict]) -> dict[tuple, list[int]]:
    """Lanes with the same swept values but for the seed, by those values."""
    names = [name for name in swept if name != "seed"]
    groups: dict[tuple, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(tuple(row[name] for name in names), []).append(index)
    return groups


def label(swept: list[str], values: tuple) -> str:
    """ "lr=0.01, algorithm=dms", or "all" where only seeds were swept."""
    names = [name for name in swept if name != "seed"]
    pairs = [f"{n}={v}" for n, v in zip(names, values, strict=True)]
    return ", ".join(pairs) or "all"


def _percent(mean: float, half: float) -> str:
    spread = "" if np.isnan(half) else f" ± {100 * half:.2f}"
    return f"{100 * mean:.2f}{spread}"


def summary(swept: list[str], rows: list[dict]) -> str:
    """The Markdown table of summary.md."""
    names = [name for name in swept if name != "seed"]
    head = [*names, "lanes", "best test accuracy, %", "final, %", "highest, %"]
    head += ["diverged", "seconds a lane"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    groups = grouped(swept, rows)
    means = {}
    for values, indices in groups.items():
        lanes = [rows[i] for i in indices]
        good = [lane for lane in lanes if lane["diverged_at"] is None]
        cells = [str(v) for v in values] + [str(len(lanes))]
        if good:
            best = [lane["best_test_accuracy"] for lane in good]
            final = [lane["final_test_accuracy"] for lane in good]
            means[values] = interval_of_mean(best)[0]
            cells += [_percent(*interval_of_mean(best))]
            cells += [_percent(*interval_of_mean(final)), f"{100 * max(best):.2f}"]
        else:
            cells += ["–"] * 3
        seconds = np.mean([lane["seconds"] for lane in lanes])
        cells += [str(len(lanes) - len(good)), f"{seconds:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    text = "Mean ± half of the 95 % confidence interval (Student's t) over the lanes "
    text += "that did not diverge; best is the highest of a lane's intervals.\n\n"
    text += "\n".join(lines) + "\n"
    if means and names:
        winner = max(means, key=means.get)
        text += f"\nHighest mean of best: {label(swept, winner)}.\n"
    return text


def write(
    folder: pathlib.Path,
    swept: list[str],
    rows: list[dict],
    history: dict[str, np.ndarray],
    about: str,
) -> None:
    """Writes every file of a sweep into a folder that exists; `about` is its title."""
    plain: list[dict[str, Any]] = [report.plain(row) for row in rows]
    report.write_metrics(folder / "results.jsonl", plain)
    names = list(dict.fromkeys(name for row in plain for name in row))
    table = io.StringIO()
    writer = csv.DictWriter(table, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    with report.replacing(folder / "results.csv") as file:
        file.write(table.getvalue().encode())
    with report.replacing(folder / "summary.md") as file:
        file.write(f"# {about}\n\n{summary(swept, rows)}".encode())
    if "test_accuracy" in history:
        curves = {
            label(swept, values): history["test_accuracy"][indices]
            for values, indices in grouped(swept, rows).items()
        }
        sweep_plots.bands(curves, folder / "curves", about)
