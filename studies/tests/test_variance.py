"""The analysis of variance of a sweep, and the power of its tests."""

import itertools

import numpy as np
import pytest
import scipy

import tsfl_jax
from studies import variance
from tests.problems import small
from tsfl_jax.types import UserError


@pytest.mark.parametrize(
    ("effect", "paired", "seeds"),
    # Cohen's tables for power 0.8 at 0.05, two-sided.
    [(0.2, False, 394), (0.5, False, 64), (0.8, False, 26), (0.5, True, 34)],
)
def test_seeds_needed_as_in_the_tables_of_cohen(effect, paired, seeds):
    assert variance.seeds_needed(effect, 1.0, paired=paired) == seeds
    assert variance.power(seeds, effect, paired=paired) >= 0.8
    assert variance.power(seeds - 1, effect, paired=paired) < 0.8


def test_power_against_simulated_tests():
    generator = np.random.default_rng(0)
    drawn = generator.normal(0.5, 0.25, (20_000, 3))
    share = (scipy.stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05).mean()
    assert variance.power(3, 2.0, paired=True) == pytest.approx(share, abs=0.01)
    assert variance.seeds_needed(0.5, 0.09277, paired=True) == 3
    assert variance.seeds_needed(0.5, 0.11183, paired=True) == 3


def test_components_by_hand():
    # Two sources: rows differ by 4, columns by 2, and an interaction of ±0.5.
    table = np.array([[0.5, 1.5], [3.5, 6.5]])
    found = variance.components(table, ["a", "b"])
    a, b, rest = found.sources
    # Sums of squares: 4·2² = 16, 4·1² = 4, and 4·0.5² = 1, of one degree each.
    assert (a.square, b.square, rest.square) == pytest.approx((16.0, 4.0, 1.0))
    assert (a.freedom, b.freedom, rest.freedom) == (1, 1, 1)
    # σ² = (MS − MS_e)·L/n.
    assert (a.variance, b.variance, rest.variance) == pytest.approx((7.5, 1.5, 1.0))
    assert a.share == pytest.approx(0.75)
    assert found.total == pytest.approx(10.0)
    assert a.p == pytest.approx(scipy.stats.f.sf(16.0, 1, 1))


def test_a_seed_whose_effect_depends_on_another_has_none_of_its_own():
    """Of four seeds, two matter only together: by chance one in twenty looks real."""
    stream, times = np.random.default_rng(2), 40
    effects: dict = {}
    for _ in range(times):
        table = stream.normal(0, 1, (4, 4, 1, 1)) + stream.normal(0, 0.3, (4, 4, 4, 4))
        for source in variance.components(table, "abcd").sources:
            effects.setdefault(source.names, []).append(source.p < 0.05)
    rate = {names: np.mean(found) for names, found in effects.items()}
    assert rate["a", "b"] == 1
    assert max(rate[n,] for n in "abcd") <= 0.15  # 0.05 ± 3 standard errors


def of_two(stream):
    """Of two sources and their interaction; the share of the first is 4/6."""
    table = stream.normal(0, 2, (6, 1)) + stream.normal(0, 1, (1, 6))
    a = variance.components(table + stream.normal(0, 1, (6, 6)), "ab").sources[0]
    return a.low <= 4 / 6 <= a.high


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    stream = np.random.default_rng(3)
    assert 0.9 <= np.mean([of_two(stream) for _ in range(200)]) <= 0.99


def rows_of(effects, algorithms=("dms", "fedavg")):
    """Lanes whose accuracy is a sum of what their seeds add."""
    rows = []
    for number, model, split in itertools.product((0, 1), range(3), range(3)):
        best = 0.9 - 0.01 * number + effects[0][model] + effects[1][split]
        best += 0.0001 * ((model * split) % 2)
        row = {"algorithm": algorithms[number], "best_test_accuracy": best}
        row |= {"seeds.model": model, "seeds.split": split, "diverged_at": None}
        row |= {"final_test_accuracy": best, "final_test_loss": 1.0, "seconds": 1.0}
        rows.append(row)
    return rows


SWEPT = ("algorithm", "seeds.model", "seeds.split")


def test_a_summary_says_where_the_spread_comes_from():
    rows = rows_of(([0.0, 0.0, 0.0], [0.0, 0.02, 0.04]))
    text = variance.text_of(SWEPT, rows, False)
    lines = text.splitlines()
    share = next(
        s for s in text.splitlines() if s.startswith("| algorithm=dms | split")
    )
    assert float(share.split("|")[4].split()[0]) == 100
    # Both rules have the same effects, so that nothing is left of the difference.
    paired = [s for s in lines if "fedavg − algorithm=dms" in s]
    assert "| yes | 2 (2 to 2) |" in paired[-1]
    # Two points of standard deviation: d = 1/4, 253 seeds of each side.
    alone = [s for s in lines if s.startswith("| algorithm=dms | 2.00")]
    assert alone[0].split("|")[4].split()[0] == "253"


@pytest.mark.slow
def test_a_folder_of_a_finished_sweep(tmp_path, capsys):
    swept = {"seeds.model": range(2), "seeds.split": range(2)}
    tsfl_jax.sweep(small(num_intervals=1), swept, workdir=tmp_path / "sweep")
    variance.main([str(tmp_path / "sweep"), "--out", str(tmp_path)])
    text = (tmp_path / "variance.md").read_text()
    assert "Where the spread comes from" in text and text in capsys.readouterr().out
    with pytest.raises(UserError, match="no finished sweep there"):
        variance.main([str(tmp_path)])
