"""The arena: fleets, scores, verdicts, racing, a small one from end to end."""

import csv

import numpy as np
import pytest

from studies import arena, arena_report, fleets
from studies.arena_report import Arena, Lane
from studies.fleets import FleetNumbers
from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare
from tsfl_jax.report import collect
from tsfl_jax.run import grid, sweeps

DIGITS = replace(Config(), arena.DATA["digits"])


@pytest.fixture(scope="module")
def digits():
    return prepare.load_dataset(DIGITS)


def fleet_of(numbers, digits, **changes):
    return fleets.make_fleet(replace(DIGITS, changes), numbers, digits)


def test_each_number_does_what_it_says(digits):
    night = fleet_of(FleetNumbers(pace=5.0, away=0.5, period=10.0), digits).tau
    assert ((night == 0).mean(axis=0) == 0.5).all() and (night[night > 0] == 5).all()
    tail = fleet_of(FleetNumbers(spread=1.0), digits).tau.mean(axis=0)
    assert tail.min() < 0.7 and tail.max() > 4
    slow = fleet_of(FleetNumbers(stragglers=0.25), digits).tau.sum(axis=0)
    assert sorted(slow.tolist()) == [7] * 5 + [75] * 15
    sizes = fleet_of(FleetNumbers(sizes=1.0), digits).size
    assert sizes.min() >= 8 and sizes.sum() <= 20 * 44 and np.ptp(sizes) > 50
    shaky = fleet_of(FleetNumbers(jitter=1.0), digits).tau
    assert len(np.unique(shaky)) > 5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_pace_follows_the_labels_of_the_run_itself(digits, sign, tmp_path):
    numbers = FleetNumbers(spread=0.6, labels=sign, sizes=0.5)
    changes = {"partition.alpha": 0.1, "seeds.split": 7}
    made = fleet_of(numbers, digits, **changes)
    path = fleets.write_fleet(tmp_path / "a.csv", made)
    config = grid.changed(DIGITS, changes | fleets.settings_of(path))
    prepared = prepare.prepare(config, dataset=digits)
    schedule, split = prepared.workload.schedule, prepared.partition
    np.testing.assert_array_equal(schedule.tau, made.tau)
    np.testing.assert_array_equal(split.capacity, made.size)
    mean = [
        digits.y_train[split.indices[i, :c]].mean() for i, c in enumerate(made.size)
    ]
    order = np.argsort(np.argsort(mean))
    pace = sign * made.tau.sum(axis=0)
    assert np.corrcoef(order, pace)[0, 1] > 0.85


def lane(final, **more):
    return Lane(final, 0.5, 3.0, 1.5, -1, 2.0)._replace(**more)


def test_verdicts_by_hand():
    best = {"fedavg": 0.8, "fedat": 0.8, "dms": 0.9, "krum": 0.5, "median": 0.8}
    noise = np.array([0.0, 0.01, 0.02, 0.01, 0.0])
    shaky = np.array([0.1, -0.1, 0.1, -0.1, 0.02])
    lanes = {
        (cell, rule, seed): lane(
            value
            + noise[seed]
            + (0.003 * seed if rule in ("dms", "krum") else 0)
            + (shaky[seed] if rule == "median" else 0)
        )
        for cell in range(2)
        for rule, value in best.items()
        for seed in range(5)
    }
    made = Arena([("equal", "IID"), ("night", "IID")], list(best), 5, 0.8, lanes)
    rows = {row["rule"]: row for row in arena_report.cell_rows(made)[:5]}
    assert rows["DMS"]["rank"] == "1" and rows["DMS"]["against the best"] == "the best"
    assert rows["DMS"]["against FedAvg"] == "better"
    assert rows["Krum"]["against FedAvg"] == "worse"
    assert rows["FedAT"]["against FedAvg"] == "identical"
    assert rows["FedAT"]["p"] == "1.000"
    assert rows["median"]["against FedAvg"] == "inconclusive"
    assert rows["DMS"]["− FedAvg"].startswith("+10.60 ± ")
    table = {row["rule"]: row for row in arena_report.rule_rows(made)}
    assert table["DMS"]["better in"] == "2" and table["Krum"]["worse in"] == "2"
    assert table["FedAvg"]["against FedAvg"] == "–"
    assert table["Krum"]["mean rank"] == "5.0"
    # A cell in which a rule is missing is not among those of all rules.
    less = {key: value for key, value in lanes.items() if key[:2] != (1, "krum")}
    part = {r["rule"]: r for r in arena_report.rule_rows(made._replace(lanes=less))}
    assert part["DMS"]["better in"] == "1"


MEGA = np.full(4, 1e6)  # bytes of a delivery
SHARES = np.array([[1.0, 0.0], [0.25, 0.75]])  # of two classes, of two clients


def history_of():
    right = np.zeros((4, 2))
    right[-3:] = [[0.4, 0.3], [0.4, 0.3], [0.4, 0.3]]  # of all: classes of half each
    return {
        "test_accuracy": np.array([0.2, 0.5, 0.9, 0.7]),
        "diverged": np.zeros(4, bool),
        "class_0": right[:, 0],
        "class_1": right[:, 1],
        "virtual_time": np.arange(1, 5.0),
        "tau": np.array([[1, 1], [2, 0], [1, 1], [1, 0]]),
        "seconds": np.float64(1.0),
    }


def test_megabytes_are_those_of_each_rule():
    rules = ["fedavg", "scaffold"]
    cells, lanes = [arena.Cell("equal", "IID")], {(0, rule, 0): {} for rule in rules}
    shares, half = {(0, 0): SHARES}, np.array([0.5, 0.5])
    plan = arena.Plan(cells, rules, 1, lanes, shares, half, 0.9, 0.0, 1)
    sent = {"fedavg": np.array([1e6, 1e6, 2e6, 9e6]), "scaffold": np.full(4, 2e6)}
    judged = arena.judge(plan, dict(enumerate([history_of()] * 2)), sent)
    # Two, one and two deliveries until the third interval.
    found = [judged.lanes[lane].megabytes for lane in lanes]
    assert found == [2 + 1 + 2 * 2, 10]


@pytest.mark.parametrize("chain", ["", "topk"])
def test_traffic_of_a_rule_by_hand(digits, chain):
    config = grid.changed(DIGITS, {"uplink.chain": chain, "num_intervals": 3})
    prepared, P = prepare.prepare(config, dataset=digits), 64 * 64 + 64 + 64 * 10 + 10
    # Of the largest tenth a number and its place, one of 2^13, else all numbers.
    up = 481 * (32 + 13) / 8 if chain else 4 * P
    # The control variates of SCAFFOLD are sent as they are, λ of FedDyn is not.
    both = {"fedavg": 4 * P + up, "scaffold": 12 * P + up, "feddyn": 4 * P + up}
    for rule, expected in both.items():
        assert arena.traffic_of(prepared, rule).tolist() == [expected] * 3


def test_a_lane_by_hand():
    history, shares = history_of(), SHARES
    found = arena.lane_of(history, shares, np.array([0.5, 0.5]), MEGA, 0.9)
    assert found.final == pytest.approx((0.5 + 0.9 + 0.7) / 3)
    # Accuracies 0.8 and 0.6 of the classes: the second client has 0.25·0.8 + 0.75·0.6.
    assert found.worst == pytest.approx(0.65)
    assert found.seconds == 3 and found.megabytes == 2 + 1 + 2
    stopped = arena.lane_of(history, shares, np.array([0.5, 0.5]), MEGA, 0.9, 2)
    assert stopped.final == pytest.approx(0.35) and stopped.seconds == np.inf
    # On test data of their own the worst tenth is known: of the last three.
    own = history | {"client_accuracy_worst": np.array([0.9, 0.2, 0.3, 0.4])}
    assert arena.lane_of(own, None, np.full(2, 0.5), MEGA, 0.9).worst == pytest.approx(
        0.3
    )
    lost = history | {"diverged": np.array([0, 0, 1, 1], bool)}
    found = arena.lane_of(lost, shares, np.array([0.5, 0.5]), MEGA, 0.9)
    assert found.final == found.worst == 0.5  # chance level
    assert found.seconds == np.inf


def test_each_data_set_has_its_room():
    roles = arena.parse(["--data", "shakespeare"])
    assert (roles.fleets, roles.splits) == (("mobile",), ("roles",))
    assert "fedavg" in roles.rules and len(roles.rules) == 6
    images = arena.parse([])
    assert len(images.fleets) == 6 and "mobile" not in images.fleets
    assert len(images.splits) == 4 and images.rules == arena.RULES


def test_a_race_stops_only_what_is_behind_in_all_seeds():
    accuracy = np.full((4, 2, 30), 0.9)
    accuracy[1:, 0], accuracy[1, 1], accuracy[2:, 1] = 0.7, 0.85, 0.7
    assert arena.raced(accuracy, 0, 10.0, 5).tolist() == [-1, -1, 10, 10]
    # What all are compared with is never stopped.
    assert arena.raced(accuracy, 3, 10.0, 5).tolist() == [-1, -1, 10, -1]
    # A run that has diverged does not lead, and is not stopped a second time.
    accuracy[0, 1, 3:] = np.nan
    assert arena.raced(accuracy, 3, 10.0, 5).tolist() == [-1, -1, -1, -1]
    assert arena.raced(accuracy[:, :, :3], 3, 10.0, 3).tolist() == [-1] * 4


SMALL = "--seeds 2 --rules fedavg fedprox median --fleets equal night "
SMALL += "--splits Dirichlet(0.5) --set num_intervals=6 --set report_every=2 "
SMALL += "--set model.hidden=4"


@pytest.mark.slow
def test_a_small_arena(tmp_path, monkeypatch):
    plan, written = arena.parse([*SMALL.split(), "--out", str(tmp_path)]), []
    config = grid.changed(Config(), arena.DATA["digits"] | plan.set)
    write = arena_report.write

    def counted(out, results, *options):
        written.append(len(results.lanes))
        return write(out, results, *options)

    monkeypatch.setattr(arena_report, "write", counted)
    paths = arena.run_arena(config, plan, "a device")
    assert all(path.exists() for path in paths)
    # After each call: two cells of two rules, then the median, a program of its own.
    assert written == [4, 8, 12]
    with open(tmp_path / "arena.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 and {row["fleet"] for row in rows} == {"equal", "night"}
    again = arena.run_arena(config, plan, "a device")
    assert again == paths and written == [4, 8, 12, 12]
    # Its sweep lies in a folder named `lanes`; it is a study all the same.
    source = collect.read_source(tmp_path)
    assert source.runs and source.missing == []
    assert [table.name for table in source.tables][:2] == ["arena", "arena_rules"]


def test_tuning_takes_the_best_step_size_of_each_rule(digits, tmp_path, monkeypatch):
    given = arena.parse(["--out", str(tmp_path), "--rules", "fedavg", "dms"])
    asked = []

    def run(config, lanes, **options):
        asked.extend(lanes)
        signs = [1 if lane["algorithm"] == "dms" else -1 for lane in lanes]
        score = [0.5 + s * x["lr"] for s, x in zip(signs, lanes, strict=True)]
        curves, diverged = np.tile(score, (4, 1)).T, np.zeros((len(lanes), 4), bool)
        diverged[2, 3] = True  # the largest step of the first rule, although ahead
        curves[2, :3], curves[2, 3] = 9.0, np.nan
        return sweeps.SweepResult([], {"test_accuracy": curves, "diverged": diverged})

    monkeypatch.setattr(arena.sweeps, "run", run)
    rates = arena.tune(DIGITS, given, digits)
    assert rates == {"fedavg": 0.01, "dms": 0.09}
    assert {lane["seed"] for lane in asked} == {arena.TUNING_SEED} and len(asked) == 6
    table = (tmp_path / "tune.md").read_text()
    assert "| DMS | 51.00 | 53.00 | 59.00 | 0.09 |" in table
    assert "| FedAvg | 49.00 | 47.00 | 10.00 | 0.01 |" in table
