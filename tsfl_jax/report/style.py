"""How figures look: styles of the algorithms, axes, and saving.

Sizes, lines and axes are set in ``figures.mplstyle``. Matplotlib's object interface is
used throughout (no pyplot), so no display is needed. Curves differ in dashes or
markers, not only in color. Matplotlib is imported when a figure is plotted.
"""

import functools
import pathlib
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from tsfl_jax.report import files
from tsfl_jax.report.statistics import confidence_interval

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import matplotlib.ticker

Style = dict[str, Any]  # keyword arguments of a line: color, linestyle, marker, …

_RC_FILE = pathlib.Path(__file__).with_name("figures.mplstyle")
_P = ParamSpec("_P")
_R = TypeVar("_R")

# The colors of Okabe and Ito, distinct for color-blind readers. Each of the paper's
# rules has a color that no other of them has, and no two rules share a marker.
_BLUE, _RED, _GREEN, _PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_BLACK, _ORANGE, _SKY, _GREY = "#000000", "#E69F00", "#56B4E9", "#888888"
_LONG, _DOTS, _MIXED = (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1))


def line_style(color: str, linestyle: Any, marker: str) -> Style:
    """The look of one curve."""
    return {"color": color, "linestyle": linestyle, "marker": marker}


ALGORITHM_STYLE: dict[str, Style] = {
    "dms": line_style(_BLUE, "-", "o"),
    "fedavg": line_style(_RED, "--", "s"),
    "fedprox": line_style(_GREEN, "-.", "^"),
    "fedasync": line_style(_PINK, ":", "D"),
    "fedbuff": line_style(_ORANGE, _MIXED, "P"),
    "fedat": line_style(_SKY, _DOTS, "X"),
    "fednova": line_style(_BLACK, _LONG, "v"),
    "bound_optimal": line_style(_GREEN, _LONG, "1"),
    "scaffold": line_style(_GREY, "-", "*"),
    "fedavgm": line_style(_BLACK, _DOTS, "<"),
    "fedadam": line_style(_ORANGE, _LONG, ">"),
    "fedyogi": line_style(_SKY, _LONG, "p"),
    "median": line_style(_BLACK, "-", "h"),
    "trimmed_mean": line_style(_GREY, _LONG, "d"),
    "geometric_median": line_style(_GREY, _MIXED, "8"),
    "krum": line_style(_ORANGE, "-", "H"),
    "multi_krum": line_style(_SKY, "-", "."),
}
# A framework looks like the rule that it is usually run with.
FRAMEWORK_STYLE: dict[str, Style] = {
    "tsfl_dms": ALGORITHM_STYLE["dms"],
    "tsfl": ALGORITHM_STYLE["fedavg"],
    "afl": ALGORITHM_STYLE["fedasync"],
    "sfl": ALGORITHM_STYLE["fednova"],
    "fedcs": ALGORITHM_STYLE["trimmed_mean"],
    "esync": ALGORITHM_STYLE["fedprox"],
    "safa": ALGORITHM_STYLE["fedyogi"],
}
OTHER_STYLES: tuple[Style, ...] = (
    line_style(_BLACK, _LONG, "v"),
    line_style(_ORANGE, _MIXED, "P"),
    line_style(_SKY, _DOTS, "X"),
    line_style(_GREY, (0, (4, 2, 1, 2)), "*"),
)
NAMES = {"dms": "DMS", "fedavg": "FedAvg", "fedprox": "FedProx"}
NAMES |= {"fedasync": "FedAsync", "fedbuff": "FedBuff", "fedat": "FedAT"}
NAMES |= {"fednova": "FedNova", "scaffold": "SCAFFOLD", "fedavgm": "FedAvgM"}
NAMES |= {"fedadam": "FedAdam", "fedyogi": "FedYogi", "median": "median"}
NAMES |= {"trimmed_mean": "trimmed mean", "geometric_median": "geometric median"}
NAMES |= {"bound_optimal": "minimiser of the bound"}
NAMES |= {"krum": "Krum", "multi_krum": "multi-Krum"}
NAMES |= {"tsfl": "T-SFL, FedAvg", "tsfl_dms": "T-SFL, DMS", "sfl": "SFL"}
NAMES |= {"afl": "AFL, FedAsync", "fedcs": "FedCS", "esync": "ESync", "safa": "SAFA"}


def styled(plot: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a plotting function, so that it runs under ``figures.mplstyle``."""

    @functools.wraps(plot)
    def plot_in_style(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        import matplotlib

        with matplotlib.rc_context(fname=_RC_FILE):
            return plot(*args, **kwargs)

    return plot_in_style


@styled
def figure_of(height: float, **grid: Any) -> "tuple[matplotlib.figure.Figure, Any]":
    """A figure of the text's width and `height` inches, with its axes."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.set_figheight(height)
    return figure, figure.subplots(**grid)


@styled
def save(figure: "matplotlib.figure.Figure", path: pathlib.Path) -> pathlib.Path:
    """Write the figure in the format that the path ends with."""
    with files.replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))
    return path


def save_both(
    figure: "matplotlib.figure.Figure", path: pathlib.Path
) -> list[pathlib.Path]:
    """Write a PNG and a PDF; `path` is without a suffix."""
    return [save(figure, path.with_suffix(suffix)) for suffix in (".png", ".pdf")]


def plot_line(
    axes: "matplotlib.axes.Axes",
    x: np.ndarray,
    y: np.ndarray,
    style: Style,
    label: str = "",
) -> None:
    """Plot a line that skips the points without a value; none if all lack one."""
    seen = np.isfinite(y)
    if seen.any():
        every = max(1, int(seen.sum()) // 10)
        axes.plot(x[seen], y[seen], **style, label=label, markevery=every)


def plot_mean(
    axes: "matplotlib.axes.Axes",
    x: np.ndarray,
    values: np.ndarray,
    style: Style,
    label: str,
    alpha: float = 0.2,
) -> None:
    """Plot the mean of ``[n, T]`` values over n, with its 95 % confidence band."""
    mean, half = confidence_interval(values, omit=True)
    seen = np.isfinite(mean) & np.isfinite(half)
    plot_band(axes, x[seen], (mean - half)[seen], (mean + half)[seen], style, alpha)
    plot_line(axes, x, mean, style, label=label)


def plot_band(
    axes: "matplotlib.axes.Axes",
    x: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    style: Style,
    alpha: float = 0.2,
) -> None:
    """Shade the area from `low` to `high` in the color of a line."""
    if len(x):
        axes.fill_between(x, low, high, color=style["color"], alpha=alpha, linewidth=0)


def whole_numbers() -> "matplotlib.ticker.MaxNLocator":
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def interval_axis(
    axes: "matplotlib.axes.Axes", interval: np.ndarray, first: int = 1
) -> None:
    """Set up the axis of intervals, from the first one to the last one."""
    axes.set_xlabel("interval")
    axes.xaxis.set_major_locator(whole_numbers())
    last = interval.max(initial=first)
    margin = max(0.03 * (last - first), 0.3)
    axes.set_xlim(first - margin, last + margin)


def style_of(label: str, index: int) -> Style:
    """The style of a rule or framework; other labels take the other styles in turn."""
    known = FRAMEWORK_STYLE | ALGORITHM_STYLE
    return known.get(label, OTHER_STYLES[index % len(OTHER_STYLES)])


def name_of(label: str) -> str:
    """The written name of a rule or framework; other labels as they are."""
    return NAMES.get(label, escape(label))


def title(text: str) -> str:
    """Break a title into lines that fit the width of a figure."""
    return textwrap.fill(escape(text), 90)


def escape(text: str) -> str:
    """Text that Matplotlib shows as it is."""
    return text.replace("$", r"\$")  # else Matplotlib takes it for mathematics
