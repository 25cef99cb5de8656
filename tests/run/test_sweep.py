"""Sweeps: parsing, lanes against single runs, one trace, divergence, files.

Stopped and damaged ones are in `test_damage`, further single runs in `test_same_bits`.
"""

import csv
import io
import json
import shutil

import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.report.statistics import confidence_interval
from tsfl_jax.run import grid, lanes, program, sweeps
from tsfl_jax.types import UserError

FLOATS = ("test_accuracy", "test_loss", "train_loss", "rho", "coupling", "smoothness")


def small(hidden=8, **changes):
    changes = {"num_intervals": 4, "num_clients": 5, "devices": 2} | changes
    return problems.small(hidden, schedule__data_size=32, **changes)


SWEPT = {"algorithm": ["fedbuff", "fedavg"], "seed": [0, 3], "lr": [0.02, 0.1]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the result of a sweep in calls of five and of three runs."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, tsfl_jax.sweep(small(), SWEPT, workdir=folder, runs_per_call=5)


def place_of(result, **wanted) -> int:
    """The lane with these settings."""
    (place,) = (
        i
        for i, row in enumerate(result.rows)
        if all(row[k] == v for k, v in wanted.items())
    )
    return place


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=log(1e-3,1e-1,3), 1", [0.001, 0.01, 0.1, 1.0]),
        ("lr=lin(0.1,0.5,5)", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("lr=0.1:0.4:0.1", [0.1, 0.2, 0.3]),  # the end is not in a range
        ("batch_size=log(8,64,4)", [8, 16, 32, 64]),
        ("seed=0:3,7", [0, 1, 2, 7]),
        ("checkpoint=true,False", [True, False]),
        ("schedule.tau=(1,4),(2,2)", [(1, 4), (2, 2)]),
        # A comma within parentheses is no end of a value.
        (
            "schedule.tau_groups=normal(2,0.4); uniform(1,5),constant(3)",
            ["normal(2,0.4); uniform(1,5)", "constant(3)"],
        ),
    ],
)
def test_values_of_a_setting(text, values):
    assert list(grid.parse([text]).values()) == [values]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=log(0,1,3)", r"expected log\(first,last,count\)"),
        ("lrr=1", "no such setting; did you mean 'lr'"),
        ("schedule.tau=1", r"'1' is not a tuple of whole numbers like \(1,4\)"),
        ("devices=1,2", "all runs of a sweep share it"),
        ("- lr: fast", "lr=fast: 'fast' is not a number"),
    ],
)
def test_slips_are_answered_in_one_line(tmp_path, text, message):
    (tmp_path / "sweep.yaml").write_text(text)
    is_file = text[0] == "-"
    with pytest.raises(UserError, match=message) as caught:
        grid.read_points(f"{tmp_path}/sweep.yaml") if is_file else grid.parse([text])
    assert "\n" not in str(caught.value)


def test_splits_and_cases_are_lanes_of_one_program():
    changes = [
        {"partition.alpha": 0.1},
        {"partition.kind": "iid"},
        {"schedule.kind": "case1"},
        {"algorithm": "fedavg"},
        {"algorithm": "fedasync"},
        {"schedule.data_size": 24},
    ]
    prepared = [prepare(grid.changed(small(), change)) for change in changes]
    assert lanes.group(prepared) == [[0, 1, 2, 3, 4, 5]]
    prepared.append(prepare(grid.changed(small(), {"schedule.iteration": "step"})))
    groups = lanes.group(prepared)
    assert len(groups) == 2
    assert lanes.causes_of(groups, prepared) == "schedule.iteration (pass, step)"


def test_points_of_a_list(whole, tmp_path, capsys):
    """They are the lanes of the product, which have been trained."""
    points = [
        {"algorithm": "fedavg", "seed": 3, "lr": 0.1},
        {"algorithm": "fedbuff", "seed": 0, "lr": 0.02},
    ]
    shutil.copytree(whole[0] / "lanes", tmp_path / "lanes")
    result = tsfl_jax.sweep(small(), points, workdir=tmp_path, verbose=True)
    assert "2 runs were finished already" in capsys.readouterr().err
    places = [place_of(whole[1], **point) for point in points]
    for name in FLOATS:
        np.testing.assert_array_equal(
            result.history[name], whole[1].history[name][places], err_msg=name
        )


def test_a_folder_with_other_settings_says_that_all_begins_again(
    whole, tmp_path, monkeypatch, capsys
):
    titles = []

    def interrupted(program, *_):
        titles.append(program.title)
        raise KeyboardInterrupt

    shutil.copytree(whole[0] / "lanes", tmp_path / "lanes")
    monkeypatch.setattr(lanes, "make_arrays", lambda *_: None)
    monkeypatch.setattr(program.Program, "compile", interrupted)
    finished = {"algorithm": "fedavg", "seed": 3, "lr": 0.1}
    for points, begins_again in (([], True), ([finished], False)):
        points = [*points, {"lr": 0.5, "schedule.iteration": "step"}, {"lr": 0.5}]
        with pytest.raises(KeyboardInterrupt):
            tsfl_jax.sweep(small(), points, workdir=tmp_path, verbose=True)
        lines = capsys.readouterr().err.splitlines()
        words = f"{tmp_path} has other settings: all begins again"
        assert lines.count(words) == begins_again
        text = "2 programs, one for each schedule.iteration ("
        assert sum(line.startswith(text) for line in lines) == 1
    assert titles == ["interval of 5 clients, 1 of 2 programs"] * 2


def test_compiles_to_come_are_in_what_is_left(monkeypatch):
    def run_group(sweep, members, bar, finished, compiles, place):
        compiles.append(30.0 + 20 * len(compiles))
        bar(4 * len(members), 80, 2.0, f"results{place}")
        yield {i: sweeps.Finished({}, {}) for i in members}

    stream, points = io.StringIO(), [{"batch_size": size} for size in (4, 8, 16)]
    monkeypatch.setattr(sweeps, "_run_group", run_group)
    sweeps.run_all(sweeps.make(small(), points, stream=stream))
    assert stream.getvalue().splitlines()[-3:] == [
        # Two compiles of 30 s and 8 intervals of half a second; one of (30 + 50) / 2 s.
        "interval 4/12, results, 1 of 3 programs, 40 samples/s, 0:01:04 left",
        "interval 8/12, results, 2 of 3 programs, 40 samples/s, 0:00:42 left",
        "interval 12/12, results, 3 of 3 programs, 40 samples/s, done in 0:00:06",
    ]


def test_a_diverged_lane_is_marked_and_the_others_do_not_notice(tmp_path):
    config = small(algorithm="fedavg", devices=1)
    alone = tsfl_jax.sweep(config, {"lr": [0.02, 0.03, 0.05]})
    mixed = tsfl_jax.sweep(config, {"lr": [0.02, 1e30, 0.05]}, workdir=tmp_path)
    assert [row["diverged_at"] for row in mixed.rows] == [None, 1, None]
    for name in FLOATS:
        np.testing.assert_array_equal(
            mixed.history[name][[0, 2]], alone.history[name][[0, 2]], err_msg=name
        )
    assert np.isnan(mixed.history["test_loss"][1, 1:]).all()
    text = (tmp_path / "summary.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| 1e+30"))
    assert "| 1 | – | – | – |" in line and line.endswith("| 1 |")


def test_files(whole):
    folder, result = whole
    lines = (folder / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    with open(folder / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table) == 8
    assert list(rows[0])[:4] == ["run", *SWEPT]
    assert [row["run"] for row in rows] == list(range(8))
    with open(folder / "history.csv", newline="") as file:
        long = list(csv.DictReader(file))
    assert len(long) == 8 * 4 and list(long[0])[:5] == ["run", *SWEPT, "interval"]
    line = long[4 * 5 + 2]  # the third interval of lane 5
    assert line["run"] == "5" and line["interval"] == "3"
    assert float(line["test_loss"]) == pytest.approx(result.history["test_loss"][5, 2])
    for row, line in zip(rows, table, strict=True):
        assert float(line["best_test_accuracy"]) == row["best_test_accuracy"]
        assert {"momentum", "partition.alpha", "data_sha", "split_sha"} <= set(row)
    for name in ("curves.png", "curves.pdf", "summary.md", "sweep.json"):
        assert (folder / name).stat().st_size > 0
    text = (folder / "summary.md").read_text()
    assert "| fedavg | 0.02 | 2 |" in text and "±" in text
    assert result.history["rho"].shape == (8, 4, 5)


def test_confidence_interval_by_hand():
    # 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.302653, so 4.302653/√3.
    mean, half = confidence_interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    values = np.array([[1.0, np.nan], [2.0, 5.0], [3.0, np.nan]])
    means, halves = confidence_interval(values, omit=True)
    np.testing.assert_allclose(means, [2, 5])
    np.testing.assert_allclose(halves, [half, np.nan])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "- {lr: 1e-2, schedule.kind: case1}\n- {seed: 3}"),
        ("a.json", '[{"lr": 0.01, "schedule.kind": "case1"}, {"seed": 3}]'),
        ("a.csv", "lr,schedule.kind,seed\n0.01,case1,\n,,3\n"),
    ],
)
def test_a_sweep_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert grid.read_points(str(tmp_path / name)) == [
        {"lr": 0.01, "schedule.kind": "case1"},
        {"seed": 3},
    ]
