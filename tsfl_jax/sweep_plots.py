"""Curves of a sweep: the mean of each group of lanes with its confidence band."""

import pathlib
import re
from collections.abc import Mapping

import numpy as np
from scipy import stats

from tsfl_jax import plot_style

_MOST = 12  # curves that can still be told apart


def band_of(values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half the width of its confidence interval at each place.

    Args:
      values: ``[n, T]``; NaN is left out.
      level: of confidence, in (0, 1), Student's t.

    Returns:
      two arrays ``[T]``, NaN where nothing was measured, or only one value.
    """
    seen = np.isfinite(values)
    count = seen.sum(axis=0)
    filled = np.where(seen, values, 0.0)
    mean = filled.sum(axis=0) / np.where(count > 0, count, np.nan)
    square = np.where(seen, (filled - mean[None]) ** 2, 0.0).sum(axis=0)
    freedom = np.where(count > 1, count - 1, np.nan)
    error = np.sqrt(square / freedom / np.where(count > 0, count, np.nan))
    return mean, stats.t.ppf(0.5 + level / 2, freedom) * error


def _look(name: str, index: int, names: list[str]) -> dict:
    """An algorithm's own style where only one of the curves is of that algorithm."""
    words = {other: re.split(r"[^\w]+", other) for other in names}
    for algorithm in plot_style.ALGORITHM_STYLE:
        having = [other for other in names if algorithm in words[other]]
        if having == [name]:
            return plot_style.style_of(algorithm, index)
    return plot_style.style_of(name, index)


def _draw(axes, found: dict, shown: list[str], first: int, scale: float) -> None:
    """Lines and bands of the groups from interval `first` on."""
    intervals = np.zeros(0)
    for index, name in enumerate(shown):
        mean, half = (values[first - 1 :] for values in found[name])
        interval = np.arange(first, first + len(mean))
        intervals = np.union1d(intervals, interval)
        style = _look(name, index, shown)
        seen = np.isfinite(mean) & np.isfinite(half)
        if seen.any():
            low, high = scale * (mean - half)[seen], scale * (mean + half)[seen]
            band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
            axes.fill_between(interval[seen], low, high, **band)
        label = plot_style.NAMES.get(name, plot_style.escape(name))
        plot_style.line(axes, interval, scale * mean, style, label=label)
    plot_style.interval_axis(axes, intervals, first)


def _late(found: dict, shown: list[str]) -> int:
    """Where a closer look begins: the last half, if the rise to it hides it; else 0."""
    length = max((len(found[name][0]) for name in shown), default=0)
    first = length // 2 + 1
    means = [found[name][0] for name in shown]
    means = [m for m in means if np.isfinite(m[first - 1 :]).any()]
    if length < 10 or not means:
        return 0
    whole = np.nanmax([np.nanmax(m) - np.nanmin(m) for m in means])
    end = np.concatenate([m[first - 1 :] for m in means])
    return first if np.nanmax(end) - np.nanmin(end) < whole / 3 else 0


def bands(
    curves: Mapping[str, np.ndarray],
    path: pathlib.Path,
    title: str = "",
    *,
    losses: bool = False,
) -> list[pathlib.Path]:
    """Draws test accuracy against the interval, one line and band per group.

    Args:
      curves: label → ``[n, T]`` accuracies in [0, 1], NaN where not evaluated; of more
        groups than can be told apart, those with the best end.
      path: without a suffix; a PNG and a PDF are written.
      title: above the figure.
      losses: the curves are test losses.
    """
    scale, sign = (1.0, -1) if losses else (100.0, 1)
    found = {name: band_of(values) for name, values in curves.items()}

    def end(name):
        mean = found[name][0]
        seen = mean[np.isfinite(mean)]
        return sign * seen[-1] if len(seen) else -np.inf

    best = sorted(found, key=end, reverse=True)[:_MOST]
    shown = [name for name in found if name in best]
    late = _late(found, shown)
    figure, panels = plot_style.figure_of(3.2, ncols=2 if late else 1)
    axes = np.ravel(panels)[0]
    _draw(axes, found, shown, 1, scale)
    axes.set_ylabel("test loss" if losses else "test accuracy in %")
    if late:
        _draw(panels[1], found, shown, late, scale)
    if axes.lines:
        most = max(len(values) for values in curves.values())
        notes = [f"mean and 95 % confidence of {most} lanes"] if most > 1 else []
        if len(found) > len(shown):
            notes.append(f"the best {len(shown)} of {len(found)}")
        look = {"frameon": False, "handlelength": 3.5, "fontsize": "small"}
        look["title_fontsize"] = "small"
        axes.legend(title="; ".join(notes) or None, **look)
    figure.suptitle(plot_style.title(title), fontsize="medium")
    return plot_style.save_both(figure, path)
