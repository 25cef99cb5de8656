"""Tables and picture of the arena: ranks, and verdicts of paired tests.

In a cell (a fleet and a split) a rule is compared by a paired t test over the seeds,
and Holm's correction counts all rules of the cell. Over all cells the differences of a
seed are first averaged, so that the test is over the seeds again: cells share them.
Wilcoxon's signed-rank test over the cells is beside it, for the question whether a rule
would win in another such cell. In one cell it decides nothing: with five seeds its p
is never below 0.0625.

A rule that a race has stopped has no score that can be compared with those of whole
runs: it gets no verdict, takes no part in Holm's correction, and is ranked behind all
that ran to their end, by its accuracy when it was stopped.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from studies import arguments
from studies.verdicts import BETTER, WORSE, signed_rank_p, verdict
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS, holm, p_text, paired_p, spread

if TYPE_CHECKING:
    import matplotlib.axes

BASE = "fedavg"  # what all are compared with
STOPPED = "stopped"


class Lane(NamedTuple):
    """What one run is judged by."""

    # In [0, 1], mean test accuracy of the last tested intervals; 1/C if it diverged.
    final: float
    worst: float  # in [0, 1], mean accuracy of the worst tenth of the clients
    seconds: float  # virtual, until the target was reached; inf: never
    megabytes: float  # sent until then
    stopped: int  # intervals after which it was stopped; −1: it was not
    wall: float  # seconds


class Arena(NamedTuple):
    """All runs there are."""

    cells: list[tuple[str, str]]  # fleet, split
    rules: list[str]
    seeds: int
    target: float
    lanes: Mapping[tuple[int, str, int], Lane]  # (cell, rule, seed) -> run

    def stopped(self) -> Bool[np.ndarray, "cells rules"]:
        """Where a rule was stopped in at least one seed."""
        return np.asarray((self.values("stopped") >= 0).any(axis=2))

    def values(self, name: str) -> Float[np.ndarray, "cells rules S"]:
        """A number of all runs; NaN where there is none."""
        shape = len(self.cells), len(self.rules), self.seeds
        found = np.full(shape, np.nan)
        for (cell, rule, seed), lane in self.lanes.items():
            found[cell, self.rules.index(rule), seed] = getattr(lane, name)
        return found


def compare(
    scores: Float[np.ndarray, "rules n"],
    against: int,
    stopped: Bool[np.ndarray, "rules"],
) -> tuple[list[float], list[str]]:
    """Holm's p values of all rules against one, and verdicts; NaN for stopped ones."""
    gaps = np.where(stopped[:, None], np.nan, scores - scores[against])
    p = [paired_p(gap) if i != against else np.nan for i, gap in enumerate(gaps)]
    p = holm(p).tolist()
    found = [verdict(gap, value) for gap, value in zip(gaps, p, strict=True)]
    return p, [STOPPED if s else v for s, v in zip(stopped, found, strict=True)]


def _verdicts(
    scores: Float[np.ndarray, "rules n"],
    base: int | None,
    stopped: Bool[np.ndarray, "rules"],
) -> list[dict[str, str]]:
    """Each rule's columns against FedAvg, None where it has not run, and the best."""
    top = int(np.where(stopped, -np.inf, scores.mean(axis=1)).argmax())
    p, against = [np.nan] * len(scores), ["–"] * len(scores)
    if base is not None:
        p, against = compare(scores, base, stopped)
    p_top, against_top = compare(scores, top, stopped)
    gaps = ["–"] * len(scores)
    for i in range(len(scores)):
        if base is not None and i != base and not stopped[i]:
            gaps[i] = spread(100 * (scores[i] - scores[base]), "+.2f")
    return [
        {
            "− FedAvg": gaps[i],
            "p": p_text(p[i]),
            "against FedAvg": against[i],
            "p, best": p_text(p_top[i]),
            "against the best": "the best" if i == top else against_top[i],
        }
        for i in range(len(scores))
    ]


def ranks(
    scores: Float[np.ndarray, "cells rules S"], stopped: Bool[np.ndarray, "cells rules"]
) -> Float[np.ndarray, "cells rules"]:
    """Rank of each rule's mean in each cell, 1 the best; equal ones share theirs."""
    from scipy import stats

    mean = scores.mean(axis=2) - stopped  # accuracies are below 1: behind all others
    return stats.rankdata(-mean, axis=1, nan_policy="omit")


def _number(values: Float[np.ndarray, "n"], stopped: bool) -> str:
    """The median; "never" is not known of runs that were stopped."""
    value = float(np.median(values))
    if np.isfinite(value):
        return f"{value:.1f}"
    return "–" if stopped else "never"


def cell_rows(arena: Arena) -> list[dict[str, str]]:
    """A row for each cell and rule, the best of a cell first."""
    final, worst = arena.values("final"), arena.values("worst")
    seconds, sent = arena.values("seconds"), arena.values("megabytes")
    ended, stopped = arena.values("stopped"), arena.stopped()
    order = ranks(final, stopped)
    rows = []
    for cell, (fleet, split) in enumerate(arena.cells):
        there = np.flatnonzero(np.isfinite(final[cell]).all(axis=1))
        if not len(there):
            continue
        scores, out = final[cell, there], stopped[cell, there]
        names = [arena.rules[i] for i in there]
        base = names.index(BASE) if BASE in names else None  # while the study runs
        verdicts = _verdicts(scores, base, out)
        for i in np.argsort(order[cell, there], kind="stable"):
            rule = there[i]
            last = ended[cell, rule].max()
            rows.append(
                {
                    "fleet": fleet,
                    "split": split,
                    "rule": style.name_of(names[i]),
                    "rank": f"{order[cell, rule]:g}",
                    "accuracy, %": spread(100 * scores[i]),
                    **verdicts[i],
                    "worst tenth, %": spread(100 * worst[cell, rule]),
                    "time to target": _number(seconds[cell, rule], bool(out[i])),
                    "MB to target": _number(sent[cell, rule], bool(out[i])),
                    "stopped at": f"{last:g}" if last >= 0 else "–",
                }
            )
    return rows


def _whole_cells(arena: Arena) -> Bool[np.ndarray, "cells"]:
    """The cells in which every rule has run."""
    return np.asarray(np.isfinite(arena.values("final")).all(axis=(1, 2)))


def _counts(
    scores: Float[np.ndarray, "cells rules S"],
    base: int,
    stopped: Bool[np.ndarray, "cells rules"],
) -> list[list[int]]:
    """Of each rule, cells in which it is better than the base, or worse."""
    found = [
        compare(one, base, out)[1] for one, out in zip(scores, stopped, strict=True)
    ]
    return [
        [sum(v[rule] == word for v in found) for word in (BETTER, WORSE)]
        for rule in range(scores.shape[1])
    ]


def rule_rows(arena: Arena) -> list[dict[str, str]]:
    """A row for each rule over all cells, the best mean rank first."""
    seen = _whole_cells(arena)
    if not seen.any():
        return []
    scores, worst, seconds, sent = (
        arena.values(name)[seen] for name in ("final", "worst", "seconds", "megabytes")
    )
    stopped = arena.stopped()[seen]
    out, base = np.asarray(stopped.any(axis=0)), arena.rules.index(BASE)
    order = ranks(scores, stopped).mean(axis=0)
    pooled = scores.mean(axis=0)  # [rules, S]
    verdicts = _verdicts(pooled, base, out)
    means = np.where(out, np.nan, scores.mean(axis=2))  # [cells, rules]
    wilcoxon = holm([signed_rank_p(m - means[:, base]) for m in means.T]).tolist()
    counts = _counts(scores, base, stopped)
    rows = []
    for i in np.argsort(order, kind="stable"):
        better, worse = counts[i]
        reached = f"{100 * np.isfinite(seconds[:, i]).mean():.0f}"
        whole = not out[i]
        rows.append(
            {
                "rule": style.name_of(arena.rules[i]),
                "mean rank": f"{order[i]:.1f}",
                "accuracy, %": spread(100 * pooled[i]) if whole else "–",
                **verdicts[i],
                "p over cells": p_text(wilcoxon[i]),
                "better in": f"{better}",
                "worse in": f"{worse}",
                "stopped in": f"{stopped[:, i].sum()}",
                "worst tenth, %": f"{100 * worst[:, i].mean():.1f}" if whole else "–",
                "runs at target, %": reached if whole else "–",
                "time to target": _number(seconds[:, i].ravel(), not whole),
                "MB to target": _number(sent[:, i].ravel(), not whole),
            }
        )
    return rows


def _about(arena: Arena, about: str) -> str:
    seconds = sum(lane.wall for lane in arena.lanes.values())
    text = f"{about}; {arguments.seeds_text(arena.seeds)}, {len(arena.lanes)} runs"
    text += f", {seconds:.0f} s of training and testing"
    return f"{text}. Accuracy: mean of the last tested intervals, {OVER_SEEDS};"


def write(
    out: pathlib.Path, arena: Arena, about: str, picture: bool
) -> list[pathlib.Path]:
    """Write arena.md, arena_rules.md and the picture, as far as there are results."""
    head = _about(arena, about)
    target = f"{100 * arena.target:g} %"
    test = " p of paired t tests over the seeds with Holm's correction"
    rest = "; worst tenth of the clients, on data of their own or of their classes; "
    rest += f"median virtual seconds and MB to {target}."
    rows, paths = cell_rows(arena), []
    if rows:
        paths += files.write_table(out, "arena", rows, f"{head}{test} in a cell{rest}")
    rows = rule_rows(arena)
    if rows:
        text = f"{head}{test}, each seed's mean over the cells; p over cells:"
        text += " Wilcoxon's signed-rank test against FedAvg; better, worse in: cells,"
        text += " which Holm's correction does not count"
        paths += files.write_table(out, "arena_rules", rows, f"{text}{rest}")
        paths += plot(arena, out / "arena", about) if picture else []
    return paths


@style.styled
def plot(arena: Arena, path: pathlib.Path, about: str) -> list[pathlib.Path]:
    """Plot the rank of each rule in each cell, and where it differs from FedAvg."""
    seen = np.flatnonzero(_whole_cells(arena))
    cells, scores = [arena.cells[i] for i in seen], arena.values("final")[seen]
    stopped = arena.stopped()[seen]
    order = ranks(scores, stopped)
    rows = np.argsort(order.mean(axis=0), kind="stable")
    base = arena.rules.index(BASE)
    verdicts = [
        compare(one, base, out)[1] for one, out in zip(scores, stopped, strict=True)
    ]
    figure, axes = style.figure_of(1.5 + 0.21 * len(rows))
    colors = {"cmap": "RdYlBu_r", "vmin": 1, "vmax": len(rows), "aspect": "auto"}
    axes.imshow(order[:, rows].T, **colors)
    axes.grid(visible=False)
    signs = {BETTER: "▲", WORSE: "▼", STOPPED: "×"}
    for y, rule in enumerate(rows):
        for x in range(len(cells)):
            rank = order[x, rule]
            dark = not 0.15 < (rank - 1) / max(len(rows) - 1, 1) < 0.85
            look = {"ha": "center", "va": "center", "fontsize": 5.5}
            text = f"{rank:.0f}{signs.get(verdicts[x][rule], '')}"
            axes.text(x, y, text, color="white" if dark else "black", **look)
    axes.set_yticks(range(len(rows)), [style.name_of(arena.rules[i]) for i in rows])
    splits = [split for _, split in cells]
    axes.set_xticks(range(len(cells)), splits, rotation=90, fontsize="x-small")
    _fleet_titles(axes, [fleet for fleet, _ in cells])
    signs_text = "▲ better, ▼ worse than FedAvg" + ", × stopped" * bool(stopped.any())
    title = f"Rank by final accuracy; {signs_text}\n{about}"
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
