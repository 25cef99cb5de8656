"""Figures of finished runs, made from the files of their workdirs only.

How they look is in `report.style`.
"""

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tsfl_jax.report import files
from tsfl_jax.report import style as plot_style
from tsfl_jax.types import UserError

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.collections
    import matplotlib.figure

_CURVES = ("interval", "test_accuracy", "test_loss", "train_loss", "regret", "gap")
_FEW_CLIENTS = 60  # bars that a reader can distinguish

_PathLike = str | pathlib.Path


@plot_style.styled
def plot_curves(workdir: _PathLike) -> pathlib.Path:
    """Plot accuracy and losses against the interval; returns curves.png.

    Only the losses, where a test loss was measured and no accuracy; and the regret of
    the weights, where it was measured.

    Args:
      workdir: folder with metrics.jsonl, and summary.json or config.json.

    Raises:
      UserError: metrics.jsonl is missing or unreadable.
    """
    folder = pathlib.Path(workdir)
    figure = curves_of(_metrics(folder), _about(folder))
    return plot_style.save(figure, folder / "curves.png")


@plot_style.styled
def curves_of(
    metrics: Mapping[str, np.ndarray], about: dict[str, str]
) -> "matplotlib.figure.Figure":
    """The figure of accuracy and losses against the interval.

    Args:
      metrics: interval, test_accuracy, test_loss and train_loss, ``[T]`` each; regret
        and gap if there are any.
      about: data, algorithm and seed, for the title.
    """
    style = plot_style.style_of(about["algorithm"], 0)
    both = np.isfinite(metrics["test_accuracy"]).any()
    both |= not np.isfinite(metrics["test_loss"]).any()
    regret = np.isfinite(metrics.get("regret", np.nan)).any()
    figure, panels = plot_style.figure_of(2.7, ncols=1 + both + regret)
    panels = np.ravel(panels)
    if both:
        _plot_accuracy(panels[0], metrics, style)
    _plot_losses(panels[int(both)], metrics, style)
    if regret:
        _plot_regret(panels[-1], metrics, style)
    for axes in panels:
        plot_style.interval_axis(axes, metrics["interval"])
    figure.suptitle(_title(about))
    return figure


def _plot_accuracy(
    axes: "matplotlib.axes.Axes",
    metrics: Mapping[str, np.ndarray],
    style: plot_style.Style,
) -> None:
    accuracy = 100 * metrics["test_accuracy"]
    plot_style.plot_line(axes, metrics["interval"], accuracy, style)
    axes.set_ylabel("test accuracy in %")
    plot_style.accuracy_axis(axes)
    if not axes.lines:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not evaluated", ha="center", transform=axes.transAxes)


def _plot_losses(
    axes: "matplotlib.axes.Axes",
    metrics: Mapping[str, np.ndarray],
    style: plot_style.Style,
) -> None:
    interval, train, test = (
        metrics[name] for name in ("interval", "train_loss", "test_loss")
    )
    dashed = plot_style.line_style("#555555", "--", "s")
    plot_style.plot_line(axes, interval, train, dashed, label="training")
    solid = style | {"linestyle": "-", "marker": "o"}
    plot_style.plot_line(axes, interval, test, solid, label="test")
    axes.set_ylabel("loss")
    seen = np.concatenate([train, test])
    seen = seen[np.isfinite(seen)]
    if seen.size and seen.min() > 0 and seen.max() > 100 * seen.min():
        axes.set_yscale("log")
    if axes.lines:
        axes.legend(handlelength=3)


def _plot_regret(
    axes: "matplotlib.axes.Axes",
    metrics: Mapping[str, np.ndarray],
    style: plot_style.Style,
) -> None:
    interval, regret = metrics["interval"], metrics["regret"]
    gap = metrics.get("gap", np.full(len(regret), np.nan))
    dashed = plot_style.line_style("#555555", "--", "s")
    plot_style.plot_line(axes, interval, gap, dashed, label="gap")
    solid = style | {"linestyle": "-", "marker": "o"}
    plot_style.plot_line(axes, interval, regret, solid, label="regret")
    axes.set_ylabel("validation loss")
    axes.set_yscale("symlog", linthresh=1e-3)  # 0 and below may be
    axes.legend(handlelength=3)


@plot_style.styled
def plot_participation(workdir: _PathLike) -> pathlib.Path:
    """Plot how often and how much each client counted; returns participation.png.

    Args:
      workdir: folder with clients.npz, and summary.json or config.json.

    Raises:
      UserError: clients.npz is missing or unreadable.
    """
    folder = pathlib.Path(workdir)
    tau, rho = _clients(folder / "clients.npz")
    intervals, clients = tau.shape
    share = 100 * (rho > 0).sum(0) / max(intervals, 1)
    weight = 100 * rho.sum(0) / max(intervals, 1)
    tau = tau.sum(0) / max(intervals, 1)
    few = clients <= _FEW_CLIENTS
    if not few:
        order = np.argsort(tau, kind="stable")
        share, weight, tau = share[order], weight[order], tau[order]

    figure, (top, bottom) = plot_style.figure_of(4.0, nrows=2, sharex=True)
    bars = _bars(top, share, tau, width=0.8 if few else 1.0, edges=few)
    top.set_ylabel("selected in\n% of intervals")
    top.set_ylim(0, 105)
    colors = figure.colorbar(bars, ax=(top, bottom), pad=0.02, aspect=30)
    colors.set_label("mean local iterations τ")
    dots = plot_style.line_style("#000000", "none", "o")
    bottom.plot(np.arange(clients), weight, **dots, markersize=4 if few else 1.2)
    equal = {"color": "#777777", "linestyle": "--", "linewidth": 1}
    bottom.axhline(100 / clients, **equal, label="equal weights, 1/N")
    bottom.legend(handlelength=2)
    bottom.set_ylabel("mean weight ρ\nin %")
    bottom.set_ylim(0, 1.1 * max(weight.max(), 100 / clients))
    bottom.set_xlim(-0.7, clients - 0.3)
    bottom.set_xlabel("client" if few else "client, in order of mean τ")
    bottom.xaxis.set_major_locator(plot_style.whole_numbers())
    figure.suptitle(_title(_about(folder)))
    return plot_style.save(figure, folder / "participation.png")


def _bars(
    axes: "matplotlib.axes.Axes",
    height: np.ndarray,
    color: np.ndarray,
    width: float,
    edges: bool,
) -> "matplotlib.collections.PolyCollection":
    """Plot bars as one collection, which is fast for thousands of them."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import ListedColormap

    left = np.arange(len(height)) - width / 2
    right = left + width
    zero = np.zeros_like(height)
    corners = [(left, zero), (left, height), (right, height), (right, zero)]
    shades = colormaps["YlGnBu"](np.linspace(0.2, 1, 256))  # darker in grey print, too
    bars = PolyCollection(
        # The stub lacks arrays, of which a collection is made fastest.
        np.stack([np.stack(xy, -1) for xy in corners], 1),  # pyright: ignore[reportArgumentType]
        array=color,
        cmap=ListedColormap(shades),
        edgecolors="#333333" if edges else "none",
        linewidths=0.6 if edges else 0,
        antialiaseds=edges,  # else there are pale seams between thin bars
    )
    if color.min() == color.max():
        bars.set_clim(color[0] - 0.5, color[0] + 0.5)
    axes.add_collection(bars)
    return bars


def _metrics(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Columns of metrics.jsonl as float64 [T]; NaN where a value is missing."""
    rows = files.read_metrics(path / "metrics.jsonl")
    return {
        name: np.array([row.get(name) for row in rows], float)  # None becomes NaN
        for name in _CURVES
        if name in _CURVES[:4] or any(name in row for row in rows)
    }


def _clients(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """τ and ρ of clients.npz, float64 [T, N]."""
    arrays = files.read_arrays(path)
    tau, rho = (arrays.get(name, np.zeros(0)) for name in ("tau", "rho"))
    if tau.ndim != 2 or rho.shape != tau.shape:
        raise UserError(f"cannot read {path}: expected tau and rho of one shape [T, N]")
    return tau.astype(float), np.nan_to_num(rho)


def _about(folder: pathlib.Path) -> dict[str, str]:
    """Data, algorithm and seed; summary.json takes precedence over config.json."""
    about = {"data": "", "algorithm": "", "seed": ""}
    for name in ("config.json", "summary.json"):
        known = files.read_json(folder / name) or {}
        if isinstance(known.get("data"), dict):
            known["data"] = known["data"].get("name", "")
        about |= {key: str(known[key]) for key in about if key in known}
    return about


def _title(about: dict[str, str]) -> str:
    algorithm = plot_style.NAMES.get(about["algorithm"], about["algorithm"])
    seed = about["seed"] and f"seed {about['seed']}"
    parts = filter(None, [about["data"], algorithm, seed])
    return plot_style.escape(", ".join(parts))
