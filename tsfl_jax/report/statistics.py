"""Means with confidence intervals, for tables and figures of several seeds.

Student's t; NaN and ±inf count as missing only where the caller says so.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

# Said above every table whose cells are made by `spread`.
OVER_SEEDS = "mean ± half of the 95 % confidence interval (Student's t) over the seeds"


def confidence_interval(
    values: np.ndarray | Sequence[float | np.floating],
    level: float = 0.95,
    *,
    omit: bool = False,
) -> tuple[Any, Any]:
    """Mean over the first axis, and half the width of its confidence interval.

    x̄ and t((1 + level) / 2; n − 1) s / √n.

    Args:
      values: ``[n, …]``, n independent measurements.
      level: of confidence, in (0, 1).
      omit: leave out values that are not finite; otherwise they make the mean NaN.

    Returns:
      Two float64 arrays ``[…]``, NumPy scalars for ``[n]``. The mean is NaN without a
      value, half the width with fewer than two.
    """
    from scipy import stats

    values = np.asarray(values, float)
    known = np.isfinite(values) if omit else np.ones(values.shape, bool)
    count = known.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):  # too few values: NaN
        mean = np.where(known, values, 0.0).sum(axis=0) / count
        square = np.where(known, (values - mean[None]) ** 2, 0.0).sum(axis=0)
        error = np.sqrt(square / (count - 1) / count)
    return mean, stats.t.ppf(0.5 + level / 2, count - 1) * error


def spread(
    values: np.ndarray | Sequence[float | np.floating], form: str = ".2f"
) -> str:
    """Format a mean ± half of its 95 % confidence interval: "97.40 ± 0.12".

    Args:
      values: ``[n]`` independent measurements; the mean alone for n = 1.
      form: format of the mean; "+.2f" shows the sign of a difference.
    """
    mean, half = confidence_interval(values)
    text = f"{mean:{form}}"
    return text if np.isnan(half) else f"{text} ± {half:{form.lstrip('+')}}"


def time_to(
    target: float, seconds: Float[np.ndarray, "E"], accuracy: Float[np.ndarray, "E"]
) -> float:
    """Virtual seconds until the accuracy was first reached; inf: never."""
    reached = np.flatnonzero(accuracy >= target)
    return float(seconds[reached[0]]) if len(reached) else np.inf


def at_times(
    times: Float[np.ndarray, "X"],
    seconds: Float[np.ndarray, "E"],
    accuracy: Float[np.ndarray, "E"],
) -> Float[np.ndarray, "X"]:
    """Accuracy of the newest tested model at each time; NaN before the first one."""
    index = np.searchsorted(seconds, times, "right") - 1
    return np.where(index >= 0, accuracy[np.maximum(index, 0)], np.nan)


def spread_of_times(times: Float[np.ndarray, "S"]) -> str:
    """Mean ± half its confidence interval, or how many seeds never reached it."""
    never = int(np.isinf(times).sum())
    return f"never ({never} of {len(times)})" if never else spread(times)
