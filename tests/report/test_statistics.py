"""Paired tests, Holm's correction, and the table of a sweep."""

import numpy as np
import pytest

from tsfl_jax.experiment import runner
from tsfl_jax.report import statistics, sweeps


def test_paired_p_by_hand():
    # Differences 1, 2, 3: mean 2, error 1/√3, t = 2√3 with 2 degrees of freedom.
    assert statistics.paired_p([1.0, 2.0, 3.0]) == pytest.approx(0.0741799, abs=1e-6)
    assert statistics.paired_p([0.0, 0.0, 0.0]) == 1.0
    # Two equal gaps of one test sample: no error to divide by, rounding or not.
    for gaps in ([1 / 360, 1 / 360], [0.3, 0.1 + 0.2]):
        assert np.isnan(statistics.paired_p(gaps))
    assert np.isnan(statistics.paired_p([1.0]))
    assert np.isnan(statistics.paired_p([1.0, np.nan]))


def test_five_pairs_cannot_be_told_apart_by_ranks():
    assert statistics.signed_rank_p([1, 2, 3, 4, 5]) == 0.0625
    assert np.isnan(statistics.signed_rank_p([0.0, 0.0]))


def test_holm_by_hand():
    # 3·0.01, 2·0.03, 1·0.04 but not below the one before it.
    found = statistics.holm([0.04, 0.01, np.nan, 0.03])
    np.testing.assert_allclose(found, [0.06, 0.03, np.nan, 0.06])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0]


def lane(rate, best, loss=1.0, **more):
    """A lane of a sweep over learning rates."""
    row = {"lr": rate, "best_test_accuracy": best, "final_test_accuracy": best}
    row |= {"final_test_loss": loss, "diverged_at": None, "seconds": 1.0}
    return row | more


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_mean_that_is_not_known_wins_nothing(order):
    nan, inf = float("nan"), float("inf")
    rows = [lane(0.1, nan), lane(0.2, 0.5), lane(0.3, 0.9)]
    text = sweeps.sweep_table(["lr"], [rows[i] for i in order])
    assert "Highest mean of best: lr=0.3." in text
    rows = [lane(0.1, nan, nan), lane(0.2, nan, inf), lane(0.3, nan, 1.2)]
    text = sweeps.sweep_table(["lr"], [rows[i] for i in order])
    assert "Lowest mean of final: lr=0.3." in text
    rows = [lane(rate, nan, nan) for rate in (0.1, 0.2, 0.3)]
    assert "mean of best:" not in sweeps.sweep_table(["lr"], rows)


def test_a_group_that_lost_lanes_wins_nothing():
    rows = [lane(0.03, 0.962), lane(0.03, 0.961), lane(0.3, 0.97)]
    rows += [lane(0.3, 0.5, diverged_at=3)]
    rows = [row | {"seed": i % 2} for i, row in enumerate(rows)]
    text = sweeps.sweep_table(["lr", "seed"], rows)
    assert "Highest mean of best: lr=0.03." in text and "97.00" in text


def test_an_infinite_regret_is_in_the_mean():
    regrets = enumerate((np.inf, 0.1, np.nan))
    rows = [lane(0.1, 0.9, mean_regret=value, seed=seed) for seed, value in regrets]
    assert "inf (1 of 2)" in sweeps.sweep_table(["lr", "seed"], rows)
    history = {"regret": np.array([np.inf, np.nan, 0.1]), "gap": np.array([0.2, 0.4])}
    found = runner.regret_of(history)
    assert found == {"mean_regret": np.inf, "mean_gap": pytest.approx(0.3)}
