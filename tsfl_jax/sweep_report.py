"""Files of a sweep: results.csv, results.jsonl, summary.md, curves."""

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


def spread(values: np.ndarray, sign: str = "") -> str:
    """ "97.40 ± 0.12", mean and half of its 95 % confidence interval."""
    mean, half = interval_of_mean(values)
    text = f"{mean:{sign}.2f}"
    return text if np.isnan(half) else f"{text} ± {half:.2f}"


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


def _accuracies(good: list[dict]) -> tuple[list[str], float]:
    """(cells, mean of best) of lanes."""
    best = [lane["best_test_accuracy"] for lane in good]
    final = [lane["final_test_accuracy"] for lane in good]
    mean, half = interval_of_mean(best)
    highest = f"{100 * max(best):.2f}"
    return [_percent(mean, half), _percent(*interval_of_mean(final)), highest], mean


def _losses(good: list[dict]) -> tuple[list[str], float]:
    """(cells, mean of final) of lanes."""
    final = [lane["final_test_loss"] for lane in good]
    mean, half = interval_of_mean(final)
    spread = "" if np.isnan(half) else f" ± {half:.4g}"
    return [f"{mean:.4g}{spread}", f"{min(final):.4g}"], mean


def summary(swept: list[str], rows: list[dict]) -> str:
    """The Markdown table of summary.md; of losses where no lane has an accuracy."""
    names = [name for name in swept if name != "seed"]
    losses = np.isnan([row["best_test_accuracy"] for row in rows]).all()
    losses &= np.isfinite([row["final_test_loss"] for row in rows]).any()
    cells_of = _losses if losses else _accuracies
    results = ["best test accuracy, %", "final, %", "highest, %"]
    results = ["final test loss", "lowest"] if losses else results
    head = [*names, "lanes", *results, "diverged", "seconds a lane"]
    table = []
    groups = grouped(swept, rows)
    means = {}
    for values, indices in groups.items():
        lanes = [rows[i] for i in indices]
        good = [lane for lane in lanes if lane["diverged_at"] is None]
        cells = [str(v) for v in values] + [str(len(lanes))]
        if good:
            found, means[values] = cells_of(good)
            cells += found
        else:
            cells += ["–"] * len(results)
        seconds = np.mean([lane["seconds"] for lane in lanes])
        cells += [str(len(lanes) - len(good)), f"{seconds:.1f}"]
        table.append(dict(zip(head, cells, strict=True)))
    text = "Mean ± half of the 95 % confidence interval (Student's t) over the lanes "
    text += "that did not diverge"
    text += "" if losses else "; best is the highest of a lane's intervals"
    text += ".\n\n"
    text += report.markdown(table)
    if means and names:
        winner = (min if losses else max)(means, key=means.get)
        which = "Lowest mean of final" if losses else "Highest mean of best"
        text += f"\n{which}: {label(swept, winner)}.\n"
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
    report.write_csv(folder / "results.csv", plain)
    report.write_text(folder / "summary.md", f"# {about}\n\n{summary(swept, rows)}")
    if "test_accuracy" in history:
        losses = np.isnan(history["test_accuracy"]).all()
        measured = history["test_loss" if losses else "test_accuracy"]
        curves = {
            label(swept, values): measured[indices]
            for values, indices in grouped(swept, rows).items()
        }
        sweep_plots.bands(curves, folder / "curves", about, losses=bool(losses))
