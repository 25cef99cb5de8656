"""``python -m studies.learned``: weights by evolution, tested on other fleets.

ρ = softmax(θ · features), see `rules.learned`. θ is trained on several small fleets and
seeds of scikit-learn's digits, with samples of the training set in place of the test
set, and then tested on fleets and seeds that training has not seen, on the test set,
paired with FedAvg and DMS; on splits of the same kinds and of other ones.

The search is an evolution strategy with antithetic samples and ranks in place of the
fitness: Salimans, Ho, Chen, Sidor, Sutskever, "Evolution Strategies as a Scalable
Alternative to Reinforcement Learning", 2017. All of the population on all fleets are
lanes of one sweep.
"""

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray
from jaxtyping import Float

from studies import arguments, study
from studies.study import Row
from studies.verdicts import tested
from tsfl_jax import data, rng
from tsfl_jax.config import Config
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS
from tsfl_jax.rules.learned import FEATURES
from tsfl_jax.run import grid
from tsfl_jax.types import Dataset, UserError

_DIGITS = {
    "num_intervals": 20,
    "batch_size": 8,
    "lr": 0.03,
    "devices": 1,
    "schedule.data_size": 32,
}


def _fleet(groups: str) -> dict[str, Any]:
    return {"schedule.kind": "distribution", "schedule.tau_groups": groups}


_ONE_OF_FOUR = "constant(1); constant(1); constant(1); constant(6)"


# Fleet and split → settings. T-SFL only: no delivery is stale.
TRAINING: dict[str, dict[str, Any]] = {
    "Case 1, Dirichlet(0.5)": {"schedule.kind": "case1"},
    "Case 3, Dirichlet(0.5)": {"schedule.kind": "case3"},
    "Case 1, IID": {"schedule.kind": "case1", "partition.kind": "iid"},
    "one fast of four, 3 classes": _fleet(_ONE_OF_FOUR)
    | {"partition.kind": "shards", "partition.classes_per_client": 3},
    "uniform 1 to 5, Dirichlet(0.2)": _fleet("uniform(1,5)") | {"partition.alpha": 0.2},
}
TESTS: dict[str, dict[str, Any]] = {
    "Case 2, Dirichlet(0.5)": {"schedule.kind": "case2"},
    "Case 2, IID": {"schedule.kind": "case2", "partition.kind": "iid"},
    "1, 2 or 7, Dirichlet(0.3)": _fleet("constant(1); constant(2); constant(7)")
    | {"partition.alpha": 0.3},
    "uniform 1 to 8, 2 classes": _fleet("uniform(1,8)") | {"partition.kind": "shards"},
    "equal, three sizes": _fleet("constant(3)")
    | {"schedule.size_groups": "normal(16,3); normal(32,6); normal(48,10)"},
}
# Not lag, which is 0 on all these fleets: its θ would drift at random.
_TRAINED = [FEATURES.index(name) for name in ("tau", "left", "size", "loss")]
_FEDAVG = np.array([0.0, 0.0, 1.0, 0.0, 0.0])
_COMPARED = ("fedavg", "dms")
_FIRST_TEST_SEED = 100  # training uses seeds from 0 on


def training_data() -> Dataset:
    """The digits without their test set: a quarter of the training set in its place."""
    whole = data.load(Config().data)
    order = rng.generator(0, "learned weights").permutation(len(whole.y_train))
    held, rest = np.split(order, [len(order) // 4])
    return whole._replace(
        name="digits, training part",
        x_train=whole.x_train[rest],
        y_train=whole.y_train[rest],
        x_test=whole.x_train[held],
        y_test=whole.y_train[held],
    )


def fitness(accuracy: xarray.DataArray) -> xarray.DataArray:
    """Mean of the mean accuracy over a run and over its last third, in points."""
    late = accuracy.isel(interval=slice(2 * accuracy.sizes["interval"] // 3, None))
    return 50 * (accuracy.mean("interval") + late.mean("interval"))


def score(
    config: Config,
    dataset: Dataset,
    theta: Float[np.ndarray, "P F"],
    seeds: int,
) -> Float[np.ndarray, "P"]:
    """The mean fitness of each θ over the fleets of training and the seeds."""
    points = {
        (member, fleet): changes | settings_of(one)
        for member, one in enumerate(theta)
        for fleet, changes in TRAINING.items()
    }
    options = {"dataset": dataset, "stream": None, "dims": ("member", "fleet")}
    accuracy = study.run(config, points, seeds, None, **options).accuracy()
    return fitness(accuracy).mean(["fleet", "seed"]).values


def settings_of(theta: Float[np.ndarray, "F"]) -> dict[str, float]:
    """θ as settings, in single precision."""
    values = theta.astype(np.float32).tolist()
    return {f"learned.{n}": v for n, v in zip(FEATURES, values, strict=True)}


def ranks(values: Float[np.ndarray, "P"]) -> Float[np.ndarray, "P"]:
    """Centered ranks in [−½, ½]: the scale of the fitness does not matter.

    Equal values share theirs; NaN is the worst.
    """
    from scipy import stats

    place = stats.rankdata(np.where(np.isnan(values), -np.inf, values)) - 1
    return place / (len(values) - 1) - 0.5


def evolve(
    score: Callable[[Float[np.ndarray, "P F"]], Float[np.ndarray, "P"]],
    start: Float[np.ndarray, "F"],
    *,
    size: int,
    generations: int,
    spread: float,
    rate: float,
    generator: np.random.Generator,
    show: Callable[[int, float, np.ndarray], None] = lambda g, f, theta: None,
) -> Float[np.ndarray, "F"]:
    """Maximize a function by an evolution strategy.

    θ ← θ + (rate/(P·spread)) Σ_p rank_p ε_p with θ_p = θ ± spread·ε.

    Args:
      score: ``[P, F]`` → ``[P]``, larger is better.
      start: θ at first.
      size: P, even: pairs θ + ε, θ − ε.
      generations: ≥ 1.
      spread: standard deviation of a sample.
      rate: length of a step.
      generator: random numbers.
      show: called after each generation with its number, mean score and θ.

    Returns:
      The mean of θ over the last quarter of the generations, which is less noisy.
    """
    theta, path = np.array(start, np.float64), []
    for generation in range(generations):
        half = generator.normal(size=(size // 2, len(theta)))
        noise = np.concatenate([half, -half])
        found = score(theta + spread * noise)
        theta = theta + rate / (size * spread) * (ranks(found) @ noise)
        path.append(theta)
        show(generation + 1, float(found.mean()), theta)
    return np.mean(path[-max(generations // 4, 1) :], axis=0)


def train(given: argparse.Namespace) -> dict[str, float]:
    """θ by name, trained on the fleets and seeds of training."""
    config = grid.changed(Config(), _DIGITS | {"algorithm": "learned"})
    begun, dataset = time.perf_counter(), training_data()

    def show(generation: int, mean: float, theta: np.ndarray) -> None:
        pairs = zip(FEATURES, theta, strict=True)
        values = ", ".join(f"{name} {value:+.2f}" for name, value in pairs)
        passed = time.perf_counter() - begun
        print(
            f"generation {generation}: score {mean:.3f}; θ {values}; {passed:.0f} s",
            file=sys.stderr,
        )

    def whole(part: np.ndarray) -> np.ndarray:
        """θ of all features, from those that are trained."""
        found = np.broadcast_to(_FEDAVG, (*part.shape[:-1], len(FEATURES))).copy()
        found[..., _TRAINED] = part
        return found

    found = evolve(
        lambda part: score(config, dataset, whole(part), given.seeds),
        _FEDAVG[_TRAINED],
        size=given.population,
        generations=given.generations,
        spread=given.spread,
        rate=given.rate,
        generator=rng.generator(1, "learned weights"),
        show=lambda generation, mean, part: show(generation, mean, whole(part)),
    )
    pairs = zip(FEATURES, whole(found), strict=True)
    return {name: round(float(value), 3) for name, value in pairs}


def test_rows(
    theta: Mapping[str, float], seeds: int, workdir: pathlib.Path
) -> list[Row]:
    """Learned weights against FedAvg and DMS on fleets that training has not seen."""
    own = {f"learned.{name}": value for name, value in theta.items()}
    points = {
        (fleet, rule): {"algorithm": rule}
        | (own if rule == "learned" else {})
        | changes
        for fleet, changes in TESTS.items()
        for rule in (*_COMPARED, "learned")
    }
    options = {"dims": ("fleet", "rule"), "first_seed": _FIRST_TEST_SEED}
    config = grid.changed(Config(), _DIGITS)
    runs = study.run(config, points, seeds, workdir, **options)
    scores = fitness(runs.accuracy())
    gains = scores.sel(rule="learned") - scores.sel(rule=list(_COMPARED))
    (p, verdicts), shown = tested(gains, "fleet", "rule"), study.texts(scores)
    columns: dict[str, Any] = {"fleet and split": scores["fleet"]}
    for rule in (*_COMPARED, "learned"):
        columns[style.name_of(rule)] = shown.sel(rule=rule)
    for rule in _COMPARED:
        gain = study.texts(gains.sel(rule=rule), "+.2f")
        columns[f"learned − {style.name_of(rule)}"] = gain
    columns["seeds"] = [str(seeds)] * len(TESTS)
    for rule in _COMPARED:
        columns[f"p, {style.name_of(rule)}"] = p.sel(rule=rule)
        columns[f"than {style.name_of(rule)}"] = verdicts.sel(rule=rule)
    return study.rows_of(columns)


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = arguments.make_parser("learned", __doc__, 2)
    about = "trained θ, as a study has printed it: tau=0.1,left=0.2,… (default: train)"
    parser.add_argument("--theta", default="", help=about)
    even = arguments.ranged(int, lambda n: n >= 2 and n % 2 == 0, "even and above 0")
    for name, kind, default, text in (
        ("generations", arguments.at_least(1), 14, ""),
        ("population", even, 12, "even "),
        ("spread", arguments.POSITIVE, 0.3, ""),
        ("rate", arguments.POSITIVE, 0.6, ""),
        ("test_seeds", arguments.at_least(1), 10, "runs of each test fleet "),
    ):
        text += f"(default: {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    return arguments.parse(parser, texts)


def _theta(text: str) -> dict[str, float]:
    """``tau=0.1,left=0.2,…`` as numbers.

    Raises:
      UserError: another text.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        found = {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        found = {}
    each_once = set(found) == set(FEATURES) and len(pairs) == len(FEATURES)
    if not each_once or not all(map(math.isfinite, found.values())):
        raise UserError(
            f"--theta={text}: expected a number for each of {', '.join(FEATURES)}, once"
        )
    return found


def main(texts: list[str]) -> None:
    """Train θ or take a given one, and test it; writes theta.json and the table."""
    given = parse(texts)
    theta = _theta(given.theta) if given.theta else None
    out = files.prepare_workdir(given.out, "--out")
    theta = theta or train(given)
    files.write_json(out / "theta.json", theta)
    print(",".join(f"{name}={value}" for name, value in theta.items()))
    rows = test_rows(theta, given.test_seeds, out / "cells")
    about = "digits, fleets and seeds that training has not seen; points: mean of the "
    about += "test accuracy over the run and over its last third. "
    about += f"Entries: {OVER_SEEDS}; differences are paired; p of paired t tests with "
    about += "Holm's correction over all of the table."
    for path in files.write_table(out, "learned", rows, about):
        print(path)


if __name__ == "__main__":
    arguments.start("learned", main)
