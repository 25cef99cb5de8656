"""Exact sums: the same bits in any order, and few digits lost."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tests import problems
from tests.engine.test_scan import DATA, PROBLEM
from tests.engine.test_scan import INPUTS as LIMITS
from tsfl_jax.engine import devices, exact_sums


def terms(spread, number=300):
    """``[number, 7]`` float32 over 2·spread powers of ten."""
    rng = np.random.default_rng(spread)
    powers = rng.uniform(-spread, spread, (number, 7))
    return (rng.normal(size=(number, 7)) * 10**powers).astype(np.float32)


@jax.jit
def one_by_one(x):
    def step(total, term):
        return exact_sums.add_all(total, term[None]), None

    return exact_sums.value(lax.scan(step, exact_sums.zeros((7,)), x)[0])


@jax.jit
def at_once(x):
    return exact_sums.value(exact_sums.add_all(exact_sums.zeros((7,)), x))


@jax.jit
def on_two_devices(x):
    def part(x):
        total = exact_sums.add_all(exact_sums.zeros((7,)), x)
        return exact_sums.value(exact_sums.over_devices(total, devices.AXIS))

    specs = PartitionSpec(devices.AXIS), PartitionSpec()
    mesh = devices.make_mesh(2, 2)
    return jax.shard_map(part, mesh=mesh, in_specs=specs[0], out_specs=specs[1])(x)


@pytest.mark.parametrize("spread", [0, 5, 30])
def test_order_grouping_and_devices_do_not_matter(spread):
    x = terms(spread)
    first = np.asarray(one_by_one(x))
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(x)
        for way in (one_by_one, at_once, on_two_devices):
            np.testing.assert_array_equal(way(shuffled), first)
    # A plain float32 sum does depend on the order.
    assert (x.cumsum(0)[-1] != x[::-1].cumsum(0)[-1]).any()
    want = np.array([math.fsum(column) for column in x.T.astype(np.float64)])
    limit = len(x) * 2.0**-25 * np.abs(x).max(axis=0) + 2.0**-23 * np.abs(want)
    assert (np.abs(first - want) <= limit).all()


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([1.0, 2.0**-20, -1.0], 2.0**-20),
        ([3e38, 1.0, -3e38], 1.0 * 0),  # far below the largest term: dropped
        ([1e-37, 1e-37], 2e-37),
        ([-0.0, 0.0], 0.0),
        ([np.inf, 1.0], np.inf),
        ([np.inf, -np.inf], np.nan),
        ([np.nan, 1.0], np.nan),
    ],
)
def test_scalars_by_hand(values, total):
    got = exact_sums.scalar(jnp.array(values, jnp.float32), None)
    np.testing.assert_allclose(got, total, rtol=0.1)


INPUTS = problems.inputs([[2, 0, 1, 3, 1]] * 3, [[12, 12, 7, 9, 12]] * 3)


def test_the_order_of_the_clients_does_not_change_a_bit():
    order = np.array([3, 0, 4, 1, 2])
    shuffled = PROBLEM._replace(rows=PROBLEM.rows[order], client=PROBLEM.client[order])
    inputs = INPUTS._replace(tau=INPUTS.tau[:, order], size=INPUTS.size[:, order])
    _, first, history = problems.run("fedavg", DATA, PROBLEM, INPUTS, limits=LIMITS)
    _, second, other = problems.run("fedavg", DATA, shuffled, inputs, limits=LIMITS)
    chex.assert_trees_all_equal(first.params, second.params)
    np.testing.assert_array_equal(history.train_loss, other.train_loss)
    np.testing.assert_array_equal(history.test_loss, other.test_loss)


def test_matrices_are_added_as_vectors_are():
    """Many terms of more than one axis take a loop of their own."""
    x = np.concatenate([terms(30, 40), -terms(5, 40), np.zeros((2, 7), np.float32)])
    x[3, 2], x[4, 3] = 3e38, 1e-40

    @jax.jit
    def matrices(x):
        total = exact_sums.add_all(exact_sums.zeros((7, 2)), jnp.stack([x, x / 2], 2))
        return exact_sums.value(exact_sums.add_all(total, jnp.stack([x, x / 2], 2)))

    whole, half = (np.asarray(one_by_one(np.concatenate([a, a]))) for a in (x, x / 2))
    np.testing.assert_array_equal(matrices(x), np.stack([whole, half], 1))
