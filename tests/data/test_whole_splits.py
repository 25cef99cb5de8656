"""Splits of all samples with sizes that follow; skewed samples and labels."""

import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.config import Config, replace
from tsfl_jax.data import whole_splits
from tsfl_jax.data.partition import mislabeled
from tsfl_jax.prepare import prepare
from tsfl_jax.types import Partition, UserError

LABELS = np.random.default_rng(5).permutation(np.arange(6000) % 10)
KINDS = tuple(whole_splits.KINDS)


def partition_settings(**changes):
    changes = {f"partition.{name}": value for name, value in changes.items()}
    return replace(Config(), changes).partition


def drawn(kind, N=20, seed=0, **changes):
    chosen = partition_settings(kind=kind, **changes)
    return whole_splits.lists(LABELS, N, chosen, np.random.default_rng(seed))


def histogram(lists):
    return np.stack([np.bincount(LABELS[rows], minlength=10) for rows in lists])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [0.3, 100.0])
def test_each_sample_has_one_client_and_none_too_few(kind, alpha):
    least = 15 if alpha > 0.5 or kind == "class_dirichlet" else 1
    lists = drawn(kind, alpha=alpha, least_size=least)
    assert (np.sort(np.concatenate(lists)) == np.arange(len(LABELS))).all()
    assert min(map(len, lists)) >= least
    again = drawn(kind, alpha=alpha, least_size=least)
    assert all((a == b).all() for a, b in zip(lists, again, strict=True))


def test_quantity_skews_sizes_only():
    """Sizes have the moments of Dir(α); the mix of labels is that of all."""
    N, alpha = 10, 2.0
    tables = [
        histogram(drawn("quantity", N, s, alpha=alpha, least_size=1))
        for s in range(150)
    ]
    share = np.stack([t.sum(axis=1) / len(LABELS) for t in tables])
    # Var p_i = (1/N)(1 − 1/N) / (Nα + 1)
    assert share.var() == pytest.approx(0.09 / 21, rel=0.1)
    mix = tables[0] / tables[0].sum(axis=1, keepdims=True)
    big = tables[0].sum(axis=1) > 500
    assert big.any() and np.abs(mix[big] - 0.1).max() < 0.06


def test_class_dirichlet_skews_labels_and_sizes():
    few = histogram(drawn("class_dirichlet", alpha=0.1, least_size=1))
    many = histogram(drawn("class_dirichlet", alpha=1000.0))
    assert np.abs(many - 30).max() < 10  # 6000 / 20 / 10
    largest = (few / few.sum(axis=1, keepdims=True)).max(axis=1)
    assert np.median(largest) > 0.4
    size = few.sum(axis=1)
    assert size.max() > 1.5 * size.min()
    shares = [
        histogram(drawn("class_dirichlet", 10, s, alpha=0.5, least_size=1))[:, 0] / 600
        for s in range(150)
    ]
    # Of the first class they are Dir(α): Var p_i = (1/N)(1 − 1/N) / (Nα + 1).
    assert np.var(shares) == pytest.approx(0.09 / 6, rel=0.1)
    # A client with M/N samples takes part in no further class.
    order = np.cumsum(few, axis=1)
    full = order[:, :-1] >= len(LABELS) / 20
    assert (few[:, 1:][full] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_alphas_and_too_large_least_sizes_end(kind):
    with pytest.raises(UserError, match="in 100 draws"):
        drawn(kind, alpha=1e-300, least_size=1)  # one client gets all, or a class
    with pytest.raises(UserError, match="least_size=301: 6000 samples of 20 clients"):
        drawn(kind, least_size=301)


def test_a_share_of_labels_is_wrong():
    x, y = np.zeros((3000, 2), np.float32), np.arange(3000) % 10
    data = tsfl_jax.make_dataset(x, y, x[:5], y[:5])
    rows = np.arange(3000).reshape(3, -1)
    got = mislabeled(data, Partition(rows, np.full(3, 1000), ()), 0.3, 0)
    wrong = (got.y_train != data.y_train).reshape(3, -1)
    assert wrong.mean(axis=1).tolist() == [0.3, 0.3, 0.3]
    shift = ((got.y_train - data.y_train) % 10)[wrong.ravel()]
    assert np.bincount(shift, minlength=10)[1:] == pytest.approx(100, rel=0.35)


def settings(**changes):
    few = {"num_clients": 8, "num_intervals": 2, "devices": 1, "algorithm": "fedavg"}
    return replace(Config(), few | {"mu": 0.0} | changes)


def test_settings_choose_them_and_change_the_identity_of_data():
    quantity = {"partition.kind": "quantity"}
    plain = prepare.prepare(settings(**quantity))
    assert plain.partition.capacity.sum() == len(plain.dataset.y_train)
    noise = [{"partition.label_noise": share} for share in (0.0, 0.5)]
    clean, noisy = prepare.prepare_all([settings(**quantity, **one) for one in noise])
    assert clean.fingerprints["data"] == plain.fingerprints["data"]
    assert noisy.fingerprints["data"] != plain.fingerprints["data"]
    assert (clean.dataset.y_train == plain.dataset.y_train).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition.label_noise": 0.1, "partition.online": True}, "cannot go with"),
        ({"partition.kind": "quantity", "schedule.data_size": 9}, "kind=quantity"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        prepare.prepare(settings(**changes))
