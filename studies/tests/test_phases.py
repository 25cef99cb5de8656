"""The study of phases: levels by hand, its runs and its arguments."""

import csv

import numpy as np
import pandas
import pytest
import xarray

from studies import phases, study
from tsfl_jax.run import sweeps


def labelled(curves):
    """Curves by rule as ``[rule, seed, interval]``."""
    several = {
        name: xarray.DataArray(a, dims=("seed", "interval"))
        for name, a in curves.items()
    }
    found = xarray.concat(several.values(), pandas.Index(several, name="rule"))
    return found.assign_coords(interval=np.arange(1, found.sizes["interval"] + 1))


def against(one, other):
    """One rule against FedAvg, which is `other`; DMS is never behind."""
    curves = labelled({"FedAvg": other, "DMS": other - 1, "x": one})
    gains = phases.gains_of(curves).sel(rule="x", reference="FedAvg", drop=True)
    return gains, phases.compared(phases.gains_of(curves)).sel(
        rule="x", reference="FedAvg"
    )


def test_differences_by_hand():
    one = np.array([[0.5, 0.6, 0.7], [0.7, 0.6, 0.5]])
    other = np.array([[0.4, 0.6, 0.8], [0.6, 0.6, 0.6]])
    gains, found = against(one, other)
    np.testing.assert_allclose(gains.mean("seed"), [10, 0, -10], atol=1e-12)
    assert found["behind"] == 1 and found["level"] == "no"
    thirds = found["thirds"].transpose("third", "seed")
    np.testing.assert_allclose(thirds, [[10, 10], [0, 0], [-10, -10]], atol=1e-9)
    assert against(other, other)[1]["level"] == "yes"
    # Seeds that disagree: nothing is shown.
    assert against(one, one[::-1])[1]["level"] == "inconclusive"
    assert against(one[:1], other[:1])[1]["level"] == "inconclusive"
    # A loss that is shown but small is level, as is one that cannot be seen.
    for less in (0.004, 0.0):
        some = other - less + 1e-4 * np.array([[1.0], [-1.0]])
        found = against(some, other)[1]
        assert found["low"] == pytest.approx(-100 * less - 12.706 * 0.01, abs=1e-3)
        assert found["level"] == ("no" if less else "yes")
    # Intervals without an evaluation are left out.
    one, other = (np.repeat(a, 2, axis=1) for a in (one, other))
    gap = np.where(np.arange(6) == 3, np.nan, one)
    assert against(gap, other)[0].sizes["interval"] == 5


def invented(seeds=3, intervals=9):
    """Accuracies: DMS ahead at first and behind later, "good" never behind."""
    rng, t = np.random.default_rng(0), np.arange(intervals)
    base = 0.5 + 0.04 * t + 1e-3 * rng.normal(size=(seeds, intervals))
    dms = base + 0.04 * np.where(t < 3, 1.0, -1.0)
    both = np.maximum(base, dms) + 0.01
    return {"FedAvg": base, "DMS": dms, "bad": base - 0.1, "good": both}


def test_the_table_says_who_is_level():
    rows = phases.candidate_rows(labelled(invented()))
    assert [row["rule"] for row in rows] == ["FedAvg", "DMS", "good", "bad"]
    level = {row["rule"]: row["level"] for row in rows}
    assert level == {"FedAvg": "no", "DMS": "no", "good": "yes", "bad": "no"}
    assert rows[1]["intervals behind FedAvg"] == 6
    assert rows[0]["− FedAvg, last third"] == "–"
    long = phases.interval_rows(labelled(invented()))
    assert len(long) == 6 * 9
    assert set(long["interval"]) == set(range(1, 10))


def test_the_study_runs_and_resumes(tmp_path, monkeypatch):
    calls = []

    def run(config, points, **options):
        calls.append((config, points, options["workdir"]))
        curves = invented(seeds=2)
        each = [curves[n] for n in ("FedAvg", "DMS", "good")]
        curves = np.concatenate(each)
        history = {"test_accuracy": curves, "diverged": np.zeros(curves.shape, bool)}
        return sweeps.SweepResult([], history)

    monkeypatch.setattr(sweeps, "run", run)
    words = ["--case", "1", "--seeds", "2", "--out", str(tmp_path), "--intervals", "9"]
    study.main(phases.STUDY, [*words, "--candidates", "inverse, 3"])
    config, points, _ = calls[0]
    assert config.num_intervals == 9 and config.data.validation == 200
    assert [p["seed"] for p in points] == [0, 1] * 3
    assert points[-1]["dms.decay"] == "inverse" and points[0]["algorithm"] == "fedavg"
    names = {path.name for path in tmp_path.iterdir()}
    base = "phases_digits_case1"
    assert {f"{base}.md", f"{base}.csv", f"{base}.png"} <= names
    with open(tmp_path / f"{base}_intervals.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 4 * 9
