"""Curves of a sweep: a line and a confidence band for each group of lanes.

Lanes that differ only in their seed are one group. Up to four lines share one pair of
axes; more are spread over small panels with the same scales.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.statistics import confidence_interval

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Row = dict[str, Any]  # one lane: swept settings and results by name
Curves = Mapping[str, np.ndarray]  # label → [n, T]

MOST = 12  # lines that a reader can distinguish
_TOGETHER = 4  # lines in one pair of axes
# Characters of titles side by side, and inches of a line of a title.
_ACROSS, _LINE = 96, 0.15


def grouped(swept: Sequence[str], rows: list[Row]) -> dict[str, list[int]]:
    """Lanes with the same swept values except for the seed, by label.

    A label is "lr=0.01, algorithm=dms", or "all" if only seeds differ. Of lanes with
    the same values and seeds only the first is in a group: they are one run.
    """
    groups: dict[str, list[int]] = {}
    seen: set[str] = set()
    for index, row in enumerate(rows):
        point = repr([row[name] for name in swept])
        if point in seen:
            continue
        seen.add(point)
        pairs = [f"{name}={row[name]}" for name in swept if name not in SEEDS]
        groups.setdefault(", ".join(pairs) or "all", []).append(index)
    return groups


def of_sweep(
    swept: Sequence[str],
    rows: list[Row],
    measured: np.ndarray,
    title: str,
    *,
    losses: bool = False,
) -> "matplotlib.figure.Figure":
    """The figure of a sweep.

    Args:
      swept: names of the swept settings.
      rows: results of each lane.
      measured: ``[L, T]`` accuracies in [0, 1], or losses.
      title: above the figure.
      losses: `measured` are test losses.
    """
    groups = grouped(swept, rows)
    curves = {label: measured[lanes] for label, lanes in groups.items()}
    settings = {
        label: {n: rows[lanes[0]][n] for n in swept if n not in SEEDS}
        for label, lanes in groups.items()
    }
    return bands(curves, title, settings, losses=losses)


def plot_bands(
    curves: Curves, path: pathlib.Path, title: str = ""
) -> list[pathlib.Path]:
    """Write the figure of accuracies as PNG and PDF; see `bands`.

    Args:
      curves: label → ``[n, T]``; a label may be the name of a rule or framework.
      path: without a suffix.
      title: above the figure.
    """
    settings = {label: {"line": label} for label in curves}
    return plot_style.save_both(bands(curves, title, settings), path)


def _best(
    curves: Curves, means: Mapping[str, np.ndarray], losses: bool
) -> dict[str, np.ndarray]:
    """The lines with the best ends, in their own order."""

    def end(name: str) -> float:
        seen = means[name][np.isfinite(means[name])]
        return (-1 if losses else 1) * seen[-1] if len(seen) else -np.inf

    best = sorted(curves, key=end, reverse=True)[:MOST]
    return {name: values for name, values in curves.items() if name in best}


@plot_style.styled
def bands(
    curves: Curves,
    title: str,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    losses: bool = False,
) -> "matplotlib.figure.Figure":
    """Plot test accuracy against the interval, one line and band per group.

    Args:
      curves: label → ``[n, T]`` accuracies in [0, 1], NaN where not evaluated. Of more
        groups than a reader can distinguish, those with the best end are shown.
      title: above the figure.
      settings: of each label, what distinguishes it.
      losses: the curves are test losses.
    """
    scale = 1.0 if losses else 100.0
    curves = {name: scale * values for name, values in curves.items()}
    means = {n: confidence_interval(v, omit=True)[0] for n, v in curves.items()}
    shown = _best(curves, means, losses)
    looks = plot_style.styles_of([settings[name] for name in shown])
    styles = dict(zip(shown, looks, strict=True))
    if len(shown) > _TOGETHER:
        figure, panels = _multiples(shown, styles, settings)
    else:
        late = _late([means[name] for name in shown])
        figure, panels = plot_style.figure_of(3.4, ncols=2 if late else 1)
        panels = list(np.ravel(panels))
        for axes, first in zip(panels, (1, late), strict=False):
            _plot(axes, shown, styles, first)
    for axes in panels:
        if not losses:
            plot_style.accuracy_axis(axes)
    figure.supylabel("test loss" if losses else "test accuracy in %", fontsize="medium")
    most = max(map(len, curves.values()), default=0)
    notes = [f"mean and 95 % confidence of {most} lanes"] if most > 1 else []
    if len(curves) > len(shown):
        notes.append(f"the best {len(shown)} of {len(curves)}")
    _legend(figure, panels, "; ".join(notes))
    figure.suptitle(plot_style.title(title))
    return figure


def _legend(
    figure: "matplotlib.figure.Figure",
    panels: "Sequence[matplotlib.axes.Axes]",
    note: str,
) -> None:
    """One legend for all panels, below them; each line once.

    Panels of one line have it in their title.
    """
    known, titled = {}, len(panels) > 2 and all(axes.get_title() for axes in panels)
    for axes in panels:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(label, line)
    if titled and len(known) == len(panels):
        known = {}
    plot_style.legend_below(figure, list(known.values()), list(known), note)


def _plot(
    axes: "matplotlib.axes.Axes",
    curves: Curves,
    styles: Mapping[str, plot_style.Style],
    first: int = 1,
) -> None:
    """Plot lines and bands of the groups from interval `first` on."""
    last = max((values.shape[1] for values in curves.values()), default=0)
    for name, values in curves.items():
        values = values[:, first - 1 :]
        interval = np.arange(first, first + values.shape[1])
        label = plot_style.name_of(name)
        plot_style.plot_mean(axes, interval, values, styles[name], label)
    plot_style.interval_axis(axes, np.arange(first, last + 1), first)


def _late(means: list[np.ndarray]) -> int:
    """The first interval of a closer look; 0: there is none.

    The last half of the intervals, where the rise before them hides the differences.
    """
    length = max(map(len, means), default=0)
    first = length // 2 + 1
    means = [mean for mean in means if np.isfinite(mean[first - 1 :]).any()]
    if length < 10 or not means:
        return 0
    whole = max(np.nanmax(mean) - np.nanmin(mean) for mean in means)
    end = np.concatenate([mean[first - 1 :] for mean in means])
    return first if np.nanmax(end) - np.nanmin(end) < whole / 3 else 0


def panels_of(
    settings: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[str]]:
    """Which lines share a panel: those with the same value of one setting.

    Args:
      settings: of each label, what distinguishes it.

    Returns:
      Title of each panel and its labels. The setting is the one with the fewest values
      that leaves at most four lines in a panel; without one, each line has its own,
      titled with all of its settings.
    """
    labels, differing = list(settings), plot_style.varied(list(settings.values()))
    best: dict[str, list[str]] = {}
    for name, values in differing.items():
        parts = {
            f"{name}={value}": [n for n in labels if settings[n].get(name) == value]
            for value in values
        }
        fits = max(map(len, parts.values())) <= _TOGETHER and len(parts) < len(labels)
        if len(differing) > 1 and fits and (not best or len(parts) < len(best)):
            best = parts
    return best or {plot_style.name_of(label): [label] for label in labels}


def _filled(title: str, width: int) -> str:
    """A title in lines of at most `width` characters, broken between settings."""
    lines = [""]
    for part in title.split(", "):
        both = f"{lines[-1]}, {part}" if lines[-1] else part
        lines = [*lines[:-1], both] if len(both) <= width else [*lines, part]
    return "\n".join(filter(None, lines))


def _multiples(
    curves: Curves,
    styles: Mapping[str, plot_style.Style],
    settings: Mapping[str, Mapping[str, Any]],
) -> "tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]":
    """Small panels with the same scales; the other panels' lines are grey."""
    parts = panels_of({name: settings[name] for name in curves})
    columns = min(len(parts), 3 if len(parts) <= 9 else 4)
    rows = -(-len(parts) // columns)
    legend = 0 if len(parts) == len(curves) else 0.09 * len(curves)
    titles = [_filled(title, _ACROSS // columns) for title in parts]
    above = _LINE * max(title.count("\n") for title in titles)
    figure, grid = plot_style.figure_of(
        1.3 + legend + ((1.9 if rows == 1 else 1.55) + above) * rows,
        nrows=rows,
        ncols=columns,
        sharex=True,
        sharey=True,
    )
    panels = list(np.ravel(grid))
    for axes in panels[len(parts) :]:
        axes.set_axis_off()
    for axes, title, labels in zip(panels, titles, parts.values(), strict=False):
        for name, values in curves.items():
            if name not in labels:
                mean, _ = confidence_interval(values, omit=True)
                x = np.arange(1, len(mean) + 1)
                plot_style.plot_line(axes, x, mean, plot_style.FAINT)
        _plot(axes, {name: curves[name] for name in labels}, styles)
        axes.set_title(plot_style.escape(title), fontsize="small")
    for axes in panels[: len(parts) - columns]:  # there is one below
        axes.set_xlabel("")
    return figure, panels[: len(parts)]
