"""The terms of Theorem 1 over time, and weights against local iterations."""

import pathlib

import numpy as np

from tsfl_jax import plot_style
from tsfl_jax.theory import Bound, Terms

_TERMS = {  # field of Terms → label, colour, dashes, marker
    "X": ("X, gradient", "#D55E00", "--", "s"),
    "Y": ("Y, mini-batch", "#009E73", "-.", "^"),
    "Z": ("Z, data distribution", "#CC79A7", ":", "D"),
}
_WEIGHTS = (
    ("#009E73", "^"),
    ("#0072B2", "o"),
    ("#56B4E9", "v"),
    ("#D55E00", "s"),
    ("#CC79A7", "D"),
)


def draw(
    interval: np.ndarray,
    terms: Terms,
    bound: Bound,
    distance: float,
    weights: dict[str, tuple[np.ndarray, np.ndarray]],
    path: pathlib.Path,
    title: str,
) -> list[pathlib.Path]:
    """Two panels, as PNG and PDF.

    Args:
      interval: ``[T]``, from 1.
      terms, bound: of the intervals so far, each field ``[T]``.
      distance: ‖w⁰ − w*‖².
      weights: five of label → (τ ``[T, N]``, ρ ``[T, N]``); drawn as the mean over
        all with the same τ.
      path: without a suffix.
      title: above the figure.
    """
    figure, (left, right) = plot_style.figure_of(3.0, ncols=2)
    void = ~(np.asarray(terms.W) > 0)
    curves = {"‖w⁰ − w*‖²": (np.full(len(interval), distance), "#0072B2", "-", "o")}
    for name, (label, *look) in _TERMS.items():
        curves[label] = (np.asarray(getattr(terms, name), float), *look)
    total = np.where(void, np.nan, np.asarray(bound.total, float))
    curves["bound"] = (total, "#000000", (0, (5, 1)), "v")
    for label, (values, color, dashes, marker) in curves.items():
        values = np.where(values > 0, values, np.nan)  # a logarithmic axis
        look = {"color": color, "linestyle": dashes, "marker": marker}
        plot_style.line(left, interval, values, look, label=label)
    if left.lines:
        left.set_yscale("log")
        left.legend(frameon=False, fontsize="x-small", handlelength=3)
    if void.any():
        first = interval[void][0]
        left.axvspan(first - 0.5, interval[-1] + 0.5, color="#EEEEEE", zorder=0)
        place = left.get_xaxis_transform()
        left.text(first, 0.02, "W ≤ 0: no bound", fontsize="small", transform=place)
    left.set_ylabel("terms of Theorem 1")
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
    right.legend(frameon=False, fontsize="x-small")
    figure.suptitle(plot_style.title(title), fontsize="medium")
    return plot_style.save_both(figure, path)
