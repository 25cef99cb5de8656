"""FedAvg's own experiment: rounds to a target by hand, a row's settings, a tiny run."""

import csv
import math

import jax
import numpy as np
import pytest
import xarray

from studies import mcmahan
from tsfl_jax.config import get
from tsfl_jax.models import networks
from tsfl_jax.models.networks import ModelConfig


def test_rounds_to_a_target_by_hand():
    # The best so far after rounds 1 to 4 is 0.5, 0.8, 0.8, 1.
    accuracy = np.array([0.5, 0.8, 0.6, 1.0])
    assert mcmahan.rounds_to(accuracy, 0.5) == 1
    assert mcmahan.rounds_to(accuracy, 0.2) == 1
    assert mcmahan.rounds_to(accuracy, 0.8) == 2
    assert mcmahan.rounds_to(accuracy, 0.6) == pytest.approx(1 + 1 / 3)
    # From 0.8 after round 3, not from 0.6 there.
    assert mcmahan.rounds_to(accuracy, 0.9) == pytest.approx(3.5)
    assert math.isnan(mcmahan.rounds_to(accuracy[:3], 0.9))


@pytest.mark.parametrize(("target", "lr"), [(0.6, 0.2), (0.9, 0.1)])
def test_the_fewest_rounds_choose_the_learning_rate(target, lr):
    """Of those that reach the target; of none the most accurate."""
    curves = [[[0.3, 0.4, 0.8]], [[0.5, 0.7, 0.7]], [[0.1, 0.1, 0.1]]]
    accuracy = xarray.DataArray(
        curves, {"lr": [0.1, 0.2, 0.5]}, ("lr", "seed", "interval")
    )
    assert mcmahan.chosen(accuracy, target) == lr


@pytest.mark.parametrize(("network", "count"), [("2nn", 199_210), ("cnn", 1_663_370)])
def test_the_networks_have_the_papers_parameters(network, count):
    module = mcmahan.NETWORKS[network].module
    shapes = jax.eval_shape(
        module.init, jax.random.key(0), np.zeros((1, 28, 28, 1), np.float32)
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_a_row_has_the_papers_steps():
    """u = E n/(B K) steps of each of ten clients in a round."""
    cnn = mcmahan.NETWORKS["cnn"]
    steps = [*map(cnn.steps, cnn.cells)]
    assert steps == [1, 5, 12, 20, 60, 60, 240, 300, 1200]  # Table 2
    given = mcmahan.parse([])
    cell = mcmahan.NETWORKS["2nn"].cells[5]
    config = mcmahan.config_of("2nn", cell, "non_iid", given)
    assert cell.label == "10,50" and cnn.steps(cell) == 120
    assert get(config, "num_intervals") == math.ceil(1.5 * 881)
    assert get(config, "schedule.tau") == (10,)
    assert get(config, "partition.kind") == "shards"
    config = mcmahan.config_of("lstm", cell, "non_iid", given)
    assert get(config, "partition.kind") == "client"
    assert get(config, "model.hidden") == 256


def test_the_lstm_has_the_papers_layers():
    """Embedding of 8, two layers of 256; 866,578 parameters with its own alphabet."""
    module = networks.MODELS["next_token_lstm"].make(84, ModelConfig(hidden=256), "")
    shapes = jax.eval_shape(module.init, jax.random.key(0), np.zeros((1, 81), np.int32))
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    lstm = sum(4 * 256 * (n + 256 + 1) for n in (8, 256))
    assert size == 84 * 8 + lstm + 257 * 84 == 818_932


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
    """The table, and u = 12 steps of 50 samples of each client in a round."""
    texts = "--networks 2nn --splits iid --cells 1,50 --lrs 0.1 0.2 --seeds 2"
    small = "--longer 0.014 --set data.name=digits --set partition.replacement=True"
    mcmahan.main([*texts.split(), *small.split(), "--out", str(tmp_path)])
    with open(tmp_path / "mcmahan_2nn_iid.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["rounds"] == "–" and row["reached"] == "0 of 2"
    assert row["the paper's"] == "144" and row["rounds run"] == "3"
    with open(tmp_path / "cells" / "2nn_iid_E1_B50" / "results.csv") as file:
        runs = list(csv.DictReader(file))
    assert {int(run["samples_trained"]) for run in runs} == {3 * 10 * 12 * 50}
