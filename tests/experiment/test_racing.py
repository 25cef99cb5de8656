"""Races: lanes that cannot win stop, the others do not notice, resuming included."""

import shutil
import types

import numpy as np
import pytest

import tsfl_jax
from studies import arena
from tests.experiment.test_seeds import small
from tsfl_jax.experiment import program, racing, sweeps
from tsfl_jax.report import collect, files, groups, page

SETTINGS = {"num_intervals": 6, "report_every": 2}
LANES = [{"algorithm": a, "seed": s} for a in ("fedavg", "dms") for s in (0, 1)]
KEPT = ("test_accuracy", "test_loss", "train_loss", "rho", "samples", "tau")


def losers(running, interval, curves):
    """Lanes 2 and 3, DMS, in interval 2 or later, if their curves are known."""
    assert all(len(curve) >= interval for curve in curves.values())
    return [lane for lane in running if lane >= 2]


RACE = racing.Race("dms stops", losers)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("race")
    whole = tsfl_jax.sweep(small(**SETTINGS), LANES)
    options = {"workdir": folder, "lanes_per_call": 2, "race": RACE}
    raced = sweeps.run(small(**SETTINGS), LANES, **options)
    return folder, whole, raced


def test_a_lane_that_has_diverged_does_not_lead():
    rules = ["fedavg", "fedadam", "dms"]
    accuracy = np.repeat([0.60, 0.75, 0.65], 2)[:, None] * np.ones(12)
    diverged = np.zeros((6, 12), bool)

    def stopped():
        race = arena.race_of(5, rules, 2, 12)
        running = racing.Running(race, list(range(6)), {}, {})
        history = types.SimpleNamespace(test_accuracy=accuracy, diverged=diverged)
        return running.drop(8, history)

    assert stopped() == [4, 5]  # ten points behind FedAdam; FedAvg is never stopped
    # Lost in the last interval of the chunk: its accuracy is of the last good model.
    diverged[2, 7:] = True
    assert stopped() == []
    diverged[2, 4:] = True
    assert stopped() == []
    accuracy[4:] = 0.9  # FedAdam is out of the race, FedAvg is kept
    assert stopped() == []


def test_what_counts_of_a_lane_by_hand():
    curve, lost = np.array([0.1, 0.2, 0.3, 0.3]), np.array([0, 0, 1, 1], bool)
    nan = np.nan
    found = racing.curve_of(curve, lost, -1)
    np.testing.assert_array_equal(found, [0.1, 0.2, nan, nan])
    found = racing.curve_of(curve, lost, 1)
    np.testing.assert_array_equal(found, [0.1, nan, nan, nan])
    found = racing.curve_of(curve, np.zeros(4, bool), -1)
    np.testing.assert_array_equal(found, curve)


@pytest.mark.slow
def test_survivors_do_not_change(runs):
    _, whole, raced = runs
    for name in KEPT:
        one, other = whole.history[name], raced.history[name]
        np.testing.assert_array_equal(one[:2], other[:2])
        # Until they were stopped, the others are the same, too.
        np.testing.assert_array_equal(one[2:, :2], other[2:, :2])
    assert raced.history["stopped"].tolist() == [-1, -1, 2, 2]
    assert "stopped" not in whole.history
    assert np.isnan(raced.history["test_loss"][2:, 2:]).all()
    assert not raced.history["samples"][2:, 2:].any()


def test_stopped_lanes_do_not_look_like_whole_runs(runs):
    folder, whole, raced = runs
    assert [row["stopped_at"] for row in raced.rows] == [None, None, 2, 2]
    assert not any("stopped_at" in row for row in whole.rows)
    kept = (folder / "results.jsonl").read_text().splitlines()
    assert [files.parse_json(row)["stopped_at"] for row in kept] == [None, None, 2, 2]
    head, *lines = (folder / "results.csv").read_text().splitlines()
    place = head.split(",").index("stopped_at")
    assert [line.split(",")[place] for line in lines] == ["", "", "2", "2"]
    summary = (folder / "summary.md").read_text()
    (line,) = (s for s in summary.splitlines() if s.startswith("| dms"))
    assert line.startswith("| dms | 2 | – | – | – | 0 | 2 |")
    assert "Note: a race stopped 2 of 4 lanes" in summary
    assert "mean of best: algorithm=fedavg." in summary
    assert repr(raced).splitlines()[1].endswith("; a race stopped 2")


@pytest.mark.parametrize("file", ["history.csv", ""])
def test_the_report_marks_stopped_lanes(runs, tmp_path, file):
    shutil.copytree(runs[0], tmp_path / "race")
    folder = tmp_path / "race"
    if not file:  # as in a sweep that was interrupted
        (folder / "history.csv").unlink()
    source = collect.read_source(folder)
    assert source.missing == []
    for run, end in zip(source.runs, (6, 6, 2, 2), strict=True):
        assert run.series["interval"][-1] == end and len(run.series["test_loss"]) == end
        assert run.tau is not None and len(run.tau) == end
        assert groups.stopped(run) == (end == 2) and not groups.lost(run)
    text = page.make_page([folder])
    assert "Stopped by a race after 2 intervals. (2 runs)" in text
    assert ">stopped<" in text and "Runs that a race stopped" in text


def test_a_race_is_resumed_and_does_not_leak_into_a_sweep_without(runs, monkeypatch):
    folder, whole, raced = runs
    files = sorted(path.name for path in (folder / "lanes").glob("*.npz"))
    assert len([name for name in files if "-" in name]) == 2 and len(files) == 4

    def refuse(*arguments, **more):
        raise AssertionError("a lane runs again")

    with monkeypatch.context() as patch:
        patch.setattr(program.Program, "compile", refuse)
        options = {"workdir": folder, "race": RACE}
        again = sweeps.run(small(**SETTINGS), LANES, **options)
        np.testing.assert_array_equal(
            again.history["test_loss"], raced.history["test_loss"]
        )
        assert again.rows[3]["final_test_loss"] == raced.rows[3]["final_test_loss"]
        other = racing.Race("another rule", losers)
        with pytest.raises(AssertionError, match="runs again"):
            sweeps.run(small(**SETTINGS), LANES, workdir=folder, race=other)
        with pytest.raises(AssertionError, match="runs again"):
            sweeps.run(small(**SETTINGS), LANES, workdir=folder)


def test_a_stopped_call_goes_on_with_the_same_decisions(runs, tmp_path):
    _, _, raced = runs
    asked = []

    def late(running, interval, curves):
        asked.append(interval)
        return [lane for lane in running if lane == 3 and interval == 2]

    race, count = racing.Race("lane 3 after 2", late), []

    def stop():
        count.append(1)
        return len(count) == 2

    options = {"workdir": tmp_path, "lanes_per_call": 4, "race": race}
    with pytest.raises(KeyboardInterrupt):
        sweeps.run(small(**SETTINGS), LANES, stop=stop, **options)
    assert asked == [2, 4]
    again = sweeps.run(small(**SETTINGS), LANES, **options)
    assert asked == [2, 4, 2, 4]
    assert again.history["stopped"].tolist() == [-1, -1, -1, 2]
    np.testing.assert_array_equal(
        again.history["test_loss"][:2], raced.history["test_loss"][:2]
    )
