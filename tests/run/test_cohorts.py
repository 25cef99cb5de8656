"""Cohorts from the workload down: only the clients that ever work are on the device."""

import jax
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.problems import same_history
from tsfl_jax.prepare import prepare, workload
from tsfl_jax.report import files
from tsfl_jax.run import lanes, runner

K = 3
SMALL = {
    "hidden": 4,
    "algorithm": "fedavg",
    "num_clients": 300,
    "num_intervals": 4,
    "lr": 0.05,
    "schedule__data_size": 24,
    "schedule__interval_seconds": 1.0,
    "schedule__dropout": 0.1,
    "schedule__size_groups": "uniform(12,24)",
    "partition__kind": "iid",
    "partition__replacement": True,
    "cohort__size": K,
}


def config_of(**changes):
    return problems.small(**SMALL | changes)


def drawn(config):
    return workload.draw_workload(config)


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


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Settings of a run in cohorts, its folder and its result."""
    config = config_of(
        algorithm="scaffold",
        num_clients=60,
        partition__kind="dirichlet",
        partition__replacement=False,
    )
    folder = tmp_path_factory.mktemp("few") / "run"
    return config, folder, tsfl_jax.simulate(config, workdir=folder)


def test_the_same_as_with_all_clients(few, monkeypatch):
    config, _, result = few

    def all_of(config, *options):
        made = workload.draw_workload(config, *options)
        return made._replace(drawn=np.arange(config.num_clients))

    monkeypatch.setattr(prepare, "draw_workload", all_of)
    # c = Σ p_i c_i is a sum over fewer clients.
    same_history(tsfl_jax.simulate(config), result, rtol=1e-4, atol=1e-5)


def some_of_twenty(draw):
    return 3 * draw.rng.permutation(20)[: draw.size]


@pytest.mark.slow
def test_neither_n_nor_a_longer_run_matters():
    def run(**changes):
        schedule = {"kind": "distribution", "tau_groups": "uniform(1,3)"}
        changes |= {f"schedule__{name}": value for name, value in schedule.items()}
        # By nature who is asked depends on N.
        return tsfl_jax.simulate(config_of(**changes), sampler=some_of_twenty)

    short = run()
    same_history(short, run(num_clients=9000))
    same_history(short, run(num_intervals=6), intervals=4)


def test_files_have_slots_and_ids(few):
    config, folder, result = few
    times = drawn(config).schedule
    np.testing.assert_array_equal(result.history["client"], times.client)
    table = result.to_xarray()
    assert table["rho"].dims == table["client"].dims == ("interval", "slot")
    arrays = files.read_arrays(folder / "clients.npz")
    assert arrays.keys() == {"tau", "size", "rho", "selected", "client"}
    assert {a.shape for a in arrays.values()} == {(4, K)}
    np.testing.assert_array_equal(arrays["client"], times.client)
    assert (folder / "participation.png").stat().st_size > 0


def test_a_framework_runs_on_cohorts():
    settings = {"timeline__upload": "uniform(0,0.5)", "num_intervals": 8}
    config = config_of(timeline__framework="fedat", report_every=3, **settings)
    result = tsfl_jax.simulate(config)
    times = drawn(config).schedule
    np.testing.assert_array_equal(result.history["client"], times.client)
    assert np.isfinite(result.history["train_loss"]).all()
    np.testing.assert_allclose(result.history["rho"].sum(1), 1, rtol=1e-5)
    words = str(tsfl_jax.explain(config))
    ever = len(np.unique(times.client[times.tau > 0]))
    assert f"3 of 300 clients at a time, {ever} ever" in words
