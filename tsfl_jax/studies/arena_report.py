"""Tables and picture of the arena: ranks, and verdicts of paired tests.

In a cell (a fleet and a split) a rule is compared by a paired t test over the seeds,
and Holm's correction counts all rules of the cell. Over all cells the differences of a
seed are first averaged, so that the test is over the seeds again: cells share them.
Wilcoxon's signed-rank test over the cells is beside it, for the question whether a rule
would win in another such cell. In one cell it can tell nothing: with five seeds its p
is never below 0.0625.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    holm,
    p_text,
    paired_p,
    signed_rank_p,
    spread,
)

if TYPE_CHECKING:
    import matplotlib.axes

BASE = "fedavg"  # what all are compared with
LEVEL = 0.05
BETTER, WORSE, OPEN, SAME = "better", "worse", "cannot be told", "identical"


class Lane(NamedTuple):
    """What one run is judged by."""

    final: float  # in [0, 1], mean test accuracy of the last tested intervals
    worst: float  # in [0, 1], mean accuracy of the worst tenth of the clients
    seconds: float  # virtual, until the target was reached; inf: never
    megabytes: float  # sent until then
    stopped: int  # intervals after which it was stopped; −1: it was not
    trained: float  # share of its local iterations that were run
    wall: float  # seconds


class Arena(NamedTuple):
    """All runs there are."""

    cells: list[tuple[str, str]]  # fleet, split
    rules: list[str]
    seeds: int
    target: float
    lanes: Mapping[tuple[int, str, int], Lane]  # (cell, rule, seed) -> run

    def values(self, name: str) -> Float[np.ndarray, "cells rules S"]:
        """A number of all runs; NaN where there is none."""
        shape = len(self.cells), len(self.rules), self.seeds
        found = np.full(shape, np.nan)
        for (cell, rule, seed), lane in self.lanes.items():
            found[cell, self.rules.index(rule), seed] = getattr(lane, name)
        return found


def name_of(rule: str) -> str:
    """The written name of a rule."""
    return style.NAMES.get(rule, rule)


def verdict(differences: Float[np.ndarray, "n"], p: float) -> str:
    """What a corrected p value says about the mean of paired differences."""
    if not np.isfinite(p):
        return "–"
    if not differences.any():
        return SAME
    if p >= LEVEL:
        return OPEN
    return BETTER if differences.mean() > 0 else WORSE


def compare(
    scores: Float[np.ndarray, "rules n"], against: int
) -> tuple[list[float], list[str]]:
    """Holm's p values of all rules against one, and verdicts."""
    gaps = scores - scores[against]
    p = [paired_p(gap) if i != against else np.nan for i, gap in enumerate(gaps)]
    p = holm(p)
    return p, [verdict(gap, value) for gap, value in zip(gaps, p, strict=True)]


def ranks(scores: Float[np.ndarray, "cells rules S"]) -> Float[np.ndarray, "cells R"]:
    """Rank of each rule's mean in each cell, 1 the best; equal ones share theirs."""
    from scipy import stats

    mean = scores.mean(axis=2)
    return stats.rankdata(-mean, axis=1, nan_policy="omit")


def _number(value: float, form: str = ".1f") -> str:
    return f"{value:{form}}" if np.isfinite(value) else "never"


def cell_rows(arena: Arena) -> list[dict[str, str]]:
    """A row for each cell and rule, the best of a cell first."""
    final, worst = arena.values("final"), arena.values("worst")
    seconds, sent = arena.values("seconds"), arena.values("megabytes")
    stopped, order = arena.values("stopped"), ranks(final)
    rows = []
    for cell, (fleet, split) in enumerate(arena.cells):
        there = np.flatnonzero(np.isfinite(final[cell]).all(axis=1))
        if not len(there):
            continue
        scores = final[cell, there]
        names = [arena.rules[i] for i in there]
        base = names.index(BASE) if BASE in names else int(scores.mean(1).argmax())
        p, against = compare(scores, base)
        top = int(scores.mean(axis=1).argmax())
        p_top, against_top = compare(scores, top)
        for i in np.argsort(order[cell, there], kind="stable"):
            rule = there[i]
            ended = stopped[cell, rule].max()
            gap = 100 * (scores[i] - scores[base])
            rows.append(
                {
                    "fleet": fleet,
                    "split": split,
                    "rule": name_of(names[i]),
                    "rank": f"{order[cell, rule]:g}",
                    "accuracy, %": spread(100 * scores[i]),
                    "− FedAvg": "–" if i == base else spread(gap, "+.2f"),
                    "p": p_text(p[i]),
                    "against FedAvg": against[i],
                    "p, best": p_text(p_top[i]),
                    "against the best": "the best" if i == top else against_top[i],
                    "worst tenth, %": spread(100 * worst[cell, rule]),
                    "time to target": _number(float(np.median(seconds[cell, rule]))),
                    "MB to target": _number(float(np.median(sent[cell, rule]))),
                    "stopped at": f"{ended:g}" if ended >= 0 else "–",
                }
            )
    return rows


def _whole_cells(arena: Arena) -> Float[np.ndarray, "cells rules S"]:
    """Scores of the cells in which every rule has run."""
    final = arena.values("final")
    return final[np.isfinite(final).all(axis=(1, 2))]


def _counts(scores: Float[np.ndarray, "cells rules S"], base: int) -> list[list[int]]:
    """Of each rule, cells in which it is better than the base, worse, or neither."""
    found = [compare(one, base)[1] for one in scores]
    return [
        [sum(v[rule] == word for v in found) for word in (BETTER, WORSE)]
        for rule in range(scores.shape[1])
    ]


def rule_rows(arena: Arena) -> list[dict[str, str]]:
    """A row for each rule over all cells, the best mean rank first."""
    scores = _whole_cells(arena)
    if not len(scores):
        return []
    base = arena.rules.index(BASE)
    order = ranks(scores).mean(axis=0)
    pooled = scores.mean(axis=0)  # [rules, S]
    top = int(pooled.mean(axis=1).argmax())
    (p, against), (p_top, against_top) = compare(pooled, base), compare(pooled, top)
    means = scores.mean(axis=2)  # [cells, rules]
    wilcoxon = holm([signed_rank_p(m - means[:, base]) for m in means.T])
    counts = _counts(scores, base)
    final = arena.values("final")
    seen = np.isfinite(final).all(axis=(1, 2))
    worst, seconds, sent = (
        arena.values(name)[seen] for name in ("worst", "seconds", "megabytes")
    )
    rows = []
    for i in np.argsort(order, kind="stable"):
        better, worse = counts[i]
        gap = 100 * (pooled[i] - pooled[base])
        reached = np.isfinite(seconds[:, i]).mean()
        rows.append(
            {
                "rule": name_of(arena.rules[i]),
                "mean rank": f"{order[i]:.1f}",
                "accuracy, %": spread(100 * pooled[i]),
                "− FedAvg": "–" if i == base else spread(gap, "+.2f"),
                "p": p_text(p[i]),
                "against FedAvg": "–" if i == base else against[i],
                "p, best": p_text(p_top[i]),
                "against the best": "the best" if i == top else against_top[i],
                "p over cells": p_text(wilcoxon[i]),
                "better in": f"{better}",
                "worse in": f"{worse}",
                "worst tenth, %": f"{100 * worst[:, i].mean():.1f}",
                "runs at target, %": f"{100 * reached:.0f}",
                "time to target": _number(float(np.median(seconds[:, i]))),
                "MB to target": _number(float(np.median(sent[:, i]))),
            }
        )
    return rows


def saved(arena: Arena) -> tuple[float, float]:
    """Share of the local iterations that racing left out, and seconds of all runs."""
    lanes = arena.lanes.values()
    return 1 - float(np.mean([x.trained for x in lanes])), sum(x.wall for x in lanes)


def _about(arena: Arena, about: str) -> str:
    share, seconds = saved(arena)
    text = f"{about}; {arena.seeds} seeds, {len(arena.lanes)} runs, {seconds:.0f} s of"
    text += " training and testing"
    if share > 0:
        text += f", {100 * share:.0f} % of the local iterations left out by stopping"
    return f"{text}. Accuracy: mean of the last tested intervals, {OVER_SEEDS};"


def write(
    out: pathlib.Path, arena: Arena, about: str, picture: bool
) -> list[pathlib.Path]:
    """Write arena.md, arena_rules.md and the picture, as far as there are results."""
    head = _about(arena, about)
    target = f"{100 * arena.target:g} %"
    test = " p of paired t tests over the seeds with Holm's correction"
    rest = "; worst tenth of the clients on data of their classes; median time (in"
    rest += f" intervals) and MB to {target}."
    rows, paths = cell_rows(arena), []
    if rows:
        paths += files.write_table(out, "arena", rows, f"{head}{test} in a cell{rest}")
    rows = rule_rows(arena)
    if rows:
        text = f"{head}{test}, each seed's mean over the cells; p over cells:"
        text += " Wilcoxon's signed-rank test against FedAvg; better, worse in: cells"
        paths += files.write_table(out, "arena_rules", rows, f"{text}{rest}")
        paths += plot(arena, out / "arena", about) if picture else []
    return paths


@style.styled
def plot(arena: Arena, path: pathlib.Path, about: str) -> list[pathlib.Path]:
    """Plot the rank of each rule in each cell, and where it differs from FedAvg."""
    scores = arena.values("final")
    seen = np.flatnonzero(np.isfinite(scores).all(axis=(1, 2)))
    cells, scores = [arena.cells[i] for i in seen], scores[seen]
    order = ranks(scores)
    rows = np.argsort(order.mean(axis=0), kind="stable")
    base = arena.rules.index(BASE)
    verdicts = [compare(one, base)[1] for one in scores]
    figure, axes = style.figure_of(1.5 + 0.21 * len(rows))
    colors = {"cmap": "RdYlBu_r", "vmin": 1, "vmax": len(rows), "aspect": "auto"}
    axes.imshow(order[:, rows].T, **colors)
    axes.grid(visible=False)
    signs = {BETTER: "▲", WORSE: "▼"}
    for y, rule in enumerate(rows):
        for x in range(len(cells)):
            rank = order[x, rule]
            dark = not 0.15 < (rank - 1) / max(len(rows) - 1, 1) < 0.85
            look = {"ha": "center", "va": "center", "fontsize": 5.5}
            text = f"{rank:.0f}{signs.get(verdicts[x][rule], '')}"
            axes.text(x, y, text, color="white" if dark else "black", **look)
    axes.set_yticks(range(len(rows)), [name_of(arena.rules[i]) for i in rows])
    splits = [split for _, split in cells]
    axes.set_xticks(range(len(cells)), splits, rotation=90, fontsize="x-small")
    _fleet_titles(axes, [fleet for fleet, _ in cells])
    title = f"Rank by final accuracy; ▲ better, ▼ worse than FedAvg\n{about}"
    figure.suptitle(style.escape(title), fontsize="small")
    return style.save_both(figure, path)


def _fleet_titles(axes: "matplotlib.axes.Axes", fleets: Sequence[str]) -> None:
    """The fleets above their columns, with a line between two of them."""
    first = [i for i, f in enumerate(fleets) if i == 0 or fleets[i - 1] != f]
    for start, end in zip(first, [*first[1:], len(fleets)], strict=True):
        axes.text(
            (start + end - 1) / 2, -0.9, fleets[start], ha="center", fontsize="x-small"
        )
        if start:
            axes.axvline(start - 0.5, color="black", linewidth=1.2)
