"""How figures look: styles of lines, axes, and saving.

Sizes, lines and axes are set in ``figures.mplstyle``. Matplotlib's object interface is
used throughout (no pyplot), so no display is needed. Curves differ in dashes or
markers, not only in color. Matplotlib is imported when a figure is plotted.
"""

import contextlib
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.report import files
from tsfl_jax.report.statistics import confidence_interval
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.timeline import FRAMEWORKS

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import matplotlib.ticker

Style = dict[str, Any]  # keyword arguments of a line: color, linestyle, marker, …

_RC_FILE = pathlib.Path(__file__).with_name("figures.mplstyle")
# The colors of Okabe and Ito, distinct for color-blind readers.
_COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#000000", "#E69F00", "#56B4E9", "#888888"),
)
_DASHES: tuple[Any, ...] = (
    *("-", "--", "-.", ":"),
    *((0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (4, 2, 1, 2))),
)
_MARKERS = "os^DvPX*<>phdH8"


def line_style(color: str, linestyle: Any, marker: str) -> Style:
    """The look of one curve."""
    return {"color": color, "linestyle": linestyle, "marker": marker}


def style_at(index: int) -> Style:
    """The look of line `index`; the first 64 differ in color or dashes."""
    dashes = index + index // len(_COLORS)
    color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
    return line_style(color, _DASHES[dashes % len(_DASHES)], marker)


def style_of(label: str, index: int) -> Style:
    """The style of a rule, in all figures; other labels have that of the index."""
    return style_at([*AGGREGATORS].index(label) if label in AGGREGATORS else index)


def styles_of(labels: Sequence[str]) -> list[Style]:
    """A style for each line; rules keep theirs where all lines are rules."""
    names = [label.removeprefix("algorithm=") for label in labels]
    are_rules = AGGREGATORS.keys() >= {*names}
    return [style_of(name if are_rules else "", i) for i, name in enumerate(names)]


@contextlib.contextmanager
def _in_style() -> Iterator[None]:
    """Plot under ``figures.mplstyle``."""
    import matplotlib

    with matplotlib.rc_context(fname=_RC_FILE):
        yield


styled = _in_style()  # decorates plotting functions


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
        distance = max(1, int(seen.sum()) // 10)  # of the markers
        axes.plot(x[seen], y[seen], **style, label=label, markevery=distance)


def plot_mean(
    axes: "matplotlib.axes.Axes",
    x: np.ndarray,
    values: np.ndarray,
    style: Style,
    label: str,
    percent: bool = False,
) -> None:
    """Plot the mean of ``[n, T]`` values over n, with its 95 % confidence band.

    For n = 2 the band is the range; that of values ≥ 0 does not go below 0, and that of
    percentages not beyond 100.
    """
    mean, half = confidence_interval(values, omit=True)
    seen = np.isfinite(mean) & np.isfinite(half)
    low, high = (mean - half)[seen], (mean + half)[seen]
    if len(values) == 2:
        low, high = values[:, seen].min(axis=0), values[:, seen].max(axis=0)
    if not (values < 0).any():
        low = np.maximum(low, 0)
    if percent:
        high = np.minimum(high, 100)
    if seen.any():
        shade = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(x[seen], low, high, **shade)
    plot_line(axes, x, mean, style, label=label)


def whole_numbers() -> "matplotlib.ticker.MaxNLocator":
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def interval_axis(axes: "matplotlib.axes.Axes", interval: np.ndarray) -> None:
    """Set up the axis of intervals, from 1 to the last one."""
    axes.set_xlabel("interval")
    axes.xaxis.set_major_locator(whole_numbers())
    last = interval.max(initial=1)
    margin = max(0.03 * (last - 1), 0.3)
    axes.set_xlim(1 - margin, last + margin)


def accuracy_axis(axes: "matplotlib.axes.Axes") -> None:
    """Keep the axis of an accuracy in % within 0 to 100: bands may end outside."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 100))


def legend_below(
    figure: "matplotlib.figure.Figure",
    lines: Sequence[Any],
    labels: Sequence[str],
    note: str = "",
) -> None:
    """A legend below the figure, outside of the data; none for a single line."""
    if len(labels) < 2 and not note:
        return
    look = {"fontsize": "small", "title_fontsize": "small", "title": note or None}
    columns = legend_columns(labels)
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, **look)


def legend_columns(labels: Sequence[str]) -> int:
    """How many of the labels fit side by side, four at most."""
    return max(1, min(4, 105 // (max(map(len, labels), default=0) + 9)))


def name_of(label: str) -> str:
    """The written name of a rule, a framework, or both, "tsfl_dms"; others as is."""
    framework, _, rule = label.partition("_")
    if framework in FRAMEWORKS and rule in AGGREGATORS:
        return f"{name_of(framework)}, {name_of(rule)}"
    rows = {**FRAMEWORKS, **AGGREGATORS}
    return rows[label].label or label if label in rows else escape(label)


def title(text: str) -> str:
    """Break a title into lines that fit the width of a figure."""
    return textwrap.fill(escape(text), 90)


def escape(text: str) -> str:
    """Text that Matplotlib shows as it is."""
    return text.replace("$", r"\$")  # else Matplotlib takes it for mathematics
