"""``tsfl report --table``: the groups of some runs as a table for a paper.

A group is the runs that differ in their seeds only. Differences to a base are paired by
seed; Holm's correction counts all groups but the base.
"""

import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tsfl_jax.config import SEEDS
from tsfl_jax.report import files, table
from tsfl_jax.report.collect import Run
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    confidence_interval,
    has_diverged,
    holm,
    p_text,
    paired_p,
    spread,
)
from tsfl_jax.types import UserError

_PERCENT = "accuracy"  # scores in [0, 1] that a table has in percent


def _by_seed(runs: Sequence[Run], score: str) -> pd.DataFrame:
    """A score ``[seeds, groups]``, NaN where a group has no run or lost it."""
    seeds = [str([run.settings.get(n) for n in SEEDS]) for run in runs]
    names = [run.name for run in runs]
    pairs = pd.MultiIndex.from_arrays([seeds, names])
    if pairs.has_duplicates:
        name = pairs[pairs.duplicated()][0][1]
        raise UserError(f"{name}: two runs of one seed; give each folder once")
    key = score if score in table.SCORES else ""  # others are settings or texts
    scores = [None if has_diverged(run.facts) else run.facts.get(key) for run in runs]
    values = (100 if _PERCENT in score else 1) * pd.Series(scores, pairs, dtype=float)
    if values.isna().all():
        expected = f"expected one of {', '.join(table.SCORES)}"
        raise UserError(f"--score={score}: no run has such a score; {expected}")
    return values.unstack(1).loc[[*dict.fromkeys(seeds)], [*dict.fromkeys(names)]]


def _base_of(groups: Sequence[str], text: str) -> str:
    """The only group of this name, setting or value, or with this text in its name."""
    matches = [name for name in groups if text in (name, *re.split(", |=", name))]
    matches = matches or [name for name in groups if text in name]
    if len(matches) != 1:
        problem = "several groups have" if matches else "no group has"
        raise UserError(
            f"--base={text}: {problem} it in its name; there are {'; '.join(groups)}"
        )
    return matches[0]


def _numbers(scores: pd.DataFrame, base: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per group of means, and with a base paired differences; and as text."""
    numbers: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for name in scores:
        values = scores[name].dropna().to_numpy()
        mean, half = confidence_interval(values)
        row = {"group": name, "runs": len(values), "mean": mean, "half": half}
        text = {"group": name, "runs": len(values), "mean": "–"}
        if len(values):
            text["mean"] = spread(values)
        if base:
            gaps = (scores[name] - scores[base]).dropna().to_numpy()
            gaps = gaps[: len(gaps) * (name != base)]
            gap, error = confidence_interval(gaps)
            row |= {"difference": gap, "difference_half": error}
            row |= {"p": paired_p(gaps), "pairs": len(gaps)}
            text["difference"] = spread(gaps, "+.2f") if len(gaps) else "–"
        numbers.append(row)
        texts.append(text)
    frames = pd.DataFrame(numbers), pd.DataFrame(texts)
    if base:
        frames[0]["holm"] = holm(frames[0]["p"].to_list())
        frames[1]["p (Holm)"] = frames[0]["holm"].map(p_text)
    return frames


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


def write(runs: Sequence[Run], folder: pathlib.Path, score: str, base: str) -> str:
    """Write table.csv, .md and .tex into a folder.

    Args:
      runs: finished ones, named after their groups; those that diverged are in no mean.
      folder: where to write.
      score: a name of `table.SCORES`; accuracies are in percent.
      base: a group that the others are compared with, by its name, a setting or value
        in it, or a part of its name that no other has; "": no differences.

    Returns:
      The Markdown. A row of table.csv has of each group: runs, mean, half (of the 95 %
      interval), and with a base: difference, its half, pairs, p (paired t test), holm.

    Raises:
      UserError: no run has this score, a group has two runs of a seed, or there is no
        such base, or several.
    """
    scores = _by_seed(runs, score)
    base = base and _base_of(list(scores), base)
    numbers, text = _numbers(scores, base)
    head = f"{score}{' in %' * (_PERCENT in score)}: {OVER_SEEDS}."
    if base:
        head += f" Differences to {base} are paired by seed."
    lost = sum(has_diverged(run.facts) for run in runs)
    head += f" {lost} runs that diverged are left out." if lost else ""
    tex = f"% {head}\n{latex(text)}"
    files.write_table(folder, "table", text, head, csv=numbers, tex=tex)
    return f"{head}\n\n{files.markdown(text)}"
