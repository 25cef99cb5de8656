"""Clients that are added up in groups, and those that are not visited."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsfl_jax
from tests import problems
from tests.experiment.test_runner import small
from tsfl_jax.engine import client, devices, interval, mapping
from tsfl_jax.engine.program_spec import ProgramSpec
from tsfl_jax.experiment import lanes, prepare


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 8))
def test_a_group_is_on_one_device_whole_and_does_not_depend_on_their_number(
    number, present, num_devices
):
    work = np.zeros((1, number), int)
    work[0, :present] = 5
    present = min(present, number)
    size = int(devices.group_size(present))
    assert size == 1 if present <= 64 else present / size >= 32
    slots = devices.assign(work, num_devices)[0].reshape(num_devices, -1)
    assert sorted(s for s in slots.flat if s < number) == list(range(number))
    for own in slots:
        for place in range(0, len(own), size):
            (group,) = np.unique(own[place : place + size] // size)[:1]
            real = [s for s in own[place : place + size] if s < number]
            wanted = range(group * size, min((group + 1) * size, number))
            assert not real or real == list(wanted)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_side_by_side_no_entry_is_empty_but_to_fill_up(num_devices):
    """One entry more than a block has room for would be trained as another block."""
    for number in (64, 65, 100, 1000):
        slots = devices.assign(np.ones((1, number), int), num_devices, grouped=False)
        assert slots.shape[1] == num_devices * -(-number // num_devices)
    assert devices.assign(np.ones((1, 1000), int), 1).shape == (1, 1000)


def test_a_hundred_clients_side_by_side_are_one_block():
    config = small(num_clients=100, num_intervals=1, batch_size=2, mapping="vmap")
    config.devices, config.schedule.data_size = 1, 4
    spec = ProgramSpec(batch_size=2, passes=1, mapping="vmap", block=100, longest=4)
    _, arrays = lanes.single(prepare.prepare(config), devices.make_mesh(1, 100))
    *_, problem, inputs = lanes.arguments_of_run(arrays, 1)
    inputs = jax.tree.map(lambda a: a[0], inputs)
    clients = interval.participants(problem, inputs)
    on_device = mapping.device_clients(
        spec, clients, inputs.assigned, jnp.ones(100) / 100
    )
    assert mapping._in_blocks(len(on_device.place), spec.block).shape == (1, 100)


def weighted(tau, rho, updates, visited=None):
    """Σ ρ_i u_i of clients one after another, on one device."""
    number = len(tau)
    ids, one = jnp.arange(number), jnp.ones(number, jnp.int32)
    clients = problems.members(ids, jnp.asarray(tau), one, one[:, None])
    start = {"w": jnp.zeros(updates.shape[1])}

    def train(c, limit):
        del limit
        if visited is not None:
            jax.debug.callback(lambda i: visited.append(int(i)), c.id)
        result = client.LocalResult(jnp.float32(1), jnp.int32(1), jnp.bool_(True))
        return mapping.Trained({"w": updates[c.id]}, result)

    spec = ProgramSpec(batch_size=1, passes=1)
    assigned = jnp.asarray(devices.assign(np.array([tau]), 1)[0])

    @jax.jit
    def run(rho):
        on_device = mapping.device_clients(spec, clients, assigned, rho)
        return mapping.weighted_updates(train, on_device, start, spec)

    found = run(jnp.asarray(rho, jnp.float32))
    jax.effects_barrier()
    return found


@pytest.mark.parametrize("number", [3, 64, 65, 500])
def test_the_sum_is_that_of_float64(number):
    rng = np.random.default_rng(number)
    updates = rng.normal(size=(number, 7)).astype(np.float32)
    rho = rng.uniform(size=number).astype(np.float32) / number
    found, _ = weighted(np.ones(number, int), rho, jnp.asarray(updates))
    wanted = rho.astype(float) @ updates.astype(float)
    scale = rho.astype(float) @ np.abs(updates)
    assert (np.abs(found.moved["w"] - wanted) < 3e-7 * scale).all()


def test_only_clients_that_work_or_count_are_visited():
    tau, rho = np.zeros(100, int), np.zeros(100)
    tau[[3, 50, 99]], rho[[3, 50, 7]] = 1, 0.5
    visited = []
    updates = jnp.ones((100, 2))
    found, results = weighted(tau, rho, updates, visited)
    assert sorted(visited) == [3, 7, 50, 99]
    assert found.moved["w"].tolist() == [1.5, 1.5]
    assert float(results.loss.sum()) == 4 and bool(results.finite.all())


@pytest.mark.parametrize(
    "train_all", [pytest.param(t, marks=pytest.mark.slow) for t in (True, False)]
)
def test_many_clients_have_the_same_bits_on_any_number_of_devices(train_all):
    def simulate(count):
        config = small(num_clients=150, num_intervals=2, batch_size=2, devices=count)
        config.train_all, config.schedule.data_size = train_all, 4
        config.dms.coupling = 0.05
        return tsfl_jax.simulate(config)

    one, several = simulate(1), simulate(2)
    assert several.summary["num_devices"] == 2
    chex.assert_trees_all_equal(one.params, several.params)
