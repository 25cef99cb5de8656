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
    import matplotlib.figure

_CURVES = ("interval", "test_accuracy", "test_loss", "train_loss", "regret", "gap")
_FEW_CLIENTS = 60  # bars that a reader can distinguish
_DASHED = plot_style.line_style("#555555", "--", "s")

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
    rows = files.read_metrics(folder / "metrics.jsonl")
    metrics = {
        name: np.array([row.get(name) for row in rows], float)  # None becomes NaN
        for name in _CURVES
    }
    figure = curves_of(metrics, _about(folder))
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
    measured = {name for name, a in metrics.items() if np.isfinite(a).any()}
    both = "test_accuracy" in measured or "test_loss" not in measured
    figure, panels = plot_style.figure_of(2.7, ncols=1 + both + ("regret" in measured))
    panels = list(np.ravel(panels))
    if both:
        _plot_accuracy(panels[0], metrics, style)
    solid = style | {"linestyle": "-", "marker": "o"}
    _plot_pair(panels[int(both)], metrics, ("train_loss", "test_loss"), solid)
    panels[int(both)].set_ylabel("loss")
    if "regret" in measured:
        _plot_pair(panels[-1], metrics, ("gap", "regret"), solid)
        panels[-1].set_ylabel("validation loss")
        panels[-1].set_yscale("symlog", linthresh=1e-3)  # 0 and below may be
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


def _plot_pair(
    axes: "matplotlib.axes.Axes",
    metrics: Mapping[str, np.ndarray],
    names: tuple[str, str],
    style: plot_style.Style,
) -> None:
    """Two quantities in one pair of axes; logarithmic over two orders of magnitude."""
    for name, look in zip(names, (_DASHED, style), strict=True):
        values = metrics.get(name, np.full(len(metrics["interval"]), np.nan))
        label = {"train_loss": "training", "test_loss": "test"}.get(name, name)
        plot_style.plot_line(axes, metrics["interval"], values, look, label)
    seen = np.concatenate([line.get_ydata() for line in axes.lines] or [np.zeros(0)])
    if seen.size and seen.min() > 0 and seen.max() > 100 * seen.min():
        axes.set_yscale("log")
    if axes.lines:
        axes.legend(handlelength=3)


@plot_style.styled
def plot_participation(workdir: _PathLike) -> pathlib.Path:
    """Plot how often and how much each client counted; returns participation.png.

    Args:
      workdir: folder with clients.npz, and summary.json or config.json.

    Raises:
      UserError: clients.npz is missing or unreadable.
    """
    from matplotlib import cm, colormaps, colors

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
    # From a lighter blue to a darker one, in grey print, too.
    shades = colors.ListedColormap(colormaps["YlGnBu"](np.linspace(0.2, 1, 256)))
    span = (tau.min(), tau.max() if tau.max() > tau.min() else tau.min() + 1)
    shown = cm.ScalarMappable(colors.Normalize(*span), shades)
    # One collection of lines: thousands of bars would take seconds.
    width = (0.8 if few else 1) * 72 * 0.8 * figure.get_figwidth() / clients  # points
    look = {"linewidth": width, "antialiased": few}
    top.vlines(np.arange(clients), 0, share, shown.to_rgba(tau), **look)
    top.set_ylabel("selected in\n% of intervals")
    top.set_ylim(0, 105)
    figure.colorbar(shown, ax=(top, bottom), pad=0.02, aspect=30).set_label(
        "mean local iterations τ"
    )
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
