"""Speed, size, labels and availability of clients that go together."""

import math

import numpy as np
import pytest
import scipy

from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare
from tsfl_jax.timeline import copula
from tsfl_jax.types import UserError

N = 400


def rank_correlation(r):
    """Spearman's, of a Gaussian copula."""
    return 6 / math.pi * math.asin(r / 2)


def spearman(a, b):
    return scipy.stats.spearmanr(a, b).statistic


def config(path="", **changes):
    few = {
        "num_clients": N,
        "num_intervals": 3,
        "algorithm": "fedavg",
        "data.name": "synthetic",
        "data.shape": (2,),
        "data.num_classes": 5,
        "data.train_size": 20000,
        "timeline.framework": "tsfl",
        "timeline.speed": "lognormal(0.1,1)",
        "timeline.availability": str(path),
        "schedule.data_size": 25,
        "schedule.size_groups": "uniform(5,45)",
    }
    return replace(Config(), few | changes)


@pytest.fixture
def windows(tmp_path):
    rows = [f"{i},0,{0.5 + 2 * i / N}" for i in range(0, N)]
    path = tmp_path / "online.csv"
    path.write_text("client,start,end\n" + "\n".join(rows) + "\n")
    return path


def measured(prepared):
    """What is known of each client, by name."""
    y, size = prepared.dataset.y_train, prepared.workload.num_samples
    rows = zip(prepared.partition.indices, size, strict=True)
    table = np.stack([np.bincount(y[row[:n]], minlength=5) for row, n in rows])
    fleet = prepared.workload.fleet
    return {
        "seconds": fleet.iteration.mean(axis=1) / size,
        "size": size,
        "rarity": copula.rarity(table.astype(float), np.bincount(y, minlength=5)),
        "online": np.array([w[0, 1] for w in fleet.online]),
    }


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
def test_what_is_drawn_has_the_rank_correlations_that_are_asked_for(windows, kind):
    asked = {
        ("seconds", "rarity"): 0.7,
        ("seconds", "size"): -0.4,
        ("seconds", "online"): -0.5,
    }
    text = "; ".join(f"{a} {b} {r}" for (a, b), r in asked.items())
    plain = prepare.prepare(config(windows, **{"partition.kind": kind}))
    changes = {"timeline.copula": text, "partition.kind": kind}
    got = measured(prepare.prepare(config(windows, **changes)))
    for (a, b), r in asked.items():
        assert spearman(got[a], got[b]) == pytest.approx(rank_correlation(r), abs=0.1)
    others = measured(plain)
    for name in ("seconds", "size", "online"):  # the distributions are the same
        np.testing.assert_allclose(np.sort(got[name]), np.sort(others[name]))
    assert abs(spearman(others["seconds"], others["rarity"])) < 0.15


def test_speed_follows_the_labels_and_sizes_of_a_given_split(windows):
    text = "seconds rarity 0.7; seconds size 0.4"
    changes = {
        "timeline.copula": text,
        "partition.kind": "class_dirichlet",
        "partition.least_size": 1,
        "partition.alpha": 0.5,
        "schedule.size_groups": "",
        "schedule.data_size": Config().schedule.data_size,
    }
    got = measured(prepare.prepare(config(**changes)))
    for name, r in (("rarity", 0.7), ("size", 0.4)):
        between = spearman(got["seconds"], got[name])
        assert between == pytest.approx(rank_correlation(r), abs=0.1)
    with pytest.raises(UserError, match="size and rarity of each client are given"):
        changes["timeline.copula"] = "size rarity 0.3; seconds size 0.1"
        prepare.prepare(config(**changes))


def test_scores_are_of_the_seed_and_the_client_alone():
    text = "seconds size 0.5; size online -0.3"
    few, many = (copula.scores(text, n, 3, {}) for n in (50, 20000))
    assert list(few) == ["seconds", "size", "online"]
    assert all(np.allclose(few[name], many[name][:50]) for name in few)
    found = np.corrcoef(list(many.values()))
    wanted = [[1, 0.5, 0], [0.5, 1, -0.3], [0, -0.3, 1]]
    np.testing.assert_allclose(found, wanted, atol=0.03)


def test_rare_classes_are_those_with_few_samples():
    shares = np.array([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.5, 0.5, 0]])
    assert copula.rarity(shares, np.array([50, 10, 90])).tolist() == [1, 2, 0, 1.5]
    assert copula.rarity(shares, np.array([5, 5, 5])).tolist() == [0, 1, 2, 0.5]


@pytest.mark.parametrize(
    "text, said",
    [
        ("seconds rarety 0.8", "did you mean 'rarity'"),
        ("seconds rarity", "expected NAME NAME r"),
        ("seconds size 0.9; size rarity 0.9; seconds rarity -0.9", "so correlated"),
    ],
)
def test_what_cannot_be_is_one_line(text, said):
    with pytest.raises(UserError, match=said):
        prepare.prepare(config(**{"timeline.copula": text, "partition.kind": "iid"}))
