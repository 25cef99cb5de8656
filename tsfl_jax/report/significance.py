"""Paired tests of differences, corrected for their number, and what they say."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray

LEVEL = 0.05  # of all tests
BETTER, WORSE, OPEN, SAME = "better", "worse", "inconclusive", "identical"


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


def signed_rank_p(differences: np.ndarray | Sequence[float | np.floating]) -> float:
    """p value of Wilcoxon's signed-rank test, two-sided.

    Pairs without a difference are left out.

    It cannot be below 2^(1 − n): with five pairs never below 0.0625.

    Args:
      differences: ``[n]`` of pairs; NaN without any that is not 0.
    """
    from scipy import stats

    found = np.asarray(differences, float)
    if not np.isfinite(found).all() or not found.any():
        return float("nan")
    return float(np.asarray(stats.wilcoxon(found))[1])


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


def verdict(
    differences: np.ndarray | Sequence[float | np.floating],
    p: float,
    words: tuple[str, str] = (BETTER, WORSE),
) -> str:
    """What a corrected p value says about the mean of paired differences.

    Args:
      differences: ``[n]`` of pairs.
      p: see `paired_p`, `holm`; "–" for NaN.
      words: for a mean above 0, and below.
    """
    if not np.isfinite(p):
        return "–"
    found = np.asarray(differences, float)
    if not found.any():
        return SAME
    if p >= LEVEL:
        return OPEN
    return words[0] if found.mean() > 0 else words[1]


def tested(
    gains: xarray.DataArray, *family: str, words: tuple[str, str] = (BETTER, WORSE)
) -> tuple[xarray.DataArray, xarray.DataArray]:
    """p values as text, and verdicts, of differences that are paired by seed.

    Args:
      gains: ``[…, seed]``; NaN: no test.
      family: dimensions whose tests Holm's correction counts together.
      words: for a mean above 0, and below.
    """
    each, many = functools.partial(xarray.apply_ufunc, vectorize=True), [[*family]]
    p = each(paired_p, gains, input_core_dims=[["seed"]])
    p = each(holm, p, input_core_dims=many, output_core_dims=many)
    say = functools.partial(verdict, words=words)
    texts: dict[str, Any] = {"output_dtypes": [object]}
    said = each(say, gains, p, input_core_dims=[["seed"], []], **texts)
    return each(p_text, p, **texts), said
