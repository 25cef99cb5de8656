"""Runs whose cohorts are chosen while training, beside choices made from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import reference_choice
from tsfl_jax.config import Config, replace
from tsfl_jax.engine import client as local
from tsfl_jax.experiment import prepare, runner, workload
from tsfl_jax.report import files
from tsfl_jax.timeline.cohort import CHOOSING, by_size_once
from tsfl_jax.types import UserError

K, D = 3, 7
SMALL = {
    "algorithm": "fedavg",
    "num_clients": 20,
    "num_intervals": 6,
    "lr": 0.1,
    "batch_size": 8,
    "report_every": 2,
    "devices": 1,
    "model.hidden": 4,
    "schedule.data_size": 24,
    "schedule.size_groups": "uniform(9,24)",
    "partition.replacement": True,
    "cohort.size": K,
    "cohort.candidates": D,
    "cohort.sampler": "power_of_choice",
}
LATE = {"cohort.sampler": "oort", "cohort.preferred": 60.0, "schedule.dropout": 0.2}
EACH = pytest.mark.parametrize("own", [{}, LATE], ids=[*CHOOSING])


def config_of(own=(), **changes) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return replace(Config(), SMALL | dict(own) | named)


def same(one, two, intervals=None, **options):
    """Whether two runs have the same history, to the bit or with tolerances."""
    assert one.history.keys() == two.history.keys()
    for name, values in one.history.items():
        other = two.history[name][:intervals]
        if options and values.dtype.kind == "f":
            np.testing.assert_allclose(values, other, **options, err_msg=name)
        else:
            np.testing.assert_array_equal(values, other, err_msg=name)


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


@pytest.mark.parametrize("algorithm", ["fedavg", "dms", "scaffold"])
def test_as_many_candidates_as_are_asked_are_a_plain_draw(algorithm):
    config = config_of(algorithm=algorithm, cohort__candidates=K)
    plain = config_of(cohort__sampler="uniform", cohort__candidates=0)
    plain.algorithm = algorithm
    found = tsfl_jax.simulate(config)
    same(found, tsfl_jax.simulate(plain, sampler=by_size_once))
    assert len(np.unique(found.history["client"])) > K


@EACH
@pytest.mark.parametrize("algorithm", ["dms", "scaffold", "krum", "fednova"])
def test_rules_see_only_those_that_are_chosen(algorithm, own):
    """The same as with a sampler that knows the choice beforehand."""
    config = config_of(own, algorithm=algorithm, schedule__dropout=0.0)
    config.partition.kind = "iid"
    if algorithm == "dms":  # estimates before training would be of all candidates
        config.constants.when = "interval"
    found = tsfl_jax.simulate(config)
    client = found.history["client"]
    plain = replace(
        config,
        {
            "cohort.sampler": "uniform",
            "cohort.candidates": 0,
            "cohort.preferred": 100.0,
        },
    )
    other = tsfl_jax.simulate(plain, sampler=lambda draw: client[draw.number])
    same(found, other, rtol=1e-5, atol=1e-6)
    assert found.history["rho"].shape == (6, K)


@EACH
def test_a_run_resumes_to_the_bit(tmp_path, own):
    exp = runner.build(config_of(own))
    with pytest.raises(KeyboardInterrupt):
        runner.run(exp, tmp_path, stop=lambda: True)
    found = runner.run(exp, tmp_path)
    whole = tsfl_jax.simulate(config_of(own))
    same(found, whole)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: (a == b).all(), found.params, whole.params)
    )


@EACH
def test_neither_a_longer_run_nor_the_calls_matter(own):
    """The last call of 5 intervals is filled up."""
    short = tsfl_jax.simulate(config_of(own, num_intervals=5))
    same(short, tsfl_jax.simulate(config_of(own)), intervals=5)
    same(short, tsfl_jax.simulate(config_of(own, num_intervals=5, report_every=1)))


@EACH
def test_lanes_are_the_single_runs(own):
    config = config_of(own)
    points = {"seed": [0, 3], "lr": [0.1, 0.02]}
    found = tsfl_jax.sweep(config, points)
    for lane, row in enumerate(found.rows):
        own = {n: row[n] for n in points}
        exp = runner.build(replace(config, own))
        one = runner.run(exp)
        for name in ("client", "test_loss", "rho"):
            np.testing.assert_array_equal(found.history[name][lane], one.history[name])
        assert row["samples_trained"] == one.summary["samples_trained"]
        assert row["bytes_moved"] == one.summary["bytes_moved"]


def test_a_sweep_of_samplers_and_penalties():
    """Programs of their own where they choose in another way; the same candidates."""
    points = [{"cohort.sampler": name} for name in CHOOSING]
    points += [{"cohort.sampler": "oort", "cohort.preferred": 60.0}]
    found = tsfl_jax.sweep(config_of(), points)
    for lane, own in enumerate(points):
        one = tsfl_jax.simulate(config_of(own))
        np.testing.assert_array_equal(
            found.history["client"][lane], one.history["client"]
        )
    client = found.history["client"]
    assert (client[0] != client[1]).any() and (client[1] != client[2]).any()


@EACH
def test_the_same_bits_on_several_devices(own):
    config = config_of(own, cohort__size=5, cohort__candidates=9)
    one = tsfl_jax.simulate(config)
    several = replace(config, {"devices": 3})
    same(one, tsfl_jax.simulate(several))


@EACH
def test_side_by_side_within_rounding(own):
    config = config_of(own, mapping="vmap", num_intervals=3)
    found = tsfl_jax.simulate(config)
    other = tsfl_jax.simulate(replace(config, {"mapping": "sequential"}))
    same(found, other, rtol=1e-4, atol=1e-6)


@EACH
def test_files_have_those_that_were_chosen(tmp_path, own):
    config = config_of(own, evaluation__clients="labels", evaluation__over="cohort")
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
    assert (arrays["tau"] == 0).any() == bool(own)  # of lost uploads
    deliveries = (arrays["tau"] > 0).sum()
    summary = found.summary
    assert summary["bytes_moved"] == deliveries * summary["bytes_per_delivery"]
    # Scores of a cohort are of those chosen.
    scores = found.history["client_accuracy_mean"]
    assert np.isfinite(scores).all()
    assert found.to_xarray()["rho"].dims == ("interval", "slot")


@EACH
def test_explain_says_that_it_depends_on_training(own):
    config = config_of(own)
    known = tsfl_jax.explain(config)
    times, drawn = known.schedule, workload.draw_workload(config).drawn
    assert times.tau.shape == (6, D)
    np.testing.assert_array_equal(drawn, np.unique(times.client))
    words = " ".join(str(known).split())
    assert f"3 of 20 clients at a time, chosen of 7 candidates, {len(drawn)} ever" in (
        words
    )
    assert "who is asked depends on training: " + config.cohort.sampler in words
    # Runs with the same seed have the same candidates, whatever they train with.
    other = tsfl_jax.explain(replace(config, {"algorithm": "dms", "lr": 0.5}))
    np.testing.assert_array_equal(other.schedule.client, times.client)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"timeline.framework": "sfl"}, "timeline.framework=sfl: cannot go with --c"),
        ({"cohort.weighting": "mean"}, "cohort.weighting=mean: cannot go with --con"),
        ({"schedule.upload_above": 2}, "upload_above=2: cannot go with --config.coh"),
        ({"cohort.candidates": 2}, "candidates=2: expected 3 to --config.num_clients"),
        ({"cohort.candidates": 21}, "candidates=21: expected 3 to --config.num_clie"),
        ({"cohort.sampler": "uniform"}, "candidates=7: would be ignored with"),
        ({"cohort.preferred": 50.0}, "it belongs to oort"),
        ({"cohort.size": 0}, "ignored with --config.cohort.size=0"),
        (
            {"cohort.sampler": "oort", "cohort.penalty": 1.0},
            "penalty=1.0: would be ignored with --config.cohort.preferred=100.0",
        ),
        ({"cohort.preferred": 0.0}, "preferred=0.0: must be in (0, 100]"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(own, words):
    with pytest.raises(UserError) as error:
        tsfl_jax.explain(config_of(own))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_sampler_of_the_users_own_is_refused_beside_it():
    config = config_of(cohort__candidates=0)
    with pytest.raises(UserError, match="sampler=: cannot go with .*power_of_choice"):
        tsfl_jax.explain(config, sampler=by_size_once)
