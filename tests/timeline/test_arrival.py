"""Samples that arrive during a run."""

import numpy as np
import pytest

import tsfl_jax
from tests.experiment.test_runner import small
from tsfl_jax.experiment import prepare
from tsfl_jax.timeline import arrival
from tsfl_jax.types import Delivery, Schedule


def test_sizes_by_hand():
    tau = np.ones((4, 2), np.int32)
    times = Schedule(tau, np.array([[100, 3]] * 4, np.int32), np.arange(1.0, 5))
    # A fifth at first, and 4/5 evenly over four seconds: tasks begin at 0, 1, 2, 3.
    found = arrival.arriving(times, 0.2, 4.0).size
    assert found.tolist() == [[20, 1], [40, 1], [60, 1], [80, 2]]
    # A task of an earlier version began earlier.
    lag = np.array([[0, 0], [0, 1], [2, 0], [0, 3]], np.int32)
    late = times._replace(delivery=Delivery(lag, lag, lag, lag[:, 0], lag[:, 0]))
    found = arrival.arriving(late, 0.2, 4.0).size
    assert found[:, 0].tolist() == [20, 40, 20, 80]
    assert found[:, 1].tolist() == [1, 1, 1, 1]
    assert arrival.arriving(times, 1.0, 4.0) is times


@pytest.mark.parametrize("framework", ["none", "tsfl", "afl"])
def test_a_run_with_few_samples_at_first(framework):
    config = small(num_intervals=8, num_clients=4)
    config.timeline.framework, config.schedule.arrive_from = framework, 0.1
    config.schedule.data_size = 40
    found = prepare.prepare(config)
    size = found.workload.schedule.size
    assert size.min() < 10 and size[0].max() <= 8
    assert (found.partition.capacity == 40).all() or framework == "none"
    whole = small(num_intervals=8, num_clients=4)
    whole.timeline.framework, whole.schedule.data_size = framework, 40
    # What a client may hold is the same; it does not hold it yet.
    np.testing.assert_array_equal(
        found.partition.indices, prepare.prepare(whole).partition.indices
    )
    samples = [tsfl_jax.simulate(c).history["samples"].sum() for c in (config, whole)]
    assert 0 < samples[0] < samples[1]


def test_the_last_interval_has_almost_all():
    config = small(num_intervals=20, num_clients=4)
    config.schedule.arrive_from = 0.5
    size = prepare.prepare(config).workload.schedule.size
    most = prepare.prepare(small(num_intervals=20, num_clients=4)).workload.schedule
    assert (size[-1] >= 0.95 * most.size[-1] - 1).all()
    assert (size[0] <= 0.5 * most.size[0]).all()
