"""Runs whose cohorts are chosen while training, beside choices made from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems, reference_choice
from tests.problems import same_history
from tsfl_jax.config import replace
from tsfl_jax.engine import client as local
from tsfl_jax.prepare import prepare, workload
from tsfl_jax.report import files

K, D = 3, 7
SMALL = {
    "hidden": 4,
    "algorithm": "fedavg",
    "num_clients": 20,
    "lr": 0.1,
    "schedule__data_size": 24,
    "schedule__size_groups": "uniform(9,24)",
    "schedule__interval_seconds": 1.0,
    "partition__replacement": True,
    "cohort__size": K,
    "cohort__candidates": D,
    "cohort__sampler": "power_of_choice",
}
LATE = {
    "cohort__sampler": "oort",
    "cohort__preferred": 60.0,
    "schedule__dropout": 0.2,
}


def config_of(changes=(), **more):
    return problems.small(**SMALL | dict(changes) | more)


def sample_losses(prepared, params, place, held):
    """Cross-entropy of each sample that a client holds, in float64."""
    data, rows = prepared.dataset, prepared.partition.indices[place, :held]
    x = (np.asarray(data.x_train[rows], np.float32) - data.mean) / data.std
    logits = np.asarray(prepared.network.model.predict(params, jnp.asarray(x)))
    logits = logits.astype(np.float64)
    total = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
    label = data.y_train[rows]
    return total + logits.max(1) - logits[np.arange(held), label]


def interval_by_interval(config):
    """Before each interval its model and candidates, and whom the program chose."""
    run, arguments = tsfl_jax.as_function(config)
    prepared, run = prepare.prepare(config), jax.jit(run)
    state, key, hparams, problem, inputs = arguments
    for t in range(config.num_intervals):
        now = jax.tree.map(lambda a, t=t: a[t : t + 1], inputs)
        new, history = run(state, key, hparams, problem, now)
        yield t, prepared, state.params, history.chosen[0].tolist()
        state = new


@pytest.mark.slow
def test_power_of_choice_is_brute_force():
    several = []
    for t, prepared, params, chosen in interval_by_interval(config_of()):
        times, place = prepared.workload.schedule, prepared.workload.places[t]
        loss = [
            sample_losses(prepared, params, p, n).mean()
            for p, n in zip(place, times.size[t], strict=True)
        ]
        assert len(set(loss)) == D
        assert chosen == sorted(np.argsort(loss)[-K:].tolist())
        several.append(chosen)
    assert len({str(chosen) for chosen in several}) > 1


@pytest.mark.slow
def test_oort_is_its_reference_along_a_run():
    """With lost uploads, of which nothing is heard, and penalties."""
    config = config_of(LATE, num_intervals=25, lr=0.02)
    sure = prepare.prepare(replace(config, {"schedule.dropout": 0.0}))
    state, lost = {}, 0
    for t, prepared, params, chosen in interval_by_interval(config):
        times, places = prepared.workload.schedule, prepared.workload.places
        ids, held = times.client[t].tolist(), times.size[t]
        # A client that will not deliver is as long at work as if it would.
        steps = sure.workload.schedule.tau[t] * local.steps_per_iteration(
            held, 8, config.schedule.iteration
        )
        mine = [state.get(i, (0.0, 0)) for i in ids]
        given = held, steps, times.lots.gumbel[t], t + 1, K, 60.0, 2.0
        assert chosen == reference_choice.oort(mine, *given)
        for k in chosen:
            if times.tau[t, k]:
                loss = sample_losses(prepared, params, places[t, k], held[k])
                utility = held[k] * np.sqrt((loss**2).mean())
                state[ids[k]] = utility, t + 1
            lost += not times.tau[t, k]
    assert lost > 3 and len(state) > 12
    assert (times.lots.factor < 1).any()


@pytest.mark.slow
def test_rules_see_only_those_that_are_chosen():
    """The same as with a sampler that knows the choice beforehand."""
    config = config_of(
        LATE, algorithm="dms", schedule__dropout=0.0, partition__kind="iid"
    )
    # Estimates at w^0 would be of all candidates.
    vars(config.constants).update(smoothness=1.0, grad_sq_norm=1.0, grad_variance=1.0)
    result = tsfl_jax.simulate(config)
    client = result.history["client"]
    plain = {"sampler": "uniform", "candidates": 0, "preferred": 100.0}
    plain = replace(config, {f"cohort.{name}": value for name, value in plain.items()})
    other = tsfl_jax.simulate(plain, sampler=lambda draw: client[draw.number])
    same_history(result, other, rtol=1e-5, atol=1e-6)
    assert result.history["rho"].shape == (6, K)


def test_files_have_those_that_were_chosen(tmp_path):
    config = config_of(LATE, evaluation__clients="labels")
    found = tsfl_jax.simulate(config, workdir=tmp_path)
    times = workload.draw_workload(config).schedule
    arrays = files.read_arrays(tmp_path / "clients.npz")
    assert arrays["tau"].shape == arrays["client"].shape == (6, K)
    np.testing.assert_array_equal(arrays["client"], found.history["client"])
    for t, ids in enumerate(arrays["client"].tolist()):
        place = [times.client[t].tolist().index(i) for i in ids]
        assert ids == sorted(set(ids))
        assert arrays["tau"][t].tolist() == times.tau[t, place].tolist()
        assert arrays["size"][t].tolist() == times.size[t, place].tolist()
    np.testing.assert_array_equal(arrays["tau"] > 0, arrays["rho"] > 0)
    assert (arrays["tau"] == 0).any()  # of lost uploads
    deliveries = (arrays["tau"] > 0).sum()
    summary = found.summary
    assert summary["bytes_moved"] == deliveries * summary["bytes_per_delivery"]
    scores = found.history["client_accuracy_mean"]
    assert np.isfinite(scores).all()
    assert found.to_xarray()["rho"].dims == ("interval", "slot")
