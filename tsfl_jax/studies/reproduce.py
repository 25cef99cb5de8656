"""``tsfl reproduce table1``: the paper's tables and figures, run here.

Every cell of a table is one sweep (four algorithms, several seeds) of an experiment in
`studies.experiments`, kept under ``--out``; a finished sweep is reused, an interrupted
one resumes. Cells whose data set is not available are listed as such.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

import numpy as np
import pandas as pd

from tsfl_jax.config import Config, get
from tsfl_jax.engine import devices
from tsfl_jax.experiment import grid, sweeps
from tsfl_jax.report import files, paper, style
from tsfl_jax.report.bands import plot_bands
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    confidence_interval,
    curves_of,
    diverged_note,
    spread,
)
from tsfl_jax.studies import arguments, experiments, paper_results
from tsfl_jax.studies.paper_results import ALGORITHMS
from tsfl_jax.types import UserError

_DATA = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "fashion_mnist": "F-MNIST",
    "svhn_cropped": "SVHN",
}
KNOWN = sorted({cell.data for cell in paper_results.CELLS.values()})
_DMS, _FEDAVG = ALGORITHMS.index("dms"), ALGORITHMS.index("fedavg")


class CellResult(NamedTuple):
    """Results of one cell of a table."""

    cell: paper_results.PaperCell
    best: np.ndarray | None  # [A, S] best test accuracy in [0, 1]; None: not available
    history: dict[str, np.ndarray] | None  # [A, S, T, …]
    seconds: float  # of training and evaluation, all runs
    note: str  # what differs from the paper's setting, or why there is nothing


def changed_config(name: str, given: argparse.Namespace) -> tuple[Config, str]:
    """An experiment with the given settings, and how it differs from the paper's.

    Args:
      name: of the experiment, such as "mnist_case1".
      given: the arguments of the command line, as in all functions here.
    """
    labels, config = dict(given.set), experiments.paper(name)
    if given.intervals:
        labels["num_intervals"] = given.intervals
    changes = {"data.download": False} | given.data_dir
    changes |= given.idx.get(get(config, "data.name"), {}) | labels
    config = grid.changed(config, changes)
    return config, arguments.joined(*(f"{k}={v}" for k, v in labels.items()))


def run_cell(
    cell: paper_results.PaperCell, given: argparse.Namespace, stream: IO[str]
) -> CellResult:
    """Run or reuse one cell; its runs are in order of algorithm, then seed."""
    config, note = changed_config(cell.config, given)
    swept = {"algorithm": ALGORITHMS, "seed": range(given.seeds)}
    try:
        # The sweep reads the data, as synthetic ones depend on the seed.
        workdir = given.out / "cells" / cell.config
        result = sweeps.run(config, swept, workdir=workdir, stream=stream)
    except UserError as error:
        reason = f"not available: {error}"
        print(f"{cell.config}: {reason}", file=sys.stderr)
        return CellResult(cell, None, None, 0.0, reason)
    runs = result.to_xarray()  # [algorithm, seed, …]
    best = np.nanmax(curves_of(runs, experiments.CLASSES), axis=-1)
    history = {name: runs[name].values for name in ("test_accuracy", "rho", "tau")}
    note = arguments.joined(note, diverged_note(result.history))
    seconds = sum(row["seconds"] for row in result.rows)
    return CellResult(cell, best, history, seconds, note)


def cell_row(result: CellResult) -> dict[str, str]:
    """One row of a table as text, by column."""
    cell, best = result.cell, result.best
    row = {"case": cell.case, "data": _DATA[cell.data]}
    for index, algorithm in enumerate(ALGORITHMS):
        name = style.NAMES[algorithm]
        row[f"{name}, paper"] = f"{cell.accuracy[index]:.2f}"
        row[name] = "–" if best is None else spread(100 * best[index])
    gain = cell.accuracy[_DMS] - cell.accuracy[_FEDAVG]
    row |= {"DMS − FedAvg, paper": f"{gain:+.2f}", "DMS − FedAvg, paired": "–"}
    row |= {"seeds": "–", "training time, min": "–", "note": result.note}
    if best is not None:
        row["DMS − FedAvg, paired"] = spread(100 * (best[_DMS] - best[_FEDAVG]), "+.2f")
        row["seeds"] = str(best.shape[1])
        row["training time, min"] = f"{result.seconds / 60:.1f}"
    return row


def latex(rows: list[dict[str, str]]) -> str:
    """A tabular for a paper; the highest measured mean of a row is bold."""
    beside = ["note", "training time, min", "seeds"]
    frame = pd.DataFrame(rows).drop(columns=beside, errors="ignore")
    return paper.latex(frame, 2, style.NAMES.values())


def write_tables(
    folder: pathlib.Path, name: str, rows: list[dict[str, str]], about: str
) -> list[pathlib.Path]:
    """Write name.md, .csv and .tex; returns their paths."""
    head = f"Highest test accuracy in %: {OVER_SEEDS}; DMS − FedAvg is paired by seed. "
    return files.write_table(folder, name, rows, f"{head}{about}.", tex=latex(rows))


def plot_cell_curves(
    folder: pathlib.Path, name: str, result: CellResult, history: dict[str, np.ndarray]
) -> list[pathlib.Path]:
    """Plot accuracy against the interval, a line per algorithm."""
    cell = result.cell
    lines = dict(zip(ALGORITHMS, history["test_accuracy"], strict=True))
    title = arguments.joined(_DATA[cell.data], cell.case, result.note)
    return plot_bands(lines, folder / f"{name}_{cell.config}", title)


@style.styled
def plot_cell_participation(
    folder: pathlib.Path, name: str, result: CellResult, history: dict[str, np.ndarray]
) -> list[pathlib.Path]:
    """Plot how often each client has weight under DMS, with the seeds' spread."""
    cell, rho, tau = result.cell, history["rho"][_DMS], history["tau"][_DMS]
    mean, half = confidence_interval(100 * (rho > 0).mean(axis=1))  # [N]
    figure, axes = style.figure_of(2.9)
    clients = np.arange(len(mean))
    look = {"color": "#56B4E9", "edgecolor": "#333333", "linewidth": 0.6}
    axes.bar(clients, mean, yerr=half, capsize=2, **look)
    axes.set_xlabel("client")
    axes.set_ylabel("intervals with weight, %")
    axes.set_ylim(0, 105)
    axes.xaxis.set_major_locator(style.whole_numbers())
    other = axes.twinx()
    other.grid(visible=False)  # it has other ticks than the bars
    other.spines["right"].set_visible(True)
    other.plot(clients, tau.mean(axis=(0, 1)), "ko", markersize=3)
    other.set_ylabel("mean local iterations τ (dots)")
    other.set_ylim(bottom=0)
    axes.set_title(f"DMS, {_DATA[cell.data]}, {cell.case}")
    return style.save_both(figure, folder / f"{name}_{cell.config}")


def write_target(
    folder: pathlib.Path, target: str, results: Sequence[CellResult], device: str
) -> list[pathlib.Path]:
    """Write one table or figure of the paper; returns the paths of its files."""
    if not results:
        return []
    if target.startswith("table"):
        rows = [cell_row(result) for result in results]
        return write_tables(folder, target, rows, f"Device: {device}")
    plot = plot_cell_participation if target == "fig6" else plot_cell_curves
    paths = []
    for result in results:
        if result.history is not None:
            paths += plot(folder, target, result, result.history)
    return paths


def case_of(cell: paper_results.PaperCell) -> str:
    """A cell's case in one word, as on the command line: "1", "2-iteration"."""
    return cell.case.removeprefix("Case ")


def wanted(
    targets: Sequence[str], data: Sequence[str], cases: Sequence[str] = ()
) -> list[str]:
    """Cells of these tables and figures, each once, in the tables' order.

    Args:
      targets: names of tables and figures.
      data: only cells of these data sets; empty: of all.
      cases: only cells of these cases, see `case_of`; empty: of all.
    """
    names = {n for target in targets for n in paper_results.TARGETS.get(target, ())}
    return [
        name
        for name, cell in paper_results.CELLS.items()
        if name in names
        and (not data or cell.data in data)
        and (not cases or case_of(cell) in cases)
    ]


def make_parser(name: str, about: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with the arguments of cells: ``--data``, ``--intervals``, ``--idx``."""
    parser = arguments.make_parser(name, about, 5, out)
    arguments.add_settings(parser)
    data = ", ".join(KNOWN)
    text = f"only these data sets of {data}"
    parser.add_argument(
        "--data", nargs="+", default=[], choices=KNOWN, metavar="DATA", help=text
    )
    text = "intervals of a run (default: as many as the paper)"
    parser.add_argument("--intervals", type=int, default=0, help=text)
    text = "read a data set from a folder of IDX files: mnist=FOLDER"
    options = {"nargs": "+", "default": [], "metavar": "DATA=FOLDER"}
    parser.add_argument("--idx", help=text, **options)
    return parser


def parsed(parser: argparse.ArgumentParser, texts: list[str]) -> argparse.Namespace:
    """The arguments of `make_parser`'s parser; ``idx`` as settings by data set."""
    given = arguments.parse(parser, texts)
    if given.intervals < 0:
        parser.error("--intervals must be at least 0")
    found = {}
    for text in given.idx:
        name, equals, folder = text.partition("=")
        folder = str(pathlib.Path(folder).expanduser()) if folder else ""
        if name not in KNOWN or not equals or not pathlib.Path(folder).is_dir():
            parser.error(
                f"--idx={text}: expected DATA=FOLDER, a folder of IDX files; DATA is "
                f"one of {', '.join(KNOWN)}"
            )
        found[name] = {"data.name": "idx", "data.dir": folder}
    given.idx = found
    return given


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    targets = [*paper_results.TARGETS]
    parser = make_parser("reproduce", __doc__, "runs/reproduce")
    names = ", ".join([*targets, "all"])
    parser.add_argument(
        "target", nargs="+", choices=[*targets, "all"], metavar="TARGET", help=names
    )
    cases = list(dict.fromkeys(map(case_of, paper_results.CELLS.values())))
    about = f"only these cases of {', '.join(cases)}"
    parser.add_argument(
        "--case", nargs="+", default=[], choices=cases, metavar="CASE", help=about
    )
    given = parsed(parser, texts)
    if "all" in given.target:
        given.target = targets
    if not wanted(given.target, given.data, given.case):
        fit = [name for name in targets if wanted([name], given.data, given.case)]
        parser.error(f"no cell of this --data and --case; see {', '.join(fit) or '-h'}")
    return given


def main(texts: list[str]) -> None:
    """Run the cells, then write each table and figure."""
    given = parse(texts)
    devices.start(0)  # all devices; the first question to JAX would start it with one
    given.out = files.check_workdir(given.out, "--out")
    results = run_cells(given)
    device = arguments.device_text()
    if not any(result.best is not None for result in results.values()):
        reasons = dict.fromkeys(result.note for result in results.values())
        raise UserError(
            f"{' '.join(given.target)}: nothing could be run ({'; '.join(reasons)}); "
            "data can be prepared (--data_dir), given as IDX files (--idx mnist=FOLDER)"
            " or downloaded (--set data.download=True)"
        )
    for target in given.target:
        for path in write_target(given.out, target, _cells(target, results), device):
            print(path)


def _cells(target: str, results: dict[str, CellResult]) -> list[CellResult]:
    """The results that a table or figure is made of, as far as there are any."""
    return [results[n] for n in paper_results.TARGETS[target] if n in results]


def run_cells(given: argparse.Namespace) -> dict[str, CellResult]:
    """Run or reuse all cells; tables are written anew after each one."""
    results: dict[str, CellResult] = {}
    names = wanted(given.target, given.data, given.case)
    for number, name in enumerate(names, start=1):
        several = arguments.seeds_text(given.seeds)
        print(f"{name}: {several}, cell {number} of {len(names)}", file=sys.stderr)
        begun = time.perf_counter()
        results[name] = run_cell(paper_results.CELLS[name], given, sys.stderr)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        for target in given.target:
            some = any(result.best is not None for result in results.values())
            if target.startswith("table") and some and number < len(names):
                device = f"{arguments.device_text()}; {number} of {len(names)} cells"
                write_target(given.out, target, _cells(target, results), device)
    return results
