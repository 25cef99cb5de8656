"""``python -m studies.variance WORKDIR``: the spread of a sweep, and seeds for a claim.

For sweeps over several seeds of ``seeds.*``: an analysis of variance with random
effects of the sources, and the power of t tests with the variance that was found.
"""

import bisect
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from studies import arguments
from studies.verdicts import LEVEL
from tsfl_jax import rng
from tsfl_jax.config import SEEDS
from tsfl_jax.report import files
from tsfl_jax.report.statistics import has_diverged, p_text
from tsfl_jax.report.table import grouped
from tsfl_jax.run import grid
from tsfl_jax.types import UserError

CLAIM = 0.5  # points of accuracy
SHOWN = 0.05  # share from which an interaction has a row of its own
REST = "other interactions"
_DRAWS = 20_000  # of the generalized confidence intervals
_NAMES = {name: name.removeprefix("seeds.") for name in SEEDS} | {"seed": "all else"}

Row = Mapping[str, Any]


class VarianceComponent(NamedTuple):
    """One source of variance: a seed, or several whose effects depend on each other."""

    names: tuple[str, ...]
    square: float  # mean square
    freedom: int
    variance: float  # its component σ_A² ≥ 0
    p: float  # of the F test that it has no effect; NaN for all sources together
    share: float  # of the sum of all components; NaN without any variance
    low: float  # 95 % confidence interval of the share
    high: float


class Components(NamedTuple):
    """An analysis of variance."""

    sources: list[VarianceComponent]  # single seeds first, then interactions
    total: float  # of a run with all seeds new
    low: float  # 95 % confidence interval of the total
    high: float


Effect = tuple[int, ...]  # axes


def power(n: int, effect: float, *, paired: bool, alpha: float = LEVEL) -> float:
    """Chance that a two-sided t test finds a true difference.

    Args:
      n: seeds ≥ 2, of each side.
      effect: difference over standard deviation: of the paired differences, or of one
        side, if the sides do not share their seeds.
      paired: whether they share them.
      alpha: level of the test.
    """
    from scipy import stats

    freedom, shift = (n - 1, n) if paired else (2 * n - 2, n / 2)
    limit, center = stats.t.ppf(1 - alpha / 2, freedom), abs(effect) * np.sqrt(shift)
    # |t| > limit by the noncentral F distribution of t², which is finite where SciPy's
    # noncentral t is not.
    return float(stats.ncf.sf(limit**2, 1, freedom, center**2))


def seeds_needed(
    difference: float,
    deviation: float,
    *,
    paired: bool,
    alpha: float = LEVEL,
    wanted: float = 0.8,
) -> int:
    """Fewest seeds with which a true difference is found with a chance of `wanted`.

    Args:
      difference: > 0.
      deviation: standard deviation ≥ 0; see `power`.
      paired, alpha: see `power`.
      wanted: in (0, 1).
    """
    if deviation <= difference / 100:
        return 2  # beyond what the noncentral t distribution is computed for

    def enough(number: int) -> bool:
        effect = difference / deviation
        return power(number, effect, paired=paired, alpha=alpha) >= wanted

    # Of a variance of one degree of freedom the upper end can ask for millions.
    most = 2
    while not enough(most):
        most *= 2
    return bisect.bisect_left(range(most), True, lo=2, key=enough)


def _mean_squares(values: Float[np.ndarray, "..."]) -> dict[Effect, tuple[float, int]]:
    """Mean square and degrees of freedom of each effect, those of few axes first."""
    parts: dict[Effect, np.ndarray] = {}
    found = {}
    for number in range(values.ndim + 1):
        for own in itertools.combinations(range(values.ndim), number):
            others = tuple(a for a in range(values.ndim) if a not in own)
            smaller = [parts[s] for s in parts if set(s) < set(own)]
            part = values.mean(axis=others, keepdims=True) - sum(smaller)
            parts[own] = part
            if own:
                freedom = int(np.prod([values.shape[a] - 1 for a in own]))
                total = values.size / part.size * (part**2).sum()
                found[own] = float(total) / freedom, freedom
    return found


def _signs(effects: Sequence[Effect]) -> Float[np.ndarray, "E E"]:
    """(−1)^(|B| − |A|) where B ⊇ A, else 0."""
    return np.array(
        [
            [(-1) ** (len(b) - len(a)) * (set(a) <= set(b)) for b in effects]
            for a in effects
        ],
        float,
    )


def _p_values(
    signs: Float[np.ndarray, "E E"],
    squares: Float[np.ndarray, "E"],
    freedom: Float[np.ndarray, "E"],
) -> list[float]:
    """p of each effect; NaN for the one of all axes, which has nothing above it."""
    from scipy import stats

    found = []
    for sign in signs:
        sums, degrees = [], []
        for side in (1, -1):
            part, of = squares[sign == side], freedom[sign == side]
            sums.append(part.sum())
            degrees.append(part.sum() ** 2 / (part**2 / of).sum())
        found.append(float(stats.f.sf(sums[0] / sums[1], *degrees)))
    return found


def components(values: Float[np.ndarray, "..."], names: Sequence[str]) -> Components:
    """Variance components of a full product of seeds, each combination once.

    y = μ + Σ_A a_A over all sets A of seeds, with independent a_A ~ (0, σ_A²). With n
    runs and L_A combinations of the levels of A, E[MS_A] = Σ_{B ⊇ A} (n/L_B) σ_B², so
    that σ_A² = max(0, (L_A/n) Σ_{B ⊇ A} (−1)^(|B| − |A|) MS_B). An effect is tested by
    Satterthwaite's quasi-F, the positive terms of this sum over the negative ones
    (Satterthwaite, "An Approximate Distribution of Estimates of Variance Components",
    Biometrics Bulletin 1946): what depends on another seed does not count as an effect
    of its own. A run is decided by its seeds, so that nothing else is left.

    The intervals are generalized (fiducial) ones: each mean square is divided by draws
    of χ²_df/df. Hannig, Iyer and Patterson, "Fiducial Generalized Confidence
    Intervals", JASA 2006.

    Args:
      values: an axis of L ≥ 2 levels for each name.
      names: of the seeds, at least two.
    """
    found = _mean_squares(values)
    effects = list(found)
    squares, freedom = map(np.array, zip(*found.values(), strict=True))
    signs = _signs(effects)
    levels = [np.prod([values.shape[a] for a in own]) for own in effects]
    matrix = signs * np.array(levels)[:, None] / values.size

    stream = rng.generator(0, "variance intervals")
    chance = stream.chisquare(freedom, (_DRAWS, len(effects)))
    drawn = (squares * freedom / chance) @ matrix.T
    own = matrix @ squares
    totals = np.maximum(drawn.sum(axis=1), 0.0)
    variance, draws = np.maximum(own, 0.0), np.maximum(drawn, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = variance / variance.sum()
        shares = draws / draws.sum(axis=1, keepdims=True)
        p = _p_values(signs, squares, freedom)
    low, high = np.quantile(shares, [0.025, 0.975], axis=0)
    rows = zip(squares, freedom, variance, p, share, low, high, strict=True)
    sources = [
        VarianceComponent(tuple(names[a] for a in effect), *row)
        for effect, row in zip(effects, rows, strict=True)
    ]
    ends = np.quantile(totals, [0.025, 0.975])
    return Components(sources, max(float(own.sum()), 0.0), *map(float, ends))


def _axes(swept: Sequence[str], rows: Sequence[Row]) -> dict[str, list]:
    """The seeds that take several values, with their values."""
    values = {
        n: list(dict.fromkeys(row[n] for row in rows)) for n in swept if n in SEEDS
    }
    return {name: found for name, found in values.items() if len(found) > 1}


def _table_of(
    axes: Mapping[str, list], rows: Sequence[Row], score: str
) -> Float[np.ndarray, "..."] | None:
    """A group's scores by seeds; None unless each combination is there once.

    A lane that diverged is missing, as it is in the means.
    """
    table = np.full([len(values) for values in axes.values()], np.nan)
    for row in rows:
        place = tuple(values.index(row[n]) for n, values in axes.items())
        table[place] = np.nan if has_diverged(row) else row[score]
    whole = len(rows) == table.size and np.isfinite(table).all()
    return table if whole else None


_NARROW = """(The intervals in the table above are too
narrow here: lanes that share a seed are not independent.)"""


def _no_analysis(rows: Sequence[Row]) -> str:
    """Why there is none, in a line."""
    why = "not each combination of seeds has one lane with a result"
    lost = sum(has_diverged(row) for row in rows)
    if lost:
        why += f"; of {len(rows)} lanes {lost} diverged"
    return f"\nNo analysis of variance: {why}.\n\n{_NARROW}\n"


def _source_rows(label: str, found: Components, unit: str) -> list[dict[str, str]]:
    """Each seed, each large interaction, and what the other interactions have."""

    def row(
        name: str, levels: str, share: str, variance: float, p: float
    ) -> dict[str, str]:
        return {
            "of": label,
            "source": name,
            "levels": levels,
            "share of the variance, %": share,
            f"standard deviation{unit}": f"{np.sqrt(variance):.2g}",
            "p": p_text(p),
        }

    rows, left = [], []
    for source in found.sources:
        if len(source.names) > 1 and not source.share >= SHOWN:
            left.append(source)
            continue
        shown = "–"
        if np.isfinite(source.share):
            low, high = 100 * source.low, 100 * source.high
            shown = f"{100 * source.share:.0f} ({low:.0f} to {high:.0f})"
        name = " × ".join(_NAMES.get(n, n) for n in source.names)
        levels = "–" if len(source.names) > 1 else str(source.freedom + 1)
        rows.append(row(name, levels, shown, source.variance, source.p))
    if left:
        share = sum(source.share for source in left)
        shown = f"{100 * share:.0f}" if np.isfinite(share) else "–"
        variance = sum(source.variance for source in left)
        rows.append(row(REST, "–", shown, variance, float("nan")))
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
    for pairs, several in ((False, alone), (True, paired)):
        for label, found in several.items():
            ends = found.total, found.low, found.high
            row = {"of": label, "standard deviation": f"{np.sqrt(found.total):.2f}"}
            row |= {"paired": "yes" if pairs else "no", "seeds": _needed(ends, pairs)}
            rows.append(row)
    return rows


_HEAD = f"""
## Where the spread comes from

Analysis of variance with random effects, shares with 95 % confidence; p of the F test
that a source has no effect whatever the other seeds are. a × b: the effect of a depends
on b. Differences are paired by all seeds. {_NARROW}

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
      rows: results of each run.
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
            return _no_analysis(rows)
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


def text_of_folder(folder: pathlib.Path) -> str:
    """The analysis of a finished sweep.

    Raises:
      UserError: no finished sweep there, or not over two of the seeds.
    """
    sweep = files.read_json(folder / "sweep.json")
    if sweep is None:
        raise UserError(f"{folder}: no finished sweep there; give the --workdir of one")
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines if (row := files.parse_json(line))]
    losses = all(row["best_test_accuracy"] is None for row in rows)
    text = text_of(grid.names_of(sweep["points"]), rows, losses)
    if not text:
        raise UserError(f"{folder}: swept no two of {', '.join(SEEDS)}")
    return text.lstrip("\n")


def main(texts: list[str]) -> None:
    """Write variance.md and print it."""
    parser = arguments.make_parser("variance", __doc__, None)
    parser.add_argument("workdir", type=pathlib.Path, help="folder of a finished sweep")
    parser.set_defaults(out=None)
    given = parser.parse_args(texts)
    text = text_of_folder(given.workdir)
    path = files.prepare_workdir(given.out or given.workdir, "--out") / "variance.md"
    files.write_text(path, text)
    print(f"{path}\n\n{text}")


if __name__ == "__main__":
    arguments.start("variance", main)
