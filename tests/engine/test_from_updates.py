"""Weights from updates, and the regret of all rules, in whole intervals."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.engine.test_scan import DATA, PROBLEM
from tests.problems import small
from tsfl_jax import config
from tsfl_jax.data import partition
from tsfl_jax.engine import evaluation, from_updates, optimizers, structures
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.prepare import prepare
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Received, RoundInfo
from tsfl_jax.types import Constants, UserError


def with_validation(**changes):
    """Four clients on digits, 60 samples held out, regret measured."""
    settings = {"num_intervals": 3, "report_every": 3, "measure_regret": True}
    return small(**settings | {"data__validation": 60} | changes)


# ---- Held-out samples ----


def test_the_same_share_of_each_class_is_held_out():
    labels = np.repeat([3, 5, 9], [60, 30, 10])
    held = partition.hold_out(labels, 20, np.random.default_rng(0))
    assert (np.bincount(labels[held])[[3, 5, 9]] == [12, 6, 2]).all()
    assert (np.diff(held) > 0).all()
    other = partition.hold_out(labels, 20, np.random.default_rng(1))
    assert (held != other).any()
    with pytest.raises(UserError, match="validation=100: there are only 100"):
        partition.hold_out(labels, 100, np.random.default_rng(0))


def test_no_client_holds_a_validation_sample():
    found = []
    for changes in ({}, {"partition__online": True}, {"seed": 1}):
        prepared = prepare.prepare(with_validation(**changes))
        held = prepared.held_out
        assert held.shape == (60,)
        assert not np.isin(prepared.partition.indices, held).any()
        found.append(held)
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


# ---- The objective ----


def objective_of(combined=None):
    """An objective over three random updates of the small network, one device."""
    model, draw = problems.mlp(), np.random.default_rng(0)
    params = model.init(jax.random.key(0), jnp.zeros((1, 5)))
    updates = jax.tree.map(
        lambda w: jnp.asarray(draw.normal(size=(3, *w.shape)), jnp.float32), params
    )
    held = evaluation.make_held_out(np.arange(30, 50))
    parts = Parts(model, (AGGREGATORS["oracle"],), optimizers.sgd, ProgramSpec(4, 1))
    given = parts, params, updates, PROBLEM.samples, held
    combined = None if combined is None else jax.tree.map(combined, updates)
    return jax.jit(from_updates.objective(*given, combined)), params, updates


def test_slopes_are_finite_differences_and_the_loss_that_of_the_model():
    objective, params, updates = objective_of()
    rho = jnp.array([0.5, 0.3, 0.2])
    loss, slope = objective(rho)
    for i in range(3):
        step = 1e-2 * jnp.zeros(3).at[i].set(1.0)
        up, down = objective(rho + step)[0], objective(rho - step)[0]
        np.testing.assert_allclose(slope[i], (up - down) / 2e-2, rtol=2e-2, atol=2e-3)
    model = jax.tree.map(lambda w, u: w + jnp.tensordot(rho, u, 1), params, updates)
    test = evaluation.make_test_set(DATA.x_train[30:50], DATA.y_train[30:50])
    evaluate = jax.jit(
        lambda model: evaluation.evaluate(
            problems.mlp(), model, PROBLEM.samples, test, None
        )
    )
    want = evaluate(model)
    np.testing.assert_allclose(loss, want.loss, rtol=1e-5)


def test_a_combined_update_is_measured_where_it_leads():
    objective, *_ = objective_of()
    combined, *_ = objective_of(lambda u: 0.7 * u[0] + 0.3 * u[2])
    loss, slope = objective(jnp.array([0.7, 0.0, 0.3]))
    there, slopes = combined(jnp.array([0.0, 0, 0, 1]))
    np.testing.assert_allclose(there, loss, rtol=1e-5)
    np.testing.assert_allclose(slopes, [*slope, 0.0], rtol=1e-3, atol=1e-5)


# ---- Whole intervals ----


def test_a_lost_model_of_negative_weight_has_its_weight_given_to_the_others():
    # −1, 1, 1 become 0, ½, ½, as in the aggregation itself.
    slope = jnp.array([1.0, 2.0, 4.0])
    size = jnp.ones(3, jnp.int32)
    given = Constants(1.0, 1.0, 1.0)
    key = jax.random.key(0)
    info = RoundInfo(key, size, size, size, size, 0 * size, jnp.int32(0), given)
    present = jnp.array([False, True, True])
    received = Received(info, jnp.array([-1.0, 1.0, 1.0]), present)
    found = from_updates.regret_of(
        lambda rho: (jnp.vdot(slope, rho), slope), received, True, problems.hparams()
    )
    np.testing.assert_allclose(found.validation_loss, 3.0)
    np.testing.assert_allclose(found.gap, 1.0)  # all weight to the second client
    # The search finds that, too: F_val is 2 there.
    np.testing.assert_allclose(found.regret, 1.0, rtol=1e-5)
    assert np.isnan(found.slope[0])
    for rho, regret in (([0, 0, 1.0], 2.0), ([0, 1.0, 0], 0.0)):
        other = received._replace(rho=jnp.array(rho))
        found = from_updates.regret_of(
            lambda rho: (jnp.vdot(slope, rho), slope), other, True, problems.hparams()
        )
        np.testing.assert_allclose(found.regret, regret, atol=1e-5)


@pytest.mark.slow
def test_the_oracle_is_never_worse_than_fedavg_in_an_interval():
    """From one w^t: F_val of the rules, and their regret."""
    names = ["fedavg", "dms", "oracle"]
    swept = tsfl_jax.sweep(with_validation(), {"algorithm": names}).history
    found = {n: {k: a[i] for k, a in swept.items()} for i, n in enumerate(names)}
    first = {name: h["validation_loss"][0] for name, h in found.items()}
    best = first["fedavg"] - found["fedavg"]["regret"][0]
    for name in ("fedavg", "dms"):
        assert first["oracle"] <= first[name]
        # The oracle of every run finds the same model in the first interval.
        mine = first[name] - found[name]["regret"][0]
        np.testing.assert_allclose(mine, best, rtol=2e-3)
    for name in names:
        regret, gap = found[name]["regret"], found[name]["gap"]
        assert (regret >= 0).all() and np.isfinite(gap).all()
        slope, rho = found[name]["slope"], found[name]["rho"]
        want = (rho * slope).sum(1) - slope.min(1)
        np.testing.assert_allclose(gap, want, rtol=1e-3, atol=1e-6)
    oracle = found["oracle"]
    assert oracle["regret"].max() < 0.05 * found["fedavg"]["regret"].min()
    np.testing.assert_allclose(oracle["rho"].sum(1), 1, rtol=1e-5)
    assert (oracle["rho"] >= 0).all() and oracle["rho"].std() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "krum"])
def test_measuring_changes_no_result(name):
    measured = with_validation(algorithm=name)
    plain = config.replace(measured, {"measure_regret": False})
    with_it, without = (tsfl_jax.simulate(one) for one in (measured, plain))
    for key, value in without.history.items():
        np.testing.assert_array_equal(with_it.history[key], value, err_msg=key)
    chex.assert_trees_all_equal(with_it.params, without.params)
    assert set(with_it.history) - set(without.history) == {*structures.REGRET}
    # Without weights on the simplex there is no gap, but there are slopes.
    assert np.isfinite(with_it.history["gap"]).all() == (name == "fedavg")
    assert np.isfinite(with_it.history["slope"]).all()
    assert "mean_regret" in with_it.summary and "mean_regret" not in without.summary
