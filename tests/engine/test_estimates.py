"""What gradients say of constants and of every client, against exact values."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from tests import problems
from tsfl_jax.engine import estimates, optimizers
from tsfl_jax.engine.program_spec import Estimates, Parts, ProgramSpec
from tsfl_jax.models import networks
from tsfl_jax.rules import AGGREGATORS

DATA = problems.dataset()
PROBLEM = problems.problem(DATA, 12, 12)
SAMPLES = PROBLEM.samples._replace(mean=jnp.zeros(()), inverse_std=jnp.ones(()))


@functools.cache
def network():
    model = networks.from_flax(networks.MLP(3, 0))
    return model, model.init(jax.random.key(3), jnp.zeros((1, 5)))


def setting(num=12):
    model, variables = network()
    clients = problems.members(
        PROBLEM.client[:num],
        jnp.ones(num, jnp.int32),
        jnp.full(num, 12, jnp.int32),
        PROBLEM.rows[:num],
    )
    return model, variables, clients


def parts(model, batch_size, method="quotient"):
    estimated = Estimates(method=method)
    spec = ProgramSpec(batch_size=batch_size, passes=1, estimates=estimated)
    return Parts(model, AGGREGATORS["dms"], optimizers.sgd, spec)


def sample_gradients(variables, rows):
    """Gradients of single samples ``[n, 18]`` of softmax regression, by hand."""
    layer = variables["params"]["Dense_0"]
    x, y = DATA.x_train[rows].astype(np.float64), DATA.y_train[rows]
    logits = x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(x[:, :, None] * p[:, None]).reshape(len(y), -1), p], axis=1)


def measured(
    model,
    variables,
    clients,
    key,
    lr=0.1,
    batch_size=4,
    method="quotient",
    samples=SAMPLES,
):
    return estimates.estimate_constants(
        parts(model, batch_size, method=method),
        variables,
        key,
        clients,
        samples,
        problems.hparams(lr=lr),
    )


compiled = jax.jit(measured, static_argnames=("model", "batch_size", "method"))


@pytest.mark.parametrize(("method", "draws"), [("quotient", 4000), ("power", 1000)])
def test_variance_and_square_norm_are_unbiased(method, draws):
    model, variables, clients = setting(num=1)
    keys = jax.random.split(jax.random.key(0), draws)
    got = jax.jit(
        jax.vmap(lambda key: measured(model, variables, clients, key, method=method))
    )(keys)
    g = sample_gradients(variables, np.asarray(clients.row[0]))
    variance = np.square(g - g.mean(0)).sum(1).mean() / 4  # of a mean of four draws
    square = np.square(g.mean(0)).sum() + variance
    for values, exact in ((got.grad_variance, variance), (got.grad_sq_norm, square)):
        error = np.std(values) / np.sqrt(draws)
        assert abs(np.mean(values) - exact) < 4 * error
        assert error < 0.05 * exact  # else the line above says nothing


def test_smoothness_is_the_curvature_along_the_gradient():
    # All clients hold sample 0 only: one gradient function, its quotient by hand.
    model, variables, clients = setting()
    clients = clients._replace(row=jnp.zeros((12, 12), jnp.int32))
    lr = 1e-2
    got = compiled(model, variables, clients, jax.random.key(0), lr=lr)
    first = sample_gradients(variables, np.array([0]))[0]
    layer = variables["params"]["Dense_0"]
    moved = {
        "params": {
            "Dense_0": {
                "kernel": layer["kernel"] - lr * first[:15].reshape(5, 3),
                "bias": layer["bias"] - lr * first[15:],
            }
        }
    }
    second = sample_gradients(moved, np.array([0]))[0]
    exact = np.linalg.norm(second - first) / (lr * np.linalg.norm(first))
    np.testing.assert_allclose(got.smoothness, exact, rtol=1e-3)


def largest_curvatures(variables, rows):
    """λ_max of the Hessian of every client's mean loss ``[N]``."""
    flat, unravel = jax.flatten_util.ravel_pytree(variables)

    def loss(flat, x, y):
        layer = unravel(flat)["params"]["Dense_0"]
        logits = x @ layer["kernel"] + layer["bias"][None]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    x, y = SAMPLES.x[rows], jnp.asarray(DATA.y_train)[rows]
    hessians = jax.jit(jax.vmap(jax.hessian(loss), in_axes=(None, 0, 0)))(flat, x, y)
    return np.linalg.eigvalsh(hessians).max(1)


def test_power_iteration_finds_the_largest_curvature_of_any_probed_client():
    # A client whose samples are all the same has one Hessian, whatever the mini-batch.
    model, variables, clients = setting()
    rows = jnp.broadcast_to(jnp.arange(12)[:, None], (12, 12))
    clients = clients._replace(row=rows)
    exact = largest_curvatures(variables, rows)
    one = jax.tree.map(lambda a: a[2:3], clients)
    got, along_the_gradient = (
        compiled(model, variables, one, jax.random.key(0), 1e-3, method=m)
        for m in ("power", "quotient")
    )
    np.testing.assert_allclose(got.smoothness, exact[2], rtol=0.02)
    assert along_the_gradient.smoothness < 0.5 * exact[2]
    square = np.square(sample_gradients(variables, np.array([2]))).sum()
    np.testing.assert_allclose(got.grad_sq_norm, square, rtol=1e-4)
    assert float(got.grad_variance) == 0.0
    everyone = compiled(
        model, variables, clients, jax.random.key(0), 1e-3, method="bounds"
    )
    np.testing.assert_allclose(everyone.smoothness, exact.max(), rtol=0.02)
    squares = np.square(sample_gradients(variables, np.arange(12))).sum(1)
    np.testing.assert_allclose(everyone.grad_sq_norm, squares.max(), rtol=1e-4)


def test_estimates_are_of_clients_with_work():
    model, variables, clients = setting()
    # Client 5 alone takes part; a NaN in the data of others must not matter.
    own = np.asarray(clients.row[5])
    x = jnp.full_like(SAMPLES.x, jnp.nan).at[own].set(SAMPLES.x[own])
    alone = clients._replace(tau=jnp.zeros(12, jnp.int32).at[5].set(2))
    got = compiled(
        model, variables, alone, jax.random.key(0), samples=SAMPLES._replace(x=x)
    )
    assert all(np.isfinite(v) and v > 0 for v in got)
    absent = clients._replace(tau=jnp.zeros(12, jnp.int32))
    got = compiled(model, variables, absent, jax.random.key(0))
    assert [float(v) for v in got] == [0.0, 0.0, 0.0]


DRAWS = 1500


def clients_of(absent=3):
    """12 clients of 10 to 12 samples, one of them away."""
    model, variables, clients = setting()
    size = jnp.arange(12) % 3 + 10
    tau = jnp.ones(12, jnp.int32).at[absent].set(0)
    return model, variables, clients._replace(size=size, tau=tau)


def measure(model, variables, clients, key):
    return estimates.client_gradients(parts(model, 4), variables, key, clients, SAMPLES)


def exact_gradients(variables, clients):
    """σ_i² and ‖∇F_i − ∇F‖² of all clients, ‖∇F‖², by the definitions."""
    rows, size = np.asarray(clients.row), np.asarray(clients.size)
    each = [sample_gradients(variables, r[:n]) for r, n in zip(rows, size, strict=True)]
    variance = [
        np.square(g - g.mean(0)).sum(1).mean() / 4 * (len(g) - 4) / (len(g) - 1)
        for g in each
    ]
    mean = np.array([g.mean(0) for g in each])
    share = np.where(np.asarray(clients.tau) > 0, size, 0)
    common = np.average(mean, axis=0, weights=share)
    return np.array(variance), np.square(mean - common).sum(1), np.square(common).sum()


@pytest.mark.parametrize("kept", [None, 7])
def test_estimates_are_unbiased(monkeypatch, kept):
    if kept:  # 7 of the 18 entries of a gradient stand for all
        monkeypatch.setattr(estimates, "_KEPT", 12 * kept)
        monkeypatch.setattr(estimates, "_LEAST", 1)
    model, variables, clients = clients_of()
    keys = jax.random.split(jax.random.key(0), DRAWS)
    draw = jax.jit(jax.vmap(lambda key: measure(model, variables, clients, key)))
    there = np.asarray(clients.tau) > 0
    for values, truth in zip(
        draw(keys), exact_gradients(variables, clients), strict=True
    ):
        values, truth = np.asarray(values), np.asarray(truth)
        if truth.ndim:
            assert np.isnan(values[:, ~there]).all()
            values, truth = values[:, there], truth[there]
        error = np.std(values, axis=0) / np.sqrt(DRAWS)
        assert (abs(values.mean(0) - truth) < 4.5 * error).all()
        assert np.median(error) < 0.1 * np.median(truth)  # else that says nothing


def test_whole_data_in_a_batch_give_exact_values():
    model, variables, clients = clients_of()
    estimate = jax.jit(
        lambda key: estimates.client_gradients(
            parts(model, 12), variables, key, clients, SAMPLES
        )
    )
    got = estimate(jax.random.key(0))
    there = np.asarray(clients.tau) > 0
    _, dissimilarity, square = exact_gradients(variables, clients)
    np.testing.assert_allclose(got.variance[there], 0, atol=1e-9)
    np.testing.assert_allclose(got.dissimilarity[there], dissimilarity[there], 1e-3)
    np.testing.assert_allclose(got.square, square, 1e-4)
