"""Cohorts from the workload down: only the clients that ever work are on the device."""

import functools

import jax
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.config import Config, replace
from tsfl_jax.experiment import lanes, memory, prepare, runner, splits, workload
from tsfl_jax.report import files, runs
from tsfl_jax.timeline import FRAMEWORKS
from tsfl_jax.timeline.cohort import SAMPLERS

K = 3
SMALL = {
    "num_clients": 300,
    "num_intervals": 4,
    "lr": 0.05,
    "batch_size": 8,
    "report_every": 2,
    "devices": 1,
    "model.hidden": 4,
    "schedule.data_size": 24,
    "partition.kind": "iid",
    "partition.replacement": True,
    "cohort.size": K,
    "schedule.dropout": 0.1,
    "schedule.size_groups": "uniform(12,24)",
}


def config_of(**changes) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return replace(Config(), SMALL | {"algorithm": "fedavg"} | named)


def drawn(config):
    return workload.draw_workload(config)


def with_all(monkeypatch):
    """All N clients on the device."""

    def all_of(config, *own):
        found = workload.draw_workload(config, *own)
        return found._replace(drawn=np.arange(config.num_clients))

    monkeypatch.setattr(prepare, "draw_workload", all_of)


def test_only_those_who_ever_work_are_on_the_device():
    exp = runner.build(config_of(num_clients=100_000, algorithm="scaffold"))
    times = exp.prepared.workload.schedule
    drawn = np.unique(times.client[times.tau > 0])
    arguments = lanes.arguments_of_run(exp.arrays, len(times.tau))
    state, _, _, problem, inputs = arguments
    np.testing.assert_array_equal(problem.client, drawn)
    assert problem.rows.shape == (len(drawn), exp.prepared.partition.capacity.max())
    there = times.tau > 0
    np.testing.assert_array_equal(drawn[inputs.client[:4]][there], times.client[there])
    assert state.server.size.shape == drawn.shape
    sizes = [n for a in jax.tree.leaves(exp.arrays) for n in np.shape(a)]
    assert 100_000 not in sizes
    rows = memory.estimate(exp.prepared, 1, 1)
    own = state.server.own
    personal = sum(leaf.nbytes for leaf in jax.tree.leaves(own)) + 4 * len(drawn)
    assert rows["personal state"] == personal
    assert "personal state" not in memory.estimate(prepare.prepare(config_of()), 1, 1)


def same(one, two, intervals=None, **options):
    """Whether two runs have the same history, to the bit or with tolerances."""
    assert one.history.keys() == two.history.keys()
    for name, values in one.history.items():
        other = two.history[name][:intervals]
        if options and values.dtype.kind == "f":
            np.testing.assert_allclose(values, other, **options, err_msg=name)
        else:
            np.testing.assert_array_equal(values, other, err_msg=name)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fedavg", {}),
        ("dms", {}),
        # c = Σ p_i c_i is a sum over fewer clients.
        ("scaffold", {"rtol": 1e-4, "atol": 1e-5}),
    ],
)
def test_the_same_as_with_all_clients(monkeypatch, algorithm, options):
    config = config_of(partition__replacement=False, num_clients=60)
    config.algorithm, config.partition.kind = algorithm, "dirichlet"
    if algorithm == "dms":
        config.constants.when = "interval"
    few = tsfl_jax.simulate(config)
    with_all(monkeypatch)
    same(tsfl_jax.simulate(config), few, **options)


def some_of_twenty(draw):
    return 3 * draw.rng.permutation(20)[: draw.size]


@pytest.mark.parametrize("algorithm", ["fedavg", "dms"])
def test_neither_n_nor_a_longer_run_matters(algorithm):
    def run(**changes):
        config = config_of(algorithm=algorithm, **changes)
        config.schedule.kind, config.schedule.tau_groups = (
            "distribution",
            "uniform(1,3)",
        )
        # By nature who is asked depends on N.
        return tsfl_jax.simulate(config, sampler=some_of_twenty)

    short = run()
    same(short, run(num_clients=9000))
    same(short, run(num_intervals=6), intervals=4)


def test_files_have_slots_and_ids(tmp_path):
    result = tsfl_jax.simulate(config_of(), workdir=tmp_path)
    times = drawn(config_of()).schedule
    np.testing.assert_array_equal(result.history["client"], times.client)
    table = result.to_xarray()
    assert table["rho"].dims == table["client"].dims == ("interval", "slot")
    arrays = files.read_arrays(tmp_path / "clients.npz")
    assert arrays.keys() == {"tau", "size", "rho", "selected", "client"}
    assert {a.shape for a in arrays.values()} == {(4, K)}
    np.testing.assert_array_equal(arrays["client"], times.client)
    assert (tmp_path / "participation.png").stat().st_size > 0
    again = tsfl_jax.simulate(config_of(), workdir=tmp_path)
    same(result, again)


@pytest.mark.parametrize("clients", [300, 58])
def test_figures_show_those_who_take_part(clients):
    times = drawn(config_of(num_clients=clients)).schedule
    there, rho = times.tau > 0, (times.tau > 0) / K
    about = {"num_clients": clients}
    figure = runs.participation(times.tau, rho, about, times.client)
    first, middle, last = figure.axes
    heights = [part[1, 1] for part in first.collections[0].get_segments()]
    count = np.bincount(times.client[there], minlength=clients)
    if clients == 58:
        np.testing.assert_allclose(heights, 100 * count / 4)
        return
    np.testing.assert_allclose(sorted(heights), 100 * np.sort(count[count > 0]) / 4)
    np.testing.assert_allclose(middle.lines[0].get_ydata(), 100 / 300)
    assert f"({len(heights)} of 300 take part)" in last.get_xlabel()


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_lanes_with_other_clients_are_the_single_runs(algorithm):
    config = config_of(algorithm=algorithm)
    found = tsfl_jax.sweep(config, {"seed": [0, 3]})
    numbers = {len(drawn(replace(config, {"seed": s})).drawn) for s in (0, 3)}
    assert len(numbers) == 2
    for lane, seed in enumerate((0, 3)):
        one = tsfl_jax.simulate(replace(config, {"seed": seed}))
        for name in ("test_loss", "rho", "client"):
            np.testing.assert_allclose(
                found.history[name][lane], one.history[name], rtol=1e-5
            )


def test_explain_counts_those_who_ever_work():
    config = config_of(algorithm="scaffold")
    known = tsfl_jax.explain(config)
    made = drawn(config)
    assert known.work.deliveries.sum() == (made.schedule.tau > 0).sum()
    assert len(known.work.deliveries) == len(made.drawn)
    assert known.work.iterations.sum() == made.schedule.tau.sum()
    words = " ".join(str(known).split())
    assert f"3 of 300 clients at a time, {len(made.drawn)} ever" in words
    assert "personal state" in words


def test_splits_of_some_clients_are_rows_of_the_whole():
    config = config_of(num_clients=9, partition__kind="shards")
    config.partition.replacement = False
    data, held = prepare.load_dataset(config), np.arange(12, 21, dtype=np.int32)
    fixed = splits.FixedSamples
    split = functools.partial(splits.draw_split, config.partition, data)
    drawn = np.array([2, 5, 8])
    every, some = (split(fixed(), held, 0, among) for among in (None, drawn))
    width = held[drawn].max()
    np.testing.assert_array_equal(some.indices, every.indices[drawn, :width])
    np.testing.assert_array_equal(some.capacity, held[drawn])
    lists = [np.arange(10 * i, 10 * i + i + 1) for i in range(9)]
    own = split(fixed(lists=lists), held, 0, drawn)
    assert own.capacity.tolist() == [3, 6, 9]
    for row, i in zip(own.indices, drawn, strict=True):
        np.testing.assert_array_equal(row[: i + 1], lists[i])


CLOCK = {"num_intervals": 8, "timeline.upload": "uniform(0,0.5)"}
ALL = {"none": {}} | {name: CLOCK for name in FRAMEWORKS}
ALL["fedbuff"] = CLOCK | {"timeline.buffer": 2}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", ALL)
def test_every_framework_draws_with_every_sampler(name, sampler):
    if (name, sampler) == ("none", "online"):
        return
    more = {"timeline.framework": name, "cohort.sampler": sampler}
    found = drawn(replace(config_of(), ALL[name] | more))
    times = found.schedule
    # Late deliveries come on top of those of a round.
    assert times.tau.shape[1] <= K or name in ("ttfed", "safa")
    there = times.tau > 0
    np.testing.assert_array_equal(found.drawn, np.unique(times.client[there]))
    assert ((times.client >= 0) & (times.client < 300)).all()
    np.testing.assert_array_equal(
        times.size[there], found.num_samples[times.client[there]]
    )
    np.testing.assert_array_equal(found.drawn[found.places][there], times.client[there])


@pytest.mark.parametrize("name", ["tsfl", "fedat", "fedbuff"])
def test_frameworks_run_on_cohorts(name, tmp_path):
    more = {"timeline.framework": name, "report_every": 3}
    config = replace(config_of(), ALL[name] | more)
    found = tsfl_jax.simulate(config, workdir=tmp_path)
    times = drawn(config).schedule
    np.testing.assert_array_equal(found.history["client"], times.client)
    assert np.isfinite(found.history["train_loss"]).all()
    np.testing.assert_allclose(found.history["rho"].sum(1), 1, rtol=1e-5)
    words = str(tsfl_jax.explain(config))
    ever = len(np.unique(times.client[times.tau > 0]))
    assert f"3 of 300 clients at a time, {ever} ever" in words


def test_a_run_resumes_to_the_bit(tmp_path):
    config = config_of(cohort__weighting="unbiased")
    exp = runner.build(config)
    with pytest.raises(KeyboardInterrupt):
        runner.run(exp, tmp_path, stop=lambda: True)
    same(runner.run(exp, tmp_path), tsfl_jax.simulate(config))
