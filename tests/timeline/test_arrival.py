"""Samples that arrive during a run."""

import numpy as np
import pytest

import tsfl_jax
from tests.problems import small
from tests.timeline.test_timeline import fleet_of, simulate
from tsfl_jax.config import Config
from tsfl_jax.prepare import prepare, workload
from tsfl_jax.timeline import FRAMEWORKS, arrival, deliveries
from tsfl_jax.timeline.schedule import complete


def test_sizes_by_hand():
    tau = np.ones((4, 2), np.int32)
    times = complete(tau, np.array([[100, 3]] * 4, np.int32))
    # A fifth at first, and 4/5 evenly over four seconds: tasks begin at 0, 1, 2, 3.
    found = arrival.arriving(times, None, 0.2, 4.0).size
    assert found.tolist() == [[20, 1], [40, 1], [60, 1], [80, 2]]
    assert arrival.arriving(times, None, 1.0, 4.0) is times


def test_a_second_task_of_a_buffer_by_hand():
    """FedBuff's client 0 begins at 0, 1, 2, … from whatever model; client 1 at 0."""
    fleet = fleet_of([1.0, 2.5])
    trace = simulate("fedbuff", fleet, horizon=10.0, iterations=1, buffer=2).trace
    assert trace.client[:2].tolist() == [[0, 0], [1, 0]]
    times = deliveries.schedule_of(trace, np.array([100, 50]))
    # Of 100 samples 20, and 8 more each second; of 50 half of that.
    found = arrival.arriving(times, trace, 0.2, 10.0).size
    assert found[:2].tolist() == [[20, 28], [10, 36]]


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sizes_are_those_of_the_second_when_a_task_begins(framework, size, tmp_path):
    """Also of clients that come online in the middle of a round."""
    path = tmp_path / "windows.csv"
    windows = ["0,0.3,2.5", "0,3.2,50", "1,0.8,4.1", "1,4.7,50", "2,1.9,50"]
    path.write_text("client,start,end\n" + "\n".join(windows) + "\n")
    config = Config(num_intervals=8, num_clients=5)
    config.timeline.framework, config.schedule.arrive_from = framework, 0.1
    config.timeline.availability, config.timeline.speed = str(path), "uniform(0.1,0.4)"
    config.schedule.data_size, config.cohort.size = 60, size
    config.timeline.buffer = 3
    drawn = workload.draw_workload(config)
    starts = {(task.client, task.number): task.start for task in drawn.tasks}
    times, late = drawn.schedule, 0
    for r, k in zip(*np.nonzero(drawn.trace.iterations), strict=True):
        name = int(drawn.trace.client[r, k]), int(drawn.trace.task[r, k])
        column = name[0] if times.client is None else k
        there = 60 * (0.1 + 0.9 * min(starts[name] / 8, 1))
        assert times.size[r, column] == int(there + 1e-9)
        late += starts[name] > 0 and starts[name] not in drawn.trace.time
    assert late or framework in ("fedcs", "tsfl")


def test_a_run_with_few_samples_at_first():
    config = small(num_intervals=8, num_clients=4)
    config.timeline.framework, config.schedule.arrive_from = "tsfl", 0.1
    config.schedule.data_size = 40
    few = prepare.prepare(config)
    times = few.workload.schedule
    assert times.size.min() < 10 and times.size[0].max() <= 8
    # What a client may hold is the same; it does not hold it yet.
    assert (few.partition.capacity == 40).all()
    samples = tsfl_jax.simulate(config).history["samples"]
    np.testing.assert_array_equal(samples, (times.tau * times.size).sum(axis=1))
    config.schedule.arrive_from = 1.0
    indices = prepare.prepare(config).partition.indices
    np.testing.assert_array_equal(few.partition.indices, indices)
