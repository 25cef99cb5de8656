"""Splits: exact sizes, no sample twice, the asked class shares, fair shortages."""

import numpy as np
import pytest
import scipy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tsfl_jax import rng
from tsfl_jax.components import Part
from tsfl_jax.data import partition
from tsfl_jax.data.partition import PartitionConfig
from tsfl_jax.types import UserError

KINDS = ("iid", "dirichlet", "shards")


def split(labels, capacity, kind, seed=0, **kwargs):
    chosen, rng = PartitionConfig(kind, **kwargs), np.random.default_rng(seed)
    labels, capacity = np.asarray(labels), np.asarray(capacity, int)
    return partition.make_partition(labels, capacity, chosen, rng)


@pytest.fixture
def by_shares(monkeypatch):
    """A split by given shares of the classes."""

    def split_by(shares, labels, capacity):
        row = Part(lambda settings, capacity, stock, rng: np.asarray(shares))
        monkeypatch.setitem(partition.PARTITIONS, "dirichlet", row)
        return split(labels, capacity, "dirichlet")

    return split_by


def rows(part):
    return [row[:n] for row, n in zip(part.indices, part.capacity, strict=True)]


def histogram(part, labels):
    """[N, C] samples of each class."""
    labels = np.asarray(labels)
    return np.stack(
        [np.bincount(labels[r], minlength=labels.max() + 1) for r in rows(part)]
    )


@st.composite
def problems(draw):
    """Labels, capacities that may or may not fit, and the settings of a kind."""
    labels = draw(st.lists(st.integers(0, 4), min_size=1, max_size=60))
    size = st.integers(1, len(labels))
    capacity = draw(st.lists(size, min_size=1, max_size=12))
    kind = draw(st.sampled_from(KINDS))
    alpha = draw(st.sampled_from([1e-300, 1e-6, 0.1, 1.0, 1e6, 1e308]))
    k = draw(st.integers(1, len(set(labels))))
    seed = draw(st.integers(0, 99))
    return labels, capacity, kind, {"alpha": alpha, "classes_per_client": k}, seed


FEW_SAMPLES = {"alpha": 1.0, "classes_per_client": 3}


@settings(deadline=None, max_examples=60)
@given(problems())
@example(([0, 0, 0, 1, 2, 3], [1, 5], "shards", FEW_SAMPLES, 4))
def test_sizes_and_distinctness(problem):
    labels, capacity, kind, options, seed = problem
    fits = sum(capacity) <= len(labels)
    if not fits:
        with pytest.raises(UserError, match=f"{sum(capacity)} .*only {len(labels)}"):
            split(labels, capacity, kind, seed, **options)
        options |= {"replacement": True}
    part = split(labels, capacity, kind, seed, **options)
    assert part.indices.shape == (len(capacity), max(capacity))
    assert part.indices.dtype == part.capacity.dtype == np.int32
    assert part.capacity.tolist() == capacity
    for row, n in zip(part.indices, capacity, strict=True):
        assert len(set(row[:n].tolist())) == n  # nothing twice
        np.testing.assert_array_equal(row, np.resize(row[:n], len(row)))  # padding
    used = np.concatenate(rows(part))
    assert used.min() >= 0 and used.max() < len(labels)
    if fits:
        assert len(set(used.tolist())) == len(used)  # nothing shared
        allowed = options | {"replacement": True}  # allows, does not force
        again = split(labels, capacity, kind, seed, **allowed)
        np.testing.assert_array_equal(again.indices, part.indices)
    assert any("held by several" in note for note in part.notes) == (not fits)
    if (histogram(part, labels) > 0).sum(1).max() > options["classes_per_client"]:
        assert kind != "shards" or part.notes


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_dirichlet_has_the_moments_of_its_shares(alpha):
    # q ~ Dir(α): mean 1/C, variance (1/C)(1 − 1/C)/(Cα + 1).
    C, N, size = 5, 1000, 400
    labels = np.arange(C * 500) % C
    part = split(labels, [size] * N, "dirichlet", alpha=alpha, replacement=True)
    shares = histogram(part, labels) / size
    assert len(part.notes) == 1  # about sharing: no class ran out
    np.testing.assert_allclose(shares.mean(0), 1 / C, atol=0.03)
    variance = (1 / C) * (1 - 1 / C) / (C * alpha + 1)
    np.testing.assert_allclose(shares.var(0), variance, rtol=0.15)


def test_dirichlet_counts_are_the_rounded_shares(by_shares):
    shares = [[0.7, 0.2, 0.1], [0.015, 0.985, 0.0], [1 / 3, 1 / 3, 1 / 3]]
    labels = np.arange(900) % 3
    part = by_shares(shares, labels, [100, 200, 30])
    expected = [[70, 20, 10], [3, 197, 0], [10, 10, 10]]
    assert histogram(part, labels).tolist() == expected and part.notes == ()


def test_a_class_that_runs_out_is_reported_and_fairly_shared(by_shares):
    # 20 clients want 40 of class 0, of which there are 400, and 10 of class 1.
    labels = np.repeat([0, 1, 2], [400, 500, 300])
    part = by_shares(np.tile([0.8, 0.2, 0.0], (20, 1)), labels, [50] * 20)
    counts = histogram(part, labels)
    assert counts.sum(0).tolist() == [400, 500, 100]  # class 2 only when both are gone
    (note,) = part.notes
    assert note.startswith("40 % of samples are of other classes")
    assert "labeled 0" in note and note.endswith("avoids that")
    # 20 of class 0 each on average, standard deviation 3.1; no first or last come.
    assert counts[:, 0].min() >= 5 and counts[:, 0].max() <= 35


def test_shards():
    labels = np.arange(8000) % 10
    part = split(labels, [200] * 20, "shards", classes_per_client=3)
    found = histogram(part, labels)
    assert part.notes == ()
    assert ((found > 0).sum(1) == 3).all()
    assert set(found[found > 0]) == {66, 67}  # equal shares
    assert set((found > 0).sum(0)) == {6}  # 20 · 3 shards over 10 classes
    pairs = {tuple(np.flatnonzero(row)) for row in found}
    assert len(pairs) > 10  # at random


def test_shards_that_use_all_the_data():
    labels = np.arange(6000) % 10
    part = split(labels, [300] * 20, "shards")
    assert part.notes == ()
    assert ((histogram(part, labels) == 150).sum(1) == 2).all()
    # Unequal classes: a few samples at most come from a third class.
    labels = np.repeat(np.arange(10), np.linspace(500, 700, 10).astype(int))
    part = split(labels, [len(labels) // 20] * 20, "shards")
    found = np.sort(histogram(part, labels), axis=1)
    assert found[:, :8].sum() < 0.02 * len(labels)
    assert any("of other classes than drawn" in note for note in part.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_beginning_of_a_row_is_a_fair_sample(kind):
    labels = np.repeat(np.arange(4), 3000)
    part = split(labels, [2000] * 5, kind)
    for row in part.indices:
        share = np.bincount(labels[row], minlength=4) / 2000
        begin = np.bincount(labels[row[:500]], minlength=4) / 500
        # Standard deviation at most √(.25/500 · 1500/1999) = 0.0194; 5 of them.
        assert np.abs(share - begin).max() < 0.097
        if kind == "iid":  # hypergeometric: below √(.1875/2000 · 10000/11999)
            assert np.abs(share - 1 / 4).max() < 5 * 0.0089


def test_a_label_for_each_client():
    labels = np.random.default_rng(0).permutation(np.repeat([2, 5, 7], 30))
    part = split(labels, [30, 10, 30], "label")
    held = [set(labels[row].tolist()) for row in rows(part)]
    assert held == [{2}, {5}, {7}]
    assert [len(set(row.tolist())) for row in rows(part)] == [30, 10, 30]
    assert part.notes == ()
    np.testing.assert_array_equal(part.indices[1], np.resize(part.indices[1, :10], 30))


@pytest.mark.parametrize(
    ("capacity", "options", "message"),
    [
        ([5, 6], {}, r"need 11 training samples in all, .* but there are only 10; .*"),
        ([3, 11], {"replacement": True}, "client 1 11 of them.* only 10"),
        ([1], {"kind": "shards", "classes_per_client": 3}, r"=3: .* 2 classes"),
    ],
)
def test_wrong_settings(capacity, options, message):
    with pytest.raises(UserError, match=message) as error:
        split([0, 1] * 5, capacity, **({"kind": "iid"} | options))
    assert "\n" not in str(error.value)


def test_hashed_bits_depend_on_their_id_alone():
    ids = np.array([5, 0, 10**6, 5])
    found = rng.hashed(3, "views", ids)
    assert found[0] == found[3] and len(set(found.tolist())) == 3
    assert (found[1:2] == rng.hashed(3, "views", np.array([0]))).all()
    for other in (rng.hashed(4, "views", ids), rng.hashed(3, "table order", ids)):
        assert (found != other).all()
    assert (found != rng.hashed(3, "views", ids, 1)).all()
    # A table of draws: ids down, numbers across.
    table = rng.hashed(3, "views", ids[:, None], np.arange(4))
    assert table.shape == (4, 4) and (table[:, 0] == found).all()
    # The published numbers of SplitMix64 from state 0.
    assert rng._mixed(np.array([0], np.uint64))[0] == 0xE220A8397B1DCDAF


def test_uniforms_are_uniform_and_independent():
    u = rng.uniforms(0, "views", np.arange(20_000)[:, None], np.arange(2))
    assert u.min() > 0 and u.max() < 1
    for column in u.T:
        assert scipy.stats.kstest(column, "uniform").pvalue > 1e-3
        assert abs(scipy.stats.spearmanr(column[1:], column[:-1])[0]) < 0.03
    assert abs(scipy.stats.spearmanr(*u.T)[0]) < 0.03


def test_a_million_clients_see_pieces_of_one_table():
    ids = np.array([0, 7, 999_999, 7])
    rows = partition.views(ids, np.full(4, 600), 60_000, seed=1)
    assert rows.shape == (4, 600) and rows.dtype == np.int32
    assert all(len(set(row)) == 600 for row in rows)
    # Which samples a client has does not depend on who else is asked.
    assert (rows[1] == rows[3]).all()
    assert (partition.views(ids[2:3], np.array([600]), 60_000, 1) == rows[2]).all()
    many = partition.views(np.arange(1000), np.full(1000, 600), 60_000, seed=1)
    assert (many[7] == rows[1]).all()
    used = np.bincount(many.ravel(), minlength=60_000)
    assert used.min() > 0  # each sample at 10 clients on average
    first = partition.views(np.arange(4000), np.ones(4000, int), 60_000, 1)[:, 0]
    assert scipy.stats.kstest(first / 60_000, "uniform").pvalue > 1e-3
    some = partition.views(np.arange(3), np.array([1, 10, 3]), 10, seed=0)
    assert sorted(some[1]) == list(range(10)) and len(set(some[0])) == 1
    assert some[2].tolist() == [*some[2][:3]] * 3 + [some[2][0]]
