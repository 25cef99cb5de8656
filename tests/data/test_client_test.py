"""Scores of each client on its own test data."""

import numpy as np
import pytest

from tsfl_jax.data import client_test
from tsfl_jax.types import Dataset, Partition, UserError

# Client 0 has classes 0, 0, 1; client 1 class 2; client 2 nothing.
ROWS = Partition(
    np.array([[0, 1, 2], [3, 3, 3], [0, 0, 0]], np.int32), np.array([3, 1, 0]), ()
)


def dataset(test_client=None, classes=4):
    one = np.array(1, np.float32)
    y_train, y_test = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2, 0])
    x = np.zeros((5, 1), np.float32)
    given = "hand", x[:4], y_train, x, y_test, classes, 0 * one, one
    return Dataset(*given, test_client=test_client)


def labels(classifies=True, classes=4):
    ids = np.arange(3) + 10
    return client_test.by_labels(dataset(None, classes), ROWS, ids, classifies)


def test_label_mix_by_hand():
    found = labels()
    np.testing.assert_array_equal(found.client, [10, 11])
    np.testing.assert_array_equal(found.size, [2, 2, 1, 0])
    accuracy = np.array([[0.9, 0.3, 0.5, np.nan], [np.nan] * 4])
    got = client_test.by_client(found, accuracy)
    np.testing.assert_allclose(got[0], [(2 * 0.9 + 0.3) / 3, 0.5])
    assert np.isnan(got[1]).all()


def test_a_client_whose_classes_are_not_tested_has_no_score():
    data = dataset()._replace(y_train=np.array([0, 0, 1, 3]))
    found = client_test.by_labels(data, ROWS, np.arange(3), True)
    got = client_test.by_client(found, np.array([[0.9, 0.3, 0.5, np.nan]]))
    np.testing.assert_allclose(got, [[0.7, np.nan]])
    # An infinite loss is of those who have its class.
    got_loss = client_test.by_client(labels(), np.array([[1.0, 2.0, np.inf, np.nan]]))
    np.testing.assert_allclose(got_loss, [[4 / 3, np.inf]])
    assert client_test.summarized(got)["mean"] == pytest.approx(0.7)


def test_own_samples_by_hand():
    own = np.array([1, 0, 1, 7, 0], np.int32)
    found = client_test.by_owner(dataset(own), np.arange(3))
    np.testing.assert_array_equal(found.group, [1, 0, 1, 2, 0])  # 7 is no client
    np.testing.assert_array_equal(found.size, [2, 2])
    score = np.array([[0.25, 0.75]])
    np.testing.assert_array_equal(client_test.by_client(found, score), score)
    one = client_test.by_owner(dataset(own), np.arange(3), most=1)
    mine = one.client[0]
    np.testing.assert_array_equal(one.group, np.where(own == mine, 0, 1))
    np.testing.assert_array_equal(one.size, [2])


def test_some_clients_are_the_same_whatever_is_scored():
    rows = Partition(np.zeros((50, 1), np.int32), np.ones(50, int), ())
    owner = np.arange(50, dtype=np.int32)
    x, y = np.zeros((50, 1), np.float32), np.zeros(50, int)
    data = dataset(owner)._replace(x_test=x, y_test=y)
    first = client_test.by_owner(data, np.arange(50), 7).client
    second = client_test.by_labels(data, rows, owner, True, 7).client
    np.testing.assert_array_equal(first, second)
    assert len({*first.tolist()}) == 7 and (np.diff(first) > 0).all()


def test_data_without_clients_or_classes_are_refused():
    for test_client in (None, np.full(5, 7)):
        with pytest.raises(UserError, match="no test sample of hand belongs"):
            client_test.by_owner(dataset(test_client), np.arange(3))
    for changes in ({"classes": 1}, {"classifies": False}):
        with pytest.raises(UserError, match="hand has one class, or none"):
            labels(**changes)


def test_summary_by_hand():
    values = np.stack([np.arange(20.0), np.full(20, np.nan)])
    got = client_test.summarized(values)
    assert [float(got[n][0]) for n in ("mean", "worst")] == [9.5, 0.5]
    np.testing.assert_allclose(got["std"][0], np.arange(20).std())
    assert all(np.isnan(a[1]) for a in got.values())
    assert client_test.summarized(values, losses=True)["worst"][0] == 18.5
    few = client_test.summarized(np.array([[3.0, np.nan, 1.0], [np.nan, np.inf, 0.0]]))
    assert few["worst"].tolist() == [1, 0] and few["mean"].tolist() == [2, np.inf]
    assert few["std"][0] == 1
    # Of 1 and 3: |1 − 3| twice over 2 · 2 · 4 = 0.25; of 0 to 19 it is 399/1140.
    assert few["gini"][0] == 0.25
    assert got["gini"][0] == pytest.approx(399 / 1140)


@pytest.mark.parametrize("intervals", [0, 250])  # blocks are of 100
def test_a_history_has_the_statistics_by_name(intervals):
    own = np.array([1, 0, 1, 2, 0], np.int32)
    found = client_test.by_owner(dataset(own), np.arange(9))
    score = np.arange(intervals)[:, None] + np.array([[0.0, 10.0, 30.0]])
    history = {"group_accuracy": score, "group_loss": score, "rho": score}
    got = client_test.named(found, history)
    assert {*got} == {"rho", *client_test.SERIES}
    np.testing.assert_array_equal(got["client_accuracy_worst"], score[:, 0])
    np.testing.assert_array_equal(got["client_loss_worst"], score[:, 2])
    assert {*client_test.named(None, history)} == {"rho"}
