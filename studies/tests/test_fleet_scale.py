"""Frameworks on measured fleets: one table and figure for all sizes."""

import math

import pandas as pd
import pytest

from studies import fleet_scale


@pytest.mark.slow
def test_the_table_has_each_framework_on_each_fleet(tmp_path):
    few = ["--set=num_intervals=3", "--set=model.hidden=4", "--seeds=1"]
    few += ["--set=timeline.local_iterations=4", "--target=0.01"]
    fleet_scale.main([*few, f"--out={tmp_path}", "--clients", "200", "300"])
    table = pd.read_csv(tmp_path / "fleet_scale.csv")
    names = ["T-SFL", "SFL", "FedBuff", "FedAT"]
    assert table["framework"].tolist() == 2 * names
    assert table["N"].astype(str).tolist() == 4 * ["200"] + 4 * ["300"]
    assert (tmp_path / "fleet_scale.png").stat().st_size > 1000
    # The first evaluation of T-SFL is after a minute.
    hours = table["h to 1 %"][table["framework"] == "T-SFL"]
    assert hours.tolist() == pytest.approx([1 / 60, 1 / 60], abs=5e-4)
    assert (table["kJ to 1 %"].astype(float) > 0).all()


def test_all_have_the_same_clients():
    entries = fleet_scale.entries(50, {"lr": 0.5})
    fleet_scale.compare.check_same_clients(entries)
    assert [entry.config.num_clients for entry in entries] == 4 * [50]
    assert {entry.config.lr for entry in entries} == {0.5}
    assert [e.config.cohort.ask for e in entries] == [0, 26, 0, 26]
    assert all(math.isclose(e.config.schedule.interval_seconds, 60) for e in entries)
