"""Estimates of L, G² and σ² against exact values of a linear softmax model."""

import functools

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from tests import problems
from tsfl_jax import rng
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


def parts(model, batch_size, axis=None, method="quotient"):
    estimated = Estimates(method=method)
    spec = ProgramSpec(batch_size=batch_size, passes=1, axis=axis, estimates=estimated)
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


def test_variance_and_square_norm_are_unbiased():
    model, variables, clients = setting(num=1)
    keys = jax.random.split(jax.random.key(0), 4000)
    got = jax.jit(
        jax.vmap(lambda key: measured(model, variables, clients, key, batch_size=4))
    )(keys)
    g = sample_gradients(variables, np.asarray(clients.row[0]))
    variance = np.square(g - g.mean(0)).sum(1).mean() / 4  # of a mean of four draws
    square = np.square(g.mean(0)).sum() + variance
    for values, exact in ((got.grad_variance, variance), (got.grad_sq_norm, square)):
        error = np.std(values) / np.sqrt(len(keys))
        assert abs(np.mean(values) - exact) < 4 * error
        assert error < 0.05 * exact  # else the line above says nothing


def test_identical_samples_have_no_variance_and_exact_norm():
    model, variables, clients = setting()
    clients = clients._replace(row=jnp.zeros((12, 12), jnp.int32))
    got = compiled(model, variables, clients, jax.random.key(0))
    exact = np.square(sample_gradients(variables, np.array([0]))).sum()
    assert float(got.grad_variance) == 0.0
    np.testing.assert_allclose(got.grad_sq_norm, exact, rtol=1e-4)


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


def test_several_draws_are_averaged_by_client_before_the_largest_is_taken():
    model, variables, clients = setting(num=4)
    own, hparams = parts(model, 4, method="bounds"), problems.hparams(lr=1e-3)
    params, batches = variables["params"], estimates.POWER_STEPS + 2

    @jax.jit
    def one(client, draw):
        stream = jax.random.fold_in(rng.fold(jax.random.key(0), "constants"), client.id)
        key = jax.random.fold_in(stream, draw)
        drawn = estimates._drawn_gradients
        drawn = drawn(own, variables, key, client, SAMPLES, batches)
        return estimates._in_turns(drawn, params, hparams.lr, True)

    one_by_one = [jax.tree.map(lambda a, i=i: a[i], clients) for i in range(4)]
    found = [one(client, draw) for client in one_by_one for draw in range(3)]
    drawn = jax.tree.map(lambda *a: np.stack(a).reshape(4, 3), *found)
    expected = jax.tree.map(lambda a: a.mean(axis=1).max(), drawn)
    got = estimates.estimate_constants(
        own, variables, jax.random.key(0), clients, SAMPLES, hparams, 3
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-4)
    assert got.smoothness < drawn.smoothness.max()


def test_power_iteration_has_unbiased_variance_and_square_norm():
    model, variables, clients = setting(num=1)
    keys = jax.random.split(jax.random.key(1), 1000)
    got = jax.jit(
        jax.vmap(lambda key: measured(model, variables, clients, key, method="power"))
    )(keys)
    g = sample_gradients(variables, np.asarray(clients.row[0]))
    variance = np.square(g - g.mean(0)).sum(1).mean() / 4
    square = np.square(g.mean(0)).sum() + variance
    for values, exact in ((got.grad_variance, variance), (got.grad_sq_norm, square)):
        error = np.std(values) / np.sqrt(len(keys))
        assert abs(np.mean(values) - exact) < 4 * error
        assert error < 0.05 * exact


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
