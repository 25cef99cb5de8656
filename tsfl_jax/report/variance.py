"""Where the spread of a sweep comes from, and how many seeds a claim needs.

For sweeps over several seeds of ``seeds.*``: an analysis of variance with random
effects of the sources, and the power of t tests with the variance that was found.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tsfl_jax import rng
from tsfl_jax.config import SEEDS
from tsfl_jax.report import files
from tsfl_jax.report.bands import grouped
from tsfl_jax.report.statistics import p_text, seeds_needed

CLAIM = 0.5  # points of accuracy
REST = "their interactions"
_DRAWS = 20_000  # of the generalized confidence intervals
_NAMES = {name: name.removeprefix("seeds.") for name in SEEDS} | {"seed": "all else"}

Row = Mapping[str, Any]


class Source(NamedTuple):
    """One source of variance."""

    name: str
    levels: int
    square: float  # mean square
    freedom: int
    variance: float  # its component σ_k² ≥ 0
    p: float  # of the F test that it has no effect; NaN for the rest
    share: float  # of the sum of all components; NaN without any variance
    low: float  # 95 % confidence interval of the share
    high: float


class Components(NamedTuple):
    """An analysis of variance."""

    sources: list[Source]  # the last one: interactions
    total: float  # Σ σ_k², of a run with all seeds new
    low: float  # 95 % confidence interval of the total
    high: float


def components(values: Float[np.ndarray, "..."], names: Sequence[str]) -> Components:
    """Variance components of a full product of seeds.

    y = μ + Σ_k a_k + e with independent a_k ~ (0, σ_k²), e ~ (0, σ_e²):
    E[MS_k] = σ_e² + (n/L_k) σ_k², so that σ_k² = max(0, (MS_k − MS_e) L_k/n). A run is
    decided by its seeds: e is the interactions of the sources. Further axes of
    `values` than names are repetitions, and then e has them as well.

    The intervals are generalized (fiducial) ones: each mean square is divided by draws
    of χ²_df/df. Hannig, Iyer and Patterson, "Fiducial Generalized Confidence
    Intervals", JASA 2006.

    Args:
      values: an axis of L_k ≥ 2 levels for each name, n in all.
      names: of the sources.
    """
    from scipy import stats

    axes, n = range(values.ndim), values.size
    levels = [values.shape[k] for k in range(len(names))]
    means = [
        values.mean(axis=tuple(a for a in axes if a != k)) for k in range(len(names))
    ]
    sums = [
        n / count * ((mean - values.mean()) ** 2).sum()
        for count, mean in zip(levels, means, strict=True)
    ]
    freedom = np.array([count - 1 for count in levels])
    rest = max(float(((values - values.mean()) ** 2).sum() - sum(sums)), 0.0)
    left = n - 1 - int(freedom.sum())
    squares, error = np.array(sums) / freedom, rest / left

    def split(squares: np.ndarray, error: np.ndarray) -> np.ndarray:
        own = np.maximum(squares - error, 0) * (np.array(levels) / n)
        return np.concatenate([own, error], axis=-1)

    found = split(squares, np.array([error]))
    stream = rng.generator(0, "variance intervals")
    draws = split(
        squares * freedom / stream.chisquare(freedom, (_DRAWS, len(names))),
        error * left / stream.chisquare(left, (_DRAWS, 1)),
    )
    total, totals = found.sum(), draws.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share, shares = found / total, draws / totals[:, None]
        p = stats.f.sf(squares / error, freedom, left)
    low, high = np.quantile(shares, [0.025, 0.975], axis=0)
    ends = np.quantile(totals, [0.025, 0.975])
    rows = zip(
        *([*names, REST], [*levels, n], [*squares, error], [*freedom, left], found),
        *([*p, np.nan], share, low, high),
        strict=True,
    )
    return Components([Source(*row) for row in rows], float(total), *map(float, ends))


def _axes(swept: Sequence[str], rows: Sequence[Row]) -> dict[str, list]:
    """The seeds that take several values, with their values."""
    values = {
        n: list(dict.fromkeys(row[n] for row in rows)) for n in swept if n in SEEDS
    }
    return {name: found for name, found in values.items() if len(found) > 1}


def _table_of(
    axes: Mapping[str, list], rows: Sequence[Row], score: str
) -> Float[np.ndarray, "..."] | None:
    """A group's scores by seeds; None unless each combination is there once."""
    table = np.full([len(values) for values in axes.values()], np.nan)
    for row in rows:
        table[tuple(values.index(row[n]) for n, values in axes.items())] = row[score]
    whole = len(rows) == table.size and np.isfinite(table).all()
    return table if whole else None


def _source_rows(label: str, found: Components, unit: str) -> list[dict[str, str]]:
    rows = []
    for source in found.sources:
        shown = "–"
        if np.isfinite(source.share):
            low, high = 100 * source.low, 100 * source.high
            shown = f"{100 * source.share:.0f} ({low:.0f} to {high:.0f})"
        rows.append(
            {
                "of": label,
                "source": _NAMES.get(source.name, source.name),
                "levels": "–" if source.name == REST else str(source.levels),
                "share of the variance, %": shown,
                f"standard deviation{unit}": f"{np.sqrt(source.variance):.2g}",
                "p": p_text(source.p),
            }
        )
    return rows


def _needed(variances: Sequence[float], paired: bool) -> str:
    """Seeds for a variance, and for the ends of its confidence interval."""
    number, least, most = (
        seeds_needed(CLAIM, float(np.sqrt(v)), paired=paired) for v in variances
    )
    return f"{number} ({least} to {most})"


def _power_rows(
    alone: Mapping[str, Components], paired: Mapping[str, Components]
) -> list[dict[str, str]]:
    """How many seeds the claim needs: sides with their own seeds, and with shared."""
    rows = []
    for label, found in alone.items():
        ends = found.total, found.low, found.high
        row = {"of": label, "standard deviation": f"{np.sqrt(found.total):.2f}"}
        rows.append(row | {"paired": "no", "seeds": _needed(ends, False)})
    for label, found in paired.items():
        ends = found.total, found.low, found.high
        row = {"of": label, "standard deviation": f"{np.sqrt(found.total):.2f}"}
        rows.append(row | {"paired": "yes", "seeds": _needed(ends, True)})
    return rows


_HEAD = """
## Where the spread comes from

Analysis of variance with random effects, shares with 95 % confidence; p of the F test
that a source has no effect. Differences are paired by all seeds. (The intervals in the
table above are too narrow here: lanes that share a seed are not independent.)

"""
_POWER = f"""
## Seeds that a claim of {CLAIM:g} points needs

Two-sided t test at 0.05 with power 0.8, all seeds new in each run: seeds of each side,
if the sides do not share them, else of both; for the estimated variance and for the
ends of its 95 % confidence interval.

"""


def text_of(swept: Sequence[str], rows: Sequence[Row], losses: bool) -> str:
    """The part of summary.md on variance; "" where no source has seeds of its own.

    Args:
      swept: names of the swept settings.
      rows: results of each lane.
      losses: lanes are judged by their final test loss, not by their best accuracy.
    """
    axes = _axes(swept, rows)
    if not any(name in SEEDS[1:] for name in axes) or len(axes) < 2:
        return ""
    score = "final_test_loss" if losses else "best_test_accuracy"
    tables = {}
    for label, lanes in grouped(swept, list(map(dict, rows))).items():
        table = _table_of(axes, [rows[i] for i in lanes], score)
        if table is None:
            why = "not each combination of seeds has one lane with a result"
            return f"\nNo analysis of variance: {why}.\n"
        tables[label] = table if losses else 100 * table
    first, *others = tables
    names = list(axes)
    alone = {label: components(table, names) for label, table in tables.items()}
    paired = {
        f"{label} − {first}": components(tables[label] - tables[first], names)
        for label in others
    }
    both, unit = (alone | paired).items(), "" if losses else ", points"
    shown = [row for label, one in both for row in _source_rows(label, one, unit)]
    text = _HEAD + files.markdown(shown)
    if losses:
        return text
    return text + _POWER + files.markdown(_power_rows(alone, paired))
