"""``tsfl report --table``: the groups of some runs as a table for a paper.

A group is the runs that differ in their seeds only. Differences to a base are paired by
seed; Holm's correction counts all groups but the base.
"""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tsfl_jax.config import SEEDS
from tsfl_jax.report import files, significance, table
from tsfl_jax.report.collect import Run
from tsfl_jax.report.statistics import OVER_SEEDS, confidence_interval, left_out, spread
from tsfl_jax.types import UserError

_PERCENT = "accuracy"  # scores in [0, 1] that a table has in percent


def score_of(run: Run, score: str) -> float:
    """A result of a run; NaN where it is not known or the run lost every model."""
    value = run.facts.get(score)
    if value is None or left_out(run.facts):
        return np.nan
    return float(value) * (100 if _PERCENT in score else 1)


def by_seed(runs: Sequence[Run], names: Sequence[str], score: str) -> pd.DataFrame:
    """A score ``[seeds, groups]``, NaN where a group has no run of a seed.

    Args:
      runs: finished ones.
      names: the group of each.
      score: a name of `table.SCORES`.

    Raises:
      UserError: no run has this score, or a group has two runs of a seed.
    """
    unknown = f"--score={score}: no run has such a score; expected one of "
    unknown += ", ".join(table.SCORES)
    if score not in table.SCORES:  # a setting, a text
        raise UserError(unknown)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for run, name in zip(runs, names, strict=True):
        seed = str([run.settings.get(n) for n in SEEDS])
        if seed in found[name]:
            raise UserError(f"{name}: two runs of one seed; give each folder once")
        found[name][seed] = score_of(run, score)
    scores = pd.DataFrame(found)
    if scores.isna().to_numpy().all():
        raise UserError(unknown)
    return scores


def base_of(groups: Sequence[str], given: str) -> str:
    """The only group that is called so, has this setting or value, or has this text.

    Raises:
      UserError: there is none, or several.
    """
    parts = {n: [n, *n.split(", ")] for n in groups}
    values = {n: [p.rpartition("=")[2] for p in some] for n, some in parts.items()}
    found = [n for n in groups if given in parts[n] or given in values[n]]
    found = found or [n for n in groups if given in n]
    if len(found) == 1:
        return found[0]
    raise UserError(
        f"--base={given}: {'several groups have' if found else 'no group has'} it in "
        f"its name; there are {'; '.join(groups)}"
    )


def numbers(scores: pd.DataFrame, base: str = "") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means, and with a base paired differences and their tests; and as text.

    Args:
      scores: ``[seeds, groups]`` from `by_seed`.
      base: a group; "": no differences.

    Returns:
      A row per group: runs, mean, half (of the 95 % interval), and difference, its
      half, pairs, p (paired t test) and holm; NaN for the base itself. The same with
      three columns of text for a reader.
    """
    rows: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for name in scores:
        known = scores[name].dropna().to_numpy()
        mean, half = confidence_interval(known)
        rows.append({"group": name, "runs": len(known), "mean": mean, "half": half})
        shown = spread(known) if len(known) else "–"
        texts.append({"group": name, "runs": len(known), "mean": shown})
        if not base:
            continue
        gaps = (scores[name] - scores[base]).dropna().to_numpy()
        compared = name != base and len(gaps) > 0
        texts[-1]["difference"] = spread(gaps, "+.2f") if compared else "–"
        if name != base:
            gap, error = confidence_interval(gaps)
            tested = {"p": significance.paired_p(gaps), "pairs": len(gaps)}
            rows[-1] |= {"difference": gap, "difference_half": error} | tested
    found, text = pd.DataFrame(rows), pd.DataFrame(texts)
    if base:
        p = [row.get("p", np.nan) for row in rows]
        found["holm"] = significance.holm(p)
        text["p (Holm)"] = found["holm"].map(significance.p_text)
    return found, text


def latex(rows: pd.DataFrame, left: int = 1, compared: Iterable[str] = ()) -> str:
    """The table for LaTeX with booktabs.

    Args:
      rows: of text.
      left: how many columns are aligned to the left.
      compared: columns of means, of which the highest in a row is bold.
    """
    means = rows[[name for name in compared if name in rows]]
    means = means.apply(lambda cells: cells.str.split().str[0].replace("–", "nan"))
    means = means.astype(float)
    highest = means.eq(means.max(axis=1), axis=0)
    highest &= highest.cumsum(axis=1) == 1  # one of those that are equal
    marks = np.where(highest, "textbf:--rwrap", "")
    look: Any = rows.style.hide().format(escape="latex")
    look = look.format_index(escape="latex", axis=1)
    look = look.apply(lambda _: marks, axis=None, subset=[*means])
    form = "l" * left + "r" * (rows.shape[1] - left)
    text = look.to_latex(column_format=form, hrules=True)
    for sign, command in {"±": r"$\pm$", "−": "$-$", "–": "--"}.items():
        text = text.replace(sign, command)
    return text


def write(
    runs: Sequence[Run],
    names: Sequence[str],
    folder: pathlib.Path,
    score: str,
    base: str,
) -> str:
    """Write table.csv, .md and .tex into a folder; returns the Markdown.

    Args:
      runs: finished ones; those that diverged are in no mean.
      names: the group of each.
      folder: where to write.
      score: a name of `table.SCORES`.
      base: see `base_of`; "": no differences.

    Raises:
      UserError: see `by_seed` and `base_of`.
    """
    scores = by_seed(runs, names, score)
    base = base and base_of(list(scores), base)
    found, rows = numbers(scores, base)
    unit = " in %" if _PERCENT in score else ""
    head = f"{score}{unit}: {OVER_SEEDS}."
    if base:
        head += f" Differences to {base} are paired by seed."
    lost = sum(bool(left_out(run.facts)) for run in runs)
    head += f" {lost} runs that diverged are left out." if lost else ""
    text = f"{head}\n\n{files.markdown(rows)}"
    files.write_csv(folder / "table.csv", found)
    files.write_text(folder / "table.md", text)
    files.write_text(folder / "table.tex", f"% {head}\n{latex(rows)}")
    return text
