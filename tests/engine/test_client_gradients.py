"""What gradients say about every client, against exact values of a linear model."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests import problems
from tests.data.test_quadratic import settings
from tests.engine.test_constants import SAMPLES, parts, sample_gradients, setting
from tests.reference import at_quadratic
from tsfl_jax.engine import client, devices, estimates
from tsfl_jax.experiment.network import exact_of
from tsfl_jax.experiment.prepare import prepare

DRAWS = 1500


def clients_of(absent=3):
    """12 clients of 10 to 12 samples, one of them away."""
    model, variables, clients = setting()
    size = jnp.arange(12) % 3 + 10
    tau = jnp.ones(12, jnp.int32).at[absent].set(0)
    return model, variables, clients._replace(size=size, tau=tau)


def measure(model, variables, clients, key, axis=None, samples=SAMPLES):
    return estimates.client_gradients(
        parts(model, 4, axis), variables, key, clients, samples
    )


compiled = jax.jit(measure, static_argnums=0)


def exact(variables, clients):
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


def test_rows_that_are_padded_for_other_lanes_change_nothing():
    model, variables, clients = clients_of()
    wider = clients._replace(row=jnp.pad(clients.row, ((0, 0), (0, 9))))
    plain = compiled(model, variables, clients, jax.random.key(3))
    padded = compiled(model, variables, wider, jax.random.key(3))
    chex.assert_trees_all_equal(plain, padded)


@pytest.mark.parametrize("kept", [None, 7])
def test_estimates_are_unbiased(monkeypatch, kept):
    if kept:  # 7 of the 18 entries of a gradient stand for all
        monkeypatch.setattr(estimates, "_KEPT", 12 * kept)
        monkeypatch.setattr(estimates, "_LEAST", 1)
    model, variables, clients = clients_of()
    keys = jax.random.split(jax.random.key(0), DRAWS)
    draw = jax.jit(jax.vmap(lambda key: measure(model, variables, clients, key)))
    there = np.asarray(clients.tau) > 0
    for values, truth in zip(draw(keys), exact(variables, clients), strict=True):
        values, truth = np.asarray(values), np.asarray(truth)
        if truth.ndim:
            assert np.isnan(values[:, ~there]).all()
            values, truth = values[:, there], truth[there]
        error = np.std(values, axis=0) / np.sqrt(DRAWS)
        assert (abs(values.mean(0) - truth) < 4.5 * error).all()
        assert np.median(error) < 0.1 * np.median(truth)  # else that says nothing


def test_whole_data_in_a_batch_give_exact_values():
    model, variables, clients = clients_of()
    got = estimates.client_gradients(
        parts(model, 12), variables, jax.random.key(0), clients, SAMPLES
    )
    there = np.asarray(clients.tau) > 0
    _, dissimilarity, square = exact(variables, clients)
    np.testing.assert_allclose(got.variance[there], 0, atol=1e-9)
    np.testing.assert_allclose(got.dissimilarity[there], dissimilarity[there], 1e-3)
    np.testing.assert_allclose(got.square, square, 1e-4)


def test_only_the_cohort_has_a_share():
    model, variables, clients = clients_of()
    nan = jnp.full_like(SAMPLES.x[:1], jnp.nan)
    samples = SAMPLES._replace(x=jnp.concatenate([SAMPLES.x, nan]))
    row = clients.row.at[3].set(len(SAMPLES.x))
    moved = clients._replace(row=row)
    spoiled = compiled(model, variables, moved, jax.random.key(0), samples=samples)
    clean = compiled(model, variables, clients, jax.random.key(0))
    np.testing.assert_array_equal(spoiled.dissimilarity, clean.dissimilarity)
    absent = clients._replace(tau=jnp.zeros(12, jnp.int32))
    for value in compiled(model, variables, absent, jax.random.key(0)):
        assert np.isnan(value).all()


def test_several_devices_give_the_result_of_one():
    model, variables, clients = clients_of()
    one = compiled(model, variables, clients, jax.random.key(1))
    mesh = Mesh(np.array(jax.devices()[:2]), (devices.AXIS,))
    whole = PartitionSpec()
    several = jax.shard_map(
        lambda variables, clients, key: measure(
            model, variables, clients, key, axis=devices.AXIS
        ),
        mesh=mesh,
        in_specs=(whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )
    several = jax.jit(several)(variables, clients, jax.random.key(1))
    chex.assert_trees_all_close(several, one, rtol=1e-4, atol=1e-6)


def test_a_clients_place_does_not_matter():
    model, variables, clients = clients_of()
    order = np.random.default_rng(0).permutation(12)
    moved = jax.tree.map(lambda a: a[order], clients)
    one = compiled(model, variables, clients, jax.random.key(2))
    other = compiled(model, variables, moved, jax.random.key(2))
    np.testing.assert_allclose(other.variance, one.variance[order], 1e-4)
    np.testing.assert_allclose(other.dissimilarity, one.dissimilarity[order], 1e-3)


@pytest.mark.parametrize("convexity", [2.0, 0.5])
def test_estimates_of_clients_whose_constants_are_known(convexity):
    """L, G², σ_i² and, with one curvature, Γ_i and ‖w⁰ − w*‖² of quadratic clients."""
    config = settings(schedule__tau=(1,), schedule__kind="explicit")
    config.quadratic.convexity = convexity
    config.quadratic.grad_variance = "constant(0.5); constant(2)"
    config.quadratic.dissimilarity = "constant(0.3); constant(0.3)"
    prepared = prepare(config)
    known = exact_of(prepared)
    samples, rows = prepared.dataset.x_train, prepared.partition.indices
    N = config.num_clients
    clients = problems.members(
        jnp.arange(N), jnp.ones(N, int), jnp.full(N, 12), jnp.asarray(rows)
    )
    stored = client.Samples(
        jnp.asarray(samples), jnp.zeros(len(samples), int), jnp.zeros(()), jnp.ones(())
    )
    start = prepared.network.model.init(jax.random.key(0), stored.x[:1])
    hparams, B = prepared.hparams, config.batch_size

    def draw(key):
        given = parts(prepared.network.model, B), start, key, clients, stored
        return (
            estimates.client_gradients(*given),
            estimates.estimate_constants(*given, hparams),
        )

    draws = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), DRAWS))
    found, constants = jax.tree.map(np.asarray, draws)
    own, _, square = at_quadratic(known, np.zeros(5))
    apart = ((known.curvature * (known.optima - known.optimum)) ** 2).sum(1)
    for values, truth in (
        (found.variance, known.grad_variance),
        (found.dissimilarity, apart),
        (found.square, square),
    ):
        error = values.std(0) / np.sqrt(DRAWS)
        assert (abs(values.mean(0) - truth) < 4.5 * error).all()
        assert np.median(error) < 0.1 * np.median(truth)
    L = known.smoothness
    assert (constants.smoothness <= L * (1 + 1e-3)).all()
    if convexity == L:  # one curvature: Γ_i and the distance themselves
        np.testing.assert_allclose(apart / L**2, known.dissimilarity)
        distance = square / L**2
        assert distance == pytest.approx(known.distance)
        np.testing.assert_allclose(constants.smoothness, L, rtol=1e-3)
    # `estimate` draws its batches with replacement: their variance is larger.
    larger = (12 - 1) / (12 - B)
    norms = own + (larger - 1) * known.grad_variance
    error = constants.grad_sq_norm.std() / np.sqrt(DRAWS)
    assert abs(constants.grad_sq_norm.mean() - norms.mean()) < 4.5 * error
    error = constants.grad_variance.std() / np.sqrt(DRAWS)
    truth = larger * known.grad_variance.mean()
    assert abs(constants.grad_variance.mean() - truth) < 4.5 * error
