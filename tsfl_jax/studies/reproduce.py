"""``python -m tsfl_jax.reproduce table1``: the paper's tables and figures, run here.

Every cell of a table is one sweep (four algorithms, several seeds) of a config in
``configs/``, kept under ``--out``; a cell that is there is used again, a killed one
goes on. Data sets that are not at hand are listed as such.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

from tsfl_jax.config import Config, flat
from tsfl_jax.engine import devices
from tsfl_jax.experiment import grid, prepare, sweeps
from tsfl_jax.report import files
from tsfl_jax.studies import (
    free_riders,
    heterogeneity,
    paper_results,
    reproduce_files,
    sensitivity,
)
from tsfl_jax.types import UserError

# Targets that are not made of cells: Fig. 2, what the paper leaves open, free riders.
SENSITIVITY, RIDERS = "sensitivity", "riders"
_OTHERS = ("fig2a", "fig2b", SENSITIVITY, RIDERS)
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


class Options(NamedTuple):
    """What the command line decides."""

    seeds: int
    out: pathlib.Path
    data_dir: str
    data: tuple[str, ...]  # only these data sets; () all
    intervals: int  # fewer intervals, labelled so; 0 the paper's
    changes: dict  # settings changed in every cell, labelled so
    target: float  # accuracy in [0, 1] that Fig. 2b waits for


def config_of(name: str) -> Config:
    """What ``configs/name.py`` returns.

    Raises:
      UserError: there is no such file, as in a package without its checkout.
    """
    path = CONFIGS / f"{name}.py"
    if not path.is_file():
        raise UserError(f"{path}: not found; run from a checkout of the repository")
    return grid.config_at(path)


def changed_config(name: str, options: Options) -> tuple[Config, str]:
    """A config with the options in it, and what differs from the paper's in words."""
    labels = options.changes | (
        {"num_intervals": options.intervals} if options.intervals else {}
    )
    changes = {"data.download": False} | grid.data_settings(options.data_dir) | labels
    note = ", ".join(f"{name}={value}" for name, value in labels.items())
    return grid.changed(config_of(name), changes), note


def run_cell(
    cell: paper_results.Cell, options: Options, stream
) -> reproduce_files.Measured:
    """Runs or reuses one cell; its lanes are in order of algorithm, then seed."""
    config, note = changed_config(cell.config, options)
    swept = {
        "algorithm": list(paper_results.ALGORITHMS),
        "seed": list(range(options.seeds)),
    }
    try:
        dataset = prepare.load_dataset(config)
    except UserError as error:
        reason = f"not available: {error}"
        print(f"{cell.config}: {reason}", file=sys.stderr)
        return reproduce_files.Measured(cell, None, None, 0.0, reason)
    workdir = options.out / "cells" / cell.config
    result = sweeps.run(config, swept, workdir=workdir, stream=stream, dataset=dataset)
    shape = (len(paper_results.ALGORITHMS), options.seeds)
    best = [row["best_test_accuracy"] for row in result.rows]
    history = {
        name: result.history[name].reshape(shape + result.history[name].shape[1:])
        for name in ("test_accuracy", "rho", "tau")
    }
    lost = sum(row["diverged_at"] is not None for row in result.rows)
    note = ", ".join(filter(None, [note, f"{lost} lanes diverged" if lost else ""]))
    seconds = float(np.sum([row["seconds"] for row in result.rows]))
    return reproduce_files.Measured(
        cell, np.reshape(best, shape), history, seconds, note
    )


def run_choices(options: Options, stream) -> tuple[list[sensitivity.Outcome], str]:
    """Runs or reuses the study of what the paper leaves open; outcomes and a note."""
    config, note = changed_config(sensitivity.CONFIG, options)
    settings = flat(dataclasses.asdict(config))
    several = sensitivity.choices(settings["lr"], settings["num_clients"])
    lanes = sensitivity.points(settings, several, options.seeds)
    workdir = options.out / "cells" / "sensitivity"
    result = sweeps.run(config, lanes, workdir=workdir, stream=stream)
    best = np.array([row["best_test_accuracy"] for row in result.rows])
    minutes = sum(row["seconds"] for row in result.rows) / 60
    about = f"{sensitivity.CONFIG}, {settings['num_intervals']} intervals"
    about += f" ({note})" * bool(note) + f", training time {minutes:.1f} min"
    return sensitivity.outcomes(several, best, options.seeds), about


def run_other(target: str, options: Options, device: str) -> list[pathlib.Path]:
    """Runs or reuses a study that is not made of cells; returns its files."""
    out = options.out
    name = sensitivity.CONFIG if target == SENSITIVITY else heterogeneity.CONFIG
    if (CONFIGS / f"{name}.py").is_file():
        changed_config(name, options)  # a wrong --set is an error, not a lack of data
    try:
        if target == SENSITIVITY:
            found, about = run_choices(options, sys.stderr)
            return reproduce_files.choices(out, found, f"{about}. Device: {device}")
        config, note = changed_config(heterogeneity.CONFIG, options)
        name = grid.setting(config, "data.name")
        about = name + f", {note}" * bool(note) + f", {options.seeds} seeds"
        workdir = out / "cells" / target
        if target == RIDERS:
            best, riders = free_riders.run(config, options.seeds, workdir, sys.stderr)
            return free_riders.write(best, riders, out, about)
        if target == "fig2a":
            curves = heterogeneity.accuracy(config, options.seeds, workdir, sys.stderr)
            return heterogeneity.plot_accuracy(curves, out, about)
        found = heterogeneity.times(config, options.seeds, workdir, sys.stderr)
        return heterogeneity.write_times(found, options.target, out, about)
    except UserError as error:
        print(f"{target}: not available: {error}", file=sys.stderr)
        return []


def wanted(targets: list[str], data: tuple[str, ...]) -> list[str]:
    """Cells of these tables and figures, each once, in the tables' order."""
    names = {
        name for target in targets for name in paper_results.TARGETS.get(target, ())
    }
    return [
        name
        for name, cell in paper_results.CELLS.items()
        if name in names and (not data or cell.data in data)
    ]


def parse(arguments: list[str]) -> tuple[list[str], Options]:
    """The command line: targets and options."""
    known = sorted({cell.data for cell in paper_results.CELLS.values()})
    parser = argparse.ArgumentParser(
        prog="python -m tsfl_jax.reproduce", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "target", nargs="+", choices=[*paper_results.TARGETS, *_OTHERS, "all"]
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each algorithm")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("runs/reproduce")
    )
    parser.add_argument("--data_dir", default="", help="prepared TFDS data")
    parser.add_argument("--data", nargs="+", default=[], choices=known)
    parser.add_argument("--intervals", type=int, default=0, help="fewer than the paper")
    parser.add_argument(
        "--accuracy", type=float, default=0.9, help="fig2b: time until this is reached"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="setting=value, in every cell"
    )
    given = parser.parse_args(arguments)
    if given.seeds < 1 or given.intervals < 0:
        parser.error("--seeds must be at least 1 and --intervals at least 0")
    if not 0 < given.accuracy < 1:
        parser.error(f"--accuracy={given.accuracy}: must be in (0, 1), as 0.9")
    try:
        changes = grid.parse_settings(given.set)
    except UserError as error:
        parser.error(str(error))
    targets = given.target
    if "all" in targets:
        targets = [*paper_results.TARGETS, *_OTHERS]
    return targets, Options(
        given.seeds,
        given.out.expanduser(),
        given.data_dir,
        tuple(given.data),
        given.intervals,
        changes,
        given.accuracy,
    )


def main(arguments: list[str]) -> None:
    """Runs the cells, then writes each table and figure."""
    targets, options = parse(arguments)
    devices.start(0)  # whatever asks JAX a question first starts it with one device
    files.prepare_workdir(options.out)
    measured = {}
    for name in wanted(targets, options.data):
        print(f"{name}: {options.seeds} seeds", file=sys.stderr)
        begun = time.perf_counter()
        measured[name] = run_cell(paper_results.CELLS[name], options, sys.stderr)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    device = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    found = any(cell.best is not None for cell in measured.values())
    for target in targets:
        if target in _OTHERS:
            paths = run_other(target, options, device)
            found = found or bool(paths)
        else:
            cells = [
                measured[n] for n in paper_results.TARGETS[target] if n in measured
            ]
            paths = reproduce_files.write(options.out, target, cells, device)
        for path in paths:
            print(path)
    if not found:
        raise UserError(
            f"{' '.join(targets)}: nothing could be run; give prepared data with "
            "--data_dir, and with --data only data sets that these targets use"
        )
