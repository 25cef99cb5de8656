"""Sweeps: parsing, lanes against single runs, one trace, divergence, files.

Stopped and damaged ones are in `test_damage`, further single runs in `test_same_bits`.
"""

import csv
import io
import json
import shutil

import jax
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tsfl_jax.engine import scan, structures
from tsfl_jax.prepare import backend
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.report.statistics import confidence_interval
from tsfl_jax.run import grid, lanes, sweeps
from tsfl_jax.types import UserError

FLOATS = ("test_accuracy", "test_loss", "train_loss", "rho", "coupling", "smoothness")


def small(hidden=8, **changes):
    changes = {"num_intervals": 4, "num_clients": 5, "devices": 2} | changes
    return problems.small(hidden, schedule__data_size=32, **changes)


SWEPT = {
    "algorithm": ["dms", "fedavg", "fedprox", "fedasync"],
    "seed": [0, 3],
    "lr": [0.02, 0.1],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the result of a sweep, and how often its program was traced."""
    folder, traces, made = tmp_path_factory.mktemp("sweep"), [], scan.make_run

    def counted(*arguments, **options):
        run = made(*arguments, **options)

        def traced(*inner):
            traces.append(1)
            return run(*inner)

        return traced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "make_run", counted)
        # Of 16 lanes the last call has one.
        result = tsfl_jax.sweep(small(), SWEPT, workdir=folder, runs_per_call=5)
    return folder, result, len(traces)


def place_of(result, **wanted) -> int:
    """The lane with these settings."""
    (place,) = (
        i
        for i, row in enumerate(result.rows)
        if all(row[k] == v for k, v in wanted.items())
    )
    return place


def test_several_settings():
    name = "schedule.tau_groups"  # a comma within parentheses is no end of a value
    groups = ["normal(2,0.4); uniform(1,5)", "constant(3)"]
    assert grid.parse([f"{name}={','.join(groups)}", "lr=1"]) == {
        name: groups,
        "lr": [1.0],
    }
    swept = {"lr": [1, 2], "seed": range(2)}
    assert grid.points(swept) == [
        {"lr": lr, "seed": seed} for lr in (1.0, 2.0) for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=log(1e-3,1e-1,3), 1", [0.001, 0.01, 0.1, 1.0]),
        ("lr=lin(0.1,0.5,5)", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("lr=0.1:0.4:0.1", [0.1, 0.2, 0.3]),  # the end is not in a range
        ("lr=0.3:0.05:-0.1", [0.3, 0.2, 0.1]),
        ("batch_size=log(8,64,4)", [8, 16, 32, 64]),
        ("seed=0:3,7", [0, 1, 2, 7]),
        ("num_clients=10:31:10", [10, 20, 30]),
        ("algorithm=dms,fedavg", ["dms", "fedavg"]),
        ("checkpoint=true,False", [True, False]),
        ("schedule.tau=(1,4),(2,2)", [(1, 4), (2, 2)]),
    ],
)
def test_values_of_a_setting(text, values):
    assert list(grid.parse([text]).values()) == [values]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=log(0,1,3)", "and ends > 0"),
        ("lr=log(1,2)", r"expected log\(first,last,count\)"),
        ("lr=0.1:0.2", "expected first:end:step"),
        ("lrr=1", "no such setting; did you mean 'lr'"),
        ("seed=3:3", "no values"),
        ("seed=1,1", "given twice"),
        ("schedule.tau=1", r"'1' is not a tuple of whole numbers like \(1,4\)"),
    ],
)
def test_slips_are_answered_in_one_line(text, message):
    with pytest.raises(UserError, match=message) as caught:
        grid.parse([text])
    assert "\n" not in str(caught.value)


def test_what_all_runs_of_a_sweep_share_is_not_swept():
    with pytest.raises(UserError, match="devices: all runs of a sweep share it"):
        tsfl_jax.sweep(small(), {"devices": [1, 2]})


@pytest.mark.slow
def test_a_history_has_what_all_runs_measure(tmp_path):
    config = grid.changed(small(algorithm="fedavg"), {"data.validation": 20})
    swept = {"measure_regret": [True, False]}
    result = tsfl_jax.sweep(config, swept, workdir=tmp_path)
    assert not {*result.history} & {*structures.REGRET}
    assert np.isfinite(result.rows[0]["mean_regret"])
    assert "mean_regret" not in result.rows[1]
    stream = io.StringIO()
    sweeps.run(config, swept, workdir=tmp_path, stream=stream)
    assert "2 runs were finished already" in stream.getvalue()


FIRST, SECOND = {"seed": 0, "lr": 0.02}, {"seed": 3, "lr": 0.1}


@pytest.mark.parametrize(("algorithm", "point"), [("dms", FIRST), ("fedprox", SECOND)])
def test_a_lane_equals_the_single_run(whole, algorithm, point):
    result = whole[1]
    place = place_of(result, algorithm=algorithm, **point)
    single = tsfl_jax.simulate(small(algorithm=algorithm, **point))
    for name in FLOATS:
        np.testing.assert_allclose(
            result.history[name][place],
            single.history[name],
            rtol=1e-5,
            atol=1e-6,
            err_msg=name,
        )
    row = result.rows[place]
    assert row["best_test_accuracy"] == pytest.approx(
        single.summary["best_test_accuracy"]
    )
    for name, value in single.summary["fingerprints"].items():
        assert row[f"{name}_sha"] == value


def test_seeds_differ_in_everything(whole):
    result = whole[1]
    shas = {row["seed"]: (row["split_sha"], row["schedule_sha"]) for row in result.rows}
    assert shas[0][0] != shas[3][0] and shas[0][1] != shas[3][1]


def test_one_trace_for_lanes_with_the_proximal_term_and_one_for_those_without(whole):
    assert whole[2] == 2


@pytest.mark.slow
def test_what_changes_shapes_makes_another_program(capsys):
    swept = {"batch_size": [8, 16], "seed": [0, 1]}
    result = tsfl_jax.sweep(small(), swept, verbose=True)
    assert "2 programs, because of batch_size=8, 16" in capsys.readouterr().err
    for row, accuracy in zip(result.rows, result.history["test_loss"], strict=True):
        changes = {name: row[name] for name in swept}
        single = tsfl_jax.simulate(small(**changes)).history["test_loss"]
        np.testing.assert_allclose(accuracy, single, rtol=1e-5)


def test_splits_and_cases_are_lanes_of_one_program():
    changes = [
        {"partition.alpha": 0.1},
        {"partition.kind": "iid"},
        {"schedule.kind": "case1"},
        {"algorithm": "fedavg"},
        {"schedule.data_size": 24},
    ]
    prepared = [prepare(grid.changed(small(), change)) for change in changes]
    assert lanes.group(prepared) == ([[0, 1, 2, 3, 4]], [])
    prepared.append(prepare(grid.changed(small(), {"schedule.iteration": "step"})))
    groups, causes = lanes.group(prepared)
    assert len(groups) == 2 and causes == ["schedule.iteration=pass, step"]


def test_points_of_a_list(whole, tmp_path, capsys):
    """They are the lanes of the product, which have been trained."""
    points = [{"algorithm": "fedavg", **SECOND}, {"algorithm": "dms", **FIRST}]
    shutil.copytree(whole[0] / "lanes", tmp_path / "lanes")
    result = tsfl_jax.sweep(small(), points, workdir=tmp_path, verbose=True)
    assert "2 runs were finished already" in capsys.readouterr().err
    places = [place_of(whole[1], **point) for point in points]
    for name in FLOATS:
        np.testing.assert_array_equal(
            result.history[name], whole[1].history[name][places], err_msg=name
        )


def test_a_diverged_lane_is_marked_and_the_others_do_not_notice(tmp_path):
    config = small(algorithm="fedavg", devices=1)
    alone = tsfl_jax.sweep(config, {"lr": [0.02, 0.05]})
    mixed = tsfl_jax.sweep(config, {"lr": [0.02, 1e30, 0.05]}, workdir=tmp_path)
    assert [row["diverged_at"] for row in mixed.rows] == [None, 1, None]
    for name in FLOATS:
        np.testing.assert_array_equal(
            mixed.history[name][[0, 2]], alone.history[name], err_msg=name
        )
    assert np.isnan(mixed.history["test_loss"][1, 1:]).all()
    text = (tmp_path / "summary.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| 1e+30"))
    assert "| 1 | – | – | – |" in line and line.endswith("| 1 |")


def test_files(whole):
    folder, result, _ = whole
    lines = (folder / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    with open(folder / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table) == 16
    assert list(rows[0])[:4] == ["run", *SWEPT]
    assert [row["run"] for row in rows] == list(range(16))
    with open(folder / "history.csv", newline="") as file:
        long = list(csv.DictReader(file))
    assert len(long) == 16 * 4 and list(long[0])[:5] == ["run", *SWEPT, "interval"]
    line = long[4 * 5 + 2]  # the third interval of lane 5
    assert line["run"] == "5" and line["interval"] == "3"
    assert float(line["test_loss"]) == pytest.approx(result.history["test_loss"][5, 2])
    for row, line in zip(rows, table, strict=True):
        assert float(line["best_test_accuracy"]) == row["best_test_accuracy"]
        assert {"momentum", "partition.alpha", "data_sha", "split_sha"} <= set(row)
    for name in ("curves.png", "curves.pdf", "summary.md", "sweep.json"):
        assert (folder / name).stat().st_size > 0
    text = (folder / "summary.md").read_text()
    assert "| fedasync | 0.02 | 2 |" in text and "±" in text
    assert result.history["rho"].shape == (16, 4, 5)


def test_confidence_interval_by_hand():
    # 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.302653, so 4.302653/√3.
    mean, half = confidence_interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    values = np.array([[1.0, np.nan], [2.0, 5.0], [3.0, np.nan]])
    means, halves = confidence_interval(values, omit=True)
    np.testing.assert_allclose(means, [2, 5])
    np.testing.assert_allclose(halves, [half, np.nan])


@pytest.mark.slow
def test_memory_decides_how_many_lanes_run_side_by_side(monkeypatch):
    class Card:
        def __init__(self, limit):
            self.limit = limit

        def memory_stats(self):
            return {"bytes_limit": self.limit}

    settings = [small(mapping="vmap", algorithm="fedavg", seed=s) for s in range(6)]
    several = [prepare(each) for each in settings]
    group = lanes.make_group(several, backend.start_jax(small()))
    counts = []
    for limit in (2**20, 2**24, 2**36):
        monkeypatch.setattr(jax, "devices", lambda limit=limit: [Card(limit)])
        counts.append(lanes.runs_per_call(group))
        monkeypatch.undo()
    assert counts[0] >= 1 and counts == sorted(counts) and counts[-1] == 6


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{lrr: 1}]", "there is no such setting; did you mean 'lr'"),
        ("[{lr: fast}]", "lr=fast: 'fast' is not a number"),
        ("lr: 1", "expected a list of points"),
        ("a: [", "cannot be read"),
    ],
)
def test_slips_in_a_sweep_file(tmp_path, text, message):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        grid.read_points(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_points_with_settings_of_their_own(tmp_path):
    points = [{"mu": 0.5}, {"seed": 1}]
    config = small(algorithm="fedprox", devices=1)
    result = tsfl_jax.sweep(config, points, workdir=tmp_path)
    assert [[row["mu"], row["seed"]] for row in result.rows] == [[0.5, 0], [0.01, 1]]
    assert "| 0.5 | " in (tmp_path / "summary.md").read_text()


def test_notes_that_differ_in_numbers_are_one_line():
    notes = [
        [f"{share} % of the samples, labeled {labels}: harmless", "same for all"]
        for share, labels in (("2", "3"), ("0.96", "1, 4"), ("11", "4, 0"))
    ]
    assert sweeps._merged(notes) == [
        f"{notes[0][0]} (with other numbers in 2 of 3 runs)",
        "same for all",
    ]
