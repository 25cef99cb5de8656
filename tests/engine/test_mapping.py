"""Clients over devices and in groups, and those that are left untrained.

That several devices give the bits of one: `test_same_bits`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import tsfl_jax
from tests import problems
from tests.engine.test_scan import DATA, PROBLEM, SIZE, TAU
from tests.problems import small
from tsfl_jax.engine import client, devices, mapping
from tsfl_jax.engine.program_spec import ProgramSpec
from tsfl_jax.types import UserError


def test_clients_are_assigned_back_and_forth_by_work():
    # In order of work: 2, 0, 3, 1, 4. Device 0 gets 2, 1, 4 and device 1 gets 0, 3.
    slots = devices.assign(np.array([[7, 3, 9, 5, 1]]), 2)
    assert slots.tolist() == [[2, 1, 4, 0, 3, 5]]  # 5 = N marks the empty place


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 8))
def test_each_client_is_assigned_once_and_evenly(work, num_devices):
    work = np.array([work])
    slots = devices.assign(work, num_devices)[0]
    assert sorted(s for s in slots if s < work.size) == list(range(work.size))
    padded = np.append(work[0], 0)
    loads = padded[slots.reshape(num_devices, -1)].sum(axis=1)
    assert loads.max() - loads.min() <= work.max()


def test_numbers_of_64_bits_are_refused():
    with jax.enable_x64(True), pytest.raises(UserError, match="JAX is set to 64 bits"):
        tsfl_jax.simulate(small())


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


@pytest.mark.parametrize("number", [64, 500])
def test_the_sum_is_that_of_float64(number):
    rng = np.random.default_rng(number)
    updates = rng.normal(size=(number, 7)).astype(np.float32)
    rho = rng.uniform(size=number).astype(np.float32) / number
    found, _ = weighted(np.ones(number, int), rho, jnp.asarray(updates))
    wanted = rho.astype(float) @ updates.astype(float)
    scale = rho.astype(float) @ np.abs(updates)
    assert (np.abs(found.moved["w"] - wanted) < 3e-7 * scale).all()


def test_ten_thousand_clients_that_do_not_move_leave_the_model():
    """A running float32 sum of ρ_i w_i is off by 1e-4 and more."""
    rho = np.random.default_rng(0).uniform(0.5, 1.5, 10_000)
    still = jnp.zeros((10_000, 3))
    found, _ = weighted(np.ones(10_000, int), rho / rho.sum(), still)
    assert not found.moved["w"].any()
    np.testing.assert_allclose(found.total_rho, 1, atol=1e-6)


def test_only_clients_that_work_or_count_are_visited():
    tau, rho = np.zeros(100, int), np.zeros(100)
    tau[[3, 50, 99]], rho[[3, 50, 7]] = 1, 0.5
    visited = []
    updates = jnp.ones((100, 2))
    found, results = weighted(tau, rho, updates, visited)
    assert sorted(visited) == [3, 7, 50, 99]
    assert found.moved["w"].tolist() == [1.5, 1.5]
    assert float(results.loss.sum()) == 4 and bool(results.finite.all())


# What says how clients were trained; all else must be the same. (The last bit of the
# entropy, of a sum that XLA orders, is not.)
OF_TRAINING = {"train_loss", "samples", "weight_entropy"}


def test_models_are_the_same_and_only_clients_with_weight_are_trained():
    hp = problems.hparams(smoothness=20.0)  # few clients have weight
    given = "dms", DATA, PROBLEM, problems.inputs(TAU, SIZE)
    runs = [problems.run(*given, hp=hp, train_all=flag) for flag in (True, False)]
    everyone, some = (history.named() for _, _, history in runs)
    for name, value in everyone.items():
        if name == "weight_entropy":
            np.testing.assert_allclose(value, some[name], rtol=1e-6)
        elif name not in OF_TRAINING:
            np.testing.assert_array_equal(value, some[name], err_msg=name)
    chex.assert_trees_all_equal(*(state.params for _, state, _ in runs))
    weighted = everyone["rho"] != 0
    assert 0 < weighted.sum() < (TAU > 0).sum()
    np.testing.assert_array_equal(everyone["samples"], TAU * SIZE)
    np.testing.assert_array_equal(some["samples"], np.where(weighted, TAU * SIZE, 0))
    assert np.isfinite(some["train_loss"]).all()
    # Of one client it is that client's loss, which is not the mean of all.
    assert (some["train_loss"] != everyone["train_loss"]).any()


def test_a_client_whose_weight_underflowed_is_trained_for_its_share():
    # Its share goes to the others only if its model is lost, which has to be known.
    clients = problems.members(
        jnp.arange(3), jnp.array([2, 1, 3]), jnp.full(3, 8), PROBLEM.rows[:3]
    )
    spec = ProgramSpec(batch_size=4, passes=3, train_all=False)
    rho, shares = jnp.array([0.0, 1.0, 0.0]), jnp.array([0.5, 0.5, 0.0])
    assign = jax.jit(lambda *args: mapping.device_clients(spec, clients, *args))
    on_device = assign(jnp.arange(3), rho, shares)
    # In order of work, 2·2 steps of client 0, 1·2 of client 1 and none of client 2.
    assert on_device.place.tolist() == [0, 1, 2]
    assert on_device.clients.tau.tolist() == [2, 1, 0]
    assert on_device.work.tolist() == [4, 2, 0]
    assert on_device.skipped.tolist() == [False, False, True]


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(1, 4))
def test_clients_are_assigned_inside_a_program_as_before_it(work, number):
    places = -(-len(work) // number)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:number]), (devices.AXIS,))
    assigned = jax.shard_map(
        lambda work: devices.assign_again(work, places, devices.AXIS),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(devices.AXIS),
    )
    before = devices.assign(np.array([work]), number)[0]
    np.testing.assert_array_equal(jax.jit(assigned)(jnp.array(work)), before)
