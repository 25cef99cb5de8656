"""Figures of finished runs, made from the files of their workdirs only.

How they look is in `report.style`.
"""

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.report import files
from tsfl_jax.report import style as plot_style
from tsfl_jax.types import UserError

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_PANELS = {  # of curves.png: the axis, and the quantities in it with their labels
    "test accuracy in %": {"test_accuracy": ""},
    "loss": {"train_loss": "training", "test_loss": "test"},
    "validation loss": {"gap": "gap", "regret": "regret"},
}
_ABOUT = ("data", "algorithm", "seed")  # of the title
_FEW_CLIENTS = 60  # bars that a reader can distinguish

_PathLike = str | pathlib.Path


@plot_style.styled
def plot_curves(workdir: _PathLike) -> pathlib.Path:
    """Plot accuracy and losses against the interval; returns curves.png.

    Args:
      workdir: folder with metrics.jsonl, and summary.json or config.json.

    Raises:
      UserError: metrics.jsonl is missing or unreadable.
    """
    folder = pathlib.Path(workdir)
    rows = files.read_metrics(folder / "metrics.jsonl")
    names = ["interval", *(name for lines in _PANELS.values() for name in lines)]
    metrics = {  # None becomes NaN
        name: np.array([row.get(name) for row in rows], float) for name in names
    }
    figure = curves_of(metrics, _about(folder))
    return plot_style.save(figure, folder / "curves.png")


@plot_style.styled
def curves_of(
    metrics: Mapping[str, np.ndarray], about: dict[str, str]
) -> "matplotlib.figure.Figure":
    """The figure of accuracy and losses against the interval.

    Without the accuracy where only a test loss was measured; with the regret of the
    weights where it was.

    Args:
      metrics: interval, test_accuracy, test_loss and train_loss, ``[T]`` each; regret
        and gap if there are any.
      about: data, algorithm and seed, for the title.
    """
    known = {name for lines in _PANELS.values() for name in lines} & metrics.keys()
    measured = {name for name in known if np.isfinite(metrics[name]).any()}
    accuracy = "test_accuracy" in measured or "test_loss" not in measured
    wanted = (accuracy, True, "regret" in measured)
    names = [name for name, there in zip(_PANELS, wanted, strict=True) if there]
    figure, grid = plot_style.figure_of(2.7, ncols=len(names), squeeze=False)
    for axes, name in zip(grid[0], names, strict=True):
        _plot_panel(axes, metrics, name, plot_style.style_of(about["algorithm"], 0))
    figure.suptitle(_title(about))
    return figure


def of_run(
    history: Mapping[str, np.ndarray], summary: Mapping[str, Any]
) -> "matplotlib.figure.Figure":
    """`curves_of` a result of Python."""
    interval = np.arange(1, len(history["test_loss"]) + 1)
    about = {name: str(summary.get(name, "")) for name in _ABOUT}
    return curves_of({"interval": interval, **history}, about)


def _plot_panel(
    axes: "matplotlib.axes.Axes",
    metrics: Mapping[str, np.ndarray],
    panel: str,
    style: plot_style.Style,
) -> None:
    """The quantities of a panel: of two the first is dashed."""
    lines, last = _PANELS[panel], style | {"linestyle": "-", "marker": "o"}
    looks = [plot_style.line_style("#555555", "--", "s"), last]
    for (name, label), look in zip(lines.items(), looks[-len(lines) :], strict=True):
        values = metrics.get(name, np.full(len(metrics["interval"]), np.nan))
        values = 100 * values if "%" in panel else values
        plot_style.plot_line(axes, metrics["interval"], values, look, label)
    plot_style.interval_axis(axes, metrics["interval"])
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
def plot_participation(workdir: _PathLike) -> pathlib.Path:
    """Plot how often and how much each client counted; returns participation.png.

    Args:
      workdir: folder with clients.npz, and summary.json or config.json.

    Raises:
      UserError: clients.npz is missing or unreadable.
    """
    path = pathlib.Path(workdir) / "clients.npz"
    arrays = files.read_arrays(path)
    tau, rho = (arrays.get(name, np.zeros(0)) for name in ("tau", "rho"))
    if tau.ndim != 2 or rho.shape != tau.shape:
        raise UserError(f"cannot read {path}: expected tau and rho of one shape [T, N]")
    rho, clients = np.nan_to_num(rho), tau.shape[1]
    few = clients <= _FEW_CLIENTS
    order = np.arange(clients) if few else np.argsort(tau.sum(0), kind="stable")
    panels = {
        "selected in\n% of intervals": 100 * (rho > 0),
        "mean weight ρ, %\n(dashed: 1/N)": 100 * rho,
        "mean local\niterations τ": tau.astype(float),
    }
    figure, grid = plot_style.figure_of(4.4, nrows=3, sharex=True)
    # One collection of lines: thousands of bars would take seconds.
    width = (0.8 if few else 1) * 72 * 0.9 * figure.get_figwidth() / clients  # points
    look = {"linewidth": width, "antialiased": few, "color": "#56B4E9"}
    for axes, (name, values) in zip(grid, panels.items(), strict=True):
        heights = values.sum(0)[order] / max(len(tau), 1)
        axes.vlines(np.arange(clients), 0, heights, **look)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
    grid[1].axhline(100 / clients, color="#777777", linestyle="--", linewidth=1)
    grid[2].set_xlim(-0.7, clients - 0.3)
    grid[2].set_xlabel("client" if few else "client, in order of mean τ")
    grid[2].xaxis.set_major_locator(plot_style.whole_numbers())
    figure.suptitle(_title(_about(path.parent)))
    return plot_style.save(figure, path.with_name("participation.png"))


def _about(folder: pathlib.Path) -> dict[str, str]:
    """Data, algorithm and seed; summary.json takes precedence over config.json."""
    found = files.read_json(folder / "config.json") or {}
    if isinstance(found.get("data"), dict):
        found["data"] = found["data"].get("name", "")
    known = found | (files.read_json(folder / "summary.json") or {})
    return {name: str(known.get(name, "")) for name in _ABOUT}


def _title(about: dict[str, str]) -> str:
    seed = about["seed"] and f"seed {about['seed']}"
    parts = (about["data"], about["algorithm"], seed)
    return ", ".join(plot_style.name_of(part) for part in parts if part)
