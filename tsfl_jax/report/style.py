"""How figures look: styles of the algorithms, axes, and saving.

Sizes, lines and axes are set in ``figures.mplstyle``. Matplotlib's object interface is
used throughout (no pyplot), so no display is needed. Curves differ in dashes or
markers, not only in color. Matplotlib is imported when a figure is plotted.
"""

import functools
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
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


_RULES = {  # name in figures and tables, color, dashes and marker
    "dms": ("DMS", _BLUE, "-", "o"),
    "fedavg": ("FedAvg", _RED, "--", "s"),
    "fedprox": ("FedProx", _GREEN, "-.", "^"),
    "fedasync": ("FedAsync", _PINK, ":", "D"),
    "fedbuff": ("FedBuff", _ORANGE, _MIXED, "P"),
    "fedat": ("FedAT", _SKY, _DOTS, "X"),
    "fednova": ("FedNova", _BLACK, _LONG, "v"),
    "bound_optimal": ("minimizer of the bound", _GREEN, _LONG, "1"),
    "scaffold": ("SCAFFOLD", _GREY, "-", "*"),
    "fedavgm": ("FedAvgM", _BLACK, _DOTS, "<"),
    "fedadam": ("FedAdam", _ORANGE, _LONG, ">"),
    "fedyogi": ("FedYogi", _SKY, _LONG, "p"),
    "median": ("median", _BLACK, "-", "h"),
    "trimmed_mean": ("trimmed mean", _GREY, _LONG, "d"),
    "geometric_median": ("geometric median", _GREY, _MIXED, "8"),
    "krum": ("Krum", _ORANGE, "-", "H"),
    "multi_krum": ("multi-Krum", _SKY, "-", "."),
    "oracle": ("oracle", _BLACK, "--", "+"),
    "dms_adaptive": ("adaptive DMS", _BLUE, "-.", "x"),
    "learned": ("learned weights", _PINK, "-", "2"),
}
# A framework looks like the rule that it is usually run with.
_FRAMEWORKS = {
    "tsfl_dms": ("T-SFL, DMS", "dms"),
    "tsfl": ("T-SFL, FedAvg", "fedavg"),
    "afl": ("AFL, FedAsync", "fedasync"),
    "sfl": ("SFL", "fednova"),
    "fedcs": ("FedCS", "trimmed_mean"),
    "esync": ("ESync", "fedprox"),
    "safa": ("SAFA", "fedyogi"),
}
_OTHERS: tuple[Style, ...] = (
    line_style(_BLACK, _LONG, "v"),
    line_style(_ORANGE, _MIXED, "P"),
    line_style(_SKY, _DOTS, "X"),
    line_style(_GREY, (0, (4, 2, 1, 2)), "*"),
)
# A line of another panel, for comparison.
FAINT: Style = {"color": "#CCCCCC", "linestyle": "-", "marker": "", "linewidth": 0.7}
# Of lines that are no rules: each color with the first dashes, then with the second, …
_COLORS = (_BLUE, _RED, _GREEN, _PINK, _BLACK, _ORANGE, _SKY, _GREY)
_DASHES = ("-", "--", "-.", ":", _LONG, _MIXED, _DOTS, (0, (4, 2, 1, 2)))
_MARKERS = "os^DvPX*<>phdH8"
ALGORITHM_STYLE = {rule: line_style(*look) for rule, (_, *look) in _RULES.items()}
NAMES = {label: name for label, (name, *_) in (_RULES | _FRAMEWORKS).items()}


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
    if "%" in axes.get_ylabel():
        high = np.minimum(high, 100)
    plot_band(axes, x[seen], low, high, style, alpha)
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
    _, rule = _FRAMEWORKS.get(label, ("", label))
    return ALGORITHM_STYLE.get(rule, _OTHERS[index % len(_OTHERS)])


def _rule_style(value: Any) -> Style | None:
    """The style of a rule or framework; None for anything else."""
    _, rule = _FRAMEWORKS.get(str(value), ("", str(value)))
    return ALGORITHM_STYLE.get(rule)


def _different(styles: list[Style]) -> bool:
    looks = [(s["color"], str(s["linestyle"])) for s in styles]
    return len(set(looks)) == len(looks)


def _colors(values: list[Any]) -> dict[Any, str]:
    """A color for each value of a setting; rules keep theirs."""
    own = [style["color"] for style in map(_rule_style, values) if style]
    if len(set(own)) < len(values):
        own = [_COLORS[i % len(_COLORS)] for i in range(len(values))]
    return dict(zip(values, own, strict=True))


def _dashes(colors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    """Dashes of each line: those of `rest`, the settings that are not the color.

    The same in all colors. Values that no color has both of may share dashes: where a
    setting belongs to one rule only, the lines of each rule begin with a solid one.
    """
    lines = list(zip(colors, rest, strict=True))
    found: dict[Any, int] = {}
    for value in dict.fromkeys(rest):
        mine = {color for color, other in lines if other == value}
        taken = {found.get(other) for color, other in lines if color in mine}
        free = (i for i in range(len(_DASHES)) if i not in taken)
        found[value] = next(free, 0)
    return [_DASHES[found[value]] for value in rest]


def varied(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that differ between some lines, with their values in order."""
    names = dict.fromkeys(name for one in settings for name in one)
    found = {n: list(dict.fromkeys(one.get(n) for one in settings)) for n in names}
    return {name: values for name, values in found.items() if len(values) > 1}


def styles_of(settings: Sequence[Mapping[str, Any]]) -> list[Style]:
    """A style for each line, no two the same: color = one setting, dashes = another.

    Args:
      settings: of each line, what distinguishes it, ``{"algorithm": "dms"}``.

    Returns:
      Styles in the same order. The algorithm has the colors, else the first setting;
      the combinations of all others have the dashes. Where each line has a color of
      its own, its dashes are its own as well.
    """
    differing = varied(settings)
    first = "algorithm" if "algorithm" in differing else next(iter(differing), "")
    values = [one.get(first) for one in settings]
    if len(set(map(str, values))) == len(values):
        own = [style for style in map(_rule_style, values) if style]
        if len(own) == len(values) and _different(own):
            return own
    elif len(differing) > 1:
        rest = [
            tuple(str(one.get(n)) for n in differing if n != first) for one in settings
        ]
        color, dashes = _colors(differing[first]), _dashes(values, rest)
        marks = {value: i for i, value in enumerate(differing[first])}
        styles = [
            line_style(color[value], dash, _MARKERS[marks[value] % len(_MARKERS)])
            for value, dash in zip(values, dashes, strict=True)
        ]
        if _different(styles):
            return styles
    return [
        line_style(
            _COLORS[i % len(_COLORS)],
            _DASHES[(i + i // len(_COLORS)) % len(_DASHES)],
            _MARKERS[i % len(_MARKERS)],
        )
        for i in range(len(settings))
    ]


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
    columns = max(1, min(4, 105 // (max(map(len, labels), default=0) + 9)))
    figure.legend(
        lines,
        labels,
        loc="outside lower center",
        ncols=columns,
        title=note or None,
        fontsize="small",
        title_fontsize="small",
    )


def name_of(label: str) -> str:
    """The written name of a rule or framework; other labels as they are."""
    return NAMES.get(label, escape(label))


def title(text: str) -> str:
    """Break a title into lines that fit the width of a figure."""
    return textwrap.fill(escape(text), 90)


def escape(text: str) -> str:
    """Text that Matplotlib shows as it is."""
    return text.replace("$", r"\$")  # else Matplotlib takes it for mathematics
