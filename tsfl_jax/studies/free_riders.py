"""Accuracy of aggregation rules without free riders, and with each kind of them."""

import pathlib
from typing import IO

import numpy as np
from jaxtyping import Float

from tsfl_jax.config import Config, get
from tsfl_jax.experiment import sweeps
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    confidence_interval,
    curves_of,
    diverged_note,
    spread,
)
from tsfl_jax.studies import settings

ALGORITHMS = ("dms", "fedavg", "fednova", "median", "trimmed_mean", "krum")
KINDS = {  # label → schedule.free_riding; None: all clients are honest
    "honest": None,
    "claims more": "claim",
    "echoes the model": "echo",
    "comes and goes": "visit",
}
# Settings that a run of the study sets itself.
CHANGED = frozenset({"algorithm", "schedule.free_riders", "schedule.free_riding"})
_HATCHES = ("", "//", "..", "xx")
_COLORS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73")


def points(free_riders: int, seeds: int) -> list[dict]:
    """Lanes: rule by rule, kind by kind, seed by seed."""
    return [
        {
            "algorithm": algorithm,
            "schedule.free_riders": 0 if kind is None else free_riders,
            "schedule.free_riding": kind or "claim",
            "seed": seed,
        }
        for algorithm in ALGORITHMS
        for kind in KINDS.values()
        for seed in range(seeds)
    ]


def run_free_riders(
    config: Config, seeds: int, workdir: pathlib.Path, stream: IO[str]
) -> tuple[Float[np.ndarray, "A K S"], str]:
    """Best test accuracy in [0, 1] by rule, kind and seed; and what to say of them.

    A quarter of the clients are free riders.
    """
    count = max(get(config, "num_clients") // 4, 1)
    lanes = points(count, seeds)
    result = sweeps.run(config, lanes, workdir=workdir, stream=stream)
    best = np.nanmax(curves_of(result.history, settings.CLASSES), axis=-1)
    note = diverged_note(result.history)
    about = f"{count} free riders" + f", {note}" * bool(note)
    return best.reshape(len(ALGORITHMS), len(KINDS), seeds), about


def free_rider_rows(best: Float[np.ndarray, "A K S"]) -> list[dict[str, str]]:
    """The table in %; changes against honest clients are paired by seed."""
    table = []
    for algorithm, one in zip(ALGORITHMS, 100 * best, strict=True):
        row = {"rule": style.NAMES[algorithm]}
        for label, values in zip(KINDS, one, strict=True):
            row[label] = spread(values)
            if label != "honest":
                row[f"{label}, change"] = spread(values - one[0], "+.2f")
        table.append(row)
    return table


@style.styled
def plot_free_riders(
    best: Float[np.ndarray, "A K S"], path: pathlib.Path, title: str
) -> list[pathlib.Path]:
    """Plot grouped bars: a group per rule, a bar per kind of free rider."""
    figure, plot = style.figure_of(3.2)
    width = 0.8 / len(KINDS)
    for index, label in enumerate(KINDS):
        mean, half = confidence_interval(100 * best[:, index].T)
        x = np.arange(len(ALGORITHMS)) + (index - (len(KINDS) - 1) / 2) * width
        look = {"color": _COLORS[index], "hatch": _HATCHES[index], "linewidth": 0.6}
        look |= {"edgecolor": "#333333", "capsize": 2}
        plot.bar(x, mean, width, yerr=half, label=label, **look)
    plot.set_xticks(range(len(ALGORITHMS)), [style.NAMES[name] for name in ALGORITHMS])
    plot.set_ylabel("best test accuracy in %")
    plot.set_ylim(0, 112)
    look = {"fontsize": "small", "loc": "upper center", "handlelength": 2}
    plot.legend(ncols=len(KINDS), **look)
    plot.set_title(style.title(title))
    return style.save_both(figure, path)


def write_free_riders(
    best: Float[np.ndarray, "A K S"], folder: pathlib.Path, about: str
) -> list[pathlib.Path]:
    """Write riders.md, .csv, .png and .pdf."""
    table = free_rider_rows(best)
    text = f"{about}. Highest test accuracy in %: {OVER_SEEDS}; changes are paired by "
    text += "seed."
    paths = files.write_table(folder, "riders", table, text)
    return paths + plot_free_riders(best, folder / "riders", about)
