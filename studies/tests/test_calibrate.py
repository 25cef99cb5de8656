"""The calibration: chosen by the baselines alone, in stages, resumable."""

import csv

import numpy as np
import pytest

from studies import calibrate
from tsfl_jax import config_files
from tsfl_jax.config import SETTINGS, Config, replace, validate
from tsfl_jax.types import UserError

CELLS = ("mnist_case1", "mnist_case2", "mnist_case3")
SMALL = {"data.name": "digits", "model.name": "mlp", "num_intervals": 2}
SMALL |= {"num_clients": 4, "batch_size": 8, "schedule.data_size": 32, "devices": 1}


def load(cell):
    return replace(config_files.load(f"papers:{cell}"), SMALL)


def test_all_variants_are_valid_and_different():
    labels = [variant.label for variant in calibrate.VARIANTS]
    assert len(set(labels)) == len(labels) >= 12
    for variant in calibrate.VARIANTS:
        assert set(variant.changes) <= set(SETTINGS)
        validate(replace(config_files.load("papers:mnist_case1"), variant.changes))
        # None decides anything that only DMS reads.
        assert not any(name.startswith("dms.") for name in variant.changes)
    plain = config_files.load("papers:mnist_case1")
    (in_use,) = (r for r in calibrate.VARIANTS if r.label == calibrate.IN_USE)
    assert replace(plain, in_use.changes) == plain
    several = [*calibrate.DMS_VARIANTS.values()]
    for changes in several:
        validate(replace(Config(), changes))
    for choice in calibrate.DMS_CHOICES:
        cell = calibrate.cell_of(choice, CELLS)
        validate(replace(config_files.load(f"papers:{cell}"), choice.changes))


def test_distance_by_hand():
    def measured(*best):
        return calibrate.Measured(np.array(best), 0.0, 1.0)

    # The paper: FedAvg 96.41 in Case 1, FedAsync 92.97 in Case 3.
    found = {
        ("a", "mnist_case1", "fedavg"): measured(95.41, 99.41),  # mean 97.41, +1
        ("a", "mnist_case3", "fedasync"): measured(85.97),  # −7
        ("a", "mnist_case1", "dms"): measured(0.0),
    }
    pairs = [("mnist_case1", "fedavg"), ("mnist_case3", "fedasync")]
    assert calibrate.distance(found, "a", pairs) == pytest.approx(5.0)
    assert calibrate.distance(found, "a", pairs[:1]) == pytest.approx(1.0)
    assert calibrate.distance(found, "b", pairs) == np.inf
    found["a", "mnist_case1", "fedavg"] = measured(np.nan)
    assert calibrate.distance(found, "a", pairs) == np.inf


@pytest.fixture
def invented(monkeypatch):
    """Variants off by 5, 4, … points in all baselines, and DMS above or below."""
    calls = []

    def run_variant(load, variant, cell, algorithms, seeds, workdir, changes=None):
        del load, workdir
        label = variant.label.partition(";")[0]
        gap = {"e": 5.0, "d": 4.0, "c": 3.0, "b": -2.0, "a": 1.0}[label]
        if label == "b" and len(algorithms) == 3 and cell == "mnist_case3":
            raise UserError("this cell cannot be run")
        calls.append((variant.label, cell, tuple(algorithms), seeds, changes))
        best = {a: calibrate.target(cell, a) + gap for a in algorithms}
        best = {a: v + 50 * (a == "dms") for a, v in best.items()}
        return {
            (variant.label, cell, a): calibrate.Measured(
                np.full(seeds, v) + np.arange(seeds), v, 60.0
            )
            for a, v in best.items()
        }

    monkeypatch.setattr(calibrate, "run_variant", run_variant)
    return calls


def run(tmp_path, names="edcba"):
    variants = [calibrate.Variant(name, {}) for name in names]
    found = (load, CELLS, variants, 3, tmp_path / "w", tmp_path, "x", 0)
    return calibrate.run_calibration(calibrate.Calibration(*found))


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_nearest_go_on_and_dms_comes_last(tmp_path, invented):
    paths = run(tmp_path)
    assert [path.name for path in paths] == [
        *("calibration.md", "calibration.csv"),
        *("calibration_dms.md", "calibration_dms.csv"),
    ]
    first_dms = next(i for i, call in enumerate(invented) if "dms" in call[2])
    baselines, last = invented[:first_dms], invented[first_dms:]
    # The baselines of all stages are over when DMS begins; only FedAvg is run again.
    assert [c[0] for c in baselines[:10]] == [n for n in "edcba" for _ in range(2)]
    assert {call[0] for call in baselines[10:16]} == set("abc")
    assert all("dms" not in call[2] for call in baselines)
    assert {call[2] for call in last} == {("dms",), ("fedavg",)}
    # b could not be run in Case 3: it is last, and c is second instead.
    assert {call[0][0] for call in last} == {"a", "c"}
    # Choices of DMS alone come last, under the nearest variant, with few seeds.
    few = last[-len(calibrate.DMS_CHOICES) :]
    assert {call[3] for call in last[: -len(few) - 1]} == {3}
    # One of them is tried in a cell of its own, which needs FedAvg as well.
    assert last[-len(few) - 1][:4] == ("a", "mnist_select2", ("fedavg",), 2)
    assert [call[0] for call in few] == [f"a; {c.label}" for c in calibrate.DMS_CHOICES]
    assert {call[3] for call in few} == {2} and few[5][1] == "mnist_case3"
    rows = rows_of(paths[1])
    assert [row["variant"] for row in rows] == ["a", "c", "b", "d", "e"]
    assert [row["stage"] for row in rows] == ["4", "4", "3", "1", "1"]
    # Two seeds a point apart in Cases 1 and 3, so 1.5 above there; 1 above in Case 2.
    distance = np.sqrt((6 * 1.5**2 + 3 * 1.0) / 9)
    assert rows[0]["distance, points"] == f"{distance:.2f}"
    assert rows[2]["distance, points"] == "–"
    assert rows[-1]["Case 1 mnist, FedAvg (paper 96.41)"] == "101.41"
    assert rows[-1]["Case 1 mnist, FedProx (paper 97.01)"] == "–"
    shown = rows_of(paths[3])
    several = 2 * 2 * len(calibrate.DMS_VARIANTS)
    assert len(shown) == several + len(calibrate.DMS_CHOICES)
    assert shown[0]["paper"] == "+1.48" and shown[0]["seeds"] == "3"
    assert shown[2]["seeds"] == "2" and shown[2]["of the mean curves"] == "–"
    assert shown[0]["DMS − FedAvg, paired"].startswith("+51.48")
