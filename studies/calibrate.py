"""``python -m studies.calibrate``: which variant gives the paper's own baselines.

What the paper leaves open is chosen by FedAvg, FedProx and FedAsync alone: a variant is
scored by how far they are from Tables 1 and 2. DMS is not run until that is decided;
then it is, with FedAvg, under the two nearest variants; what concerns DMS alone is
varied under the nearest.

Variants are run in stages: all of them with little work, the nearest of each stage with
more (successive halving: Jamieson and Talwalkar, "Non-stochastic Best Arm
Identification and Hyperparameter Optimization", AISTATS 2016), and so does the one that
the package uses. Every finished lane is kept, so the same command goes on where it was
stopped, and the table is written anew after each cell.
"""

import argparse
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from studies import arguments, reproduce, study
from studies.paper_results import ALGORITHMS, CELLS
from tsfl_jax.config import Config
from tsfl_jax.engine import devices
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS, spread
from tsfl_jax.run import grid
from tsfl_jax.types import UserError

BASELINES = ("fedavg", "fedprox", "fedasync")  # DMS must not decide


class Variant(NamedTuple):
    """One way to fill the gaps of the paper, for all algorithms."""

    label: str
    changes: Mapping[str, Any]  # setting → value
    # Settings of single algorithms; "auto" for the others.
    by_size: Mapping[str, bool] = {}


class Stage(NamedTuple):
    """How much work the remaining variants get."""

    keep: int  # the nearest so many of the stage before; 0: all
    cells: tuple[str, ...]  # names of experiments, as in `paper_results.CELLS`
    algorithms: tuple[str, ...]
    seeds: int


_IID = {"partition.kind": "iid"}
_SPLITS: dict[str, dict] = {
    "IID": _IID,
    "Dirichlet(1)": {"partition.alpha": 1.0},
    "Dirichlet(0.5)": {"partition.alpha": 0.5},
    "2 classes": {"partition.kind": "shards"},
    "4 classes": {"partition.kind": "shards", "partition.classes_per_client": 4},
    "half IID, half 2 classes": {
        "partition.kind": "shards",
        "partition.iid_share": 0.5,
    },
    "half common to all, half 2 classes": {
        "partition.kind": "shards",
        "partition.iid_share": 0.5,
        "partition.common": True,
    },
    "IID, drawn anew in every interval": _IID | {"partition.online": True},
    "Dirichlet(0.5), drawn anew in every interval": {
        "partition.alpha": 0.5,
        "partition.online": True,
    },
}


def _variant(momentum: float, inputs: str, split: str, network: str = "") -> Variant:
    changes = {"momentum": momentum, "data.normalize": inputs} | _SPLITS[split]
    shown = "standardized" if inputs == "standard" else "in [0, 1]"
    label = f"momentum {momentum:g}, inputs {shown}, {split}"
    if network:
        label, changes = f"{label}, dropout", changes | {"model.name": network}
    return Variant(label, changes)


# The one in use stays in all stages, so that the nearest can be compared with it.
IN_USE = "momentum 0.9, inputs in [0, 1], Dirichlet(0.5)"
# Most plausible first.
VARIANTS: tuple[Variant, ...] = (
    _variant(0.0, "standard", "IID"),
    _variant(0.0, "standard", "Dirichlet(0.5)"),
    _variant(0.5, "standard", "IID"),
    _variant(0.5, "standard", "Dirichlet(0.5)"),
    _variant(0.0, "standard", "IID, drawn anew in every interval"),
    _variant(0.5, "standard", "IID", "mnist_dropout_cnn"),
    _variant(0.9, "unit", "Dirichlet(0.5)"),
    _variant(0.5, "standard", "Dirichlet(0.5), drawn anew in every interval"),
    _variant(0.0, "standard", "Dirichlet(1)"),
    _variant(0.5, "standard", "half IID, half 2 classes"),
    _variant(0.5, "standard", "Dirichlet(0.5)", "mnist_dropout_cnn"),
    _variant(0.0, "standard", "4 classes"),
    _variant(0.5, "unit", "Dirichlet(0.5)"),
    _variant(0.5, "standard", "2 classes"),
    _variant(0.0, "unit", "Dirichlet(0.5)"),
    _variant(0.9, "standard", "Dirichlet(0.5)"),
    _variant(0.5, "standard", "half common to all, half 2 classes"),
    _variant(0.9, "unit", "IID"),
    _variant(0.9, "unit", "2 classes"),
    _variant(0.0, "standard", "Dirichlet(0.5)")._replace(
        label="momentum 0, inputs standardized, Dirichlet(0.5), FedAvg without |D_i|",
        by_size={"fedavg": False, "fedprox": False},
    ),
)
# What only DMS depends on: run under each of the nearest variants, not chosen by it.
DMS_VARIANTS: dict[str, dict] = {
    "bounds of all clients, once at w⁰": {},
    "quotients of eight clients, in every interval": {
        "constants.when": "interval",
        "constants.estimator": "quotient",
    },
}


class DmsChoice(NamedTuple):
    """One more way to fill a gap that concerns DMS alone."""

    label: str
    changes: Mapping[str, Any]
    # A cell of the first stage, 0 the first and −1 the last; or an experiment's name.
    cell: int | str = 0


# Run under the nearest variant alone, with few seeds, after everything else.
DMS_CHOICES: tuple[DmsChoice, ...] = (
    DmsChoice("selection only, c = 0", {"dms.coupling": 0.0}),
    DmsChoice("bounds in every interval", {"constants.when": "interval"}),
    DmsChoice(
        "L of eight clients by power iteration", {"constants.estimator": "power"}
    ),
    DmsChoice("weights as computed, some negative", {"dms.project": False}),
    DmsChoice("weights at most 2/N", {"dms.weight_limit": 2.0}),
    DmsChoice("weights times |D_i|", {"dms.by_size": True}, -1),
    DmsChoice("half the chance to be dropped", {"dms.drop": 0.5}),
    DmsChoice("no client dropped", {"dms.drop": 0.0}),
    DmsChoice("K the mean τ of the deliveries", {}, "mnist_select2"),
    DmsChoice("K the mean τ of all work", {"dms.threshold": "all"}, "mnist_select2"),
)
CHOICE_SEEDS = 2


def changed_by(variants: Sequence[Variant]) -> set[str]:
    """Settings that runs of these variants set themselves."""
    several = [variant.changes for variant in variants]
    several += [*DMS_VARIANTS.values(), *(choice.changes for choice in DMS_CHOICES)]
    return {"dms.by_size", "fedavg.by_size"}.union(*several)


def stages(cells: Sequence[str], count: int) -> tuple[Stage, ...]:
    """The stages for so many variants.

    On the first data set FedAvg alone in the first and the last cell for all; all three
    baselines for a third; a second seed for three. Then the other cells for two, and
    FedAvg in the first cell of the other data sets.
    """
    data = CELLS[cells[0]].data
    own = tuple(cell for cell in cells if CELLS[cell].data == data)
    others = {CELLS[c].data: c for c in reversed(cells) if CELLS[c].data != data}
    few = tuple(dict.fromkeys((own[0], own[-1])))
    found = (
        Stage(0, few, BASELINES[:1], 1),
        Stage(max(-(-count // 3), 3), few, BASELINES, 1),
        Stage(3, few, BASELINES, 2),
    )
    if len(own) > len(few):
        found += (Stage(2, own, BASELINES, 1),)
    if others:
        found += (Stage(2, tuple(others.values()), BASELINES[:1], 1),)
    return found


def pairs_of(steps: Sequence[Stage]) -> list[tuple[str, str]]:
    """All (cell, algorithm) of these stages, each once."""
    return list(
        dict.fromkeys((c, a) for r in steps for c in r.cells for a in r.algorithms)
    )


class Measured(NamedTuple):
    """One algorithm of one cell under one variant."""

    best: np.ndarray  # [S] in %, each run's best test accuracy
    of_mean: float  # in %, best of the mean curve
    seconds: float  # of training and evaluation, all seeds


Key = tuple[str, str, str]  # label of the variant, cell, algorithm
Load = Callable[[str], Config]  # the settings of a cell


def run_variant(
    load: Load,
    variant: Variant,
    cell: str,
    algorithms: Sequence[str],
    seeds: int,
    workdir: pathlib.Path,
    changes: Mapping[str, Any] | None = None,
) -> dict[Key, Measured]:
    """Run or reuse algorithms × seeds of one cell as lanes of one program.

    Args:
      load: settings of a cell.
      variant: what is changed in them.
      cell: name of the experiment.
      algorithms: names of rules.
      seeds: lanes of each.
      workdir: folder of finished lanes, one for each cell.
      changes: settings beside those of the variant.
    """
    config = grid.changed(load(cell), {**variant.changes, **(changes or {})})
    sized = {a: {"fedavg.by_size": variant.by_size.get(a, True)} for a in algorithms}
    points = {
        a: {"algorithm": a} | (sized[a] if variant.by_size else {}) for a in algorithms
    }
    runs = study.run(config, points, seeds, workdir / cell)
    seconds = runs.labelled(
        np.array([row["train_seconds"] for row in runs.result.rows])
    )
    curves, best = 100 * runs.accuracy(), runs.best()
    of_mean = curves.mean("seed").max("interval")
    return {
        (variant.label, cell, a): Measured(
            best.sel(rule=a).values,
            float(of_mean.sel(rule=a)),
            float(seconds.sel(rule=a).sum()),
        )
        for a in algorithms
    }


def target(cell: str, algorithm: str) -> float:
    """What the paper reports, in %."""
    return CELLS[cell].accuracy[ALGORITHMS.index(algorithm)]


def distance(
    measured: Mapping[Key, Measured], label: str, pairs: Sequence[tuple[str, str]]
) -> float:
    """Root mean square of measured − paper over (cell, algorithm), in points.

    inf where something is missing, so that such a variant is last.
    """
    gaps = [
        measured[label, cell, a].best.mean() - target(cell, a)
        if (label, cell, a) in measured
        else np.inf
        for cell, a in pairs
    ]
    found = float(np.sqrt(np.mean(np.square(gaps))))
    return found if np.isfinite(found) else np.inf


def calibration_rows(
    measured: Mapping[Key, Measured],
    variants: Sequence[Variant],
    steps: Sequence[Stage],
    reached: Mapping[str, int],
) -> list[dict[str, str]]:
    """The table as text: the variants that came furthest first, then by distance."""
    found = []
    for variant in variants:
        at = reached.get(variant.label, -1)
        if at < 0:
            continue
        score = distance(measured, variant.label, pairs_of(steps[: at + 1]))
        row = {"variant": variant.label, "stage": str(at + 1)}
        row["distance, points"] = f"{score:.2f}" if np.isfinite(score) else "–"
        for cell in dict.fromkeys(c for step in steps for c in step.cells):
            for a in BASELINES:
                one = measured.get((variant.label, cell, a))
                name = f"{CELLS[cell].case} {CELLS[cell].data}, {style.name_of(a)}"
                text = "–" if one is None else spread(one.best)
                row[f"{name} (paper {target(cell, a):.2f})"] = text
        mine = [m for key, m in measured.items() if key[0] == variant.label]
        row["seeds"] = str(max(len(m.best) for m in mine) if mine else 0)
        row["minutes"] = f"{sum(m.seconds for m in mine) / 60:.1f}"
        found.append((-at, score, row))
    return [row for _, _, row in sorted(found, key=lambda item: item[:2])]


def final_row(
    measured: Mapping[Key, Measured], variant: str, cell: str, name: str
) -> dict[str, str]:
    """DMS beside FedAvg of the same seeds; {} if one of them is missing."""
    fedavg = measured.get((variant, cell, "fedavg"))
    dms = measured.get((f"{variant}; {name}", cell, "dms"))
    if fedavg is None or dms is None:
        return {}
    seeds = min(len(dms.best), len(fedavg.best))
    base, best = fedavg.best[:seeds], dms.best[:seeds]
    paper = target(cell, "dms") - target(cell, "fedavg")
    whole = len(dms.best) == len(fedavg.best)  # else the mean curves are not paired
    return {
        "variant": variant,
        "DMS": name,
        "case": f"{CELLS[cell].case} {CELLS[cell].data}",
        "FedAvg": spread(base),
        "DMS, %": spread(best),
        "DMS − FedAvg, paired": spread(best - base, "+.2f"),
        "of the mean curves": f"{dms.of_mean - fedavg.of_mean:+.2f}" if whole else "–",
        "paper": f"{paper:+.2f}",
        "seeds": str(seeds),
    }


def cell_of(choice: DmsChoice, cells: Sequence[str]) -> str:
    """The experiment in which a choice is tried; cells are those of the first stage."""
    return choice.cell if isinstance(choice.cell, str) else cells[choice.cell]


def final_rows(
    measured: Mapping[Key, Measured], several: Sequence[Variant], cells: Sequence[str]
) -> list[dict[str, str]]:
    """DMS and FedAvg under the nearest variants, paired by seed."""
    cells = list(dict.fromkeys([*cells, *(cell_of(c, cells) for c in DMS_CHOICES)]))
    names = [*DMS_VARIANTS, *(choice.label for choice in DMS_CHOICES)]
    found = (
        final_row(measured, variant.label, cell, name)
        for variant, cell, name in itertools.product(several, cells, names)
    )
    return [row for row in found if row]


class Calibration(NamedTuple):
    """What is run, and where its files are."""

    load: Load  # the settings of a cell
    cells: Sequence[str]  # the first and the last are those of the first stage
    variants: Sequence[Variant]  # the most plausible first
    seeds: int  # of the second stage
    workdir: pathlib.Path  # of finished lanes
    out: pathlib.Path  # of the tables
    about: str  # said above the tables
    num_stages: int = 0  # only the first so many, and no DMS; 0: all, and DMS


def _attempt(
    study: Calibration,
    variant: Variant,
    cell: str,
    algorithms: Sequence[str],
    seeds: int,
    changes: Mapping[str, Any] | None = None,
) -> dict[Key, Measured]:
    """`run_variant`; {} with a line on stderr where it cannot work."""
    begun = time.perf_counter()
    try:
        found = run_variant(
            study.load, variant, cell, algorithms, seeds, study.workdir, changes
        )
    except UserError as error:
        print(f"{variant.label}: not available: {error}", file=sys.stderr)
        return {}
    passed = time.perf_counter() - begun
    print(f"{variant.label}, {cell}: {passed:.0f} s", file=sys.stderr)
    return found


def choose(study: Calibration, steps: Sequence[Stage]) -> list[Variant]:
    """Run the stages; the variants of the last one, the nearest first."""
    measured: dict[Key, Measured] = {}
    reached: dict[str, int] = {}
    left, about = list(study.variants), f"{study.about}. Distance: root mean square of"
    about += " FedAvg, FedProx and FedAsync minus the paper's, over what the stage ran;"
    about += f" accuracies: {OVER_SEEDS}, of each run's best."
    for at, stage in enumerate(steps):
        best = left[: stage.keep or None]
        left = best + [r for r in left[len(best) :] if r.label == IN_USE]
        for variant in left:
            reached[variant.label] = at
            for cell in stage.cells:
                work = (cell, stage.algorithms, stage.seeds)
                for key, one in _attempt(study, variant, *work).items():
                    if key not in measured or len(one.best) > len(measured[key].best):
                        measured[key] = one  # that of more seeds
                rows = calibration_rows(measured, study.variants, steps, reached)
                if measured:
                    files.write_table(study.out, "calibration", rows, about)
        pairs = pairs_of(steps[: at + 1])
        left.sort(key=lambda r, pairs=pairs: distance(measured, r.label, pairs))
    if not measured:
        raise UserError("calibrate: no variant could be run; see the lines above")
    return left


def confirm(
    study: Calibration, several: Sequence[Variant], cells: Sequence[str]
) -> bool:
    """Run DMS and FedAvg under the nearest variants; whether there is a table."""
    measured: dict[Key, Measured] = {}
    about = f"{study.about}. Best accuracy of each run in %: {OVER_SEEDS}."

    def add(variant: Variant, cell: str, name: str, changes: Mapping, seeds: int):
        one = variant._replace(label=f"{variant.label}; {name}")
        measured.update(_attempt(study, one, cell, ("dms",), seeds, changes))
        rows = final_rows(measured, several, cells)
        if rows:
            files.write_table(study.out, "calibration_dms", rows, about)

    for variant in several:
        for cell in cells:
            measured |= _attempt(study, variant, cell, ("fedavg",), study.seeds)
            for name, changes in DMS_VARIANTS.items():
                add(variant, cell, name, changes, study.seeds)
    few = min(study.seeds, CHOICE_SEEDS)
    where = [cell_of(choice, cells) for choice in DMS_CHOICES]
    for cell in dict.fromkeys(where):
        if cell not in cells:
            measured |= _attempt(study, several[0], cell, ("fedavg",), few)
    for choice, cell in zip(DMS_CHOICES, where, strict=True):
        add(several[0], cell, choice.label, choice.changes, few)
    return bool(final_rows(measured, several, cells))


def run_calibration(study: Calibration) -> list[pathlib.Path]:
    """Run or resume both stages; the paths of the tables.

    Raises:
      UserError: no variant could be run.
    """
    out = files.prepare_workdir(study.out, "--out")
    steps = stages(study.cells, len(study.variants))
    best = choose(study, steps[: study.num_stages or None])[:2]
    names = ["calibration"]
    if not study.num_stages and confirm(study, best, steps[0].cells):
        names.append("calibration_dms")
    return [out / f"{name}.{kind}" for name in names for kind in ("md", "csv")]


def chosen(parser: argparse.ArgumentParser, text: str) -> Sequence[Variant]:
    """The part of `VARIANTS` that this names: "12", "12:20", "12:"."""
    first, colon, last = text.partition(":")
    first, last = (first, last) if colon else ("", first)
    if all(not part or part.isdecimal() for part in (first, last)) and (colon or last):
        found = VARIANTS[int(first or 0) : int(last) if last else None]
        if found:
            return found
    parser.error(
        f"--variants={text}: expected a number of variants or FIRST:LAST, counted from "
        f"0 and without LAST, of the {len(VARIANTS)} that there are"
    )


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = reproduce.make_parser("calibrate", __doc__)
    about = "only the first so many variants (12), or from the 13th on (12:)"
    parser.add_argument("--variants", default=":", help=about)
    about = "only the first so many stages, without DMS (default: all)"
    parser.add_argument("--stages", type=arguments.at_least(0), default=0, help=about)
    about = "folder of the tables, if not OUT"
    parser.add_argument("--table", type=pathlib.Path, help=about)
    given = reproduce.parsed(parser, texts)
    given.variants = chosen(parser, given.variants)
    study.check_free(given.set, changed_by(given.variants), "calibrate")
    return given


def main(texts: list[str]) -> None:
    """Run or resume the calibration and print the paths of its tables."""
    given = parse(texts)
    devices.start(0)
    given.out = files.prepare_workdir(given.out, "--out")
    data = given.data or ["mnist"]
    cells = reproduce.chosen_cells(["table1", "table2"], data)
    cells = [name for name in cells if "select" not in name]
    note = reproduce.changed_config(cells[0], given)[1]
    device = f"device: {arguments.device_text()}"
    made = run_calibration(
        Calibration(
            lambda name: reproduce.changed_config(name, given)[0],
            cells,
            given.variants,
            given.seeds,
            given.out / "cells" / "calibrate",
            given.table or given.out,
            arguments.joined(", ".join(data), note, device),
            given.stages,
        )
    )
    for path in made:
        print(path)


if __name__ == "__main__":
    arguments.start("calibrate", main)
