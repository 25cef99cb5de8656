"""The search for a fleet: its numbers, its file, resuming, and what it measures."""

import csv

import numpy as np
import pytest

from studies import adversary, arena
from studies.fleets import BOUNDS, FleetNumbers
from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare
from tsfl_jax.types import UserError

SMALL = {"num_intervals": 4, "report_every": 2, "num_clients": 6, "model.hidden": 4}
SMALL |= {"devices": 1}
CONFIG = replace(Config(), arena.DATA["digits"] | SMALL)
WAY = ("fedprox", "fedavg")


@pytest.fixture(scope="module")
def digits():
    return prepare.load_dataset(CONFIG)


def test_places_of_the_unit_cube():
    low, high = (adversary.numbers_at(np.full(8, share)) for share in (0.0, 1.0))
    assert low == FleetNumbers(*(bounds[0] for bounds in BOUNDS.values()))
    assert high == FleetNumbers(*(bounds[1] for bounds in BOUNDS.values()))
    middle = adversary.numbers_at(np.full(8, 0.5))
    assert middle.period == 6.32 and middle.labels == 0.0  # √(2 · 20)
    assert tuple(BOUNDS) == FleetNumbers._fields


def test_a_search_finds_the_best_place_and_goes_on(tmp_path):
    asked = []

    def evaluate(several):
        asked.append(several)
        return np.array(
            [-((n.spread - 1.2) ** 2) - (n.labels + 0.5) ** 2 for n in several]
        )

    log = tmp_path / "log.jsonl"
    mean, best = adversary.search(evaluate, 25, 8, log)
    assert best.numbers.spread == pytest.approx(1.2, abs=0.2)
    assert best.numbers.labels == pytest.approx(-0.5, abs=0.2)
    assert mean.numbers.spread == pytest.approx(1.2, abs=0.3)
    assert len(asked) == 25
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: 8 * 20]))
    again = adversary.search(evaluate, 25, 8, log)
    assert again[1] == best and again[0].numbers == mean.numbers
    assert len(asked) == 30 and asked[25:] == asked[20:25]
    assert log.read_text() == "".join(lines)
    # Another search does not take these results for its own.
    with pytest.raises(UserError, match="generation 0 has other fleets"):
        adversary.search(evaluate, 25, 10, log)


def test_a_fleet_is_measured_on_other_seeds_and_kept(digits, tmp_path, monkeypatch):
    swept = []

    def gaps(config, dataset, way, points, workdir):
        swept.append(points)
        return np.arange(10.0), np.arange(10.0) - 1

    monkeypatch.setattr(adversary, "gaps", gaps)
    found = adversary.Found(FleetNumbers(spread=1.0), 5.0)
    made = adversary.confirm(CONFIG, digits, WAY, found, tmp_path)
    clients, kept = swept
    used = {point["seed"] for point in clients}
    assert used == set(adversary.FRESH)
    assert not used & {*adversary.SEARCH, *adversary.CHOICE, arena.TUNING_SEED}
    assert {point["seeds.split"] for point in kept} == {adversary.FRESH[0]}
    (file,) = {point["schedule.trace"] for point in kept}
    assert file == str(tmp_path / "fedprox-over-fedavg.csv")
    with open(file, newline="", encoding="utf-8") as rows:
        assert len(list(csv.DictReader(rows))) == 4 * 6
    (row,) = adversary.rows_of([made])
    assert row["difference"] == "FedProx − FedAvg" and row["spread"] == "1"
    assert row["in the search"] == "+5.00" and row["new clients"].startswith("+4.50 ±")
    assert row["the file, best"].startswith("+3.50 ±")
