"""Figures of a finished run.

How they look is in `report.style`.
"""

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Integer

from tsfl_jax.report import style as plot_style

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_PANELS = {  # of curves.png: the axis, and the quantities in it with their labels
    "test accuracy in %": {"test_accuracy": ""},
    "loss": {"train_loss": "training", "test_loss": "test"},
    "validation loss": {"gap": "gap", "regret": "regret"},
    "accuracy of clients in %": {
        "client_accuracy_worst": "worst decile",
        "client_accuracy_mean": "mean",
    },
}
FIGURES = ("curves.png", "participation.png")
_FEW_CLIENTS = 60  # bars that a reader can distinguish


def write_figures(
    folder: pathlib.Path, results: Mapping[str, np.ndarray], labels: Mapping[str, Any]
) -> None:
    """Write `FIGURES`; see `curves` and `participation`."""
    bars = participation(results["tau"], results["rho"], labels, results.get("client"))
    for name, figure in zip(FIGURES, (curves(results, labels), bars), strict=True):
        plot_style.save(figure, folder / name)


@plot_style.styled
def curves(
    history: Mapping[str, np.ndarray], labels: Mapping[str, Any]
) -> "matplotlib.figure.Figure":
    """The figure of accuracy and losses against the interval.

    Without the accuracy where only a test loss was measured; with the regret of the
    weights and the accuracy of clients where they were.

    Args:
      history: test_accuracy, test_loss and train_loss, ``[T]`` each; regret, gap and
        `client_test.SERIES` if there are any; NaN where not measured.
      labels: data, algorithm and seed, for the title.
    """
    names = {name for lines in _PANELS.values() for name in lines} & history.keys()
    measured = {name for name in names if np.isfinite(history[name]).any()}
    if "test_loss" not in measured:
        measured |= {"test_accuracy"}  # neither: a panel says so
    measured |= {"train_loss"}
    panels = [panel for panel, lines in _PANELS.items() if lines.keys() & measured]
    figure, grid = plot_style.figure_of(2.7, ncols=len(panels), squeeze=False)
    look = plot_style.style_of(str(labels.get("algorithm")), 0)
    for axes, panel in zip(grid[0], panels, strict=True):
        _plot_panel(axes, history, panel, look)
    figure.suptitle(_title(labels))
    return figure


def _plot_panel(
    axes: "matplotlib.axes.Axes",
    history: Mapping[str, np.ndarray],
    panel: str,
    style: plot_style.Style,
) -> None:
    """The quantities of a panel: of two the first is dashed."""
    interval = np.arange(1, len(history["train_loss"]) + 1)
    lines, last = _PANELS[panel], style | {"linestyle": "-", "marker": "o"}
    looks = [plot_style.line_style("#555555", "--", "s"), last]
    for (name, label), look in zip(lines.items(), looks[-len(lines) :], strict=True):
        values = history.get(name, np.full(len(interval), np.nan))
        values = 100 * values if "%" in panel else values
        plot_style.plot_line(axes, interval, values, look, label)
    plot_style.interval_axis(axes, interval)
    axes.set_ylabel(panel)
    seen = np.array([y for line in axes.lines for y in np.asarray(line.get_ydata())])
    if "%" in panel:
        plot_style.accuracy_axis(axes)
    elif panel == "validation loss":
        axes.set_yscale("symlog", linthresh=1e-3)  # 0 and below may be
    elif seen.size and seen.min() > 0 and seen.max() > 100 * seen.min():
        axes.set_yscale("log")
    if not seen.size:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not evaluated", ha="center", transform=axes.transAxes)
    elif len(lines) > 1:
        axes.legend(handlelength=3)


@plot_style.styled
def participation(
    tau: Integer[np.ndarray, "T N"],
    rho: Float[np.ndarray, "T N"],
    labels: Mapping[str, Any],
    client: Integer[np.ndarray, "T N"] | None = None,
) -> "matplotlib.figure.Figure":
    """The figure of how often and how much each client counted.

    Args:
      tau: local iterations.
      rho: weights of the aggregation; NaN where every model was lost.
      labels: data, algorithm and seed, for the title, and num_clients.
      client: who is in each slot of a cohort or an update; None: client i in column i.
    """
    rho = np.nan_to_num(rho)
    ids = np.broadcast_to(
        np.arange(tau.shape[1]) if client is None else client, tau.shape
    )
    num_clients = int(labels.get("num_clients") or ids.max(initial=0) + 1)
    few, works = num_clients <= _FEW_CLIENTS, (tau > 0) | (rho > 0)
    clients = np.arange(num_clients) if few or client is None else np.unique(ids[works])
    place = np.searchsorted(clients, ids[works])
    panels = {
        "selected per\n100 intervals": 100 * (rho > 0),
        "mean ρ in %\n(dashed: 1/N)": 100 * rho,
        "mean local\niterations τ": tau.astype(float),
    }
    means = [
        np.bincount(place, values[works], len(clients)) / max(len(tau), 1)
        for values in panels.values()
    ]
    order = np.arange(len(clients)) if few else np.argsort(means[-1], kind="stable")
    figure, grid = plot_style.figure_of(4.4, nrows=3, sharex=True)
    # One collection of lines: thousands of bars would take seconds.
    width = (0.8 if few else 1) * 72 * 0.9 * figure.get_figwidth() / len(clients)
    look = {"linewidth": width, "antialiased": few, "color": "#56B4E9"}
    for axes, name, heights in zip(grid, panels, means, strict=True):
        axes.vlines(np.arange(len(clients)), 0, heights[order], **look)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
    grid[1].axhline(100 / num_clients, color="#777777", linestyle="--", linewidth=1)
    grid[2].set_xlim(-0.7, len(clients) - 0.3)
    label = "client" if few else "client, in order of mean τ"
    if len(clients) < num_clients:
        label += f" ({len(clients):,} of {num_clients:,} take part)"
    grid[2].set_xlabel(label)
    grid[2].xaxis.set_major_locator(plot_style.whole_numbers())
    figure.align_ylabels(grid)
    figure.suptitle(_title(labels))
    return figure


def _title(labels: Mapping[str, Any]) -> str:
    parts = [str(labels.get(name) or "") for name in ("data", "algorithm")]
    parts += [f"seed {labels['seed']}"] if "seed" in labels else []
    return ", ".join(plot_style.name_of(part) for part in parts if part)
