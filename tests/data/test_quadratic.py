"""Quadratic clients: known constants against definitions, training, and real runs."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests.reference import at_quadratic
from tsfl_jax.config import Config, replace
from tsfl_jax.data import quadratic
from tsfl_jax.engine import client
from tsfl_jax.models import networks
from tsfl_jax.prepare import network
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.report import progress
from tsfl_jax.types import UserError


def settings(**changes) -> Config:
    """Six clients in five dimensions, half 1 and half 4 steps."""
    start = {
        "algorithm": "fedavg",
        "num_intervals": 4,
        "num_clients": 6,
        "lr": 0.2,
        "batch_size": 4,
        "momentum": 0.0,
        "devices": 1,
        "checkpoint": False,
        "data.name": "quadratic",
        "model.name": "quadratic",
        "data.shape": (5,),
        "partition.kind": "label",
        "schedule.kind": "case1",
        "schedule.data_size": 12,
        "schedule.iteration": "step",
        "quadratic.smoothness": 2.0,
        "quadratic.convexity": 0.5,
    }
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return replace(Config(), start | changes)


LINE = {"data__shape": (1,), "quadratic__convexity": 2.0}  # one dimension


def exact(config: Config) -> quadratic.Exact:
    return network.exact_of(prepare(config))


def test_exact_by_hand():
    # Client 0 holds 0 and 2, client 1 holds 3, 4 and 8; λ = (2, 1), B = 1, w⁰ = (1, 0).
    x = np.array([[0, 0], [2, 0], [3, 0], [4, 0], [8, 0]], np.float32)
    rows = np.array([[0, 1, 0], [2, 3, 4]])
    lam, start = np.array([2.0, 1.0]), np.array([1.0, 0.0])
    exact = quadratic.exact(x, rows, np.array([2, 3]), lam, 1, start)
    np.testing.assert_allclose(exact.shares, [0.4, 0.6])
    np.testing.assert_allclose(exact.optima, [[1, 0], [5, 0]])
    np.testing.assert_allclose(exact.optimum, [3.4, 0])
    np.testing.assert_allclose(exact.dissimilarity, [2.4**2, 1.6**2])
    # Λ² = 4 along the first axis; variances 1 and (4 + 1 + 9) / 3.
    np.testing.assert_allclose(exact.grad_variance, [4, 56 / 3])
    # From 0 to 8: client 0 is at most 7 away, client 1 at most 5.
    assert exact.grad_sq_norm == pytest.approx(4 * 49 + 4)
    assert exact.smoothness == 2
    assert exact.distance == pytest.approx(2.4**2)
    square, excess, gradient = at_quadratic(exact, [[3.4, 0], [5.4, 3]])
    np.testing.assert_allclose(excess, [0, 0.5 * (2 * 4 + 9)], atol=1e-12)
    np.testing.assert_allclose(gradient, [0, 16 + 9], atol=1e-12)
    np.testing.assert_allclose(square[1], [4 * 4.4**2 + 9 + 4, 4 * 0.4**2 + 9 + 56 / 3])


@pytest.mark.parametrize(("n", "batch"), [(6, 2), (1, 1), (7, 3), (3, 8)])
def test_variance_of_all_mini_batches(n, batch):
    rng = np.random.default_rng(n)
    x, lam = rng.normal(size=(n, 3)), np.array([1.0, 0.5, 3.0])
    found = quadratic.exact(
        x, np.arange(n)[None], np.array([n]), lam, batch, np.zeros(3)
    )
    size = n % batch or min(n, batch)  # 7 in batches of 3: the last has one sample
    w = rng.normal(size=3)
    gradients = [
        lam * (w - x[list(chosen)].mean(0))
        for chosen in itertools.combinations(range(n), size)
    ]
    mean = np.mean(gradients, axis=0)
    np.testing.assert_allclose(mean, lam * (w - found.optima[0]), atol=1e-12)
    variance = np.mean([((g - mean) ** 2).sum() for g in gradients])
    np.testing.assert_allclose(found.grad_variance, [variance], atol=1e-12)
    square = np.mean([(g**2).sum() for g in gradients])
    np.testing.assert_allclose(at_quadratic(found, w)[0], [square])


@pytest.mark.parametrize(
    ("changes", "dissimilarity", "grad_variance"),  # of clients in equal groups
    [
        ({"num_clients": 7}, (1,), (1,)),
        (LINE | {"num_clients": 2}, (1,), (1,)),
        ({"num_clients": 5, "seed": 3}, (1, 2), (0, 3)),
        ({"batch_size": 12}, (0,), (0,)),
        ({"quadratic__distance": 9.0, "seed": 1, "batch_size": 2}, (1,), (1,)),
    ],
)  # fmt: skip
def test_data_have_the_requested_constants(changes, dissimilarity, grad_variance):
    constants = {"dissimilarity": dissimilarity, "grad_variance": grad_variance}
    groups = {
        f"quadratic__{name}": ";".join(f"constant({value})" for value in values)
        for name, values in constants.items()
    }
    config = settings(**changes, **groups)
    prepared, q, N = prepare(config), config.quadratic, config.num_clients
    result = network.exact_of(prepared)
    np.testing.assert_allclose(result.shares, np.full(N, 1 / N))
    np.testing.assert_allclose(result.distance, q.distance, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(result.curvature.max(), q.smoothness, rtol=1e-6)
    np.testing.assert_allclose(result.curvature.min(), q.convexity, rtol=1e-6)
    for name, values in constants.items():
        requested = np.array(values, float)[np.arange(N) * len(values) // N]
        measured = getattr(result, name)
        np.testing.assert_allclose(measured, requested, rtol=1e-5, atol=1e-12)
    # The test set is w*, so that the test loss is exact.
    x = prepared.dataset.x_test[0]
    np.testing.assert_allclose(x, result.optimum, rtol=1e-4, atol=1e-6)


def test_gradient_is_the_formula():
    lam = (0.5, 2.0, 1.0)
    model = networks.from_flax(quadratic.Quadratic(lam))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=3)
    start = model.init(jax.random.key(0), x)
    np.testing.assert_array_equal(start["params"]["w"], np.zeros(3))
    variables = {"params": {"w": jnp.asarray(w, jnp.float32)}}
    mask = jnp.array([True, True, True, False])
    labels = jnp.zeros(4, jnp.int32)
    batch = client.Batch(jnp.asarray(x), labels, mask, jax.random.key(0))
    (loss, _), g = client.batch_gradient(model, variables, batch)
    np.testing.assert_allclose(g["w"], lam * (w - x[:3].mean(0)), rtol=1e-5)
    expected = 0.5 * ((w - x[:3]) ** 2 @ np.array(lam)).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_full_batches_have_a_closed_form_and_reach_the_optimum():
    full = {"batch_size": 12, "quadratic__grad_variance": "constant(0)"}
    full["schedule__kind"] = "explicit"
    config = settings(**full, num_intervals=1, schedule__tau=(0, 0, 3, 0, 0, 0))
    constants, result = exact(config), tsfl_jax.simulate(config)
    contraction = (1 - config.lr * constants.curvature) ** 3
    expected = constants.optima[2] - contraction * constants.optima[2]  # from w⁰ = 0
    np.testing.assert_allclose(result.params["params"]["w"], expected, rtol=1e-5)
    _, excess, _ = at_quadratic(constants, expected)
    np.testing.assert_allclose(result.history["test_loss"], [excess], rtol=1e-5)
    # Equal work reaches the optimum.
    config = settings(**full, num_intervals=100, schedule__tau=(2,))
    result = tsfl_jax.simulate(config)
    assert 0 <= result.history["test_loss"][-1] < 1e-11
    w = result.params["params"]["w"]
    np.testing.assert_allclose(w, exact(config).optimum, rtol=1e-5)


def test_bound_of_gradients_holds_along_the_way():
    config = settings(batch_size=2, lr=0.5)  # η = 1/L, the largest that is allowed
    prepared = prepare(config)
    found = network.exact_of(prepared)
    held = prepared.dataset.x_train[prepared.partition.indices]
    rng, lam, w = np.random.default_rng(0), found.curvature, np.zeros((6, 5))
    for step in range(200):
        if step % 5 == 0:
            w[:] = rng.dirichlet(np.full(6, 0.3)) @ w  # any average of models
        chosen = rng.permuted(np.tile(np.arange(12), (6, 1)), axis=1)[:, :2]
        batch = np.take_along_axis(held, chosen[:, :, None], axis=1).mean(1)
        w -= config.lr * lam * (w - batch)
        assert at_quadratic(found, w)[0].max() <= found.grad_sq_norm


def test_files_of_a_run_without_accuracy(tmp_path):
    result = tsfl_jax.simulate(settings(), workdir=tmp_path)
    assert np.isnan(result.history["test_accuracy"]).all()
    assert np.isfinite(result.history["test_loss"]).all()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best_test_accuracy"] is summary["final_test_accuracy"] is None
    assert summary["data"] == "synthetic quadratic(5 dimensions, 6 clients)"
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "accuracy" not in progress.summary_text(result.summary)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__shape": (1,)}, "one dimension has one eigenvalue"),
        ({"quadratic__dissimilarity": "constant(1);constant(900)", "num_clients": 2},
         "no directions in 5"),
        ({"batch_size": 5}, "multiple of --config.batch_size=5"),
    ],
)  # fmt: skip
def test_wrong_settings(changes, message):
    with pytest.raises(UserError, match=message) as error:
        prepare(settings(**changes))
    assert "\n" not in str(error.value)
