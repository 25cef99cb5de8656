"""Clients over several devices: the dealing out, and the same results."""

import os
import types

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsfl_jax
from tests import problems
from tests.experiment.test_runner import small
from tsfl_jax.engine import devices
from tsfl_jax.experiment import backend, identity, prepare, runner
from tsfl_jax.rules import AGGREGATORS
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


@pytest.mark.parametrize(
    ("count", "algorithm"),
    [
        (2, "dms"),
        pytest.param(4, "fedprox", marks=pytest.mark.slow),
        pytest.param(2, "fedasync", marks=pytest.mark.slow),
        pytest.param(2, "fedprox", marks=pytest.mark.slow),
        pytest.param(4, "dms", marks=pytest.mark.slow),
        pytest.param(4, "fedasync", marks=pytest.mark.slow),
    ],
)
def test_several_devices_give_the_bits_of_one(algorithm, count):
    # Five clients over 2 and over 4 devices: neither divides.
    changes = {"num_clients": 5, "algorithm": algorithm, "momentum": 0.5}
    one = tsfl_jax.simulate(small(**changes, devices=1))
    many = tsfl_jax.simulate(small(**changes, devices=count))
    assert (one.summary["num_devices"], many.summary["num_devices"]) == (1, count)
    for name, value in one.history.items():
        np.testing.assert_array_equal(many.history[name], value, err_msg=name)
    chex.assert_trees_all_equal(many.params, one.params)


@pytest.mark.slow
def test_spoiled_clients_are_counted_over_all_devices():
    data = problems.dataset(samples=400)
    settings = small(algorithm="fedavg", devices=2, lr=1e30)
    result = tsfl_jax.simulate(settings, dataset=data)
    assert result.summary["num_discarded"] == 4
    assert result.summary["diverged_at"] == 1


def test_devices_wait_for_each_other_unless_set_otherwise(monkeypatch):
    stuck, end = (
        f"--xla_cpu_collective_call_{name}_timeout_seconds"
        for name in ("warn_stuck", "terminate")
    )
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {end}=9")
    devices.start(0)
    devices.start(0)
    assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=x {end}=9 {stuck}=604800"


def test_the_number_of_devices_in_xla_s_flags_is_kept(monkeypatch):
    asked = []
    config = types.SimpleNamespace(
        jax_num_cpu_devices=-1, update=lambda *given: asked.append(given)
    )
    monkeypatch.setattr(devices, "jax", types.SimpleNamespace(config=config))
    for flags, updates in (("--xla_force_host_platform_device_count=3", 0), ("", 1)):
        asked.clear()
        monkeypatch.setenv("XLA_FLAGS", flags)
        devices.start(0)
        assert len(asked) == updates


def test_numbers_of_64_bits_are_refused():
    with jax.enable_x64(True), pytest.raises(UserError, match="JAX is set to 64 bits"):
        tsfl_jax.simulate(small())


def test_more_devices_than_there_are():
    with pytest.raises(UserError, match="--config.devices=99"):
        tsfl_jax.simulate(small(devices=99))


def test_far_too_many_devices_are_refused_before_jax_starts_them():
    with pytest.raises(UserError, match="--config.devices=100000: expected at most"):
        devices.start(100000)


def test_never_more_devices_than_clients():
    assert backend.start_jax(small(num_clients=2, devices=4)).size == 2


GRADIENTS = tsfl_jax.rule(lambda info: info.size, uses_gradients=True)


@pytest.mark.parametrize(
    ("changes", "aggregator", "expected"),
    [
        ({"algorithm": "dms"}, None, False),
        ({"algorithm": "fedavg", "mapping": "vmap"}, None, True),
        ({"algorithm": "bound_optimal"}, None, True),
        ({"algorithm": "fedavg"}, GRADIENTS, True),
        ({"algorithm": "bound_optimal"}, AGGREGATORS["fedavg"], False),
    ],
)
def test_whose_last_bits_depend_on_the_number_of_devices(changes, aggregator, expected):
    prepared = prepare.prepare(small(**changes), aggregator=aggregator)
    assert identity.depends_on_devices(prepared) is expected


@pytest.mark.slow
def test_no_operation_is_split_over_a_pool_of_threads():
    """Clients use all cores already."""
    config = tsfl_jax.Config(algorithm="fedavg", num_intervals=2, num_clients=2)
    config.model.hidden, config.schedule.data_size = 1500, 64
    made = runner.build(config)
    arguments = made.program.arguments(made.arrays, made.arrays.start, 0)
    lowered = made.program.lower(*arguments)
    options = devices.compiler_options(made.program.mesh)
    split = '"outer_dimension_partitions":["'
    assert split in lowered.compile().as_text()
    assert split not in lowered.compile(options).as_text()
