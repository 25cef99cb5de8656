"""The study of learned weights: the evolution strategy, the test of a given θ."""

import numpy as np
import pytest
import xarray

from studies import learned as study
from tsfl_jax.run import sweeps
from tsfl_jax.types import UserError

DIMS = ("seed", "interval")


def test_ranks_and_evolution():
    assert study.ranks(np.array([3.0, 9.0, 1.0])).tolist() == [0.0, 0.5, -0.5]
    # Equal ones share their rank, so that nothing moves; NaN is the worst.
    assert study.ranks(np.full(4, 5.0)).tolist() == [0.0] * 4
    assert study.ranks(np.array([1.0, np.nan, 3.0])).tolist() == [0.0, -0.5, 0.5]
    goal = np.array([1.0, -2.0])
    found = study.evolve(
        lambda theta: -((theta - goal) ** 2).sum(axis=1),
        np.zeros(2),
        size=20,
        generations=60,
        spread=0.2,
        rate=0.5,
        generator=np.random.default_rng(0),
    )
    np.testing.assert_allclose(found, goal, atol=0.15)


def test_fitness_by_hand():
    """Mean of 50 (over all) and 80 (over the last third), in points."""
    accuracy = xarray.DataArray([[0.2, 0.3, 0.4, 0.5, 0.7, 0.9]], dims=DIMS)
    np.testing.assert_allclose(study.fitness(accuracy), [65.0])


def test_training_sees_no_test_sample():
    training, whole = study.training_data(), study.data.load(study.Config().data)
    tests = {x.tobytes() for x in whole.x_test}
    assert len(training.y_test) == len(whole.y_train) // 4
    for part in (training.x_train, training.x_test):
        assert sum(x.tobytes() in tests for x in part.astype(whole.x_test.dtype)) == 0


def test_the_study_tests_a_given_theta(tmp_path, monkeypatch):
    asked = []

    def run(settings, points, **options):
        asked.extend(points)
        lanes = [p["algorithm"] == "learned" for p in points]
        seeds = [p["seed"] / 1e4 for p in points]
        accuracy = np.array([np.full(6, 0.5 + 0.1 * a) for a in lanes])
        accuracy += np.array(seeds)[:, None]
        # Without any spread of the differences there would be no test.
        accuracy += ((np.array(seeds) - 0.01005) * lanes)[:, None]
        diverged = np.zeros(accuracy.shape, bool)
        return sweeps.SweepResult([], {"test_accuracy": accuracy, "diverged": diverged})

    monkeypatch.setattr(sweeps, "run", run)
    text = "tau=1,left=2,size=1,lag=0,loss=-1"
    words = ["--theta", text, "--test_seeds", "2", "--out", str(tmp_path)]
    study.main(words)
    assert len(asked) == 2 * 3 * len(study.TESTS)
    assert {p["seed"] for p in asked} == {100, 101}
    ours = [p for p in asked if p["algorithm"] == "learned"]
    assert ours[0]["learned.left"] == 2.0
    table = (tmp_path / "learned.md").read_text()
    assert "+10.00" in table
    assert table.count("| better |") == 2 * len(study.TESTS)
    with pytest.raises(UserError, match="expected a number for each of tau"):
        study.main(["--theta", "tau=1", "--out", str(tmp_path)])
    assert not set(study.TRAINING) & set(study.TESTS)
