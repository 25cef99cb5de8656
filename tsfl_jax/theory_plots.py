"""The bound's items over time, and weights against local iterations, as a figure."""

import pathlib

import numpy as np

from tsfl_jax import plot_style
from tsfl_jax.theory import Bound

_ITEMS = {  # field of Bound → label, colour, dashes, marker
    "initial": ("initial", "#0072B2", "-", "o"),
    "gradient": ("gradient", "#D55E00", "--", "s"),
    "mini_batch": ("mini-batch", "#009E73", "-.", "^"),
    "data_distribution": ("data distribution", "#CC79A7", ":", "D"),
    "total": ("bound", "#000000", (0, (5, 1)), "v"),
}
_WEIGHTS = (("#0072B2", "o"), ("#D55E00", "s"), ("#CC79A7", "D"), ("#009E73", "^"))


def draw(
    interval: np.ndarray,
    bound: Bound,
    weights: dict[str, tuple[np.ndarray, np.ndarray]],
    path: pathlib.Path,
    title: str,
) -> list[pathlib.Path]:
    """Two panels, as PNG and PDF.

    Args:
      interval: ``[T]``, from 1.
      bound: of the intervals so far, each field ``[T]``; where it is void the figure
        says so.
      weights: label → (τ ``[T, N]``, ρ ``[T, N]``); drawn as the mean over all with
        the same τ.
      path: without a suffix.
      title: above the figure.
    """
    figure, (left, right) = plot_style.figure_of(3.0, ncols=2)
    void = ~(np.asarray(bound.W) > 0)
    for name, (label, color, dashes, marker) in _ITEMS.items():
        values = np.where(void, np.nan, np.asarray(getattr(bound, name), float))
        values = np.where(values > 0, values, np.nan)  # a logarithmic axis
        look = {"color": color, "linestyle": dashes, "marker": marker}
        plot_style.line(left, interval, values, look, label=label)
    if left.lines:
        left.set_yscale("log")
        left.legend(frameon=False, fontsize="small", handlelength=3)
    if void.any():
        first = interval[void][0]
        left.axvspan(first - 0.5, interval[-1] + 0.5, color="#EEEEEE", zorder=0)
        left.text(first, 0.02, " void: W ≤ 0", transform=left.get_xaxis_transform())
    left.set_ylabel("item of Theorem 1's bound")
    plot_style.interval_axis(left, interval)

    for (label, (tau, rho)), (color, marker) in zip(
        weights.items(), _WEIGHTS, strict=True
    ):
        known = np.isfinite(rho) & (tau > 0)
        levels = np.unique(tau[known])
        mean = [100 * rho[known & (tau == level)].mean() for level in levels]
        right.plot(levels, mean, color=color, marker=marker, label=label, linewidth=1.2)
    right.set_xlabel("local iterations τ")
    right.set_ylabel("mean weight ρ in %")
    right.xaxis.set_major_locator(plot_style.whole_numbers())
    right.legend(frameon=False, fontsize="small")
    figure.suptitle(plot_style.title(title), fontsize="medium")
    return plot_style.save_both(figure, path)
