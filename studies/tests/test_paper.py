"""The studies of the paper's first case: choices, free riders, unequal speeds."""

import argparse
import csv

import numpy as np
import pytest
import xarray

from studies import heterogeneity, riders, sensitivity, study
from tsfl_jax.config import Config

SMALL = ["data.name=digits", "model.name=mlp", "num_clients=4", "batch_size=8"]
SMALL += ["schedule.data_size=32", "lr=0.03"]


def words(tmp_path, *more):
    changes = [part for change in SMALL for part in ("--set", change)]
    return [*changes, "--intervals", "2", "--seeds", "2", "--out", str(tmp_path), *more]


def test_choices_by_hand():
    several = sensitivity.choices(lr=0.003, num_clients=20)
    names = [choice.choice for choice in several]
    assert len(set(names)) == len(names) and several[0].changes == {}
    # c = ηL(H−1)G²/(2Nσ²) = 0.003 · L · 3 · 1 / (40 · 1), so c = 0.01 needs L = 44.4.
    given = sensitivity.given_coupling(0.003, 20, 0.01)
    assert given["constants.smoothness"] == pytest.approx(400 / 9)
    points = sensitivity.points(Config(lr=0.003, num_clients=20), argparse.Namespace())
    rules = [rule for _, rule in points]
    assert rules.count("dms") == 13 and rules.count("fedavg") == 7
    assert points["0", "fedavg"] == {"momentum": 0.0, "algorithm": "fedavg"}
    assert (
        points["c = 0.01", "dms"]["constants.smoothness"]
        == given["constants.smoothness"]
    )
    two = (several[0], several[1], several[6])
    # FedAvg and DMS; the last choice is of DMS alone.
    best = [
        [[0.95, 0.94], [0.96, 0.9501]],
        [[0.9, 0.8], [0.8, 0.9]],
        [[np.nan, np.nan], [0.92, 0.89]],
    ]
    names = {"choice": [choice.choice for choice in two], "rule": ["fedavg", "dms"]}
    made = 100 * xarray.DataArray(best, names, ("choice", "rule", "seed"))
    found = sensitivity.choice_rows(two, sensitivity.completed(made))
    # DMS − FedAvg of the standard: +1, +1.01; momentum 0: −10, +10; given c: −3, −5
    assert [row["verdict"] for row in found] == [
        "DMS helps",
        "inconclusive",
        "inconclusive",  # −4 ± 12.7, t(0.975, 1) = 12.706
    ]
    # t = −4 with one degree of freedom: p = 1 − 2 arctan(4)/π, twice for Holm.
    assert found[2]["p"] == "0.312" and found[1]["p"] == "1.000"
    assert found[2]["FedAvg, %"] == found[0]["FedAvg, %"]
    assert found[2]["DMS − FedAvg, paired"] == "-4.00 (-5.00 to -3.00)"
    # With these the rows "c = …" would have another c than they say.
    assert {"dms.coupling", "dms.unit", "schedule.kind"} <= sensitivity.TAKEN


def test_free_riders_by_hand():
    config = Config(num_clients=20)
    points = list(riders.points(config, argparse.Namespace()).values())
    assert len(points) == 6 * 4 and points[0]["schedule.free_riders"] == 0
    assert points[1]["schedule.free_riders"] == 5
    assert points[1]["schedule.free_riding"] == "claim"
    names = {"rule": list(riders.ALGORITHMS), "kind": list(riders.KINDS)}
    best = xarray.DataArray(np.full((6, 4, 2), 90.0), names, ("rule", "kind", "seed"))
    best.loc["dms", "claims more"] = [70, 80]  # −20, −10
    row = riders.free_rider_rows(best)[0]
    change = row["claims more, change"]
    assert row["rule"] == "DMS" and change == "-15.00 (-20.00 to -10.00)"


def test_patterns_differ_in_heterogeneity_only():
    degrees = [heterogeneity.degree(p) for p in heterogeneity.PATTERNS]
    assert degrees == [0.25, 1.25, 2.25, 6.75]
    assert {np.mean(p) for p in heterogeneity.PATTERNS} == {2.5}
    assert heterogeneity.groups((1, 4)) == "constant(1); constant(4)"
    assert heterogeneity.speeds((1, 4), 2.0) == "constant(2.0); constant(0.5)"


@pytest.mark.slow
@pytest.mark.parametrize("made", [riders.STUDY, sensitivity.STUDY], ids=lambda s: s[0])
def test_files(made, tmp_path, capsys):
    study.main(made, words(tmp_path))
    printed = capsys.readouterr().out
    for kind in ("md", "csv", "png", "pdf"):
        path = tmp_path / f"{made.name}.{kind}"
        assert path.stat().st_size and str(path) in printed
    text = (tmp_path / f"{made.name}.md").read_text()
    assert "num_intervals=2" in text


@pytest.mark.slow
def test_figure_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(heterogeneity, "PATTERNS", ((2, 3), (1, 4)))
    few = {name: heterogeneity.ENTRIES[name] for name in ("sfl", "tsfl")}
    monkeypatch.setattr(heterogeneity, "ENTRIES", few)
    options = ["--accuracy=0.2", "--intervals=4"]
    heterogeneity.main(["fig2a", "fig2b", *words(tmp_path), *options])
    printed = capsys.readouterr().out
    assert "fig2a_dms.png" in printed and "fig2b.pdf" in printed
    with open(tmp_path / "fig2b.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # At δ = 0.25 the slowest does 2 iterations in Δ: SFL and T-SFL update alike. At
    # δ = 2.25 it does 1, so that SFL takes two intervals for its 2 iterations.
    by_name = {(r["δ"], r["framework"]): r for r in rows}
    assert by_name["0.25", "SFL"]["s per update"] == "1.00"
    assert by_name["2.25", "SFL"]["s per update"] == "2.00"
    assert by_name["2.25", "T-SFL"]["saved per round, %"] == "50"
    text = (tmp_path / "fig2b.md").read_text()
    assert text.startswith("digits, data.name=digits, model.name=mlp, ")
