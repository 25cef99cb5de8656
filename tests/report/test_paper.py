"""The table for a paper: means, paired differences and Holm's correction by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tsfl_jax.report import paper
from tsfl_jax.report.collect import Run
from tsfl_jax.types import UserError

# Final accuracies by rule and seed; differences to "a" are 0.01, 0.02, 0.03 and 0.
SCORES = {"a": [0.5, 0.6, 0.7], "b": [0.51, 0.62, 0.73], "c": [0.5, 0.6, 0.7]}


def run_of(name, seed, value, diverged=None, score="final_test_accuracy"):
    facts = {score: value, "diverged_at": diverged}
    settings = {"algorithm": name, "seed": seed}
    return Run(f"algorithm={name}", ".", settings, facts, pd.DataFrame())


def runs_of(scores=SCORES, **more):
    pairs = [(n, s, v) for n, values in scores.items() for s, v in enumerate(values)]
    return [run_of(*pair, **more) for pair in pairs]


def test_numbers_by_hand(tmp_path):
    runs = runs_of()
    text = paper.write(runs, tmp_path, "final_test_accuracy", "a")
    found = pd.read_csv(tmp_path / "table.csv").set_index("group")
    b = found.loc["algorithm=b"]
    assert b["mean"] == pytest.approx(62.0) and b["difference"] == pytest.approx(2.0)
    # s = 1, so half = t(0.975; 2)/√3 of the differences 1, 2, 3.
    assert b["difference_half"] == pytest.approx(stats.t.ppf(0.975, 2) / np.sqrt(3))
    assert b["p"] == pytest.approx(stats.ttest_rel([51, 62, 73], [50, 60, 70])[1])
    assert b["holm"] == pytest.approx(2 * b["p"])  # of two tests
    assert found.loc["algorithm=c", "holm"] == 1.0
    assert np.isnan(found.loc["algorithm=a", "p"])
    assert "| algorithm=b | 3 | 62.00 ± 27.33 | +2.00 ± 2.48 | 0.148 |" in text
    tex = (tmp_path / "table.tex").read_text()
    assert r"algorithm=b & 3 & 62.00 $\pm$ 27.33 & +2.00 $\pm$ 2.48 & 0.148 \\" in tex
    assert r"\toprule" in tex and "±" not in tex.splitlines()[3]


def test_what_is_missing_is_in_no_mean(tmp_path):
    """A diverged run; and seeds that only one of two groups has are no pairs."""
    runs = [*runs_of(), run_of("a", 3, 0.1, diverged=2), run_of("b", 4, 0.0)]
    text = paper.write(runs, tmp_path, "final_test_accuracy", "a")
    found = pd.read_csv(tmp_path / "table.csv").set_index("group")
    assert found["runs"].tolist() == [3, 4, 3] and found["pairs"].iloc[1] == 3
    assert "1 runs that diverged are left out" in text
    assert found.loc["algorithm=b", "difference"] == pytest.approx(2.0)


def test_wrong_names_are_one_line(tmp_path):
    runs = runs_of()
    with pytest.raises(UserError, match="no group has it in its name; there are alg"):
        paper.write(runs, tmp_path, "final_test_accuracy", "d")
    with pytest.raises(UserError, match="algorithm=a: two runs of one seed"):
        paper.write([*runs, runs[0]], tmp_path, "final_test_accuracy", "")
