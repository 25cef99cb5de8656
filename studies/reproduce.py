"""``python -m studies.reproduce table1``: the paper's tables and figures, run here.

Every cell of a table is one sweep (four algorithms, several seeds) of an experiment in
configs/papers.py, kept under ``--out``; a finished sweep is reused, an interrupted
one resumes. Cells whose data set is not available are listed as such.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

import numpy as np
import pandas as pd

from studies import arguments, paper_results, study
from studies.differences import plot_bands
from studies.paper_results import ALGORITHMS
from studies.verdicts import curves_of, diverged_note
from tsfl_jax import config_files
from tsfl_jax.config import Config, get
from tsfl_jax.engine import devices
from tsfl_jax.report import files, paper, style
from tsfl_jax.report.statistics import OVER_SEEDS, confidence_interval, spread
from tsfl_jax.run import grid, sweeps
from tsfl_jax.types import UserError

_DATA_NAMES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "fashion_mnist": "F-MNIST",
    "svhn_cropped": "SVHN",
}
DATA = sorted({cell.data for cell in paper_results.CELLS.values()})
_DMS, _FEDAVG = ALGORITHMS.index("dms"), ALGORITHMS.index("fedavg")


class CellResult(NamedTuple):
    """Results of one cell of a table."""

    cell: paper_results.PaperCell
    best: np.ndarray | None  # [A, S] best test accuracy in [0, 1]; None: not available
    history: dict[str, np.ndarray] | None  # [A, S, T, …]
    seconds: float  # of training and evaluation, all runs
    note: str  # what differs from the paper's setting, or why there is nothing


def changed_config(name: str, flags: argparse.Namespace) -> tuple[Config, str]:
    """An experiment with the flags' settings, and how it differs from the paper's.

    Args:
      name: of the experiment, such as "mnist_case1".
      flags: of the command line, as in all functions here.
    """
    labels, config = dict(flags.set), config_files.load(f"papers:{name}")
    if flags.intervals:
        labels["num_intervals"] = flags.intervals
    changes = {"data.download": False} | flags.data_dir
    changes |= flags.idx.get(get(config, "data.name"), {}) | labels
    config = grid.changed(config, changes)
    return config, arguments.joined(*(f"{k}={v}" for k, v in labels.items()))


def run_cell(
    cell: paper_results.PaperCell, flags: argparse.Namespace, stream: IO[str]
) -> CellResult:
    """Run or reuse one cell; its runs are in order of algorithm, then seed."""
    config, note = changed_config(cell.config, flags)
    swept = {"algorithm": ALGORITHMS, "seed": range(flags.seeds)}
    try:
        # The sweep reads the data, as synthetic ones depend on the seed.
        workdir = flags.out / "cells" / cell.config
        result = sweeps.run(config, swept, workdir=workdir, stream=stream)
    except UserError as error:
        reason = f"not available: {error}"
        print(f"{cell.config}: {reason}", file=sys.stderr)
        return CellResult(cell, None, None, 0.0, reason)
    runs = result.to_xarray()  # [algorithm, seed, …]
    best = np.nanmax(curves_of(runs, study.CLASSES), axis=-1)
    history = {name: runs[name].values for name in ("test_accuracy", "rho", "tau")}
    note = arguments.joined(note, diverged_note(result.history))
    seconds = sum(row["train_seconds"] for row in result.rows)
    return CellResult(cell, best, history, seconds, note)


def cell_row(result: CellResult) -> dict[str, str]:
    """One row of a table as text, by column."""
    cell, best = result.cell, result.best
    row = {"case": cell.case, "data": _DATA_NAMES[cell.data]}
    for index, algorithm in enumerate(ALGORITHMS):
        name = style.name_of(algorithm)
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
    return paper.latex(frame, 2, map(style.name_of, ALGORITHMS))


def write_tables(
    folder: pathlib.Path, name: str, rows: list[dict[str, str]], device: str
) -> list[pathlib.Path]:
    """Write name.md, .csv and .tex; returns their paths."""
    title = f"Highest test accuracy in %: {OVER_SEEDS}; DMS − FedAvg is paired by "
    title += f"seed. Device: {device}."
    return files.write_table(folder, name, rows, title, tex=latex(rows))


def plot_cell_curves(
    folder: pathlib.Path, name: str, result: CellResult, history: dict[str, np.ndarray]
) -> list[pathlib.Path]:
    """Plot accuracy against the interval, a line per algorithm."""
    cell = result.cell
    lines = dict(zip(ALGORITHMS, history["test_accuracy"], strict=True))
    title = arguments.joined(_DATA_NAMES[cell.data], cell.case, result.note)
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
    right = axes.twinx()
    right.grid(visible=False)  # it has other ticks than the bars
    right.spines["right"].set_visible(True)
    right.plot(clients, tau.mean(axis=(0, 1)), "ko", markersize=3)
    right.set_ylabel("mean local iterations τ (dots)")
    right.set_ylim(bottom=0)
    axes.set_title(f"DMS, {_DATA_NAMES[cell.data]}, {cell.case}")
    return style.save_both(figure, folder / f"{name}_{cell.config}")


def write_target(
    folder: pathlib.Path, target: str, results: Mapping[str, CellResult], device: str
) -> list[pathlib.Path]:
    """Write one table or figure of the cells that have results; returns the paths."""
    cells = [results[n] for n in paper_results.TARGETS[target] if n in results]
    if target.startswith("table"):
        rows = [cell_row(result) for result in cells]
        return write_tables(folder, target, rows, device) if rows else []
    plot = plot_cell_participation if target == "fig6" else plot_cell_curves
    paths = []
    for result in cells:
        if result.history is not None:
            paths += plot(folder, target, result, result.history)
    return paths


def case_of(cell: paper_results.PaperCell) -> str:
    """A cell's case in one word, as on the command line: "1", "2-iteration"."""
    return cell.case.removeprefix("Case ")


def chosen_cells(
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


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of cells: ``--data``, ``--intervals``, ``--idx``."""
    parser = arguments.make_parser(name, doc)
    arguments.add_settings(parser)
    add = parser.add_argument
    help_of_data = f"only these data sets of {', '.join(DATA)}"
    add(
        "--data", nargs="+", default=[], choices=DATA, metavar="DATA", help=help_of_data
    )
    text = "intervals of a run (default: as many as the paper)"
    add("--intervals", type=arguments.at_least(0), default=0, help=text)
    text = "read a data set from a folder of IDX files: mnist=FOLDER"
    add("--idx", nargs="+", default=[], metavar="DATA=FOLDER", help=text)
    return parser


def parsed(parser: argparse.ArgumentParser, texts: list[str]) -> argparse.Namespace:
    """The arguments of `make_parser`'s parser; ``idx`` as settings by data set."""
    flags, settings = arguments.parse(parser, texts), {}
    for text in flags.idx:
        name, _, folder = text.partition("=")
        path = pathlib.Path(folder or "/no folder").expanduser()
        if name not in DATA or not path.is_dir():
            parser.error(
                f"--idx={text}: expected DATA=FOLDER, a folder of IDX files; DATA is "
                f"one of {', '.join(DATA)}"
            )
        settings[name] = {"data.name": "idx", "data.dir": str(path)}
    flags.idx = settings
    return flags


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    targets = [*paper_results.TARGETS]
    parser, names = make_parser("reproduce", __doc__), [*targets, "all"]
    text = ", ".join(names)
    parser.add_argument("target", nargs="+", choices=names, metavar="TARGET", help=text)
    cases = list(dict.fromkeys(map(case_of, paper_results.CELLS.values())))
    text = f"only these cases of {', '.join(cases)}"
    parser.add_argument(
        "--case", nargs="+", default=[], choices=cases, metavar="CASE", help=text
    )
    flags = parsed(parser, texts)
    if "all" in flags.target:
        flags.target = targets
    if not chosen_cells(flags.target, flags.data, flags.case):
        fit = [n for n in targets if chosen_cells([n], flags.data, flags.case)]
        parser.error(f"no cell of this --data and --case; see {', '.join(fit) or '-h'}")
    return flags


def main(texts: list[str]) -> None:
    """Run or reuse the cells; tables are written anew after each one, figures last."""
    flags = parse(texts)
    devices.start(0)  # all devices; the first question to JAX would start it with one
    flags.out = files.check_workdir(flags.out, "--out")
    names = chosen_cells(flags.target, flags.data, flags.case)
    results: dict[str, CellResult] = {}
    paths: list[pathlib.Path] = []
    for number, name in enumerate(names, start=1):
        seeds, is_last = arguments.seeds_text(flags.seeds), number == len(names)
        print(f"{name}: {seeds}, cell {number} of {len(names)}", file=sys.stderr)
        begun = time.perf_counter()
        results[name] = run_cell(paper_results.CELLS[name], flags, sys.stderr)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        if all(result.best is None for result in results.values()):
            continue
        count = "" if is_last else f"; {number} of {len(names)} cells"
        device = f"{arguments.device_text()}{count}"
        for target in flags.target:
            if is_last or target.startswith("table"):
                paths += write_target(flags.out, target, results, device)
    if not paths:
        reasons = dict.fromkeys(result.note for result in results.values())
        raise UserError(
            f"{' '.join(flags.target)}: nothing could be run ({'; '.join(reasons)}); "
            "data can be prepared (--data_dir), given as IDX files (--idx mnist=FOLDER)"
            " or downloaded (--set data.download=True)"
        )
    for path in dict.fromkeys(paths):
        print(path)


if __name__ == "__main__":
    arguments.start("reproduce", main)
