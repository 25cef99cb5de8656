"""Figures of accuracies by rule, and of their differences to one rule."""

import pathlib
from collections.abc import Mapping

import numpy as np
import pandas
import xarray

from tsfl_jax.report import bands, style

_COLUMNS = 4


@style.styled
def plot_differences(
    accuracy: xarray.DataArray, base: str, path: pathlib.Path, title: str
) -> list[pathlib.Path]:
    """Plot each rule minus the base against the interval, with its confidence band.

    The axis of differences is linear up to one point and logarithmic beyond, so that
    early and late ones can be read in one picture.

    Args:
      accuracy: ``[rule, seed, interval]`` on the test set, in [0, 1].
      base: a rule, with which the others are paired by seed.
      path: without a suffix.
      title: above the figure.

    Returns:
      The paths of the PNG and the PDF.
    """
    gains = 100 * (accuracy - accuracy.sel(rule=base)).drop_sel(rule=base)
    columns = min(len(gains), _COLUMNS) or 1
    rows = -(-len(gains) // columns) or 1
    grid_of = {"nrows": rows, "ncols": columns, "sharex": True, "sharey": True}
    figure, panels = style.figure_of(1.3 + 1.5 * rows, **grid_of)
    panels = list(np.ravel(panels))
    for axes in panels[len(gains) :]:
        axes.set_axis_off()
    look = style.line_style("#0072B2", "-", "")
    grey = {"color": "#777777", "linestyle": "--", "linewidth": 1}
    for axes, gain in zip(panels, gains, strict=False):
        style.plot_mean(axes, gain["interval"].values, gain.values, look, "")
        axes.axhline(0, **grey)
        axes.set_title(style.name_of(gain["rule"].item()), fontsize="small")
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter("{x:g}")
    label = "points of test accuracy" + ("\n" if rows == 1 else " ") + "above "
    figure.supylabel(label + style.name_of(base), fontsize="medium")
    figure.supxlabel("interval", fontsize="medium")
    figure.suptitle(style.title(title))
    return style.save_both(figure, path)


def plot_bands(
    curves: Mapping[str, np.ndarray], path: pathlib.Path, title: str = ""
) -> list[pathlib.Path]:
    """Write the figure of accuracies as PNG and PDF; see `bands.bands`.

    Args:
      curves: label → ``[n, T]``; a label may be the name of a rule or framework.
      path: without a suffix.
      title: above the figure.
    """
    frames = {
        name: pandas.DataFrame(values.T, np.arange(1, values.shape[1] + 1))
        for name, values in curves.items()
    }
    return style.save_both(bands.bands(frames, title), path)
