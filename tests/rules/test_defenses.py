"""Centered clipping and FLTrust by hand, and the server's training against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.uplink.test_attacks import NUM, PARTS_OF_RUN, TAU, descended, regression
from tsfl_jax.prepare import prepare
from tsfl_jax.rules import AGGREGATORS, centered_clipping, fltrust
from tsfl_jax.types import UserError

# Distances 5, 1 and 13 from the origin; the fourth is not there.
U = {"w": jnp.array([[3.0, 4.0], [1.0, 0.0], [-5.0, -12.0], [jnp.nan, 9.0]])}
PRESENT = jnp.array([True, True, True, False])
ZERO = {"w": jnp.zeros(2)}


def test_clipped_mean_by_hand():
    def mean(*numbers, present=PRESENT):
        updates = {"w": jnp.where(PRESENT[:, None], U["w"], 0.0)}
        return centered_clipping.clipped_mean(updates, present, ZERO, *numbers)["w"]

    # τ = 2: (6, 8)/5, (1, 0) and (−10, −24)/13, a third of their sum.
    once = np.array([1.2 + 1 - 10 / 13, 1.6 - 24 / 13]) / 3
    np.testing.assert_allclose(mean(2.0), once, rtol=1e-6)
    np.testing.assert_allclose(mean(0.0), mean(5.0))  # the median distance
    np.testing.assert_allclose(mean(100.0), [-1 / 3, -8 / 3], rtol=1e-6)  # the mean
    np.testing.assert_array_equal(mean(2.0, present=jnp.zeros(4, bool)), [0, 0])
    shifted = np.asarray(U["w"])[:3] - once
    length = np.linalg.norm(shifted, axis=1, keepdims=True)
    twice = once + (shifted * np.minimum(1, 2 / length)).mean(axis=0)
    np.testing.assert_allclose(mean(2.0, 2), twice, rtol=1e-5)


def test_the_center_is_kept():
    """The second update is clipped around the first one."""
    rule, updates = AGGREGATORS["centered_clipping"], {"w": U["w"][1:2]}
    hparams = problems.hparams(centered_clipping__radius=0.25)
    params, state = ZERO, tsfl_jax.init_rule(rule, ZERO, num_clients=1)
    for expected in (0.25, 0.75, 1.5):  # v = 0.25, 0.5, 0.75
        options = {"hparams": hparams}
        params, state = tsfl_jax.aggregate(rule, updates, params, state, **options)
        np.testing.assert_allclose(params["w"], [expected, 0])


def test_trust_by_hand():
    """u_0 = (0, 2): cosines 0.8, 0 and −12/13."""
    server = {"w": jnp.array([0.0, 2.0])}
    trust_weights = jax.jit(fltrust.trust_weights)
    rho = trust_weights({"w": U["w"][:3]}, server, PRESENT[:3])
    np.testing.assert_allclose(rho, [2 / 5, 0, 0], rtol=1e-6)
    two = {"w": jnp.array([[0.0, 4.0], [3.0, 3.0], [0.0, 0.0]])}
    rho = trust_weights(two, server, PRESENT[:3])
    root, total = np.sqrt(0.5), 1 + np.sqrt(0.5)
    expected = [2 / 4 / total, root * 2 / np.sqrt(18) / total, 0]
    np.testing.assert_allclose(rho, expected, rtol=1e-6)
    nothing = trust_weights(two, {"w": -server["w"]}, PRESENT[:3])
    np.testing.assert_array_equal(nothing, [0, 0, 0])
    rule = AGGREGATORS["fltrust"]
    new, _ = tsfl_jax.aggregate(rule, two, ZERO, server_update=server)
    np.testing.assert_allclose(new["w"], rho @ np.asarray(two["w"]), rtol=1e-6)
    with pytest.raises(UserError, match="expected server_update="):
        tsfl_jax.aggregate(rule, two, ZERO)


def test_the_server_trains_as_numpy_does():
    """On the validation samples, as many full batches as the median client, two."""
    options = {"data.validation": 8, "attack.share": 0.0, "num_intervals": 3}
    options |= {"schedule.data_size": 10}
    config = regression(algorithm="fltrust", **options)
    parts = PARTS_OF_RUN | {"partition": None}
    rows = prepare.prepare(config, **parts).partition.indices
    held_out = prepare.prepare(config, **parts).held_out
    result = tsfl_jax.simulate(config, **parts)
    w = np.zeros(6)
    for _ in range(3):
        u = np.stack([descended(w, rows[i], TAU[i]) for i in range(NUM)])
        server = descended(w, held_out, int(np.median(TAU)))
        length = np.linalg.norm(u, axis=1)
        trust = np.maximum(u @ server / length / np.linalg.norm(server), 0)
        w = w + (trust * np.linalg.norm(server) / length) @ u / trust.sum()
    kernel = result.params["params"]["kernel"][:, 0]
    np.testing.assert_allclose(kernel, w, rtol=1e-4, atol=1e-5)
