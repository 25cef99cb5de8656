"""``tsfl reproduce table1``: the paper's tables and figures, run here.

Every cell of a table is one sweep (four algorithms, several seeds) of an experiment in
`studies.settings`, kept under ``--out``; a finished sweep is reused, an interrupted one
resumes. Cells whose data set is not available are listed as such.
"""

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Collection, Sequence
from typing import IO, NamedTuple

import numpy as np

from tsfl_jax.config import Config, get
from tsfl_jax.engine import devices
from tsfl_jax.experiment import grid, sweeps
from tsfl_jax.report import files, style
from tsfl_jax.report.bands import plot_bands
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    confidence_interval,
    curves_of,
    diverged_note,
    spread,
)
from tsfl_jax.studies import (
    arguments,
    calibrate,
    free_riders,
    heterogeneity,
    paper_results,
    sensitivity,
    settings,
)
from tsfl_jax.studies.paper_results import ALGORITHMS
from tsfl_jax.types import UserError

STUDY_CONFIG = "mnist_case1"  # the experiment that the studies vary
# Targets that are not made of cells: Fig. 2, what the paper leaves open, free riders.
_CHANGED = {  # study → settings that its runs set themselves
    **heterogeneity.CHANGED,
    "sensitivity": sensitivity.CHANGED,
    "riders": free_riders.CHANGED,
}
STUDIES = tuple(_CHANGED)
LONG = ("calibrate",)  # hours: not among "all"
_DATA = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "fashion_mnist": "F-MNIST",
    "svhn_cropped": "SVHN",
}
_DMS, _FEDAVG = ALGORITHMS.index("dms"), ALGORITHMS.index("fedavg")


class CellResult(NamedTuple):
    """Results of one cell of a table."""

    cell: paper_results.Cell
    best: np.ndarray | None  # [A, S] best test accuracy in [0, 1]; None: not available
    history: dict[str, np.ndarray] | None  # [A, S, T, …]
    seconds: float  # of training and evaluation, all lanes
    note: str  # what differs from the paper's setting, or why there is nothing


def changed_config(name: str, given: argparse.Namespace) -> tuple[Config, str]:
    """An experiment with the given settings, and how it differs from the paper's.

    Args:
      name: of the experiment, such as "mnist_case1".
      given: the arguments of the command line, as in all functions here.
    """
    labels, config = dict(given.set), settings.paper(name)
    if given.intervals:
        labels["num_intervals"] = given.intervals
    changes = {"data.download": False} | given.data_dir
    changes |= given.idx.get(get(config, "data.name"), {}) | labels
    config = grid.changed(config, changes)
    return config, arguments.joined(*(f"{k}={v}" for k, v in labels.items()))


def run_cell(
    cell: paper_results.Cell, given: argparse.Namespace, stream: IO[str]
) -> CellResult:
    """Run or reuse one cell; its lanes are in order of algorithm, then seed."""
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
    shape = (len(ALGORITHMS), given.seeds)
    best = np.nanmax(curves_of(result.history, settings.CLASSES), axis=-1)
    history = {
        name: result.history[name].reshape(shape + result.history[name].shape[1:])
        for name in ("test_accuracy", "rho", "tau")
    }
    note = arguments.joined(note, diverged_note(result.history))
    seconds = sum(row["seconds"] for row in result.rows)
    return CellResult(cell, np.reshape(best, shape), history, seconds, note)


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


def _in_latex(text: str) -> str:
    for old, new in (("±", r"$\pm$"), ("−", "$-$"), ("–", "--"), ("%", r"\%")):
        text = text.replace(old, new)
    return text


def latex(rows: list[dict[str, str]]) -> str:
    """A tabular for a paper; the highest measured mean of a row is bold."""
    names = [n for n in rows[0] if n not in ("note", "training time, min", "seeds")]
    lines = [rf"\begin{{tabular}}{{ll{'r' * (len(names) - 2)}}}", r"\hline"]
    lines.append(" & ".join(map(_in_latex, names)) + r" \\ \hline")
    for row in rows:
        measured = {n: row.get(n, "–") for n in style.NAMES.values()}
        means = {n: float(t.split()[0]) for n, t in measured.items() if t != "–"}
        cells = {name: _in_latex(row[name]) for name in names}
        if means:
            best = max(means, key=means.__getitem__)
            cells[best] = rf"\textbf{{{cells[best]}}}"
        lines.append(" & ".join(cells.values()) + r" \\")
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


def write_tables(
    folder: pathlib.Path, name: str, rows: list[dict[str, str]], about: str
) -> list[pathlib.Path]:
    """Write name.md, .csv and .tex; returns their paths."""
    head = f"Highest test accuracy in %: {OVER_SEEDS}; DMS − FedAvg is paired by seed. "
    tex = folder / f"{name}.tex"
    files.write_text(tex, latex(rows))
    return [*files.write_table(folder, name, rows, f"{head}{about}."), tex]


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


def run_study(
    target: str, given: argparse.Namespace, device: str
) -> list[pathlib.Path]:
    """Run or reuse a study that is not made of cells; returns its files."""
    config, note = changed_config(STUDY_CONFIG, given)
    out, workdir = given.out, given.out / "cells" / target
    # Files of `--idx` hold the paper's images, so they do not change the name.
    data = given.set.get("data.name", get(settings.paper(STUDY_CONFIG), "data.name"))
    about = arguments.joined(data, note, arguments.seeds_text(given.seeds))
    options = (config, given.seeds, workdir, sys.stderr)
    try:
        arguments.check_free(given.set, _CHANGED[target], target)
        if target == "sensitivity":
            found, more = sensitivity.run_choices(*options)
            about = f"{STUDY_CONFIG}, {get(config, 'num_intervals')} intervals"
            about += f" ({note})" * bool(note) + f", {more}"
            rows, about = sensitivity.choice_rows(found), f"{about}. Device: {device}"
            paths = write_tables(out, target, rows, about)
            return paths + sensitivity.plot_choices(found, out / target)
        if target == "riders":
            best, more = free_riders.run_free_riders(*options)
            return free_riders.write_free_riders(best, out, f"{about}, {more}")
        if target == "fig2a":
            curves, more = heterogeneity.run_patterns(*options)
            about = arguments.joined(about, more)
            return heterogeneity.plot_accuracy(curves, out, about)
        found = heterogeneity.run_frameworks(*options)
        return heterogeneity.write_times(found, given.accuracy, out, about)
    except UserError as error:
        print(f"{target}: not available: {error}", file=sys.stderr)
        return []


def case_of(cell: paper_results.Cell) -> str:
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


def _idx_settings(
    parser: argparse.ArgumentParser, texts: list[str], known: list[str]
) -> dict[str, dict]:
    """Settings of each data set that is read from a folder of IDX files."""
    found = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        folder = str(pathlib.Path(folder).expanduser()) if folder else ""
        if name not in known or not equals or not pathlib.Path(folder).is_dir():
            parser.error(
                f"--idx={text}: expected DATA=FOLDER, a folder of IDX files; DATA is "
                f"one of {', '.join(known)}"
            )
        found[name] = {"data.name": "idx", "data.dir": folder}
    return found


def _readings(
    parser: argparse.ArgumentParser, text: str
) -> Sequence[calibrate.Reading]:
    """The part of `calibrate.READINGS` that this names: "12", "12:20", "12:"."""
    first, colon, last = text.partition(":")
    first, last = (first, last) if colon else ("", first)
    if all(not part or part.isdecimal() for part in (first, last)) and (colon or last):
        found = calibrate.READINGS[int(first or 0) : int(last) if last else None]
        if found:
            return found
    parser.error(
        f"--readings={text}: expected a number of readings or FIRST:LAST, counted from "
        f"0 and without LAST, of the {len(calibrate.READINGS)} that there are"
    )


def run_calibrate(given: argparse.Namespace, device: str) -> list[pathlib.Path]:
    """Run or resume the calibration on the cells of these data sets."""
    data = given.data or ["mnist"]
    cells = [
        name for name in wanted(["table1", "table2"], data) if "select" not in name
    ]
    note = changed_config(cells[0], given)[1]
    return calibrate.run_calibration(
        lambda name: changed_config(name, given)[0],
        cells,
        given.readings,
        seeds=given.seeds,
        num_rungs=given.rungs,
        workdir=given.out / "cells" / "calibrate",
        out=given.table or given.out,
        about=arguments.joined(", ".join(data), note, f"device: {device}"),
    )


def _check_targets(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse flags and settings that the targets would ignore or set themselves."""
    cells = {"all", *paper_results.TARGETS}
    readers = {"data": cells | {*LONG}, "case": cells, "accuracy": {"fig2b", "all"}}
    readers |= dict.fromkeys(("readings", "rungs", "table"), {*LONG})
    for name, several in readers.items():
        value = getattr(given, name)
        if value != parser.get_default(name) and not several & set(given.target):
            shown = " ".join(value) if isinstance(value, list) else value
            parser.error(
                f"--{name} {shown}: would be ignored by {' '.join(given.target)}; "
                "leave it out"
            )
    # With "all" only the study is left out, see `run_study`.
    for study in set(given.target) & set(_CHANGED):
        _check_free(parser, given, study, _CHANGED[study])


def _check_free(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    study: str,
    changed: Collection[str],
) -> None:
    """Refuse settings that the runs of a study set themselves."""
    try:
        arguments.check_free(given.set, changed, study)
    except UserError as error:
        parser.error(str(error))


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    known = sorted({cell.data for cell in paper_results.CELLS.values()})
    targets = [*paper_results.TARGETS, *STUDIES]
    several = [*targets, *LONG, "all"]
    parser = arguments.make_parser("reproduce", __doc__, 5, "runs/reproduce")
    arguments.add_settings(parser)
    parser.add_argument(
        "target", nargs="+", choices=several, metavar="TARGET", help=", ".join(several)
    )
    about = f"only these data sets of {', '.join(known)}"
    parser.add_argument(
        "--data", nargs="+", default=[], choices=known, metavar="DATA", help=about
    )
    cases = list(dict.fromkeys(map(case_of, paper_results.CELLS.values())))
    about = f"only these cases of {', '.join(cases)}"
    parser.add_argument(
        "--case", nargs="+", default=[], choices=cases, metavar="CASE", help=about
    )
    about = "intervals of a run (default: as many as the paper)"
    parser.add_argument("--intervals", type=int, default=0, help=about)
    about = "fig2b: time until this test accuracy (default: %(default)s)"
    parser.add_argument("--accuracy", type=float, default=0.9, help=about)
    parser.add_argument(
        "--idx",
        nargs="+",
        default=[],
        metavar="DATA=FOLDER",
        help="read a data set from a folder of IDX files: mnist=FOLDER",
    )
    about = "calibrate: only the first so many (12), or from the 13th on (12:)"
    parser.add_argument("--readings", default=":", help=about)
    about = "calibrate: only the first so many rungs, without DMS (default: all)"
    parser.add_argument("--rungs", type=int, default=0, help=about)
    parser.add_argument(
        "--table", type=pathlib.Path, help="calibrate: folder of the tables, if not out"
    )
    given = arguments.parse(parser, texts, "accuracy")
    _check_targets(parser, given)
    given.idx = _idx_settings(parser, given.idx, known)
    given.readings = _readings(parser, given.readings)
    if "calibrate" in given.target:
        changed = calibrate.changed_by(given.readings)
        _check_free(parser, given, "calibrate", changed)
    for name in ("intervals", "rungs"):
        if getattr(given, name) < 0:
            parser.error(f"--{name} must be at least 0")
    if "all" in given.target:
        given.target = targets
    return given


def main(texts: list[str]) -> None:
    """Run the cells, then write each table and figure."""
    given = parse(texts)
    targets = given.target
    devices.start(0)  # all devices; the first question to JAX would start it with one
    given.out = files.prepare_workdir(given.out, "--out")
    _check_cells(given)
    results = run_cells(given)
    device = arguments.device_text()
    available = any(result.best is not None for result in results.values())
    for target in targets:
        if target in STUDIES or target in LONG:
            run = (
                run_calibrate
                if target in LONG
                else functools.partial(run_study, target)
            )
            paths = run(given, device)
            available = available or bool(paths)
        elif not available:
            paths = []  # a table of nothing but the paper's values
        else:
            paths = write_target(given.out, target, _cells(target, results), device)
        for path in paths:
            print(path)
    if not available:
        reasons = dict.fromkeys(result.note for result in results.values())
        raise UserError(
            f"{' '.join(targets)}: nothing could be run ({'; '.join(reasons)}); data "
            "can be prepared (--data_dir), given as IDX files (--idx mnist=FOLDER) or "
            "downloaded (--set data.download=True)"
        )


def _check_cells(given: argparse.Namespace) -> None:
    """Raise `UserError` if no cell of these tables and figures was asked for."""
    tables = [target for target in given.target if target in paper_results.TARGETS]
    if len(tables) < len(given.target) or wanted(tables, given.data, given.case):
        return
    others = [
        target
        for target in paper_results.TARGETS
        if wanted([target], given.data, given.case)
    ]
    chosen = arguments.joined(
        given.data and f"--data {' '.join(given.data)}",
        given.case and f"--case {' '.join(given.case)}",
    )
    raise UserError(
        f"{' '.join(tables)}: has nothing of {chosen}; "
        + (f"that is in {', '.join(others)}" if others else "nor has another target")
    )


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
