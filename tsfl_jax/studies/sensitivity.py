"""What the paper leaves open: under which choices DMS helps, and by how much.

One case is run with one choice changed at a time. DMS and FedAvg have the same clients,
data and schedule in every run, so their difference is paired by seed.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import IO, NamedTuple

import numpy as np
from jaxtyping import Float

from tsfl_jax.config import Config, flat
from tsfl_jax.experiment import sweeps
from tsfl_jax.report import style
from tsfl_jax.report.statistics import (
    confidence_interval,
    curves_of,
    diverged_note,
    holm,
    p_text,
    paired_p,
    spread,
    verdict,
)
from tsfl_jax.studies import settings


class Choice(NamedTuple):
    """One way to fill a gap in the paper."""

    open: str  # what the paper leaves open
    choice: str  # what is done here
    changes: dict  # the settings that do it
    only_dms: bool = False  # no effect on FedAvg: its standard run is used


def given_coupling(
    lr: float, num_clients: int, coupling: float, longest: int = 4
) -> dict:
    """Settings under which Corollary 1's c = ηL(H−1)G²/(2Nσ²) is this number.

    Args:
      lr: η.
      num_clients: N.
      coupling: c > 0.
      longest: H, which is 4 in every interval of Case 1.
    """
    smoothness = 2 * num_clients * coupling / (lr * (longest - 1))
    return {
        "dms.smoothness": smoothness,
        "dms.grad_sq_norm": 1.0,
        "dms.grad_variance": 1.0,
    }


def choices(lr: float, num_clients: int) -> list[Choice]:
    """All choices, for this η and N; the first one is the standard."""
    split, kind = "non-IID split", "partition.kind"
    found = [
        Choice("–", "standard: momentum 0.9, Dirichlet(0.5), c estimated", {}),
        Choice("momentum", "0", {"momentum": 0.0}),
        Choice(split, "Dirichlet(0.1)", {"partition.alpha": 0.1}),
        Choice(split, "Dirichlet(1)", {"partition.alpha": 1.0}),
        Choice(split, "IID", {kind: "iid"}),
        Choice(split, "shards, 2 classes per client", {kind: "shards"}),
    ]
    found += [
        Choice("L, G², σ²", f"c = {c:g}", given_coupling(lr, num_clients, c), True)
        for c in (0.001, 0.003, 0.01, 0.03, 0.1)
    ]
    return [
        *found,
        Choice("weight limit", "θ = 2", {"dms.weight_limit": 2.0}, True),
        Choice("iteration", "one mini-batch", {"schedule.iteration": "step"}),
    ]


# Settings that a run of the study sets itself, or on which c = … depends.
CHANGED = frozenset(name for c in choices(1.0, 1) for name in c.changes) | {
    *("dms.coupling", "dms.unit"),
    *("schedule.kind", "schedule.tau", "schedule.tau_groups", "schedule.trace"),
}


def points(base: dict, several: Sequence[Choice], seeds: int) -> list[dict]:
    """Lanes of one sweep: DMS with every choice, FedAvg where it makes a difference.

    Args:
      base: settings of the standard; each lane sets all that any choice changes.
      several: the choices.
      seeds: lanes of one algorithm.
    """
    standard = {name: base[name] for c in several for name in c.changes}
    return [
        standard | choice.changes | {"algorithm": algorithm, "seed": seed}
        for choice in several
        for algorithm in (("dms",) if choice.only_dms else ("dms", "fedavg"))
        for seed in range(seeds)
    ]


class ChoiceResult(NamedTuple):
    """Best test accuracies in [0, 1] under one choice, by seed."""

    choice: Choice
    fedavg: Float[np.ndarray, "S"]
    dms: Float[np.ndarray, "S"]


def by_choice(
    several: Sequence[Choice], best: Float[np.ndarray, "lanes"], seeds: int
) -> list[ChoiceResult]:
    """The lanes' results, in the order of `points`, by choice."""
    parts = iter(np.reshape(best, (-1, seeds)))
    found: list[ChoiceResult] = []
    for choice in several:
        dms = next(parts)
        fedavg = found[0].fedavg if choice.only_dms else next(parts)
        found.append(ChoiceResult(choice, fedavg, dms))
    return found


def run_choices(
    config: Config, seeds: int, workdir: pathlib.Path, stream: IO[str]
) -> tuple[list[ChoiceResult], str]:
    """Run or reuse the study: the results, and what to say of them."""
    standard = flat(dataclasses.asdict(config))
    several = choices(standard["lr"], standard["num_clients"])
    lanes = points(standard, several, seeds)
    result = sweeps.run(config, lanes, workdir=workdir, stream=stream)
    best = np.nanmax(curves_of(result.history, settings.CLASSES), axis=-1)
    note = diverged_note(result.history)
    minutes = sum(row["seconds"] for row in result.rows) / 60
    about = f"training time {minutes:.1f} min" + f", {note}" * bool(note)
    return by_choice(several, best, seeds), about


def choice_rows(several: Sequence[ChoiceResult]) -> list[dict[str, str]]:
    """The table as text, one row per choice; Holm's correction counts all of them."""
    found = []
    gains = [100 * (dms - fedavg) for _, fedavg, dms in several]
    corrected = holm([paired_p(gain) for gain in gains])
    for (choice, fedavg, dms), gain, p in zip(several, gains, corrected, strict=True):
        found.append(
            {
                "open in the paper": choice.open,
                "choice": choice.choice,
                "FedAvg, %": spread(100 * fedavg),
                "DMS, %": spread(100 * dms),
                "DMS − FedAvg, paired": spread(gain, "+.2f"),
                "p": p_text(p),
                "verdict": verdict(gain, p, ("DMS helps", "DMS hurts")),
                "seeds": str(len(gain)),
            }
        )
    return found


@style.styled
def plot_choices(
    several: Sequence[ChoiceResult], path: pathlib.Path
) -> list[pathlib.Path]:
    """Plot differences with their confidence intervals, one line per choice."""
    figure, axes = style.figure_of(0.8 + 0.25 * len(several))
    for row, (_, fedavg, dms) in enumerate(several):
        gain, half = confidence_interval(100 * (dms - fedavg))
        look = {"fmt": "o", "color": "#0072B2", "markersize": 4}
        axes.errorbar(gain, row, xerr=half, **look)
    axes.axvline(0, color="#333333", linewidth=1)
    axes.set_xscale("symlog", linthresh=1, linscale=2)  # tenths of a point and tens
    axes.xaxis.set_major_formatter("{x:g}")
    names = [
        f"{choice.open}: {choice.choice}" if choice.changes else "standard"
        for choice, _, _ in several
    ]
    axes.set_yticks(range(len(names)), [style.escape(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("DMS − FedAvg in points of best accuracy, 95 % confidence")
    figure.suptitle("What the paper leaves open: one choice changed at a time")
    return style.save_both(figure, path)
