"""The table of a sweep."""

import numpy as np
import pytest

from tsfl_jax.experiment import summary
from tsfl_jax.report import sweep_files


def lane(rate, best, loss=1.0, **more):
    """A lane of a sweep over learning rates."""
    row = {"lr": rate, "best_test_accuracy": best, "final_test_accuracy": best}
    row |= {"final_test_loss": loss, "diverged_at": None, "seconds": 1.0}
    return row | more


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_mean_that_is_not_known_wins_nothing(order):
    nan, inf = float("nan"), float("inf")
    rows = [lane(0.1, nan), lane(0.2, 0.5), lane(0.3, 0.9)]
    text = sweep_files.best(["lr"], [rows[i] for i in order])
    assert "Highest mean of best accuracy: lr=0.3" in text
    rows = [lane(0.1, nan, nan), lane(0.2, nan, inf), lane(0.3, nan, 1.2)]
    text = sweep_files.best(["lr"], [rows[i] for i in order])
    assert text == "Lowest mean of final loss: lr=0.3"
    rows = [lane(rate, nan, nan) for rate in (0.1, 0.2, 0.3)]
    assert not sweep_files.best(["lr"], rows)


def test_a_group_that_lost_lanes_wins_nothing():
    rows = [lane(0.03, 0.962), lane(0.03, 0.961), lane(0.3, 0.97)]
    rows += [lane(0.3, 0.5, diverged_at=3)]
    rows = [row | {"seed": i % 2} for i, row in enumerate(rows)]
    text = sweep_files.best(["lr", "seed"], rows)
    assert text.endswith("lr=0.03")
    shown = sweep_files.groups_table(["lr", "seed"], rows).set_index("lr")
    assert shown["best accuracy, %"][0.3] == "97.00" and shown["diverged"][0.3] == "1"


def test_an_infinite_regret_is_in_the_mean():
    regrets = enumerate((np.inf, 0.1, np.nan))
    rows = [lane(0.1, 0.9, mean_regret=value, seed=seed) for seed, value in regrets]
    shown = sweep_files.groups_table(["lr", "seed"], rows)
    assert shown["mean regret"][0] == "inf (1 of 2)"
    history = {"regret": np.array([np.inf, np.nan, 0.1]), "gap": np.array([0.2, 0.4])}
    measured = {"test_accuracy": np.ones(2), "test_loss": np.ones(2)}
    found = summary.scores_of(history | measured | {"diverged": np.zeros(2, bool)})
    assert found["mean_regret"] == np.inf and found["mean_gap"] == pytest.approx(0.3)
