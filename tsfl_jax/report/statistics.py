"""Means with confidence intervals and paired tests, for results of several seeds.

Student's t; NaN and ±inf count as missing only where the caller says so.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    import pandas

# Said above every table whose entries are made by `spread`.
OVER_SEEDS = "mean ± half of the 95 % confidence interval (Student's t) over the seeds"


def confidence_interval(
    values: np.ndarray | Sequence[float | np.floating], omit: bool = False
) -> tuple[Any, Any]:
    """Mean over the first axis, and half the width of its 95 % confidence interval.

    x̄ and t(0.975; n − 1) s / √n.

    Args:
      values: ``[n, …]``, n independent measurements.
      omit: leave out values that are not finite; otherwise they make the mean NaN.

    Returns:
      Two float64 arrays ``[…]``, NumPy scalars for ``[n]``. The mean is NaN without a
      value, half the width with fewer than two.
    """
    from scipy import stats

    values = np.asarray(values, float)
    counted = np.isfinite(values) if omit else np.ones(values.shape, bool)
    count = counted.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):  # too few values: NaN
        mean = np.where(counted, values, 0.0).sum(axis=0) / count
        square = np.where(counted, (values - mean[None]) ** 2, 0.0).sum(axis=0)
        error = np.sqrt(square / (count - 1) / count)
    return mean, stats.t.ppf(0.975, count - 1) * error


def has_diverged(row: Mapping[str, Any]) -> bool:
    """Whether the results of a run, by name, are in no mean."""
    return row.get("diverged_at") is not None


def spread(
    values: np.ndarray | Sequence[float | np.floating], form: str = ".2f"
) -> str:
    """Format a mean ± half of its 95 % confidence interval: "97.40 ± 0.12".

    Args:
      values: ``[n]`` independent measurements; the mean alone for n = 1, and the range
        for n = 2, whose interval of 12.7 standard errors says nothing.
      form: format of the mean; "+.2f" shows the sign of a difference, and with "g" the
        interval has two digits, the mean as many decimals.
    """
    mean, half = confidence_interval(values)
    if form.endswith("g") and (half >= 1e-4 or 1e4 <= abs(mean) < np.inf):
        decimals = 1 - math.floor(math.log10(half)) if half > 0 else 0
        form = f"{form.partition('.')[0]}.{max(0, decimals)}f"
    text = f"{mean:{form}}"
    low, high = (f"{end:{form}}" for end in (min(values), max(values)))
    if len(values) == 2 and low != high:
        return f"{text} ({low} to {high})"
    return text if np.isnan(half) else f"{text} ± {half:{form.lstrip('+')}}"


def spread_of_known(
    values: np.ndarray | Sequence[float], form: str = ".2f", is_time: bool = False
) -> str:
    """`spread` of what is known; "–" if nothing is, "inf (1 of 3)" of infinite ones.

    Of times to a target (`is_time`) "reached by 2 of 3", or "never", instead of "inf".
    """
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    if not len(values):
        return "–"
    total, finite = len(values), int(np.isfinite(values).sum())
    if finite == total:
        return spread(values, form)
    if is_time:
        return f"reached by {finite} of {total}" if finite else "never"
    return f"inf ({total - finite} of {total})" if total > 1 else "inf"


def time_to(
    target: float, seconds: Float[np.ndarray, "E"], accuracy: Float[np.ndarray, "E"]
) -> float:
    """Virtual seconds until the accuracy was first reached; inf: never."""
    reached = np.flatnonzero(accuracy >= target)
    return float(seconds[reached[0]]) if len(reached) else np.inf


def in_time(
    curves: Iterable[tuple[Float[np.ndarray, "E"], Float[np.ndarray, "E"]]],
    *,
    forward: bool = True,
) -> "pandas.DataFrame":
    """Accuracy of each run's newest tested model, a column per run.

    Args:
      curves: (virtual seconds, test accuracy) of each run.
      forward: a model counts until the next one is tested; else only then.

    Returns:
      A line for each time at which any run was tested; NaN before a run's first.
    """
    import pandas

    lines = [pandas.Series(a, s).groupby(level=0).last() for s, a in curves]
    tested = pandas.concat(lines, axis=1).sort_index()
    return tested.ffill() if forward else tested


def paired_p(differences: np.ndarray | Sequence[float | np.floating]) -> float:
    """p value of Student's paired t test, two-sided, of a mean difference of 0.

    Args:
      differences: ``[n]`` of pairs. Fewer than two, or a NaN: NaN. Without any spread
        the test has no error to divide by: 1 where all are 0, else NaN.
    """
    from scipy import stats

    gaps = np.asarray(differences, float)
    if len(gaps) < 2 or not np.isfinite(gaps).all():
        return float("nan")
    if np.ptp(gaps) <= 1e-9 * np.abs(gaps).max():  # rounding is no spread
        return float("nan") if gaps.any() else 1.0
    return float(np.asarray(stats.ttest_1samp(gaps, 0.0))[1])


def p_text(value: float) -> str:
    """A p value as text, three digits; "–" for NaN."""
    if not np.isfinite(value):
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def holm(p_values: np.ndarray | Sequence[float]) -> np.ndarray:
    """p values corrected for their number; NaN are no tests and stay.

    p̃_(i) = max_{j ≤ i} min(1, (m − j + 1) p_(j)), p_(1) ≤ … ≤ p_(m). Holm, "A Simple
    Sequentially Rejective Multiple Test Procedure", Scand. J. Statistics 1979.

    Args:
      p_values: of any shape, all of them tests of one family.
    """
    p = np.array(p_values, float)
    order = np.argsort(p, axis=None)[: int(np.isfinite(p).sum())]
    factors = np.arange(len(order), 0, -1)
    p.flat[order] = np.minimum(np.maximum.accumulate(factors * p.flat[order]), 1.0)
    return p
