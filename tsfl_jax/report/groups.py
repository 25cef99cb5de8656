"""Runs of a report in groups that differ in more than the seed, and their results."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report import collect
from tsfl_jax.report.collect import Run, Source
from tsfl_jax.report.statistics import DIVERGED, STOPPED, left_out
from tsfl_jax.report.style import NAMES
from tsfl_jax.rules import AGGREGATORS

_STEP = 0.05  # the target accuracy is a multiple of it
_BYTES = 4  # of a parameter that is sent


class Group(NamedTuple):
    """Runs that differ in their seed only."""

    name: str
    runs: list[Run]
    look: tuple[int, int] = (0, 0)  # color and dashes, see `vector.look`


class Report(NamedTuple):
    """All that the sections of a page are made of."""

    sources: list[Source]
    groups: list[Group]
    target: float | None  # accuracy in (0, 1]; None: nothing was measured
    chosen: bool  # the target was chosen here


def grouped(sources: Sequence[Source]) -> list[Group]:
    """Groups of runs with the same name and settings, except for the seed."""
    found: dict[tuple, list[Run]] = {}
    for source in sources:
        prefix = f"{source.folder.resolve().name}: " if len(sources) > 1 else ""
        prefix = prefix if source.kind != collect.RUN else ""
        for run in source.runs:
            settings = {n: v for n, v in run.settings.items() if n not in SEEDS}
            key = (prefix + run.name, str(sorted(settings.items(), key=str)))
            found.setdefault(key, []).append(run)
    groups: list[Group] = []
    names: dict[str, int] = {}
    for (name, _), runs in found.items():
        names[name] = names.get(name, 0) + 1
        number = f" ({names[name]})" if names[name] > 1 else ""
        groups.append(Group(NAMES.get(name, name) + number, runs))
    return [
        group._replace(look=look)
        for group, look in zip(groups, _looks(groups), strict=True)
    ]


def _looks(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Color and dashes of each group.

    Where the groups differ in two settings, the color is one and the dashes the other.
    """
    settings = [group.runs[0].settings for group in groups]
    names = dict.fromkeys(n for own in settings for n in own if n not in SEEDS)
    texts = {name: [str(own.get(name)) for own in settings] for name in names}
    values = {name: list(dict.fromkeys(texts[name])) for name in names}
    differ = [name for name in names if len(values[name]) > 1]
    differ.sort(key=lambda name: -len(values[name]))
    alone = [(index, index) for index in range(len(groups))]
    if len(differ) != 2:
        return alone
    places = [[values[name].index(text) for text in texts[name]] for name in differ]
    looks = list(zip(*places, strict=True))
    few = len(values[differ[0]]) <= 7 and len(values[differ[1]]) <= 5
    return looks if few and len(set(looks)) == len(looks) else alone


def seen_values(
    run: Run, column: str = "test_accuracy"
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values of what was measured."""
    values = run.series.get(column, np.zeros(0))
    index = np.flatnonzero(np.isfinite(values))
    return index, values[index]


def best_target(groups: Sequence[Group]) -> float | None:
    """The highest multiple of 5 % that half of the runs reach."""
    best = [score(run, "best_test_accuracy") for group in groups for run in group.runs]
    best = [value for value in best if math.isfinite(value)]
    if not best:
        return None
    steps = math.floor(float(np.median(best)) / _STEP + 1e-9)
    return round(steps * _STEP, 2) if steps else None


def score(run: Run, name: str) -> float:
    """A result of a run; NaN if it is not known."""
    value = run.facts.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def lost(run: Run) -> bool:
    """Whether all models of a run became infinite or NaN."""
    return left_out(run.facts) == DIVERGED


def stopped(run: Run) -> bool:
    """Whether a race stopped a run before its end."""
    return left_out(run.facts) == STOPPED


def moved_bytes(run: Run) -> float:
    """Bytes of the models to and from the clients: 2 · 4 · parameters · deliveries.

    Twice as many where control variates are sent, too, see `bytes_sent`. NaN where the
    number of parameters or the deliveries are not known.
    """
    parameters = run.facts.get("num_parameters")
    if run.tau is None or not isinstance(parameters, int):
        return math.nan
    # A free rider may have weight without any work.
    there = run.tau > 0 if run.rho is None else (run.tau > 0) | (run.rho > 0)
    count = there if run.deliveries is None else run.deliveries
    return bytes_sent(run.facts.get("algorithm", ""), parameters) * int(count.sum())


def bytes_sent(rule: str, parameters: int) -> float:
    """Bytes of one delivery and its download, float32; SCAFFOLD's variates as well."""
    sends_more = rule in AGGREGATORS and AGGREGATORS[rule].correction is not None
    return 2.0 * _BYTES * (2 if sends_more else 1) * parameters
