"""Scores of each client on its own test data."""

import numpy as np
import pytest

from tsfl_jax.data import client_test
from tsfl_jax.types import Dataset, Partition, UserError

# Client 0 has classes 0, 0, 1; client 1 class 2; client 2 nothing.
ROWS = Partition(
    np.array([[0, 1, 2], [3, 3, 3], [0, 0, 0]], np.int32), np.array([3, 1, 0]), ()
)


def dataset(test_client=None):
    one = np.float32(1)
    y_train, y_test = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2, 0])
    x = np.zeros((5, 1), np.float32)
    given = "hand", x[:4], y_train, x, y_test, 4, 0 * one, one
    return Dataset(*given, test_client=test_client)


def test_label_mix_by_hand():
    found = client_test.client_test("labels", dataset(), ROWS)
    np.testing.assert_array_equal(found.client, [0, 1])
    np.testing.assert_array_equal(found.size, [2, 2, 1, 0])
    accuracy = np.array([[0.9, 0.3, 0.5, np.nan], [np.nan] * 4])
    got = client_test.by_client(found, accuracy)
    np.testing.assert_allclose(got[0], [(2 * 0.9 + 0.3) / 3, 0.5])
    assert np.isnan(got[1]).all()


def test_own_samples_by_hand():
    own = np.array([1, 0, 1, 7, 0], np.int32)
    found = client_test.client_test("own", dataset(own), ROWS)
    np.testing.assert_array_equal(found.group, [1, 0, 1, 2, 0])  # 7 is no client
    np.testing.assert_array_equal(found.size, [2, 2])
    score = np.array([[0.25, 0.75]])
    np.testing.assert_array_equal(client_test.by_client(found, score), score)
    one = client_test.client_test("own", dataset(own), ROWS, most=1)
    np.testing.assert_array_equal(one.client, [0])
    np.testing.assert_array_equal(one.group, [1, 0, 1, 1, 0])


def test_data_without_clients_are_refused():
    with pytest.raises(UserError, match="no test sample of hand belongs to a client"):
        client_test.client_test("own", dataset(), ROWS)


def test_summary_by_hand():
    values = np.stack([np.arange(20.0), np.full(20, np.nan)])
    got = client_test.summarized(values)
    assert [float(got[n][0]) for n in ("mean", "worst")] == [9.5, 0.5]
    np.testing.assert_allclose(got["std"][0], np.arange(20).std())
    assert all(np.isnan(a[1]) for a in got.values())
