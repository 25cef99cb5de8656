"""Samples that arrive during a run."""

import numpy as np
import pytest

import tsfl_jax
from tests.problems import small
from tests.timeline.test_timeline import fleet_of, simulate
from tsfl_jax.config import Config
from tsfl_jax.experiment import prepare, workload
from tsfl_jax.timeline import FRAMEWORKS, arrival, replay
from tsfl_jax.types import Schedule


def test_sizes_by_hand():
    tau = np.ones((4, 2), np.int32)
    times = Schedule(tau, np.array([[100, 3]] * 4, np.int32), np.arange(1.0, 5))
    # A fifth at first, and 4/5 evenly over four seconds: tasks begin at 0, 1, 2, 3.
    found = arrival.arriving(times, None, 0.2, 4.0).size
    assert found.tolist() == [[20, 1], [40, 1], [60, 1], [80, 2]]
    assert arrival.arriving(times, None, 1.0, 4.0) is times


def test_a_second_task_of_a_buffer_by_hand():
    """FedBuff's client 0 begins at 0, 1, 2, … from whatever model; client 1 at 0."""
    fleet = fleet_of([1.0, 2.5])
    trace = simulate("fedbuff", fleet, horizon=10.0, iterations=1, buffer=2).trace
    assert trace.client[:2].tolist() == [[0, 0], [1, 0]]
    times = replay.schedule_of(trace, np.array([100, 50]))
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
