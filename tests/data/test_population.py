"""Clients as places in a table of samples."""

import numpy as np
from scipy import stats

from tsfl_jax import rng
from tsfl_jax.data import population


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


def test_a_million_clients_see_pieces_of_one_table():
    ids = np.array([0, 7, 999_999, 7])
    rows = population.views(ids, np.full(4, 600), 60_000, seed=1)
    assert rows.shape == (4, 600) and rows.dtype == np.int32
    assert all(len(set(row)) == 600 for row in rows)
    # Which samples a client has does not depend on who else is asked.
    assert (rows[1] == rows[3]).all()
    assert (population.views(ids[2:3], np.array([600]), 60_000, 1) == rows[2]).all()
    many = population.views(np.arange(1000), np.full(1000, 600), 60_000, seed=1)
    assert (many[7] == rows[1]).all()
    used = np.bincount(many.ravel(), minlength=60_000)
    assert used.min() > 0  # each sample at 10 clients on average
    first = population.views(np.arange(4000), np.ones(4000, int), 60_000, 1)[:, 0]
    assert stats.kstest(first / 60_000, "uniform").pvalue > 1e-3
    some = population.views(np.arange(3), np.array([1, 10, 3]), 10, seed=0)
    assert sorted(some[1]) == list(range(10)) and len(set(some[0])) == 1
    assert some[2].tolist() == [*some[2][:3]] * 3 + [some[2][0]]


def test_pieces_are_of_all_classes():
    labels = np.arange(1000) % 10
    rows = population.views(np.arange(50), np.full(50, 50), 1000, seed=0)
    assert min(len(set(labels[row])) for row in rows) > 5
