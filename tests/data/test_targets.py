"""Real numbers as labels: soft labels and regression."""

import flax.linen as nn
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.config import replace
from tsfl_jax.data import in_memory
from tsfl_jax.prepare.prepare import load_dataset
from tsfl_jax.types import UserError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 5)).astype(np.float32)
TARGETS = np.stack([X[:, 0] - X[:, 1], X[:, 2] ** 2], axis=1)
LABELS = RNG.integers(0, 3, 240)


def data(y, test=None, num_classes=0):
    y_test = y[200:] if test is None else test
    parts = (X[:200], y[:200], X[200:], y_test)
    return tsfl_jax.make_dataset(*parts, num_classes=num_classes)


def config(**settings):
    start = {"num_intervals": 3, "num_clients": 4, "batch_size": 8, "momentum": 0.0}
    start |= {"algorithm": "fedavg", "schedule.data_size": 32, "model.name": "mlp"}
    start["devices"] = 1
    settings = {name.replace("__", "."): v for name, v in settings.items()}
    return replace(tsfl_jax.Config(), start | settings)


# One client that takes one step with all samples.
ONE = {"num_clients": 1, "batch_size": 200, "schedule__data_size": 200}
ONE |= {"schedule__kind": "explicit", "schedule__tau": (1,), "partition__kind": "iid"}


def linear(outputs):
    return nn.Dense(outputs, kernel_init=nn.initializers.zeros)


def test_one_hot_rows_give_the_bits_of_class_numbers():
    rows = np.eye(3)[LABELS]
    soft = data(rows)
    assert soft.num_classes == 3 and (soft.y_train == LABELS[:200]).all()
    np.testing.assert_array_equal(soft.target, data(rows, LABELS[200:]).target)
    plain, history = (
        tsfl_jax.simulate(config(), model=linear(3), dataset=dataset).history
        for dataset in (data(LABELS), soft)
    )
    for name in plain.keys() - {"seconds"}:
        np.testing.assert_array_equal(history[name], plain[name], err_msg=name)


def test_soft_labels_by_hand():
    """One step of one client: ∂(−Σ_k s_k log p_k)/∂logits = p − s."""
    share = RNG.dirichlet(np.ones(3), 240).astype(np.float32)
    settings = config(**ONE, num_intervals=1, lr=0.5)
    result = tsfl_jax.simulate(settings, model=linear(3), dataset=data(share))
    kernel = 0.5 * X[:200].T @ (share[:200] - 1 / 3) / 200
    bias = 0.5 * (share[:200] - 1 / 3).mean(axis=0)
    layer = result.params["params"]
    np.testing.assert_allclose(layer["kernel"], kernel, atol=2e-7)
    np.testing.assert_allclose(layer["bias"], bias, atol=2e-7)
    logits = X[200:] @ kernel + bias
    right = (logits.argmax(1) == share[200:].argmax(1)).mean()
    assert result.history["test_accuracy"][-1] == pytest.approx(right, abs=1e-6)


def test_regression_equals_gradient_descent():
    dataset = data(TARGETS)
    settings = config(**ONE, lr=0.1)
    result = tsfl_jax.simulate(settings, model=linear(2), dataset=dataset)
    w, x = np.zeros((6, 2)), np.c_[X, np.ones(240)].astype(np.float64)
    for _ in range(3):  # the loss is the mean over samples and both numbers
        w -= 0.1 * x[:200].T @ (x[:200] @ w - TARGETS[:200]) / 200
    layer = result.params["params"]
    np.testing.assert_allclose(layer["kernel"], w[:5], atol=1e-6)
    mse = np.square(x[200:] @ w - TARGETS[200:]).mean()
    assert result.history["test_loss"][-1] == pytest.approx(mse, rel=1e-5)
    assert np.isnan(result.history["test_accuracy"]).all()
    assert any("a regression" in note for note in result.summary["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("y", [TARGETS, TARGETS[:, 0]])
def test_built_in_networks_predict_numbers(y):
    from sklearn import metrics  # slow to import

    settings = config(num_intervals=8, lr=0.05)
    settings.partition.online = True  # new samples of "the same class": any
    result = tsfl_jax.simulate(settings, dataset=data(y))
    outputs, targets = tsfl_jax.predict(settings, result.params, dataset=data(y))
    assert targets.shape == y[200:].shape
    assert outputs.shape == (40, 1 if y.ndim == 1 else y.shape[1])
    assert metrics.r2_score(targets, outputs) > 0.2
    mse = metrics.mean_squared_error(targets, outputs)
    assert mse == pytest.approx(result.history["test_loss"][-1], rel=1e-4)


@pytest.mark.parametrize(
    ("y", "test", "message"),
    [
        (TARGETS, TARGETS[200:, 0], r"y_test is float32 of shape \(40,\); expected"),
        (np.where(X > 2, np.inf, X), None, "y_train holds .*inf.* expected finite"),
    ],
)
def test_targets_that_do_not_fit(y, test, message):
    with pytest.raises(UserError, match=message):
        data(y, test)


def test_what_needs_classes_is_refused():
    with pytest.raises(UserError, match="label_noise class numbers"):
        tsfl_jax.simulate(config(partition__label_noise=0.1), dataset=data(TARGETS))


def test_floats_are_targets_whatever_their_values(tmp_path):
    """Classes are integers; whole floats are said to be one astype away from them."""
    y = np.maximum(np.round(2 * X[:, 0] + 7), 0).astype(np.float16)
    arrays = {"x_train": X[:200], "y_train": y[:200]}
    np.savez(tmp_path / "n.npz", **arrays, x_test=X[200:], y_test=y[200:])
    settings = config(data__name="npz", data__file=f"{tmp_path}/n.npz")
    subset = load_dataset(replace(settings, {"data.train_size": 150}))
    assert len(subset.target) == 150 and set(subset.target) <= set(y[:200])
    for dataset in (data(y), load_dataset(settings), data(y, y[200:].astype(int))):
        assert dataset.num_classes == 1 and dataset.test_target.dtype == np.float32
        np.testing.assert_array_equal(dataset.target, y[:200])
        np.testing.assert_array_equal(dataset.test_target, y[200:])
    assert data(y.astype(int)).num_classes == y.max() + 1
    assert in_memory.check(data(y)).num_classes == 1
    with pytest.raises(UserError, match=r"num_classes=17: y_train .* a regression or"):
        data(y, num_classes=17)
    with pytest.raises(UserError, match=r"y_test is float.*: y_test.astype\(int\)"):
        data(y.astype(int), y[200:])


def test_shares_may_be_rounded_to_two_digits():
    classes = 300
    rows = RNG.dirichlet(np.full(classes, 2 / classes), 240)
    rows[0] = np.eye(classes)[0] * 0.875 + np.eye(classes)[1] * 0.125
    rows[:, 0] += 1 - rows.sum(axis=1)
    rounded = np.floor(100 * rows + 0.5) / 100
    assert abs(rounded.sum(axis=1) - 1).max() > 0.009
    assert data(rounded).num_classes == classes
    np.testing.assert_array_equal(data(rounded).y_train, rounded[:200].argmax(axis=1))
    assert data(np.minimum(2 * rounded, 1)).num_classes == 1
    assert data(0 * rounded).num_classes == data(rounded * 1.5).num_classes == 1
