"""Tables and figures of a reproduction: the paper's value beside the measured one."""

import pathlib
from typing import NamedTuple

import numpy as np

from tsfl_jax.report import files, style, sweeps
from tsfl_jax.report.statistics import confidence_interval, spread
from tsfl_jax.studies import paper_results, sensitivity

_NAMES = style.NAMES
_DATA = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "fashion_mnist": "F-MNIST",
    "svhn_cropped": "SVHN",
}


class Measured(NamedTuple):
    """Results of one cell of a table."""

    cell: paper_results.Cell
    best: np.ndarray | None  # [A, S] best test accuracy in [0, 1]; None: not available
    history: dict[str, np.ndarray] | None  # [A, S, T, …]
    seconds: float  # of training and evaluation, all lanes
    note: str  # what differs from the paper's setting, or why there is nothing


def _cells(measured: Measured) -> dict[str, str]:
    """One row of a table as text, by column."""
    cell, best = measured.cell, measured.best
    row = {"case": cell.case, "data": _DATA[cell.data]}
    for index, algorithm in enumerate(paper_results.ALGORITHMS):
        row[f"{_NAMES[algorithm]}, paper"] = f"{cell.accuracy[index]:.2f}"
        row[_NAMES[algorithm]] = "–" if best is None else spread(100 * best[index])
    dms, fedavg = (paper_results.ALGORITHMS.index(name) for name in ("dms", "fedavg"))
    gain = cell.accuracy[dms] - cell.accuracy[fedavg]
    row["DMS − FedAvg, paper"] = f"{gain:+.2f}"
    row["DMS − FedAvg, paired"] = (
        "–" if best is None else spread(100 * (best[dms] - best[fedavg]), "+.2f")
    )
    row["seeds"] = "–" if best is None else str(best.shape[1])
    row["training time, min"] = "–" if best is None else f"{measured.seconds / 60:.1f}"
    row["note"] = measured.note
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
        measured = {n: row.get(n, "–") for n in _NAMES.values()}
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
    head = "Highest test accuracy in %: mean ± half of the 95 % confidence interval "
    head += "(Student's t) over the seeds; DMS − FedAvg is paired by seed. "
    head += f"{about}."
    tex = folder / f"{name}.tex"
    files.write_text(tex, latex(rows))
    return [*files.write_table(folder, name, rows, head), tex]


def table(
    folder: pathlib.Path, name: str, cells: list[Measured], device: str
) -> list[pathlib.Path]:
    """Write one of the paper's tables; returns the paths of its files."""
    rows = [_cells(measured) for measured in cells]
    return write_tables(folder, name, rows, f"Device: {device}")


def choices(
    folder: pathlib.Path, found: list[sensitivity.Outcome], about: str
) -> list[pathlib.Path]:
    """Write table and figure of the choices that the paper leaves open.

    Args:
      folder: of the files, which are named "sensitivity".
      found: what each choice led to.
      about: what was run, and where.
    """
    title = "What the paper leaves open: one choice changed at a time"
    paths = write_tables(folder, "sensitivity", sensitivity.rows(found), about)
    return paths + sensitivity.plot_outcomes(found, folder / "sensitivity", title)


def plot_curves(
    folder: pathlib.Path, name: str, measured: Measured, history: dict[str, np.ndarray]
) -> list[pathlib.Path]:
    """Plot accuracy against the interval, a line per algorithm."""
    cell = measured.cell
    lines = zip(paper_results.ALGORITHMS, history["test_accuracy"], strict=True)
    title = ", ".join(filter(None, (_DATA[cell.data], cell.case, measured.note)))
    path = folder / f"{name}_{cell.config}"
    return sweeps.plot_bands(dict(lines), path, title)


@style.styled
def plot_participation(
    folder: pathlib.Path, name: str, measured: Measured, history: dict[str, np.ndarray]
) -> list[pathlib.Path]:
    """Plot how often each client has weight under DMS, with the seeds' spread."""
    cell, dms = measured.cell, paper_results.ALGORITHMS.index("dms")
    rho, tau = history["rho"][dms], history["tau"][dms]
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


def write(
    folder: pathlib.Path, target: str, cells: list[Measured], device: str
) -> list[pathlib.Path]:
    """Write everything of one table or figure; returns the paths."""
    if not cells:
        return []
    if target.startswith("table"):
        return table(folder, target, cells, device)
    plot = plot_participation if target == "fig6" else plot_curves
    paths = []
    for measured in cells:
        if measured.history is not None:
            paths += plot(folder, target, measured, measured.history)
    return paths
