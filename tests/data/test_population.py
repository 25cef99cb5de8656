"""Clients as places in a table of samples."""

import numpy as np
import pytest
from scipy import stats

from tsfl_jax import UserError, rng
from tsfl_jax.data import given_partition, population


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
        assert stats.kstest(column, "uniform").pvalue > 1e-3
        assert abs(stats.spearmanr(column[1:], column[:-1])[0]) < 0.03
    assert abs(stats.spearmanr(*u.T)[0]) < 0.03


def test_a_population_by_client_has_what_the_lists_have():
    client = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [3, 1, 5, 2]))
    made = population.of_clients(client)
    assert made.size.tolist() == [3, 1, 5, 2] and made.bytes == 4 * 12
    rows = made.rows(np.array([2, 0]))
    assert rows.shape == (2, 5) and rows.dtype == np.int32
    assert rows[0].tolist() == np.flatnonzero(client == 2).tolist()
    own = np.flatnonzero(client == 0)
    assert rows[1].tolist() == [*own, *own[:2]]  # from its first one again
    assert made.rows(np.array([2]), 2).tolist() == [rows[0][:2].tolist()]
    lists = [np.flatnonzero(client == i) for i in range(4)]
    table = given_partition.as_partition(lists, np.random.default_rng(0))
    assert (np.sort(table.indices[2]) == rows[0]).all()
    assert population.of_clients(np.sort(client)).order is None
    with pytest.raises(UserError, match="client 1 of 3 has no training samples"):
        population.of_clients(np.array([0, 2]))


def test_a_million_clients_see_pieces_of_one_table():
    million = population.views(10**6, 60_000, 600, seed=1)
    assert million.bytes <= 12 * 10**6 and million.size.dtype == np.int32
    ids = np.array([0, 7, 999, 7])
    rows = million.rows(ids)
    assert rows.shape == (4, 600) and (rows[1] == rows[3]).all()
    assert all(len(set(row)) == 600 for row in rows)
    # Which samples a client has does not depend on how many clients there are.
    few = population.views(1000, 60_000, 600, seed=1)
    assert (few.rows(ids) == rows).all()
    used = np.bincount(few.rows(np.arange(1000)).ravel(), minlength=60_000)
    assert used.min() > 0  # each sample at 10 clients on average
    assert stats.kstest(million.start / 60_000, "uniform").pvalue > 1e-3
    sizes = population.views(3, 10, np.array([1, 10, 3]), seed=0)
    assert sizes.rows(np.arange(3)).shape == (3, 10) and sizes.bytes == 36
    with pytest.raises(UserError, match="client 1 has 11 of 10 samples"):
        population.views(2, 10, np.array([1, 11]), seed=0)


def test_views_of_a_sorted_table_have_few_classes():
    labels = np.arange(1000) % 10
    skewed = population.views(50, 1000, 50, seed=0, labels=labels)
    classes = [len(set(labels[row])) for row in skewed.rows(np.arange(50))]
    assert max(classes) == 2
    plain = population.views(50, 1000, 50, seed=0).rows(np.arange(50))
    assert min(len(set(labels[row])) for row in plain) > 5
