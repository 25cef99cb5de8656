"""Frameworks on the same clients in virtual time: times, tables, small runs."""

import csv
import pathlib

import numpy as np
import pytest

from studies import compare, verdicts
from studies.heterogeneity import read
from tsfl_jax import config_files
from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare
from tsfl_jax.report import statistics
from tsfl_jax.run import grid as axes
from tsfl_jax.run import runner
from tsfl_jax.types import UserError

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "frameworks"
FILES = sorted(FOLDER.glob("*.py"))
SMALL = {
    "data.name": "digits",
    "model.name": "mlp",
    "num_clients": 4,
    "num_intervals": 3,
    "batch_size": 8,
    "lr": 0.05,
    "schedule.data_size": 32,
    "report_every": 2,
}


def test_time_to_a_target_by_hand():
    seconds = np.array([1.0, 2.5, 4.0])
    accuracy = np.array([0.5, 0.9, 0.8])
    assert compare.time_to(0.9, seconds, accuracy) == 2.5
    assert compare.time_to(0.4, seconds, accuracy) == 1.0
    assert compare.time_to(0.91, seconds, accuracy) == np.inf
    other = np.array([0.5, 3.0, 3.0]), np.array([0.1, 0.2, 0.3])
    found = statistics.in_time([(seconds, accuracy), other])
    assert found.index.tolist() == [0.5, 1.0, 2.5, 3.0, 4.0]
    np.testing.assert_array_equal(found[0], [np.nan, 0.5, 0.9, 0.9, 0.8])
    np.testing.assert_array_equal(found[1], [0.1, 0.1, 0.1, 0.3, 0.3])


def result(label, times, best=0.95):
    """A run per seed that reaches 0.9 at the given time, inf: never."""
    curves = [
        (np.array([1.0, min(t, 99.0)]), np.array([0.1, best if t < 99 else 0.2]))
        for t in times
    ]
    return compare.FrameworkResult(label, "fedavg", curves, 10, 100, 0.5, 7.0)


def test_table_by_hand():
    results = [result("sfl", [8.0, 12.0]), result("tsfl", [4.0, 4.0])]
    results.append(result("afl", [4.0, np.inf]))
    first, second, third = compare.comparison_rows(results, 0.9)
    # Seeds 8 and 12: mean 10, s/√2 = 2, t(0.975, 1) = 12.706.
    assert first["s to 90 %"] == "10.00 (8.00 to 12.00)"
    assert second["s to 90 %"] == "4.00 ± 0.00" and second["speed-up"][:4] == "2.50"
    assert third["s to 90 %"] == "reached by 1 of 2" and third["speed-up"] == "–"
    assert [r["framework"] for r in (first, second)] == ["SFL", "T-SFL"]


def test_costs_to_a_target_and_their_front_by_hand(tmp_path):
    """At 1 s 2 MB are spent, at the time of the target 6 or 5 or 9 MB."""
    results = [
        result(label, [time])._replace(
            spent=[
                {"bytes": np.array([2e6, moved]), "energy_joules": np.array([1e3, 8e3])}
            ]
        )
        for label, time, moved in (("sfl", 8.0, 6e6), ("afl", 4, 9e6), ("tsfl", 9, 7e6))
    ]
    rows = compare.comparison_rows(results, 0.9)
    assert [row["MB to 90 %"] for row in rows] == ["6", "9", "7"]
    assert rows[0]["kJ to 90 %"] == "8"
    # T-SFL is slower than SFL and sends more.
    assert compare.front_of(np.array([[6, 8], [9, 4], [7, 9], [1, np.inf]])) == [0, 1]
    paths = {p.name for p in compare.write_comparison(tmp_path, results, 0.9, "digits")}
    assert {"compare_bytes.png", "compare_energy_joules.pdf", "pareto.png"} <= paths


def test_a_run_that_diverged_has_guessed(tmp_path):
    """What it had reached before would make its framework look good."""
    history = {
        "test_accuracy": np.array([[0.8, np.nan, 0.9], [0.8, np.nan, 0.3]]),
        "diverged": np.array([[False, False, False], [False, False, True]]),
    }
    best = np.nanmax(verdicts.curves_of(history, 10), axis=-1)
    assert best.tolist() == [0.9, 0.1]
    note = verdicts.diverged_note(history)
    assert note == "1 diverged, scored at chance level"
    assert verdicts.diverged_note({n: a[:1] for n, a in history.items()}) == ""
    untested = {n: a[1:, -1:] for n, a in history.items()}
    untested["test_accuracy"] = np.full((1, 1), np.nan)
    assert verdicts.curves_of(untested, 10).tolist() == [[0.1]]
    summary = {"algorithm": "fedavg", "train_seconds": 1.0, "data": "digits"}
    facts = {"updates": 3, "iterations": 9, "mean_staleness": 0.0}
    runs = []
    for lane, lost in enumerate((None, 3)):
        one = {n: a[lane] for n, a in history.items()}
        one["virtual_time"] = np.array([1.0, 2.0, 3.0])
        made = runner.Result({}, one, summary | {"diverged_at": lost})
        runs.append((made, facts))
    found = compare._over_seeds("sfl", runs, 10)
    assert found.lost == 1 and compare.times_of(found, 0.5).tolist() == [1.0, np.inf]
    text = compare.write_comparison(tmp_path, [found], 0.5, "digits")[0].read_text()
    assert "Diverged, scored at chance level: 1 of sfl." in text


def with_sizes(framework, **changes):
    """Six clients with 20, 40 or 60 samples; client 3 takes 20 s per iteration."""
    paces = [f"constant({20 if i == 3 else 1})" for i in range(6)]
    changes |= {"timeline.framework": framework, "timeline.speed": "; ".join(paces)}
    changes |= {"schedule.size_groups": "constant(20);constant(40);constant(60)"}
    own = {"num_clients": 6, "num_intervals": 4, "batch_size": 8, "timeline.buffer": 3}
    own |= {"schedule.interval_seconds": 3.0}
    return axes.changed(Config(), read(own | changes))


def test_the_split_depends_neither_on_the_framework_nor_on_its_horizon():
    first = prepare.prepare(with_sizes("tsfl")).partition
    assert first.capacity.tolist() == [20, 40, 60, 20, 40, 60]
    for framework in ("fedcs", "afl", "fedbuff", "safa"):
        for intervals in (4, 20):  # client 3 delivers within 60 s, not within 12
            config = with_sizes(framework, num_intervals=intervals)
            found = prepare.prepare(config).partition
            for field in first._fields:
                one, other = getattr(first, field), getattr(found, field)
                np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_iterations_are_those_done_and_not_those_reported(tmp_path):
    changes = {"schedule.free_riders": 6, "schedule.free_riding": "echo"}
    config = with_sizes("afl", **changes)
    with pytest.raises(UserError, match="no client does"):
        prepare.prepare(config)
    config = axes.changed(config, {"schedule.free_riding": "claim", "devices": 1})
    dataset = prepare.load_dataset(config)
    result, facts = compare._run_one(config, dataset, tmp_path)
    # Of a task of four iterations one is done, and all are reported.
    updates = len(result.history["virtual_time"])
    assert facts["iterations"] == facts["updates"] == updates > 6
    version = prepare.prepare(config).workload.trace.version[:, 0]
    assert facts["mean_staleness"] == (np.arange(updates) - version).mean() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_intervals": 7}, "interval_seconds is 14.0 and 80.0"),
        ({"partition.alpha": 0.1}, "partition.alpha is 0.1 and "),
    ],
)
def test_other_data_clients_or_seconds_are_refused(tmp_path, changes, words):
    entries = [compare.Entry(path.stem, config_files.load(path)) for path in FILES]
    compare.check_same_clients(entries)  # all files of the folder share theirs
    other = compare.Entry("other", replace(entries[0].config, changes))
    with pytest.raises(UserError, match=words):
        compare.run_frameworks([*entries, other], 1, tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing was trained


@pytest.mark.slow
def test_a_small_comparison_from_end_to_end(tmp_path, capsys):
    changes = [f"--set={name}={value}" for name, value in SMALL.items()]
    names = ("sfl", "afl")
    command = [*(str(FOLDER / f"{n}.py") for n in names), *changes]
    command += ["--seeds=2", f"--out={tmp_path}", "--target=0.3"]
    compare.main(command)
    printed = capsys.readouterr()
    assert "compare.md" in printed.out and "afl, seed 1" in printed.err
    text = (tmp_path / "compare.md").read_text()
    with open(tmp_path / "compare.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["framework"] for r in rows] == ["SFL", "AFL"]
    # AFL: an update at every arrival, each from an old model.
    assert float(rows[1]["updates"]) > 3 * float(rows[0]["updates"])
    assert float(rows[1]["mean staleness"]) > 1 > float(rows[0]["mean staleness"])
    assert rows[0]["MB to 30 %"] and (tmp_path / "pareto.png").stat().st_size > 0
    assert (tmp_path / "compare.png").stat().st_size > 0
    compare.main(command)  # everything is there: the same table, without training
    assert (tmp_path / "compare.md").read_text() == text
