"""What paired tests say, and means over the seeds of labelled arrays."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray
from jaxtyping import Float

from tsfl_jax.report.statistics import confidence_interval, holm, p_text, paired_p

LEVEL = 0.05  # of all tests
BETTER, WORSE, OPEN, SAME = "better", "worse", "inconclusive", "identical"


def over(values: xarray.DataArray) -> xarray.DataArray:
    """`confidence_interval` over the seeds of a labelled array.

    Args:
      values: with the dimension ``seed``; differences of two rules are paired by it.

    Returns:
      An array with the dimension ``statistic`` of "mean" and "half" in place of
      ``seed``, as the first one.
    """
    first = values.transpose("seed", ...)
    both = np.stack(confidence_interval(first.values))
    coords = {n: a for n, a in first.coords.items() if "seed" not in a.dims}
    coords["statistic"] = ["mean", "half"]
    return xarray.DataArray(both, coords, ("statistic", *first.dims[1:]))


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


def curves_of(history: Mapping[Any, Any], classes: int) -> Float[np.ndarray, "*L T"]:
    """Test accuracies of runs; one that diverged is scored at chance level.

    What it reached before it diverged must not make it look good.

    Args:
      history: of one or more runs, or their table: ``test_accuracy`` in [0, 1], NaN
        where not tested, and ``diverged``: the run had lost every model by then.
      classes: number of them, ≥ 1.
    """
    accuracy = np.array(history["test_accuracy"], float)
    tested = np.isfinite(accuracy).reshape(-1, accuracy.shape[-1]).any(axis=0)
    tested |= ~tested.any()  # lost before the first test
    lost = np.asarray(history["diverged"]).any(axis=-1)
    accuracy[lost] = np.where(tested, 1 / classes, np.nan)
    return accuracy


def diverged_note(history: Mapping[str, np.ndarray]) -> str:
    """How many runs diverged, for a note; "" if none. `curves_of` has what they get."""
    lost = int(np.asarray(history["diverged"]).any(axis=-1).sum())
    return f"{lost} diverged, scored at chance level" if lost else ""
