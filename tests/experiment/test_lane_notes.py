"""Notes of sweeps: one line for all seeds, and settings without an effect."""

import dataclasses
import io

import numpy as np
import pytest

import tsfl_jax
from tests.experiment.test_runner import small
from tsfl_jax.experiment import grid, lane_notes, sweeps


def configs_of(points):
    return [grid.changed(tsfl_jax.Config(), point) for point in points]


def replaced(percent, count, labels):
    return f"{percent} % of the samples ({count} of 1,880), labeled {labels}: harmless"


def test_notes_of_several_seeds_are_one_line():
    notes = [
        [replaced("2", 38, "3"), "same for all"],
        [replaced("0.96", 18, "1, 4"), "same for all"],
        [replaced("11", 207, "4, 0"), "same for all"],
    ]
    assert lane_notes.merged(notes, configs_of([{"seed": s} for s in range(3)])) == [
        "seeds 0–2: 0.96 to 11 % of the samples (18 to 207 of 1,880), labeled "
        "0, 1, 3, 4: harmless",
        "same for all",
    ]


def test_names_are_listed_and_words_are_kept():
    notes = [[f"client {i} has float32 and 7 samples"] for i in range(10)]
    points = [{"seed": 2 * i} for i in range(10)]
    assert lane_notes.merged(notes, configs_of(points)) == [
        "seeds 0, 2, 4, 6, 8, 10, 12, 14, …: client 0, 1, 2, 3, 4, 5, 6, 7, … has "
        "float32 and 7 samples"
    ]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([1, 1, 2, 2], "seeds 0–1: 1 to 2 x"),  # by seed, whatever the rule
        ([1, 0, 2, 0], "2 of 4 lanes: 1 to 2 x"),
        ([3, 3, 0, 0], "3 x"),
    ],
)
def test_where_a_merged_note_belongs(numbers, words):
    points = [
        {"seed": seed, "algorithm": rule} for seed in (0, 1) for rule in ("dms", "krum")
    ]
    notes = [[f"{number} x"] if number else [] for number in numbers]
    assert lane_notes.merged(notes, configs_of(points)) == [words]


def history(value, lost=False):
    return {
        "diverged": np.array([False, lost]),
        "test_loss": np.array([np.nan, value]),
        "seconds": np.random.default_rng().uniform(),
    }


def test_a_setting_without_an_effect_is_named_with_where_it_has_none():
    points = [
        {"algorithm": rule, "dms.weight_limit": limit, "seed": seed}
        for rule in ("dms", "fedavg")
        for limit in (1.5, 2.0)
        for seed in (0, 1)
    ]
    histories = [history(v) for v in (1, 2, 3, 4, 5, 6, 5, 6)]
    (found,) = lane_notes.identical(points, configs_of(points), histories)
    assert found.lanes == (4, 5, 6, 7)
    assert found.note.startswith(
        "dms.weight_limit=1.5, 2.0 made no difference with algorithm=fedavg: 2 times 2 "
        "lanes have the same results to the last bit"
    )
    assert "dms.weight_limit is: " in found.note and ";" not in found.note


def test_no_alarm_without_a_cause():
    points = [{"lr": 1.0}, {"lr": 2.0}]
    same = [history(1), history(1)]
    assert lane_notes.identical(points, configs_of(points), same)
    for histories in ([history(1), history(2)], [history(1, True), history(1, True)]):
        assert lane_notes.identical(points, configs_of(points), histories) == []
    never = [{"checkpoint": True}, {"checkpoint": False}]
    assert lane_notes.identical(never, configs_of(never), same) == []
    twice = [{"lr": 1.0}, {"lr": 1.0}]
    assert lane_notes.identical(twice, configs_of(twice), same) == []


@tsfl_jax.component("power")
class Power:
    gamma: float = 0.5

    def weights(self, situation):
        return situation.tau**self.gamma


def test_a_sweep_says_what_had_no_effect(tmp_path):
    """μ, which this rule does not read; γ has lanes of its own, for it reads that."""
    config = dataclasses.replace(small(), num_intervals=2)
    # Most samples are dealt out: classes run short, by another number in each seed.
    config.schedule.kind, config.schedule.iteration = "case1", "step"
    config.schedule.data_size = 340
    stream = io.StringIO()
    points = {"mu": [0.1, 1.0], "power.gamma": [0.1, 0.9], "seed": [0, 1]}
    result = sweeps.run(
        config, points, workdir=tmp_path, stream=stream, aggregator=Power()
    )
    words = "mu=0.1, 1.0 made no difference: 4 times 2 lanes have the same results"
    said = stream.getvalue()
    assert said.count("made no difference") == said.count(words) == 1
    assert words in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert all(words in row["notes"] for row in result.rows)
    assert said.count("of other classes than drawn") == 1
    assert said.count("note: seeds 0–1: ") == 1
