"""Sweeps: parsing, lanes against single runs, one trace, divergence, resuming."""

import csv
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsfl_jax
from tsfl_jax import config
from tsfl_jax.engine import scan, structures
from tsfl_jax.experiment import backend, grid, lanes, sweeps
from tsfl_jax.experiment.prepare import prepare
from tsfl_jax.models import networks
from tsfl_jax.report.statistics import confidence_interval
from tsfl_jax.types import UserError

FLOATS = ("test_accuracy", "test_loss", "train_loss", "rho", "coupling", "smoothness")


def small(hidden=8, **changes) -> config.Config:
    settings = config.Config(
        num_intervals=4, num_clients=5, lr=0.02, batch_size=8, report_every=2, devices=2
    )
    settings.schedule.data_size = 32
    settings.model.hidden = hidden
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


SWEPT = {
    "algorithm": ["dms", "fedavg", "fedprox", "fedasync"],
    "seed": [0, 3],
    "lr": [0.02, 0.1],
}


AT_ONCE = 5  # lanes of a call: of 16 the last call has one


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
        options = {"workdir": folder, "runs_per_call": AT_ONCE}
        result = tsfl_jax.sweep(small(), SWEPT, **options)
    return folder, result, len(traces)


def place_of(result, **wanted) -> int:
    """The lane with these settings."""
    (place,) = (
        i
        for i, row in enumerate(result.rows)
        if all(row[k] == v for k, v in wanted.items())
    )
    return place


def test_parsing():
    found = grid.parse(["seed=0:3", "lr=0.1, 1", "algorithm=dms,fedavg"])
    assert found == {
        "seed": [0, 1, 2],
        "lr": [0.1, 1.0],
        "algorithm": ["dms", "fedavg"],
    }
    assert grid.parse(["num_clients=10:31:10"]) == {"num_clients": [10, 20, 30]}
    assert grid.parse(["checkpoint=true,False"]) == {"checkpoint": [True, False]}
    name = "schedule.tau_groups"  # a comma within parentheses is no end of a value
    groups = ["normal(2,0.4); uniform(1,5)", "constant(3)"]
    assert grid.parse([f"{name}={','.join(groups)}"]) == {name: groups}
    assert grid.parse(["schedule.tau=(1,4),(2,2)"]) == {
        "schedule.tau": [(1, 4), (2, 2)]
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
    ],
)
def test_ranges_of_numbers(text, values):
    assert list(grid.parse([text]).values()) == [values]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=log(0,1,3)", "and ends > 0"),
        ("lr=log(1,2)", r"expected log\(first,last,count\)"),
        ("lr=lin(1,2,1)", "a count from 2 to"),
        ("lr=0.1:0.2", "expected first:end:step"),
        ("lr=nan:1:1", "expected first:end:step"),
        ("seed=lin(0,1,5)", "given twice"),
        ("seed", "expected setting=values"),
        ("lrr=1", "no such setting; did you mean 'lr'"),
        ("lr=a", "'a' is not a number"),
        ("seed=3:3", "no values"),
        ("seed=1:5:0", "expected first:end"),
        ("seed=1,1", "given twice"),
        ("checkpoint=maybe", "neither True nor False"),
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


def test_a_lane_that_cannot_work_is_named():
    with pytest.raises(UserError, match=r"run lr=-1.0: --config.lr=-1"):
        tsfl_jax.sweep(small(), {"lr": [0.1, -1]})


FIRST, SECOND = {"seed": 0, "lr": 0.02}, {"seed": 3, "lr": 0.1}
# Each rule once, each point twice; the other half of them is slow.
SINGLE = [
    pytest.param(name, point, marks=[pytest.mark.slow] * ((name, i) != ("dms", 0)))
    for name in SWEPT["algorithm"]
    for i, point in enumerate((FIRST, SECOND))
]


@pytest.mark.parametrize(("algorithm", "point"), SINGLE)
def test_a_lane_equals_the_single_run(whole, algorithm, point):
    result, wanted = whole[1], {"algorithm": algorithm, **point}
    place = place_of(result, **wanted)
    single = tsfl_jax.simulate(small(**wanted))
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


@pytest.mark.slow
def test_side_by_side_equals_one_after_another(whole):
    swept = {"algorithm": ["dms", "fedasync"], "seed": [0, 3]}
    result = tsfl_jax.sweep(small(mapping="vmap"), swept)
    for lane, row in enumerate(result.rows):
        wanted = {name: row[name] for name in swept}
        other = place_of(whole[1], lr=0.02, **wanted)
        for name in FLOATS:
            np.testing.assert_allclose(
                whole[1].history[name][other],
                result.history[name][lane],
                rtol=2e-4,
                atol=1e-5,
            )


@pytest.mark.slow
def test_splits_and_cases_are_lanes_of_one_program(whole):
    base = small()
    prepared = [
        prepare(grid.changed(base, changes))
        for changes in (
            {"partition.alpha": 0.1},
            {"partition.kind": "iid"},
            {"schedule.kind": "case1"},
            {"algorithm": "fedavg"},
            {"schedule.data_size": 24},
        )
    ]
    assert lanes.group(prepared) == ([[0, 1, 2, 3, 4]], [])
    prepared.append(prepare(grid.changed(base, {"schedule.iteration": "step"})))
    groups, causes = lanes.group(prepared)
    assert len(groups) == 2 and causes == ["schedule.iteration=pass, step"]
    sizes = {"schedule.data_size": [24, 32]}
    losses = tsfl_jax.sweep(base, sizes).history["test_loss"]
    base.schedule.data_size = 24
    single = tsfl_jax.simulate(base).history["test_loss"]
    np.testing.assert_allclose(losses[0], single, rtol=1e-5)
    other = whole[1].history["test_loss"][place_of(whole[1], algorithm="dms", **FIRST)]
    np.testing.assert_allclose(losses[1], other, rtol=1e-5)


@pytest.mark.slow
def test_own_parts_work_in_lanes_and_are_distinguished(tmp_path):
    def weights(info, hparams):
        return tsfl_jax.AGGREGATORS["fedavg"].weights(info, hparams)

    def update(mean, params, state, received, hparams):
        state = jax.tree.map(lambda s, m: 0.5 * s + m, state, mean["params"])
        return {**mean, "params": state}, state

    rule = tsfl_jax.Aggregator(
        weights,
        lambda p, counts: jax.tree.map(jnp.zeros_like, p["params"]),
        update,
        sections=tsfl_jax.AGGREGATORS["fedavg"].sections,
    )
    seeds, options = {"seed": [0, 1]}, {"workdir": tmp_path, "aggregator": rule}
    first = tsfl_jax.sweep(small(), seeds, optimizer=optax.adam(1e-3), **options)
    other = tsfl_jax.sweep(small(), seeds, optimizer=optax.adam(1e-2), **options)
    assert len(list((tmp_path / "lanes").iterdir())) == 4
    assert (first.history["test_loss"] != other.history["test_loss"]).all()
    single = tsfl_jax.simulate(
        small(seed=1), optimizer=optax.adam(1e-3), aggregator=rule
    )
    np.testing.assert_allclose(
        first.history["test_loss"][1], single.history["test_loss"], rtol=1e-5
    )


def test_a_network_of_the_wrong_width_is_refused():
    with pytest.raises(UserError, match=r"logits \[1, 3\]"):
        tsfl_jax.sweep(
            small(networks.ModelConfig.hidden), {"seed": [0]}, model=networks.MLP(3, 4)
        )


def test_points_of_a_list(whole, tmp_path):
    """They are the lanes of the product, which have been trained."""
    points = [{"algorithm": "fedavg", **SECOND}, {"algorithm": "dms", **FIRST}]
    shutil.copytree(whole[0] / "lanes", tmp_path / "lanes")
    stream = io.StringIO()
    result = sweeps.run(small(), points, workdir=tmp_path, stream=stream)
    assert "2 runs were finished already" in stream.getvalue()
    places = [place_of(whole[1], **point) for point in points]
    for name in FLOATS:
        np.testing.assert_array_equal(
            result.history[name], whole[1].history[name][places], err_msg=name
        )
    for bad, message in (
        ([], "no points"),
        ([3], "expected settings as a dict"),
    ):
        with pytest.raises(UserError, match=message):
            tsfl_jax.sweep(small(), bad)


def test_a_diverged_lane_is_marked_and_the_others_do_not_notice(tmp_path):
    good = {"lr": [0.02, 0.05]}
    alone = tsfl_jax.sweep(small(algorithm="fedavg"), good)
    mixed = tsfl_jax.sweep(
        small(algorithm="fedavg"), {"lr": [0.02, 1e30, 0.05]}, workdir=tmp_path
    )
    assert [row["diverged_at"] for row in mixed.rows] == [None, 1, None]
    for name in FLOATS:
        np.testing.assert_array_equal(
            mixed.history[name][[0, 2]], alone.history[name], err_msg=name
        )
    assert np.isnan(mixed.history["test_loss"][1, 1:]).all()
    text = (tmp_path / "summary.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| 1e+30"))
    assert "| 1 | – | – | – |" in line and line.endswith("| 1 |")


@pytest.mark.slow
def test_a_killed_sweep_goes_on_with_the_finished_lanes(
    tmp_path, whole, monkeypatch, caplog
):
    calls, options = [], {"workdir": tmp_path, "runs_per_call": AT_ONCE}

    def stop():
        calls.append(1)
        # After the first chunk of the fourth call, which has what FedProx trains.
        return len(calls) == 7

    with pytest.raises(KeyboardInterrupt):
        sweeps.run(small(), SWEPT, **options, stop=stop)
    kept = sorted((tmp_path / "lanes").iterdir())
    assert len(kept) == 12
    kept[0].write_bytes(b"half a file")  # and four were damaged or swapped
    kept[1].write_bytes(kept[1].read_bytes()[:200])
    swapped = kept[2].read_bytes(), kept[3].read_bytes()
    kept[3].write_bytes(swapped[0])
    kept[2].write_bytes(swapped[1])
    trained = []
    make = lanes.make_arrays

    def counted(group, several, count):
        trained.append(len(several))
        return make(group, several, count)

    monkeypatch.setattr(lanes, "make_arrays", counted)
    resumed = sweeps.run(small(), SWEPT, **options)
    assert sum(trained) == 4 + 4
    assert sum("runs again" in text for text in caplog.messages) == 4
    for name in FLOATS:
        np.testing.assert_allclose(
            resumed.history[name], whole[1].history[name], rtol=1e-5, atol=1e-6
        )


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
        ("", "expected a list of points"),
        ("[{1: 2}]", "there is no such setting"),
        (None, "cannot be read"),
    ],
)
def test_slips_in_a_sweep_file(tmp_path, text, message):
    path = tmp_path / "sweep.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        grid.read_points(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_points_with_settings_of_their_own(tmp_path):
    points = [{"algorithm": "fedprox", "mu": 0.5}, {"algorithm": "fedavg", "seed": 1}]
    result = tsfl_jax.sweep(small(), points, workdir=tmp_path)
    shown = [[row[n] for n in ("algorithm", "mu", "seed")] for row in result.rows]
    assert shown == [["fedprox", 0.5, 0], ["fedavg", 0.01, 1]]
    assert "| fedprox | 0.5 |" in (tmp_path / "summary.md").read_text()


def test_an_interrupted_call_goes_on_inside_and_tables_grow(tmp_path, whole, caplog):
    stream, calls_of = io.StringIO(), []

    def stop():
        calls_of.append(1)
        return len(calls_of) == 3  # after the first chunk of the second call

    options = {"workdir": tmp_path, "runs_per_call": AT_ONCE, "stream": stream}
    with pytest.raises(KeyboardInterrupt):
        sweeps.run(small(), SWEPT, **options, stop=stop)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == [0, 1, 2, 3, 4]
    assert "5 of 16 runs so far" in (tmp_path / "summary.md").read_text()
    assert len(list((tmp_path / "running").iterdir())) == 1
    text = stream.getvalue()
    assert "interval 30/64, best accuracy " in text
    assert " left" in text
    trained = []
    resumed = sweeps.run(
        small(), SWEPT, **options, stop=lambda: bool(trained.append(1))
    )
    # Two calls whole, with two chunks each, and the other chunk of the interrupted one;
    # nothing is asked after a call's last chunk, but once between two calls.
    assert len(trained) == 2 * 1 + 2
    assert not (tmp_path / "running").exists()
    for name in FLOATS:
        np.testing.assert_array_equal(
            resumed.history[name], whole[1].history[name], err_msg=name
        )


@pytest.mark.parametrize(
    ("seeds", "at_once", "stopped_at", "asked"),
    [(3, 4, 1, 2), pytest.param(3, 4, 2, 0, marks=pytest.mark.slow)],
)
def test_a_call_goes_on_with_the_states_of_its_rules(
    tmp_path, seeds, at_once, stopped_at, asked
):
    """Finished lanes of another rule, and a last call with idle lanes, change nothing.

    FedAdam's and FedYogi's states have the same shapes: exchanged, they would fit.
    """
    swept = {"algorithm": ["fedadam", "fedyogi"], "seed": list(range(seeds))}
    options = {"workdir": tmp_path, "runs_per_call": at_once}
    whole = sweeps.run(small(), swept, runs_per_call=at_once)
    calls_of = []

    def stop():  # two chunks: asked once in a call, and once between both
        calls_of.append(1)
        return len(calls_of) == 2 * stopped_at - 1

    with pytest.raises(KeyboardInterrupt):
        sweeps.run(small(), swept, **options, stop=stop)
    assert len(list((tmp_path / "running").iterdir())) == 1
    trained = []
    resumed = sweeps.run(
        small(), swept, **options, stop=lambda: bool(trained.append(1))
    )
    assert len(trained) == asked  # no chunk was trained again
    for name in FLOATS:
        np.testing.assert_array_equal(
            resumed.history[name], whole.history[name], err_msg=name
        )


def test_lanes_draw_online_data_from_their_own_training_samples():
    """Each seed holds out other samples; a lane has the history of a single run."""
    changes = {"partition.online": True, "data.validation": 200}
    config = grid.changed(small(algorithm="fedavg", measure_regret=True), changes)
    swept = sweeps.run(config, {"seed": [0, 1]})
    single = tsfl_jax.simulate(grid.changed(config, {"seed": 1}))
    for name in ("test_loss", "validation_loss", "regret"):
        np.testing.assert_allclose(
            swept.history[name][1], single.history[name], rtol=1e-4, atol=1e-5
        )


def test_a_damaged_file_of_a_call_is_left_out(tmp_path):
    def stop():
        return True

    seeds, options = {"seed": [0, 3]}, {"workdir": tmp_path, "runs_per_call": 2}
    with pytest.raises(KeyboardInterrupt):
        sweeps.run(small(algorithm="fedavg"), seeds, **options, stop=stop)
    (file,) = (tmp_path / "running").glob("*/*.npz")
    file.write_bytes(file.read_bytes()[:500])
    stream = io.StringIO()
    sweeps.run(small(algorithm="fedavg"), seeds, **options, stream=stream)
    assert "no intact checkpoint in" in stream.getvalue()


def test_notes_that_differ_in_numbers_are_one_line():
    notes = [
        [f"{share} % of the samples, labeled {labels}: harmless", "same for all"]
        for share, labels in (("2", "3"), ("0.96", "1, 4"), ("11", "4, 0"))
    ]
    assert sweeps._merged(notes) == [
        f"{notes[0][0]} (with other numbers in 2 of 3 runs)",
        "same for all",
    ]
