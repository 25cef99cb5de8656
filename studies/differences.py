"""Curves of rules minus those of one rule, a small panel for each."""

import pathlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from tsfl_jax.report import style

_COLUMNS = 4


@style.styled
def plot_differences(
    curves: Mapping[str, Float[np.ndarray, "S T"]],
    base: str,
    path: pathlib.Path,
    title: str,
) -> list[pathlib.Path]:
    """Plot each rule minus the base against the interval, with its confidence band.

    The axis of differences is linear up to one point and logarithmic beyond, so that
    early and late ones can be read in one picture.

    Args:
      curves: name → test accuracies in [0, 1], paired by seed with the base's.
      base: key of `curves`.
      path: without a suffix.
      title: above the figure.

    Returns:
      The paths of the PNG and the PDF.
    """
    names = [name for name in curves if name != base]
    columns = min(len(names), _COLUMNS) or 1
    rows = -(-len(names) // columns) or 1
    grid_of = {"nrows": rows, "ncols": columns, "sharex": True, "sharey": True}
    figure, panels = style.figure_of(1.3 + 1.5 * rows, **grid_of)
    panels = list(np.ravel(panels))
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    look = style.line_style("#0072B2", "-", "")
    grey = {"color": "#777777", "linestyle": "--", "linewidth": 1}
    for axes, name in zip(panels, names, strict=False):
        gain = 100 * (curves[name] - curves[base])
        x = np.arange(1, gain.shape[1] + 1)
        style.plot_mean(axes, x, gain, look, "")
        axes.axhline(0, **grey)
        axes.set_title(style.name_of(name), fontsize="small")
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter("{x:g}")
    label = "points of test accuracy" + ("\n" if rows == 1 else " ") + "above "
    figure.supylabel(label + style.name_of(base), fontsize="medium")
    figure.supxlabel("interval", fontsize="medium")
    figure.suptitle(style.title(title))
    return style.save_both(figure, path)
