"""How figures look: styles of the algorithms, axes, and saving.

Matplotlib's object interface throughout: no pyplot, so no global state and no display.
Every curve differs from the others by its dashes or markers, not by its colour alone.
"""

import pathlib
import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tsfl_jax import report

# Okabe and Ito's colours, which the colour-blind can tell apart; the paper's rules have
# theirs to themselves, and no two rules a marker.
_BLUE, _RED, _GREEN, _PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_BLACK, _ORANGE, _SKY, _GREY = "#000000", "#E69F00", "#56B4E9", "#888888"
_LONG, _DOTS, _MIXED = (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1))


def _style(color: str, linestyle: Any, marker: str) -> dict[str, Any]:
    return {"color": color, "linestyle": linestyle, "marker": marker}


ALGORITHM_STYLE: dict[str, dict[str, Any]] = {
    "dms": _style(_BLUE, "-", "o"),
    "fedavg": _style(_RED, "--", "s"),
    "fedprox": _style(_GREEN, "-.", "^"),
    "fedasync": _style(_PINK, ":", "D"),
    "fedbuff": _style(_ORANGE, _MIXED, "P"),
    "fedat": _style(_SKY, _DOTS, "X"),
    "fednova": _style(_BLACK, _LONG, "v"),
    "bound_optimal": _style(_GREEN, _LONG, "1"),
    "scaffold": _style(_GREY, "-", "*"),
    "fedavgm": _style(_BLACK, _DOTS, "<"),
    "fedadam": _style(_ORANGE, _LONG, ">"),
    "fedyogi": _style(_SKY, _LONG, "p"),
    "median": _style(_BLACK, "-", "h"),
    "trimmed_mean": _style(_GREY, _LONG, "d"),
    "geometric_median": _style(_GREY, _MIXED, "8"),
    "krum": _style(_ORANGE, "-", "H"),
    "multi_krum": _style(_SKY, "-", "."),
}
# Frameworks look like the rule that is theirs.
FRAMEWORK_STYLE: dict[str, dict[str, Any]] = {
    "tsfl_dms": ALGORITHM_STYLE["dms"],
    "tsfl": ALGORITHM_STYLE["fedavg"],
    "afl": ALGORITHM_STYLE["fedasync"],
    "sfl": ALGORITHM_STYLE["fednova"],
    "fedcs": ALGORITHM_STYLE["trimmed_mean"],
    "esync": ALGORITHM_STYLE["fedprox"],
    "safa": ALGORITHM_STYLE["fedyogi"],
}
OTHER_STYLES: tuple[dict[str, Any], ...] = (
    _style(_BLACK, _LONG, "v"),
    _style(_ORANGE, _MIXED, "P"),
    _style(_SKY, _DOTS, "X"),
    _style(_GREY, (0, (4, 2, 1, 2)), "*"),
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

_WIDTH = 7.2  # inches, the text width of a two-column page
_DPI = 200


def figure_of(height: float, **grid: Any) -> tuple[Figure, Any]:
    """A figure of the text's width and `height` inches, with its axes."""
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**grid)
    for one in np.ravel(axes):
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#DDDDDD", linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: pathlib.Path) -> pathlib.Path:
    """Writes the figure in the format that the path ends with."""
    with report.replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))
    return path


def save_both(figure: Figure, path: pathlib.Path) -> list[pathlib.Path]:
    """Writes a PNG and a PDF; `path` is without a suffix."""
    return [save(figure, path.with_suffix(suffix)) for suffix in (".png", ".pdf")]


def line(
    axes: Axes, x: np.ndarray, y: np.ndarray, style: dict, label: str = ""
) -> None:
    """Draws a line across the intervals without a value, or none if all lack one."""
    seen = np.isfinite(y)
    if seen.any():
        look = style | {"linewidth": 1.5, "markersize": 3.5}
        every = max(1, int(seen.sum()) // 10)
        axes.plot(x[seen], y[seen], **look, label=label, markevery=every)


def whole_numbers() -> MaxNLocator:
    """Ticks at whole numbers only."""
    return MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def interval_axis(axes: Axes, interval: np.ndarray, first: int = 1) -> None:
    """The axis of intervals, from the first one to the last one."""
    axes.set_xlabel("interval")
    axes.xaxis.set_major_locator(whole_numbers())
    last = interval.max(initial=first)
    margin = max(0.03 * (last - first), 0.3)
    axes.set_xlim(first - margin, last + margin)


def style_of(label: str, index: int) -> dict[str, Any]:
    """A rule's or framework's own look; all else takes the next of the others."""
    known = FRAMEWORK_STYLE | ALGORITHM_STYLE
    return known.get(label, OTHER_STYLES[index % len(OTHER_STYLES)])


def title(text: str) -> str:
    """A title in lines that fit the width of a figure."""
    return textwrap.fill(escape(text), 90)


def escape(text: str) -> str:
    """Text as it is, for Matplotlib."""
    return text.replace("$", r"\$")  # else Matplotlib takes it for mathematics
