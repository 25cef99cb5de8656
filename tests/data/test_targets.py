"""Real numbers as labels: soft labels and regression."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

import tsfl_jax
from tsfl_jax.data import in_memory
from tsfl_jax.experiment.prepare import load_dataset
from tsfl_jax.types import UserError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 5)).astype(np.float32)
TARGETS = np.stack([X[:, 0] - X[:, 1], X[:, 2] ** 2], axis=1)
LABELS = RNG.integers(0, 3, 240)


def data(y, test=None, **more):
    y_test = y[200:] if test is None else test
    return tsfl_jax.make_dataset(X[:200], y[:200], X[200:], y_test, **more)


def config(**settings):
    made = tsfl_jax.Config(num_intervals=3, num_clients=4, batch_size=8)
    made.algorithm, made.schedule.data_size, made.momentum = "fedavg", 32, 0.0
    for name, value in settings.items():
        part, _, last = name.rpartition("__")
        setattr(getattr(made, part) if part else made, last, value)
    return made


def same(a, b):
    assert a.history.keys() == b.history.keys()
    for name, values in a.history.items():
        if name != "seconds":
            np.testing.assert_array_equal(values, b.history[name], err_msg=name)


def test_one_hot_rows_give_the_bits_of_class_numbers():
    rows = np.eye(3)[LABELS]
    soft = data(rows)
    assert soft.num_classes == 3 and (soft.y_train == LABELS[:200]).all()
    plain = tsfl_jax.simulate(config(model__name="mlp"), dataset=data(LABELS))
    for given in (soft, data(rows, LABELS[200:])):
        same(tsfl_jax.simulate(config(model__name="mlp"), dataset=given), plain)


def test_soft_labels_by_hand():
    """One step of one client: ∂(−Σ_k s_k log p_k)/∂logits = p − s."""
    share = RNG.dirichlet(np.ones(3), 240).astype(np.float32)
    one = config(num_clients=1, num_intervals=1, batch_size=200, lr=0.5)
    one.schedule.kind, one.schedule.tau = "explicit", (1,)
    one.schedule.data_size, one.partition.kind = 200, "iid"
    zeros = nn.Dense(3, kernel_init=nn.initializers.zeros)
    found = tsfl_jax.simulate(one, model=zeros, dataset=data(share))
    kernel = 0.5 * X[:200].T @ (share[:200] - 1 / 3) / 200
    bias = 0.5 * (share[:200] - 1 / 3).mean(axis=0)
    layer = found.params["params"]
    np.testing.assert_allclose(layer["kernel"], kernel, atol=2e-7)
    np.testing.assert_allclose(layer["bias"], bias, atol=2e-7)
    logits = X[200:] @ kernel + bias
    right = (logits.argmax(1) == share[200:].argmax(1)).mean()
    assert found.history["test_accuracy"][-1] == pytest.approx(right, abs=1e-6)


def test_regression_equals_gradient_descent():
    one = config(num_clients=1, batch_size=200, lr=0.1)
    one.schedule.kind, one.schedule.tau = "explicit", (1,)
    one.schedule.data_size, one.partition.kind = 200, "iid"
    zeros = nn.Dense(2, kernel_init=nn.initializers.zeros)
    found = tsfl_jax.simulate(one, model=zeros, dataset=data(TARGETS))
    w, x = np.zeros((6, 2)), np.c_[X, np.ones(240)].astype(np.float64)
    for _ in range(3):  # the loss is the mean over samples and both numbers
        w -= 0.1 * x[:200].T @ (x[:200] @ w - TARGETS[:200]) / 200
    layer = found.params["params"]
    np.testing.assert_allclose(layer["kernel"], w[:5], atol=1e-6)
    mse = np.square(x[200:] @ w - TARGETS[200:]).mean()
    assert found.history["test_loss"][-1] == pytest.approx(mse, rel=1e-5)
    assert np.isnan(found.history["test_accuracy"]).all()
    assert any("a regression" in note for note in found.summary["notes"])


def test_targets_equal_a_table_of_the_user():
    def squared(outputs, y):
        return ((outputs - table[y]) ** 2).mean(axis=1)

    table = jnp.asarray(TARGETS, jnp.float32)
    row = np.arange(240)
    rows = data(row, num_classes=240)
    settings = {"partition__kind": "iid"}
    made = config(**settings)
    by_table = tsfl_jax.simulate(made, model=nn.Dense(2), dataset=rows, loss=squared)
    given = tsfl_jax.simulate(made, model=nn.Dense(2), dataset=data(TARGETS))
    np.testing.assert_allclose(
        given.history["test_loss"], by_table.history["test_loss"], rtol=1e-6
    )


@pytest.mark.parametrize("y", [TARGETS, TARGETS[:, 0], TARGETS[:, :1]])
@pytest.mark.parametrize("rule", ["dms", "median", "scaffold"])
def test_built_in_networks_predict_numbers(y, rule):
    made = config(num_intervals=8, lr=0.05, algorithm=rule, model__name="mlp")
    made.partition.online = rule == "dms"  # new samples of "the same class": any
    found = tsfl_jax.simulate(made, dataset=data(y))
    outputs, known = tsfl_jax.predict(made, found.params, dataset=data(y))
    assert known.shape == y[200:].shape
    assert outputs.shape == (40, 1 if y.ndim == 1 else y.shape[1])
    score = metrics.r2_score(known, outputs)
    mse = metrics.mean_squared_error(known, outputs)
    assert score > 0.2 and mse == pytest.approx(
        found.history["test_loss"][-1], rel=1e-4
    )


def test_metrics_get_targets():
    def mae(outputs, y):
        return abs(outputs - y).mean(axis=1)

    found = tsfl_jax.simulate(
        config(), model=nn.Dense(2), dataset=data(TARGETS), metrics={"mae": mae}
    )
    outputs, y = tsfl_jax.predict(
        config(), found.params, model=nn.Dense(2), dataset=data(TARGETS)
    )
    assert found.history["mae"][-1] == pytest.approx(abs(outputs - y).mean(), rel=1e-5)


def test_targets_from_a_file_and_as_a_subset(tmp_path):
    path = tmp_path / "numbers.npz"
    y = TARGETS[:, 0]
    np.savez(path, x_train=X[:200], y_train=y[:200], x_test=X[200:], y_test=y[200:])
    made = config(model__name="mlp", data__name="npz", data__file=str(path))
    made.data.train_size = 150
    assert np.isfinite(tsfl_jax.simulate(made).history["train_loss"]).all()


@pytest.mark.parametrize(
    ("y", "test", "message"),
    [
        (TARGETS, TARGETS[200:, 0], r"y_test is float32 of shape \(40,\); expected"),
        (TARGETS, TARGETS[201:], r"expected \[40, 2\] targets, a row for each"),
        (np.eye(3)[LABELS], LABELS[200:] + 1, "y_test is int64 of shape"),
        (np.where(X > 2, np.inf, X), None, "y_train holds .*inf.* expected finite"),
    ],
)
def test_targets_that_do_not_fit(y, test, message):
    with pytest.raises(UserError, match=message):
        data(y, test)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition__label_noise": 0.1}, "has no class numbers|has one class"),
        ({"evaluation__clients": "labels"}, "has one class"),
        ({"model__name": "quadratic"}, "quadratic"),
    ],
)
def test_what_needs_classes_is_refused(settings, message):
    made = config(**({"model__name": "mlp"} | settings))
    with pytest.raises(UserError, match=message):
        tsfl_jax.simulate(made, dataset=data(TARGETS))


def test_a_network_of_the_wrong_width_is_named():
    with pytest.raises(UserError, match=r"outputs \[B, 3\], targets \[B, 2\]"):
        tsfl_jax.simulate(config(), model=nn.Dense(3), dataset=data(TARGETS))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_floats_are_targets_whatever_their_values(tmp_path, kind):
    """Classes are integers; whole floats are said to be one astype away from them."""
    y = np.maximum(np.round(2 * X[:, 0] + 7), 0).astype(kind)
    arrays = {"x_train": X[:200], "y_train": y[:200]}
    np.savez(tmp_path / "n.npz", **arrays, x_test=X[200:], y_test=y[200:])
    made = config(model__name="mlp", data__name="npz", data__file=f"{tmp_path}/n.npz")
    given = data(y)
    for dataset in (given, load_dataset(made), data(y, y[200:].astype(int))):
        assert dataset.num_classes == 1 and dataset.test_target.dtype == np.float32
        np.testing.assert_array_equal(dataset.target, y[:200])
        np.testing.assert_array_equal(dataset.test_target, y[200:])
        assert "; y_train.astype(int) makes" in in_memory.notes(dataset, False)[0]
    assert "astype" not in in_memory.notes(data(y - 0.5), False)[0]
    assert "astype" not in in_memory.notes(data(y - 9), False)[0]
    assert data(y.astype(int)).num_classes == y.max() + 1
    assert in_memory.check(given).num_classes == 1
    with pytest.raises(UserError, match=r"num_classes=17: y_train .* a regression or"):
        data(y, num_classes=17)
    with pytest.raises(UserError, match=r"y_test is float.*; use y_test.astype\(int\)"):
        data(y.astype(int), y[200:])


def test_whole_floats_are_learned_as_numbers():
    y = np.round(2 * X[:, 0] + 7).astype(np.float32)
    one = config(num_clients=1, num_intervals=1, batch_size=200, lr=0.1)
    one.schedule.kind, one.schedule.tau = "explicit", (1,)
    one.schedule.data_size, one.partition.kind = 200, "iid"
    zeros = nn.Dense(1, kernel_init=nn.initializers.zeros)
    found = tsfl_jax.simulate(one, model=zeros, dataset=data(y)).params["params"]
    step = 0.1 * 2 * (y[:200, None] * X[:200]).mean(axis=0)
    np.testing.assert_allclose(found["kernel"][:, 0], step, atol=1e-5)


@pytest.mark.parametrize("classes", [2, 10, 300])
def test_shares_may_be_rounded_to_two_digits(classes):
    rows = RNG.dirichlet(np.full(classes, 2 / classes), 240)
    rows[0] = np.eye(classes)[0] * 0.875 + np.eye(classes)[1] * 0.125
    rows[:, 0] += 1 - rows.sum(axis=1)
    rounded = np.floor(100 * rows + 0.5) / 100
    assert abs(rounded.sum(axis=1) - 1).max() > 0.009
    made = data(rounded)
    assert made.num_classes == classes
    np.testing.assert_array_equal(made.y_train, rounded[:200].argmax(axis=1))
    assert data(np.minimum(2 * rounded, 1)).num_classes == 1
    assert data(0 * rounded).num_classes == data(rounded * 1.5).num_classes == 1


def test_shares_with_one_largest_class_have_something_to_learn():
    share = RNG.uniform(0.6, 0.9, 240)
    made = data(np.stack([share, 1 - share], axis=1))
    assert not made.y_train.any() and in_memory.notes(made, True) == ()


def test_augmentation_gets_targets():
    def mixed(key, x, y):
        weight = jax.random.uniform(key)
        blend = lambda a: weight * a + (1 - weight) * a[::-1]  # noqa: E731
        return blend(x), blend(y)

    found = tsfl_jax.simulate(
        config(model__name="mlp"), dataset=data(np.eye(3)[LABELS]), augment=mixed
    )
    assert np.isfinite(found.history["train_loss"]).all()
