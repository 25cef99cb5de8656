"""The table for a paper: means, paired differences and Holm's correction by hand."""

import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import scipy

from tsfl_jax.report import collect, paper
from tsfl_jax.report.collect import Run
from tsfl_jax.types import UserError

# Final accuracies by rule and seed; differences to "a" are 0.01, 0.02, 0.03 and 0.
SCORES = {"a": [0.5, 0.6, 0.7], "b": [0.51, 0.62, 0.73], "c": [0.5, 0.6, 0.7]}
TEX = shutil.which("pdflatex") or shutil.which("tectonic") or ""


def run_of(name, seed, value, diverged=None, score="final_test_accuracy", curves=()):
    facts = {score: value, "diverged_at": diverged}
    settings = {"algorithm": name, "seed": seed}
    curves = pd.DataFrame(dict(curves), dtype=float)
    return Run(f"algorithm={name}", ".", settings, facts, curves)


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
    half = scipy.stats.t.ppf(0.975, 2) / np.sqrt(3)
    assert b["difference_half"] == pytest.approx(half)
    assert b["p"] == pytest.approx(scipy.stats.ttest_rel([51, 62, 73], [50, 60, 70])[1])
    assert b["holm"] == pytest.approx(2 * b["p"])  # of two tests
    assert found.loc["algorithm=c", "holm"] == 1.0
    assert np.isnan(found.loc["algorithm=a", "p"])
    assert "| group | runs | final accuracy, % | difference, points | p (Holm) |" in (
        " ".join(text.split())
    )
    assert "| algorithm=b | 3 | 62.00 ± 27.33 | +2.00 ± 2.48 | 0.148 |" in text
    assert "| algorithm=c | 3 | 60.00 ± 24.84 | +0.00 ± 0.00 | 1.000 |" in text
    (table,) = collect.read_source(tmp_path).tables  # not the digits of table.csv
    assert [*table.rows["final accuracy, %"]][1] == "62.00 ± 27.33"


def test_what_is_missing_is_in_no_mean(tmp_path):
    """A diverged run; and seeds that only one of two groups has are no pairs."""
    runs = [*runs_of(), run_of("a", 3, 0.1, diverged=2), run_of("b", 4, 0.0)]
    text = paper.write(runs, tmp_path, "final_test_accuracy", "a")
    found = pd.read_csv(tmp_path / "table.csv").set_index("group")
    assert found["runs"].tolist() == [3, 4, 3] and found["pairs"].iloc[1] == 3
    assert "Left out because they diverged: 1." in text
    assert found.loc["algorithm=b", "difference"] == pytest.approx(2.0)


SIGNS = r"50 % of a_b & #1 {x} ~^\\ <−1|"  # what TeX reads otherwise


def test_the_latex_is_fit_to_print(tmp_path):
    runs = runs_of({SIGNS: [0.4, 0.5], "a": [0.5, 0.5]})
    paper.write(runs, tmp_path, "final_test_accuracy", "=a")
    lines = (tmp_path / "table.tex").read_text().splitlines()
    assert lines[:3] == [r"% \usepackage{booktabs}", r"\begin{table}", r"\centering"]
    assert lines[3].startswith(r"\caption{Final accuracy, \%: mean $\pm$ half of the")
    assert lines[4:6] == [r"\label{tab:final_test_accuracy}", r"\begin{tabular}{lrrrr}"]
    names = r"group & runs & final accuracy, \% & difference, points & p (Holm) \\"
    assert [lines[n] for n in (6, 7, 8, 11)] == [
        *(r"\toprule", names, r"\midrule", r"\bottomrule")
    ]
    signs = r"50 \% of a\_b \& \#1 \{x\} \textasciitilde{}\textasciicircum{}"
    signs += r"\textbackslash{}\textbackslash{} $<$$-$1$|$"
    cells = r" & 2 & 45.00 (40.00 to 50.00) & $-$5.00 ($-$10.00 to +0.00) & 0.500 \\"
    assert lines[9] == f"algorithm={signs}{cells}"
    assert lines[10] == r"algorithm=a & 2 & 50.00 $\pm$ 0.00 & -- & -- \\"


@pytest.mark.skipif(not TEX, reason="needs pdflatex or tectonic")
def test_the_latex_compiles(tmp_path):
    paper.write(runs_of({SIGNS: [0.4, 0.5]}), tmp_path, "final_test_accuracy", "")
    text = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    (tmp_path / "a.tex").write_text(rf"{text}\input{{table}}\end{{document}}")
    options = ["-halt-on-error"] * TEX.endswith("pdflatex")
    subprocess.run([TEX, *options, "a.tex"], cwd=tmp_path, check=True, timeout=300)
    assert (tmp_path / "a.pdf").stat().st_size > 1000


def test_a_time_to_a_target_says_how_many_reached_it(tmp_path):
    ends = {"a": [0.8, 0.8, 0.8], "b": [0.8, 0.6, 0.8], "c": [0.6, 0.6, 0.6]}
    runs = [
        run_of(n, seed, None, curves={"virtual_time": [2, 4 + seed]} | accuracy)
        for n, values in ends.items()
        for seed, value in enumerate(values)
        for accuracy in [{"test_accuracy": [0.5, value]}]
    ]
    text = paper.write(runs, tmp_path, "time_to_target", "=a", 0.75)
    assert "Virtual time to 75 %, s: mean" in text and "| difference, s" in text
    assert "| algorithm=a | 3 | 5.00 ± 2.48 | – |" in " ".join(text.split())
    assert "| algorithm=b | 3 | reached by 2 of 3 | – | – |" in " ".join(text.split())
    assert "| algorithm=c | 3 | never | – | – |" in " ".join(text.split())
    found = pd.read_csv(tmp_path / "table.csv").set_index("group")
    assert found["reached"].tolist() == [3, 2, 0]
    # The last value of a metric, in its unit; digits as many as the interval has.
    text = paper.write(runs, tmp_path, "virtual_time", "")
    assert "virtual time, s" in text and "| 5.0 ± 2.5 |" in text
    text = paper.write(runs, tmp_path, "test_accuracy", "")
    assert "test accuracy, %" in text and "| 80.00 ± 0.00 |" in text

    with pytest.raises(UserError, match="did you mean 'test_accuracy'"):
        paper.write(runs, tmp_path, "test_acuracy", "")


def test_wrong_names_are_one_line(tmp_path):
    runs = runs_of()
    with pytest.raises(UserError, match="no group has it in its name; there are alg"):
        paper.write(runs, tmp_path, "final_test_accuracy", "d")
    with pytest.raises(UserError, match="algorithm=a: two runs of one seed"):
        paper.write([*runs, runs[0]], tmp_path, "final_test_accuracy", "")
