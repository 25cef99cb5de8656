"""``tsfl report --table``: the groups of some runs as a table for a paper.

A group is the runs that differ in their seeds only. Differences to a base are paired by
seed; Holm's correction counts all groups but the base.
"""

import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tsfl_jax.config import SEEDS
from tsfl_jax.report import files, statistics, table
from tsfl_jax.report.collect import Run, results_of
from tsfl_jax.report.statistics import confidence_interval, spread_of_known
from tsfl_jax.types import UserError, nearest

# Characters that LaTeX reads otherwise, or that its oldest fonts lack.
_TEX = {char: rf"\{char}" for char in "&%$#_{}"}
_TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_TEX |= {"\\": r"\textbackslash{}", "−": "$-$", "–": "--", "±": r"$\pm$"}
_TEX |= {"×": r"$\times$"} | {char: f"${char}$" for char in "<>|"}


def _by_seed(runs: Sequence[Run], score: str, target: float | None) -> pd.DataFrame:
    """A score ``[seeds, groups]``, NaN where a group has no run or lost it."""
    seeds = [str([run.settings.get(n) for n in SEEDS]) for run in runs]
    names = [run.name for run in runs]
    pairs = pd.MultiIndex.from_arrays([seeds, names])
    if pairs.has_duplicates:
        name = pairs[pairs.duplicated()][0][1]
        raise UserError(f"{name}: two runs of one seed; give each folder once")
    rows = [results_of(run, target) for run in runs]
    scores = [None if statistics.has_diverged(row) else row.get(score) for row in rows]
    values = pd.Series(scores, pairs, dtype=float)
    if values.isna().all():
        names = [*dict.fromkeys(itertools.chain(*rows))]
        expected = f"expected one of {', '.join(names) or 'those of finished runs'}"
        problem = f"no run has such a score{nearest(score, names)}"
        raise UserError(f"--score={score}: {problem}; {expected}")
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


def _numbers(
    scores: pd.DataFrame, base: str, column: table.Column
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per group of means, and with a base paired differences; and as text."""
    _, comma, unit = column.head.partition(", ")
    gap_head = f"difference{comma}{unit.replace('%', 'points')}"
    numbers: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for name in scores:
        values = scores[name].dropna().to_numpy()
        mean, half = confidence_interval(values)
        text = {"group": name, "runs": len(values)}
        row = text | {"mean": mean, "half": half}
        text[column.head] = spread_of_known(values, column.form, column.is_time)
        if column.is_time:
            row["reached"] = int(np.isfinite(values).sum())
        if base:
            both = scores[[name, base]].notna().all(axis=1) & (name != base)
            gaps = np.asarray(scores[name] - scores[base])[both]
            gaps = gaps[: len(gaps) * np.isfinite(gaps).all()]  # none where one is inf
            gap, error = confidence_interval(gaps)
            row |= {"difference": gap, "difference_half": error}
            row |= {"p": statistics.paired_p(gaps), "pairs": len(gaps)}
            text[gap_head] = spread_of_known(gaps, f"+{column.form}")
        numbers.append(row)
        texts.append(text)
    frames = pd.DataFrame(numbers), pd.DataFrame(texts)
    if base:
        frames[0]["holm"] = statistics.holm(frames[0]["p"].to_list())
        frames[1]["p (Holm)"] = frames[0]["holm"].map(statistics.p_text)
    return frames


def _escaped(text: object) -> str:
    """Text for LaTeX, with the signs of numbers in math mode."""
    minus = re.sub(r"(?<![\w.])-(?=[\d.])", "−", str(text))
    return minus.translate(str.maketrans(_TEX))


def latex(
    rows: pd.DataFrame,
    left: int = 1,
    compared: Iterable[str] = (),
    caption: str = "",
    label: str = "",
) -> str:
    """The table for LaTeX with booktabs.

    Args:
      rows: of text.
      left: how many columns are aligned to the left.
      compared: columns of means, of which the highest in a row is bold.
      caption: of a table environment; "": a tabular alone.
      label: of the table environment.
    """
    means = rows[[name for name in compared if name in rows]]
    means = means.apply(lambda cells: cells.str.split().str[0].replace("–", "nan"))
    means = means.astype(float)
    highest = means.eq(means.max(axis=1), axis=0)
    highest &= highest.cumsum(axis=1) == 1  # one of those that are equal
    marks = np.where(highest, "textbf:--rwrap", "")
    look: Any = rows.style.hide().format(_escaped).format_index(_escaped, axis=1)
    look = look.apply(lambda _: marks, axis=None, subset=[*means])
    form = "l" * left + "r" * (rows.shape[1] - left)
    options: dict[str, Any] = {"column_format": form, "hrules": True}
    if caption:
        options |= {"caption": _escaped(caption), "position_float": "centering"}
        options |= {"label": label}
    return look.to_latex(**options)


def write(
    runs: Sequence[Run],
    folder: pathlib.Path,
    score: str,
    base: str,
    target: float | None = None,
) -> str:
    """Write table.csv, .md and .tex into a folder.

    Args:
      runs: finished ones, named after their groups; those that diverged are in no mean.
      folder: where to write.
      score: a name of `collect.results_of`, in the unit of its `table.Column`.
      base: a group that the others are compared with, by its name, a setting or value
        in it, or a part of its name that no other has; "": no differences.
      target: test accuracy in (0, 1] of the score "time_to_target".

    Returns:
      The Markdown. A row of table.csv has of each group: runs, mean, half (of the 95 %
      interval), reached (of a time: by how many), and with a base: difference, its
      half, pairs, p (paired t test), holm.

    Raises:
      UserError: no run has this score, a group has two runs of a seed, or there is no
        such base, or several.
    """
    column = table.column_of(score, target)
    scores = column.scale * _by_seed(runs, score, target)
    base = base and _base_of(list(scores), base)
    numbers, text = _numbers(scores, base, column)
    head = f"{column.head[0].upper()}{column.head[1:]}: {statistics.OVER_SEEDS}."
    if base:
        head += f" Differences to {base} are paired by seed."
    lost = sum(statistics.has_diverged(run.facts) for run in runs)
    head += f" Left out because they diverged: {lost}." if lost else ""
    tex = latex(text, caption=head, label=f"tab:{score}")
    tex = f"% \\usepackage{{booktabs}}\n{tex}"
    files.write_table(folder, "table", text, head, csv=numbers, tex=tex)
    return f"{head}\n\n{files.markdown(text)}"
