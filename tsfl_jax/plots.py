"""Figures of finished runs, made from the files of their workdirs only.

How they look is in `plot_style`.
"""

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap

from tsfl_jax import plot_style, report
from tsfl_jax.types import UserError

_FEW_CLIENTS = 60  # that many bars can be told apart

_PathLike = str | pathlib.Path


def curves(workdir: _PathLike) -> pathlib.Path:
    """Draws accuracy and losses against the interval; returns curves.png.

    The losses alone, where a test loss was measured and no accuracy.

    Args:
      workdir: folder with metrics.jsonl, and summary.json or config.json.

    Raises:
      UserError: metrics.jsonl is missing or unreadable.
    """
    folder = pathlib.Path(workdir)
    metrics = _metrics(folder)
    about = _about(folder)
    style = plot_style.style_of(about["algorithm"], 0)

    both = np.isfinite(metrics["test_accuracy"]).any()
    both |= not np.isfinite(metrics["test_loss"]).any()
    figure, panels = plot_style.figure_of(2.7, ncols=2 if both else 1)
    panels = np.ravel(panels)
    right = panels[-1]
    if both:
        _accuracy(panels[0], metrics, style)
    losses = {
        "training": (
            "train_loss",
            {"color": "#555555", "linestyle": "--", "marker": "s"},
        ),
        "test": ("test_loss", style | {"linestyle": "-", "marker": "o"}),
    }
    for label, (name, look) in losses.items():
        plot_style.line(right, metrics["interval"], metrics[name], look, label=label)
    right.set_ylabel("loss")
    seen = np.concatenate([metrics["train_loss"], metrics["test_loss"]])
    seen = seen[np.isfinite(seen)]
    if seen.size and seen.min() > 0 and seen.max() > 100 * seen.min():
        right.set_yscale("log")
    if right.lines:
        right.legend(frameon=False, handlelength=3)
    for axes in panels:
        plot_style.interval_axis(axes, metrics["interval"])
    figure.suptitle(_title(about), fontsize="medium")
    return plot_style.save(figure, folder / "curves.png")


def _accuracy(axes: Axes, metrics: dict, style: dict) -> None:
    accuracy = 100 * metrics["test_accuracy"]
    plot_style.line(axes, metrics["interval"], accuracy, style)
    axes.set_ylabel("test accuracy in %")
    if not axes.lines:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not evaluated", ha="center", transform=axes.transAxes)


def participation(workdir: _PathLike) -> pathlib.Path:
    """Draws how often and how much each client counted; returns participation.png.

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
    colours = figure.colorbar(bars, ax=(top, bottom), pad=0.02, aspect=30)
    colours.set_label("mean local iterations τ")
    dots = {"color": "#000000", "marker": "o", "markersize": 4 if few else 1.2}
    bottom.plot(np.arange(clients), weight, linestyle="none", **dots)
    equal = {"color": "#777777", "linestyle": "--", "linewidth": 1}
    bottom.axhline(100 / clients, **equal, label="equal weights, 1/N")
    bottom.legend(frameon=False)
    bottom.set_ylabel("mean weight ρ\nin %")
    bottom.set_ylim(0, 1.1 * max(weight.max(), 100 / clients))
    bottom.set_xlim(-0.7, clients - 0.3)
    bottom.set_xlabel("client" if few else "client, in order of mean τ")
    bottom.xaxis.set_major_locator(plot_style.whole_numbers())
    figure.suptitle(_title(_about(folder)), fontsize="medium")
    return plot_style.save(figure, folder / "participation.png")


def compare(
    runs: Mapping[str, Sequence[_PathLike]], path: _PathLike, title: str = ""
) -> pathlib.Path:
    """Draws test accuracy of several algorithms, each over its seeds.

    Args:
      runs: for each label (a name of an algorithm has its own style), workdirs or
        metrics.jsonl files, one or more, one per seed. The line is their mean where
        all were evaluated, the band runs from the lowest to the highest.
      path: the PNG file to write.
      title: above the figure.

    Raises:
      UserError: a metrics.jsonl is missing or unreadable.
    """
    figure, axes = plot_style.figure_of(3.2)
    intervals, most = np.zeros(0), 0
    for index, (label, seeds) in enumerate(runs.items()):
        interval, accuracy = _align([_metrics(pathlib.Path(run)) for run in seeds])
        style = plot_style.style_of(label, index)
        if len(seeds) > 1 and len(interval):
            low, high = accuracy.min(0), accuracy.max(0)
            band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
            axes.fill_between(interval, low, high, **band)
        name = plot_style.NAMES.get(label, plot_style.escape(label))
        plot_style.line(axes, interval, accuracy.mean(0), style, label=name)
        intervals = np.union1d(intervals, interval)
        most = max(most, len(seeds))
    plot_style.interval_axis(axes, intervals)
    axes.set_ylabel("test accuracy in %")
    if axes.lines:
        note = f"mean and range of {most} seeds" if most > 1 else None
        axes.legend(frameon=False, handlelength=3.5, title=note)
    axes.set_title(plot_style.escape(title), fontsize="medium")
    return plot_style.save(figure, pathlib.Path(path))


def _bars(
    axes: Axes, height: np.ndarray, colour: np.ndarray, width: float, edges: bool
) -> PolyCollection:
    """Bars as one collection, which stays quick for thousands of them."""
    left = np.arange(len(height)) - width / 2
    right = left + width
    zero = np.zeros_like(height)
    corners = [(left, zero), (left, height), (right, height), (right, zero)]
    shades = colormaps["YlGnBu"](np.linspace(0.2, 1, 256))  # darker in grey print, too
    bars = PolyCollection(
        np.stack([np.stack(xy, -1) for xy in corners], 1),
        array=colour,
        cmap=ListedColormap(shades),
        edgecolors="#333333" if edges else "none",
        linewidths=0.6 if edges else 0,
        antialiaseds=edges,  # else there are pale seams between thin bars
    )
    if colour.min() == colour.max():
        bars.set_clim(colour[0] - 0.5, colour[0] + 0.5)
    axes.add_collection(bars)
    return bars


def _align(found: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Intervals [E] where every run was evaluated, and accuracies in %, [R, E]."""
    known = [m["interval"][np.isfinite(m["test_accuracy"])] for m in found]
    common = functools.reduce(np.intersect1d, known)
    rows = [m["test_accuracy"][np.isin(m["interval"], common)] for m in found]
    return common, 100 * np.stack(rows)


def _metrics(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Columns of metrics.jsonl as float64 [T]; NaN where a value is missing."""
    rows = report.read_metrics(path / "metrics.jsonl" if path.is_dir() else path)
    names = ("interval", "test_accuracy", "test_loss", "train_loss")
    missing = math.nan
    return {
        name: np.array(
            [missing if r.get(name) is None else r[name] for r in rows], float
        )
        for name in names
    }


def _clients(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = report.read_arrays(path)
    tau, rho = (arrays.get(name, np.zeros(0)) for name in ("tau", "rho"))
    if tau.ndim != 2 or rho.shape != tau.shape:
        raise UserError(f"cannot read {path}: expected tau and rho of one shape [T, N]")
    return tau.astype(float), np.nan_to_num(rho)


def _about(folder: pathlib.Path) -> dict[str, str]:
    """Data, algorithm and seed, from the first file that knows them."""
    about = {"data": "", "algorithm": "", "seed": ""}
    for name in ("config.json", "summary.json"):
        known = report.read_json(folder / name) or {}
        if isinstance(known.get("data"), dict):
            known["data"] = known["data"].get("name", "")
        about |= {key: str(known[key]) for key in about if key in known}
    return about


def _title(about: dict[str, str]) -> str:
    algorithm = plot_style.NAMES.get(about["algorithm"], about["algorithm"])
    seed = about["seed"] and f"seed {about['seed']}"
    return plot_style.escape(
        ", ".join(part for part in (about["data"], algorithm, seed) if part)
    )
