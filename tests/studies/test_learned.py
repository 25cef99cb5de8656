"""Learned weights: features by hand, limits, the evolution strategy, the study."""

import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.rules.test_rules import event
from tsfl_jax import config, rng
from tsfl_jax.experiment import sweeps
from tsfl_jax.rules import learned
from tsfl_jax.rules.base import Outcome
from tsfl_jax.studies import learned as study
from tsfl_jax.types import UserError

HAPPENED = event([1, 0, 4, 2], [10, 99, 20, 30], lag=[0, 0, 3, 1])
LOSS = jnp.array([2.0, jnp.nan, 1.0, 3.0])


def test_features_by_hand():
    """max τ = 4, mean |D| = 20, mean loss = 2, one quarter of the run is over."""
    situation = HAPPENED.situation._replace(interval=jnp.int32(5))
    found = learned.features(situation, LOSS, HAPPENED.present, jnp.float32(20.0))
    log = np.log
    want = [
        [0.25, 0.75 * 0.25, log(0.5), 0.0, 0.0],
        [0.0] * 5,
        [1.0, 0.75, 0.0, 0.75, log(0.5)],
        [0.5, 0.75 * 0.5, log(1.5), 0.5, log(1.5)],
    ]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)


def test_features_have_no_unit():
    scaled = event([3, 0, 12, 6], [70, 693, 140, 210], lag=[0, 0, 3, 1])
    pairs = ((HAPPENED, LOSS), (scaled, 9 * LOSS))
    one, other = (
        learned.features(e.situation, loss, e.present, 1.0) for e, loss in pairs
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def weights(happened=HAPPENED, losses=LOSS, **theta):
    plain = {f"theta_{name}": 0.0 for name in learned.FEATURES}
    hp = problems.hparams(**plain | {f"theta_{n}": v for n, v in theta.items()})
    found, state = learned.learned_weights(Outcome(losses, None), (), happened, hp)
    assert state == ()
    return found.rho


def test_limits():
    np.testing.assert_allclose(weights(), [1 / 3, 0, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(weights(size=1.0), [1 / 6, 0, 1 / 3, 1 / 2], rtol=1e-5)
    far = weights(tau=200.0)
    np.testing.assert_allclose(far, [0, 0, 1, 0], atol=1e-6)
    ratio = weights(loss=2.0)
    np.testing.assert_allclose(ratio[3] / ratio[2], 9.0, rtol=1e-4)


def test_unknown_losses_and_nobody_present():
    missing = jnp.full(4, jnp.nan)
    np.testing.assert_allclose(
        weights(losses=missing, tau=1.0), weights(tau=1.0), rtol=1e-6
    )
    np.testing.assert_allclose(weights(losses=0 * LOSS).sum(), 1, rtol=1e-6)
    away = event([0, 0, 0, 0])
    np.testing.assert_array_equal(weights(away), np.zeros(4))


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


@pytest.mark.parametrize(
    "words", [["--rate", "-1"], ["--rate", "nan"], ["--rate", "0"], ["--spread", "inf"]]
)
def test_steps_of_the_evolution_are_positive_numbers(words, capsys):
    with pytest.raises(SystemExit):
        study.parse(words)
    assert f"{words[0]} must be a number above 0" in capsys.readouterr().err


def test_a_given_theta_has_each_name_once():
    good = ",".join(f"{name}={i}" for i, name in enumerate(study.FEATURES))
    assert study._theta(good)["left"] == 1.0
    first = good.partition(",")[0]
    for text in (f"{good},{first}", good.replace("=0", "=nan"), good + ",", "tau"):
        with pytest.raises(UserError, match="a number for each of .*, once"):
            study._theta(text)


def test_fitness_by_hand():
    """Mean of 50 (over all) and 80 (over the last third), in points."""
    accuracy = np.array([[0.2, 0.3, 0.4, 0.5, 0.7, 0.9]])
    np.testing.assert_allclose(study.fitness(accuracy), [65.0])


def test_training_sees_no_test_sample():
    training, whole = study.training_data(), study.data.load(study.DataConfig())
    tests = {x.tobytes() for x in whole.x_test}
    assert len(training.y_test) == len(whole.y_train) // 4
    for part in (training.x_train, training.x_test):
        assert sum(x.tobytes() in tests for x in part.astype(whole.x_test.dtype)) == 0


@pytest.mark.slow
def test_one_population_is_one_program_and_theta_decides(monkeypatch):
    settings = config.replace(
        config.Config(),
        study._DIGITS | {"algorithm": "learned", "num_clients": 4, "num_intervals": 3},
    )
    fleets = [{"schedule.kind": "case1", "seed": s} for s in (0, 1)]
    made = study.make_population(settings, fleets, 2, study.training_data())
    assert made.lanes == 4
    theta = np.array([[0.0, 0, 1, 0, 0], [60.0, 0, 0, 0, 0]])
    found = made.score(theta)
    assert found[0] != found[1]
    # The same as single runs: the first member is FedAvg.
    single = [
        study.fitness(
            tsfl_jax.simulate(
                config.replace(settings, {"algorithm": "fedavg"} | fleet),
                dataset=study.training_data(),
            )
            .history["test_accuracy"][None]
            .astype(np.float64)
        )
        for fleet in fleets
    ]
    np.testing.assert_allclose(found[0], np.mean(single), atol=0.5)


def test_the_published_theta_is_the_default():
    found = {name: getattr(config.LearnedConfig(), name) for name in learned.FEATURES}
    hp = tsfl_jax.HParams(*[0.0] * 9)
    assert found == {n: getattr(hp, f"theta_{n}") for n in learned.FEATURES}


def test_the_study_tests_a_given_theta(tmp_path, monkeypatch):
    asked = []

    def run(settings, points, **options):
        asked.append(points)
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
    assert len(asked) == len(study.TESTS)
    assert {p["seed"] for points in asked for p in points} == {100, 101}
    ours = [p for p in asked[0] if p["algorithm"] == "learned"]
    assert ours[0]["learned.left"] == 2.0
    table = (tmp_path / "learned.md").read_text()
    assert "+10.00" in table and table.count("| better |") == 2 * len(asked)
    with pytest.raises(UserError, match="expected a number for each of tau"):
        study.main(["--theta", "tau=1", "--out", str(tmp_path)])
    assert not set(study.TRAINING) & set(study.TESTS)
    assert rng.STREAMS["learned weights"]
