"""Notes of sweeps: one line for all seeds, and settings without an effect."""

import dataclasses
import io

import numpy as np

import tsfl_jax
from tests.experiment.test_runner import small
from tsfl_jax.experiment import lane_notes, sweeps


def replaced(percent, count, labels):
    return f"{percent} % of the samples ({count} of 1,880), labeled {labels}: harmless"


def test_notes_that_differ_in_numbers_are_one_line():
    notes = [
        [replaced("2", 38, "3"), "same for all"],
        [replaced("0.96", 18, "1, 4"), "same for all"],
        [replaced("11", 207, "4, 0"), "same for all"],
    ]
    first = replaced("2", 38, "3")
    assert lane_notes.merged(notes) == [
        f"{first} (with other numbers in 2 of 3 runs)",
        "same for all",
    ]


def history(value, lost=False):
    return {
        "diverged": np.array([False, lost]),
        "test_loss": np.array([np.nan, value]),
        "seconds": np.random.default_rng().uniform(),
    }


def test_a_setting_without_an_effect_is_named():
    points = [
        {"lr": lr, "mu": mu, "seed": seed}
        for lr in (0.1, 0.2)
        for mu in (1.5, 2.0)
        for seed in (0, 1)
    ]
    histories = [history(v) for v in (1, 2, 1, 2, 5, 6, 5, 6)]
    (note,) = lane_notes.without_effect(points, histories)
    assert note.startswith("mu made no difference")
    histories[2] = history(3)  # it has an effect with one of the rates
    assert lane_notes.without_effect(points, histories) == []


def test_no_alarm_without_a_cause():
    points = [{"lr": 1.0}, {"lr": 2.0}]
    for histories in ([history(1), history(2)], [history(1, True), history(1, True)]):
        assert lane_notes.without_effect(points, histories) == []
    twice = [{"lr": 1.0}, {"lr": 1.0}]
    assert lane_notes.without_effect(twice, [history(1), history(1)]) == []


@tsfl_jax.component("power")
class Power:
    gamma: float = 0.5

    def weights(self, situation):
        return situation.tau**self.gamma


def test_a_sweep_says_what_had_no_effect(tmp_path):
    """μ, which this rule does not read."""
    config = dataclasses.replace(small(), num_intervals=2)
    # Most samples are dealt out: classes run short, by another number in each seed.
    config.schedule.kind, config.schedule.iteration = "case1", "step"
    config.schedule.data_size = 340
    stream = io.StringIO()
    points = {"mu": [0.1, 1.0], "power.gamma": [0.1, 0.9], "seed": [0, 1]}
    sweeps.run(config, points, workdir=tmp_path, stream=stream, aggregator=Power())
    said = stream.getvalue()
    assert said.count("made no difference") == said.count("mu made no difference") == 1
    assert "mu made no difference" in (tmp_path / "summary.md").read_text()
    assert said.count("of other classes than drawn") == 1
    assert said.count("with other numbers in 7 of 8 runs") == 1
    assert "interval 16/16, best accuracy " in said and " samples/s, done in " in said
