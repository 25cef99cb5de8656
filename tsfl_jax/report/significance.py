"""Paired tests of differences, corrected for their number."""

from collections.abc import Sequence

import numpy as np


def paired_p(differences: np.ndarray | Sequence[float | np.floating]) -> float:
    """p value of Student's paired t test, two-sided, of a mean difference of 0.

    Args:
      differences: ``[n]`` of pairs. Fewer than two, or a NaN: NaN. Without any spread
        the test has no error to divide by: 1 where all are 0, else NaN.
    """
    from scipy import stats

    found = np.asarray(differences, float)
    if len(found) < 2 or not np.isfinite(found).all():
        return float("nan")
    if np.ptp(found) <= 1e-9 * np.abs(found).max():  # rounding is no spread
        return float("nan") if found.any() else 1.0
    return float(np.asarray(stats.ttest_1samp(found, 0.0))[1])


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
