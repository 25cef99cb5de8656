"""Sweeps: parsing, lanes against single runs, one trace, divergence, resuming."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsfl_jax
from tsfl_jax import config
from tsfl_jax.engine import scan
from tsfl_jax.experiment import backend, grid, lanes, sweeps
from tsfl_jax.experiment.prepare import prepare
from tsfl_jax.models import networks
from tsfl_jax.report.statistics import confidence_interval
from tsfl_jax.types import UserError

FLOATS = ("test_accuracy", "test_loss", "train_loss", "rho", "coupling", "smoothness")


def small(**changes) -> config.Config:
    settings = config.Config(
        num_intervals=4, num_clients=5, lr=0.02, batch_size=8, report_every=2, devices=2
    )
    settings.schedule.data_size = 32
    settings.model.hidden = 8
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


SWEPT = {
    "algorithm": ["dms", "fedavg", "fedprox", "fedasync"],
    "seed": [0, 3],
    "lr": [0.02, 0.1],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return folder, tsfl_jax.sweep(small(), SWEPT, workdir=folder)


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
    assert grid.product({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "expected setting=values"),
        ("lrr=1", "no such setting; did you mean 'lr'"),
        ("lr=a", "'a' is not a float"),
        ("seed=3:3", "no values"),
        ("seed=1:5:0", "expected first:end"),
        ("seed=1,1", "given twice"),
        ("checkpoint=maybe", "neither True nor False"),
        ("schedule.tau=1", "cannot be swept"),
    ],
)
def test_slips_are_answered_in_one_line(text, message):
    with pytest.raises(UserError, match=message) as caught:
        grid.parse([text])
    assert "\n" not in str(caught.value)


def test_a_lane_that_cannot_work_is_named():
    with pytest.raises(UserError, match=r"lane lr=-1.0: --config.lr=-1"):
        tsfl_jax.sweep(small(), {"lr": [0.1, -1]})


@pytest.mark.parametrize("algorithm", SWEPT["algorithm"])
@pytest.mark.parametrize(("seed", "lr"), [(0, 0.02), (3, 0.1)])
def test_a_lane_equals_the_single_run(whole, algorithm, seed, lr):
    _, result = whole
    wanted = {"algorithm": algorithm, "seed": seed, "lr": lr}
    place = [
        i
        for i, row in enumerate(result.rows)
        if all(row[k] == v for k, v in wanted.items())
    ]
    single = tsfl_jax.simulate(small(**wanted))
    for name in FLOATS:
        np.testing.assert_allclose(
            result.history[name][place[0]],
            single.history[name],
            rtol=1e-5,
            atol=1e-6,
            err_msg=name,
        )
    row = result.rows[place[0]]
    assert row["best_test_accuracy"] == pytest.approx(
        single.summary["best_test_accuracy"]
    )
    for name, value in single.summary["fingerprints"].items():
        assert row[f"{name}_sha"] == value


def test_seeds_differ_in_everything(whole):
    _, result = whole
    shas = {row["seed"]: (row["split_sha"], row["schedule_sha"]) for row in result.rows}
    assert shas[0][0] != shas[3][0] and shas[0][1] != shas[3][1]


def test_one_trace_for_the_whole_sweep(monkeypatch):
    traces = []
    made = scan.make_run

    def counted(*arguments, **options):
        run = made(*arguments, **options)

        def traced(*inner):
            traces.append(1)
            return run(*inner)

        return traced

    monkeypatch.setattr(scan, "make_run", counted)
    tsfl_jax.sweep(small(), SWEPT, lanes_per_call=3)  # 16 lanes: the last call is short
    assert len(traces) == 1


@pytest.mark.slow
def test_what_changes_shapes_makes_another_program(capsys):
    swept = {"batch_size": [8, 16], "seed": [0, 1]}
    result = tsfl_jax.sweep(small(), swept, verbose=True)
    assert "2 programs, because of batch_size=8, 16" in capsys.readouterr().err
    for row, accuracy in zip(result.rows, result.history["test_loss"], strict=True):
        changes = {name: row[name] for name in swept}
        single = tsfl_jax.simulate(small(**changes)).history["test_loss"]
        np.testing.assert_allclose(accuracy, single, rtol=1e-5)


def test_side_by_side_equals_one_after_another():
    swept = {"algorithm": ["dms", "fedasync"], "seed": [0, 1]}
    first = tsfl_jax.sweep(small(), swept)
    other = tsfl_jax.sweep(small(mapping="vmap"), swept)
    for name in FLOATS:
        np.testing.assert_allclose(
            first.history[name], other.history[name], rtol=2e-4, atol=1e-5
        )


def test_splits_and_cases_are_lanes_of_one_program():
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
    for size, loss in zip(sizes["schedule.data_size"], losses, strict=True):
        base.schedule.data_size = size
        single = tsfl_jax.simulate(base).history["test_loss"]
        np.testing.assert_allclose(loss, single, rtol=1e-5)


def test_own_parts_work_in_lanes_and_are_distinguished(tmp_path):
    def weights(situation, hparams):
        return tsfl_jax.AGGREGATORS["fedavg"].weights(situation, hparams)

    def update(mean, params, state, event, hparams):
        state = jax.tree.map(lambda s, m: 0.5 * s + m, state, mean["params"])
        return {**mean, "params": state}, state

    rule = tsfl_jax.Aggregator(
        weights, lambda p, counts: jax.tree.map(jnp.zeros_like, p["params"]), update
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
        tsfl_jax.sweep(small(), {"seed": [0]}, model=networks.MLP(3, 4))


def test_points_of_a_list(whole):
    points = [
        {"algorithm": "fedavg", "seed": 3, "lr": 0.1},
        {"algorithm": "dms", "seed": 0, "lr": 0.02},
    ]
    result = tsfl_jax.sweep(small(), points)
    places = [
        next(
            i
            for i, row in enumerate(whole[1].rows)
            if all(row[k] == v for k, v in point.items())
        )
        for point in points
    ]
    np.testing.assert_allclose(
        result.history["test_loss"], whole[1].history["test_loss"][places], rtol=1e-5
    )
    for bad, message in (
        ([], "no points"),
        ([{"lr": 1.0}, {"seed": 1}], "every point needs the same settings"),
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
    assert "| – | – | – | 1 |" in line


def test_a_killed_sweep_goes_on_with_the_finished_lanes(
    tmp_path, whole, monkeypatch, caplog
):
    calls = []

    def stop():
        calls.append(1)
        return len(calls) == 7  # after the first interval of the fourth call

    with pytest.raises(KeyboardInterrupt):
        sweeps.run(small(), SWEPT, workdir=tmp_path, lanes_per_call=2, stop=stop)
    kept = sorted((tmp_path / "lanes").iterdir())
    assert len(kept) == 6
    kept[0].write_bytes(b"half a file")  # and four were damaged or swapped
    kept[1].write_bytes(kept[1].read_bytes()[:200])
    swapped = kept[2].read_bytes(), kept[3].read_bytes()
    kept[3].write_bytes(swapped[0])
    kept[2].write_bytes(swapped[1])
    trained = []
    make = lanes.make_lanes

    def counted(group, several, count):
        trained.append(len(several))
        return make(group, several, count)

    monkeypatch.setattr(lanes, "make_lanes", counted)
    resumed = sweeps.run(small(), SWEPT, workdir=tmp_path, lanes_per_call=2)
    assert sum(trained) == 16 - 2
    assert sum("runs again" in text for text in caplog.messages) == 4
    for name in FLOATS:
        np.testing.assert_allclose(
            resumed.history[name], whole[1].history[name], rtol=1e-5, atol=1e-6
        )


def test_files(whole):
    folder, result = whole
    lines = (folder / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    with open(folder / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table) == 16
    assert list(rows[0])[:3] == list(SWEPT)
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


def test_memory_decides_how_many_lanes_run_side_by_side(monkeypatch):
    class Card:
        def __init__(self, limit):
            self.limit = limit

        def memory_stats(self):
            return {"bytes_limit": self.limit}

    several = [prepare(small(mapping="vmap", seed=s)) for s in range(6)]
    group = lanes.make_group(several, backend.start_jax(small()))
    counts = []
    for limit in (2**20, 2**24, 2**36):
        monkeypatch.setattr(jax, "devices", lambda limit=limit: [Card(limit)])
        counts.append(sweeps.lanes_of_call(group))
        monkeypatch.undo()
    assert counts[0] >= 1 and counts == sorted(counts) and counts[-1] == 6
