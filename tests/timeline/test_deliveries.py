"""Timelines as arrays, and the program that replays them against a slow reference."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsfl_jax
from tests import problems, reference
from tests.engine.test_scan import DATA, PROBLEM, SIZE, TAU, as_reference
from tests.timeline.test_timeline import fleet_of, run
from tsfl_jax import config
from tsfl_jax.prepare import workload
from tsfl_jax.report import files as report
from tsfl_jax.timeline import FRAMEWORKS, deliveries
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import Delivery

SIZES = np.array([10, 12, 7, 9, 8])


def trace_of(client, version, iterations=None, task=None, time=None, group=None):
    """A trace by hand; 1 iteration where not said otherwise."""
    client, version = np.array(client, np.int32), np.array(version, np.int32)
    updates = len(client)
    zeros = np.zeros(client.shape, np.int32)
    iterations = (client >= 0).astype(int) if iterations is None else iterations
    seconds = np.arange(1.0, updates + 1) if time is None else time
    nothing = np.full(client.shape, np.nan)
    return Trace(
        time=np.array(seconds, np.float64),
        client=client,
        version=version,
        iterations=np.array(iterations, np.int32),
        task=zeros if task is None else np.array(task, np.int32),
        start=nothing,
        arrival=nothing,
        group=np.array([0] * updates if group is None else group, np.int32),
    )


# ---- Arrays by hand ----


def test_all_from_the_newest_model_is_dense():
    trace = trace_of([[0, 2], [1, -1]], [[0, 0], [1, 0]], [[3, 4], [2, 0]])
    schedule = deliveries.schedule_of(trace, np.array([5, 6, 7]))
    assert schedule.snapshots == 0
    assert schedule.tau.tolist() == [[3, 0, 4], [0, 2, 0]]
    assert schedule.size.tolist() == [[5, 6, 7], [5, 6, 7]]
    assert schedule.seconds.tolist() == [1, 2]
    assert schedule.tau.dtype == schedule.size.dtype == np.int32


def test_afl_of_three_clients():
    # Version 0 is used until update 4, 1 until update 1, 2 from update 1 to 3; no task
    # starts from 3, 4 or 5. Update 1 reads 1 before 2 replaces the same snapshot.
    trace = trace_of(
        client=[[0], [0], [1], [0], [2]],
        version=[[0], [1], [0], [2], [0]],
        iterations=[[4], [4], [4], [4], [4]],
        task=[[0], [1], [0], [2], [0]],
    )
    schedule = deliveries.schedule_of(trace, np.array([5, 6, 7]))
    assert schedule.snapshots == 2
    d = schedule.delivery
    assert schedule.client.tolist() == [[0], [0], [1], [0], [2]]
    assert d.task.tolist() == [[0], [1], [0], [2], [0]]
    assert d.snapshot.tolist() == [[0], [1], [0], [1], [0]]
    assert d.lag.tolist() == [[0], [0], [2], [1], [4]]
    assert d.keep.tolist() == [1, 1, 2, 2, 2]  # 2 = P: nowhere
    assert d.group.tolist() == [0] * 5
    assert schedule.tau.tolist() == [[4]] * 5
    assert schedule.size.tolist() == [[5], [5], [6], [5], [7]]


def test_the_same_client_twice_and_padding():
    # All from the newest model in update 0, but client 0 twice.
    trace = trace_of(
        client=[[0, 0, -1], [1, 0, 2]],
        version=[[0, 0, 0], [0, 1, 1]],
        iterations=[[2, 3, 0], [4, 5, 0]],
        task=[[0, 1, 0], [7, 2, 9]],
    )
    for rows in (1, 2):
        part = trace._replace(
            **{n: getattr(trace, n)[:rows] for n in Trace._fields if n != "time"},
            time=trace.time[:rows],
        )
        schedule = deliveries.schedule_of(part, np.array([5, 6, 7]))
        assert schedule.snapshots > 0
    d = schedule.delivery
    assert schedule.client.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert d.task.tolist() == [[0, 1, 0], [7, 2, 0]]
    assert d.snapshot.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert d.lag.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert d.keep.tolist() == [1, 2]
    assert schedule.tau.tolist() == [[2, 3, 0], [4, 5, 0]]
    assert schedule.size.tolist() == [[5, 5, 1], [6, 5, 1]]


def test_evaluated_by_hand():
    seconds = np.array([0.5, 1.0, 1.2, 1.9, 2.0, 2.0, 3.5])
    # 1.0 ends the first second, the second 2.0 the second one, 3.5 is the last.
    assert np.flatnonzero(deliveries.evaluated(seconds, 1.0)).tolist() == [1, 5, 6]
    assert np.flatnonzero(deliveries.evaluated(seconds, 2.0)).tolist() == [5, 6]
    assert np.flatnonzero(deliveries.evaluated(seconds, 9.0)).tolist() == [6]
    # A multiple that is a rounding error late.
    late = np.array([0.1, 0.2, 0.1 + 0.1 + 0.1, 0.35])
    assert late[2] > 0.3 and deliveries.evaluated(late, 0.1).all()


def test_who_ever_works():
    trace = trace_of([[0, 3, 3], [2, 1, -1]], [[0, 0, 0], [0, 1, 0]])
    schedule = deliveries.schedule_of(trace, np.array([5, 6, 7, 8, 9]))
    assert deliveries.drawn(schedule).tolist() == [0, 1, 2, 3]
    # A client that did nothing, but says that it did, has its weight, too.
    idle = schedule.tau * (schedule.client != 2)
    assert deliveries.drawn(schedule._replace(tau=idle)).tolist() == [0, 1, 3]
    lazy = schedule._replace(tau=idle, reported=schedule.tau)
    assert deliveries.drawn(lazy).tolist() == [0, 1, 2, 3]


@st.composite
def traces(draw):
    """Up to 12 updates of up to 4 deliveries from any earlier version."""
    updates, width = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    recent = draw(st.integers(0, 12))
    shape = updates, width
    low = np.maximum(np.arange(updates) - recent, 0)[:, None]
    version = rng.integers(low, np.arange(updates)[:, None] + 1, shape)
    client = rng.integers(-1, 5, shape)
    iterations = rng.integers(0, 4, shape)
    task = rng.integers(0, 99, shape)
    return trace_of(client, version, iterations, task)


@settings(deadline=None, max_examples=60)
@given(traces())
def test_every_delivery_reads_its_version_from_the_smallest_pool(trace):
    schedule = deliveries.schedule_of(trace, SIZES)
    real = (trace.client >= 0) & (trace.iterations > 0)
    work = np.zeros((len(real), 5), int)
    for r, k in zip(*np.nonzero(real), strict=True):
        work[r, trace.client[r, k]] += trace.iterations[r, k]
    found = schedule.tau
    if not schedule.in_order:
        found = np.zeros_like(work)
        row = np.arange(len(work))[:, None]
        np.add.at(found, (row, schedule.client), schedule.tau)
    np.testing.assert_array_equal(found, work)
    if not schedule.snapshots:
        assert (trace.version == np.arange(len(real))[:, None])[real].all()
        return
    d, pool, needed = schedule.delivery, [0] * schedule.snapshots, []
    for r in range(len(real)):
        for k in np.flatnonzero(real[r]):
            assert pool[d.snapshot[r, k]] == trace.version[r, k]
            assert d.lag[r, k] == r - trace.version[r, k]
            assert schedule.client[r, k] == trace.client[r, k]
            assert d.task[r, k] == trace.task[r, k]
        assert (schedule.tau[r][~real[r]] == 0).all()
        if d.keep[r] < schedule.snapshots:
            pool[d.keep[r]] = r + 1
        # Versions there are when update r reads, and that it or a later one reads.
        later = set(trace.version[r:][real[r:]].tolist())
        needed.append(len([v for v in later if v <= r]))
    assert schedule.snapshots == max(needed)


# ---- Samples that arrive during a run ----


def test_sizes_by_hand():
    tau = np.ones((4, 2), np.int32)
    times = complete(tau, np.array([[100, 3]] * 4, np.int32))
    # A fifth at first, and 4/5 evenly over four seconds: tasks begin at 0, 1, 2, 3.
    found = deliveries.arriving(times, None, 0.2, 4.0).size
    assert found.tolist() == [[20, 1], [40, 1], [60, 1], [80, 2]]
    assert deliveries.arriving(times, None, 1.0, 4.0) is times


def test_a_second_task_of_a_buffer_by_hand():
    """FedBuff's client 0 begins at 0, 1, 2, … from whatever model; client 1 at 0."""
    fleet = fleet_of([1.0, 2.5])
    trace = run("fedbuff", fleet, horizon=10.0, buffer=2)
    assert trace.client[:2].tolist() == [[0, 0], [1, 0]]
    times = deliveries.schedule_of(trace, np.array([100, 50]))
    # Of 100 samples 20, and 8 more each second; of 50 half of that.
    found = deliveries.arriving(times, trace, 0.2, 10.0).size
    assert found[:2].tolist() == [[20, 28], [10, 36]]


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sizes_are_those_of_the_second_when_a_task_begins(framework, size, tmp_path):
    """Also of clients that come online in the middle of a round."""
    path = tmp_path / "windows.csv"
    windows = ["0,0.3,2.5", "0,3.2,50", "1,0.8,4.1", "1,4.7,50", "2,1.9,50"]
    path.write_text("client,start,end\n" + "\n".join(windows) + "\n")
    settings = {"num_intervals": 8, "num_clients": 5, "cohort.size": size}
    settings |= {"schedule.arrive_from": 0.1, "schedule.data_size": 60}
    settings |= {"timeline.framework": framework, "timeline.buffer": 3}
    settings |= {"timeline.availability": str(path)}
    settings |= {"timeline.speed": "uniform(0.1,0.4)"}
    drawn = workload.draw_workload(config.replace(config.Config(), settings))
    starts = {(task.client, task.number): task.start for task in drawn.tasks}
    times, late = drawn.schedule, 0
    for r, k in zip(*np.nonzero(drawn.trace.iterations), strict=True):
        name = int(drawn.trace.client[r, k]), int(drawn.trace.task[r, k])
        column = name[0] if times.in_order else k
        there = 60 * (0.1 + 0.9 * min(starts[name] / 8, 1))
        assert times.size[r, column] == int(there + 1e-9)
        late += starts[name] > 0 and starts[name] not in drawn.trace.time
    assert late or framework in ("fedcs", "tsfl")


# ---- The engine ----


def in_form_of_deliveries(schedule):
    """The same schedule as if a snapshot were kept for all clients."""
    updates, clients = schedule.tau.shape
    zeros = np.zeros((updates, clients), np.int32)
    task = zeros + np.arange(updates, dtype=np.int32)[:, None]
    none = np.zeros(updates, np.int32)
    delivery = Delivery(task=task, snapshot=zeros, lag=zeros, keep=none, group=none)
    client = zeros + np.arange(clients, dtype=np.int32)
    return schedule._replace(client=client, delivery=delivery, snapshots=1)


@pytest.mark.slow
def test_intervals_as_deliveries_have_the_same_bits():
    hp = problems.hparams(momentum=0.9, mu=0.1, lr=0.03)
    dense = complete(TAU.astype(np.int32), SIZE.astype(np.int32))
    options = {"hp": hp, "mapping": "vmap", "block": 5}
    _, plain, history = problems.replayed("fedavg", PROBLEM, dense, **options)
    as_deliveries = in_form_of_deliveries(dense)
    _, pooled, other = problems.replayed("fedavg", PROBLEM, as_deliveries, **options)
    chex.assert_trees_all_equal(history, other)
    chex.assert_trees_all_equal(plain.params, pooled.params)
    first = jax.tree.map(lambda a: a[0], pooled.snapshots)
    chex.assert_trees_all_equal(first, pooled.params)


SPEEDS = fleet_of([0.3, 1.0, 1.3, 2.0, 3.1], [0.1, 0.2, 0.1, 0.3, 0.2])
STALE = {"staleness__kind": 1, "staleness__a": 0.5, "gamma": 0.5}
SAFA = {"horizon": 9.0, "fraction": 0.5, "lag": 3}
CASES = {  # name: settings of the framework, which is its first word; rule, numbers
    "afl": ({"horizon": 8.0}, "fedasync", STALE),
    "fedbuff": (
        {"horizon": 6.0, "buffer": 3},
        "fedbuff",
        {"server__lr": 0.7, "momentum": 0.9},
    ),
    # Client 0 is in a buffer three times.
    "fedbuff scaffold": (
        {"horizon": 9.0, "buffer": 4},
        "scaffold",
        {"momentum": 0.5, "mu": 0.2},
    ),
    "fedbuff feddyn": ({"horizon": 9.0, "buffer": 4}, "feddyn", {"mu": 0.2}),
    "fedbuff ca2fl": ({"horizon": 9.0, "buffer": 4}, "ca2fl", {"server__lr": 0.7}),
    "fedbuff fadas": (
        {"horizon": 9.0, "buffer": 3},
        "fadas",
        {"fadas__delay": 2.0, "fedopt__lr": 0.05, "fedopt__floor": 0.01},
    ),
    "fedat": ({"horizon": 12.0, "tiers": 3}, "fedat", {}),
    "safa": (SAFA, "fedavg", {"staleness__kind": 3}),
}
SLOW = {"fedbuff scaffold", "safa", "fedbuff feddyn", "fedbuff fadas"}


@functools.cache
def case(name):
    """A case's trace, schedule and reference."""
    options, algorithm, changes = CASES[name]
    simulate = FRAMEWORKS[name.split()[0]].simulate
    trace = simulate(SPEEDS, iterations=2, **options).trace
    hp, groups = problems.hparams(**changes), options.get("tiers", 1)
    schedule = deliveries.schedule_of(trace, SIZES)
    start, state, history = problems.replayed(
        algorithm, PROBLEM, schedule, hp=hp, groups=groups, sizes=SIZES.tolist()
    )
    return trace, schedule, hp, start, state, history


def reference_of(start, name, hp, trace, unit="step", groups=1):
    """Every version of the global model, by the plain float64 reference."""
    return reference.replay(
        as_reference(start.params),
        (DATA.x_train.astype(np.float64) - 0.3) / 1.7,
        DATA.y_train,
        np.asarray(PROBLEM.rows),
        trace,
        SIZES,
        jax.random.fold_in(jax.random.key(0), 1),
        problems.numbers_of(hp),
        name,
        4,
        unit,
        groups,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_replay_matches_plain_reference(name):
    trace, schedule, hp, start, state, history = case(name)
    options, algorithm, _ = CASES[name]
    groups = options.get("tiers", 1)
    versions = reference_of(start, algorithm, hp, trace, "pass", groups)
    for n, value in versions[-1].items():
        assert np.abs(value - versions[0][n]).max() > 1e-2
        got = as_reference(state.params)[n]
        np.testing.assert_allclose(got, value, rtol=2e-4, atol=2e-5)
    # What the last snapshots hold is the last version that was put there.
    held = np.zeros(schedule.snapshots, int)
    for r, p in enumerate(schedule.delivery.keep):
        held[p : p + 1] = r + 1  # an empty slice for P
    for p, version in enumerate(held):
        kept = as_reference(jax.tree.map(lambda a, p=p: a[p], state.snapshots))
        for n, value in versions[version].items():
            np.testing.assert_allclose(kept[n], value, rtol=2e-4, atol=2e-5)
    there = schedule.tau > 0
    np.testing.assert_array_equal(history.selected, there)
    assert not np.asarray(history.rho)[~there].any()
    counted = np.where(there, schedule.tau * schedule.size, 0).sum(axis=1)
    np.testing.assert_array_equal(history.samples.sum(1), counted)


def damaged(client):
    """The problem with NaN in the samples of one client, which no other client has."""
    own = np.asarray(PROBLEM.rows[client])
    rows = np.asarray(PROBLEM.rows).copy()
    for i in range(len(rows)):
        if i != client:
            rows[i] = np.resize(rows[i][~np.isin(rows[i], own)], rows.shape[1])
    clean = PROBLEM._replace(rows=jnp.asarray(rows))
    x = PROBLEM.samples.x.at[own].set(np.nan)
    return clean, clean._replace(samples=PROBLEM.samples._replace(x=x))


def test_a_damaged_delivery_is_left_out_and_the_pool_unharmed():
    _, schedule, hp, *_ = case("fedbuff")
    clean, bad = damaged(1)
    _, state, history = problems.replayed("fedbuff", bad, schedule, hp=hp)
    theirs = (schedule.client == 1) & (schedule.tau > 0)
    assert theirs.any() and not (theirs | (schedule.tau == 0)).all(axis=1).any()
    np.testing.assert_array_equal(history.num_discarded, theirs.sum(axis=1))
    assert not history.diverged.any()
    # The same as if it had delivered nothing.
    away = schedule._replace(tau=np.where(theirs, 0, schedule.tau).astype(np.int32))
    _, without, _ = problems.replayed("fedbuff", clean, away, hp=hp)
    chex.assert_trees_all_close(
        (state.params, state.snapshots),
        (without.params, without.snapshots),
        rtol=1e-5,
        atol=1e-6,
    )


def test_no_client_delivers():
    # Update 1 has no delivery, but client 1 starts from its model all the same.
    column = lambda *numbers: np.array(numbers, np.int32)[:, None]  # noqa: E731
    delivery = Delivery(
        task=column(0, 0, 0, 1),
        snapshot=column(0, 0, 0, 1),
        lag=column(0, 0, 2, 1),
        keep=column(2, 1, 2, 2)[:, 0],
        group=np.zeros(4, np.int32),
    )
    tau, size, client = column(1, 0, 0, 0), column(*[10] * 4), column(0, 0, 1, 1)
    schedule = complete(tau, size, client=client, delivery=delivery, snapshots=2)
    start, state, history = problems.replayed("fedasync", PROBLEM, schedule)
    losses = np.asarray(history.test_loss)
    assert (losses == losses[0]).all()
    assert history.samples.sum(1).tolist() == [10, 0, 0, 0]
    assert not history.diverged.any()
    moved = jax.tree.map(lambda a, b: (a != b).any(), start.params, state.params)
    assert any(jax.tree.leaves(moved))
    first, second = (jax.tree.map(lambda a, p=p: a[p], state.snapshots) for p in (0, 1))
    chex.assert_trees_all_equal(first, start.params)
    chex.assert_trees_all_equal(second, state.params)


# ---- From a config ----


def test_files_of_a_timeline(tmp_path):
    """Four clients on digits for 3 · 2 virtual seconds."""
    settings = {"num_intervals": 3, "num_clients": 4, "lr": 0.02, "batch_size": 8}
    settings |= {"report_every": 2, "devices": 1, "algorithm": "fedbuff"}
    settings |= {"schedule.data_size": 32, "schedule.interval_seconds": 2.0}
    settings |= {"model.hidden": 8, "timeline.framework": "fedbuff"}
    settings |= {"timeline.jitter": 0.2, "timeline.buffer": 2}
    chosen = config.replace(config.Config(), settings)
    result = tsfl_jax.simulate(chosen, workdir=tmp_path)
    rows = report.read_metrics(tmp_path / "metrics.jsonl")
    seconds = np.array([row["virtual_time"] for row in rows])
    assert (np.diff(seconds) > 0).all() and seconds[-1] <= 6
    # Once in each 2 s in which something happens, by the last update in them.
    accuracy = result.history["test_accuracy"]
    assert np.isfinite(accuracy).sum() == len(np.unique(np.ceil(seconds / 2)))
    assert np.isfinite(accuracy[-1])
    with np.load(tmp_path / "clients.npz") as clients:
        assert clients["client"].shape == result.history["rho"].shape
        assert not clients["rho"][clients["tau"] == 0].any()
        worked = clients["tau"].sum(axis=1) * 32
    np.testing.assert_array_equal(result.history["samples"], worked)
