"""The compiled interval against a slow plain reference, and its limit cases."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import problems, reference
from tsfl_jax.engine import client as local
from tsfl_jax.engine import mapping as mappings
from tsfl_jax.engine.program_spec import ProgramSpec

TAU = np.array([[1, 4, 2, 3, 0], [2, 1, 0, 5, 1], [3, 3, 1, 2, 4]])
SIZE = np.array([[10, 12, 7, 9, 8], [12, 5, 8, 4, 11], [6, 9, 12, 8, 12]])
DATA = problems.dataset()
PROBLEM = problems.problem(DATA, 5, 12)
INPUTS = problems.inputs(TAU, SIZE)
MAPPINGS = [("sequential", 1), ("vmap", 5), ("vmap", 2)]
ONLY_FIRST = np.array([[1], [0], [0]])  # intervals with work

SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "lr": 0.03},
    "clipping": {"clip_norm": 0.5, "momentum": 0.5},
    "limit": {"weight_limit": 1.5},
    "strong coupling": {"smoothness": 40.0},
}


def as_reference(params):
    """Flax's MLP parameters as the reference's dict, float64."""
    first, second = params["params"]["Dense_0"], params["params"]["Dense_1"]
    names = {"w1": first["kernel"], "b1": first["bias"]}
    names |= {"w2": second["kernel"], "b2": second["bias"]}
    return {k: np.asarray(v, np.float64) for k, v in names.items()}


def reference_run(start, algorithm, hp, batch_size=4, iteration="pass"):
    x = (DATA.x_train.astype(np.float64) - 0.3) / 1.7
    key = jax.random.fold_in(jax.random.key(0), 1)
    hp = problems.numbers_of(hp)
    w, trace = as_reference(start.params), []
    for t in range(len(TAU)):
        w, rho, selected, loss = reference.interval(
            w,
            x,
            DATA.y_train,
            np.asarray(PROBLEM.rows),
            np.arange(5),
            TAU[t],
            SIZE[t],
            key,
            t,
            hp,
            algorithm,
            batch_size,
            iteration,
        )
        trace.append((rho, selected, loss))
    return w, trace


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        # c is read by DMS alone.
        pytest.param(
            rule,
            name,
            marks=[pytest.mark.slow] * (name == "strong coupling" and rule != "dms"),
        )
        for rule in ("fedavg", "fedprox", "fedasync", "dms")
        for name in SETTINGS
    ],
)
def test_matches_plain_reference(algorithm, settings):
    changes = SETTINGS[settings]
    mu = 0.3 if algorithm == "fedprox" else 0.0
    hp = problems.hparams(mu=mu, **changes)
    # Of the others a program for one mapping alone, which the tests below use as well.
    place = len(settings) % 3 if algorithm in ("fedavg", "dms") else 0
    mapping, block = MAPPINGS[place]
    start, state, history = problems.run(
        algorithm, DATA, PROBLEM, INPUTS, hp=hp, mapping=mapping, block=block
    )
    want, trace = reference_run(start, algorithm, hp)
    got = as_reference(state.params)
    for name, value in want.items():
        moved = np.abs(value - as_reference(start.params)[name]).max()
        assert moved > 1e-2  # else agreement would mean nothing
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-5)
    for t, (rho, selected, loss) in enumerate(trace):
        np.testing.assert_allclose(history.rho[t], rho, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(history.selected[t], selected)
        np.testing.assert_allclose(history.train_loss[t], loss, rtol=1e-4)


def test_step_iterations_match_reference():
    hp, options = problems.hparams(momentum=0.9), {"iteration": "step"}
    start, state, _ = problems.run("fedavg", DATA, PROBLEM, INPUTS, hp=hp, **options)
    want, _ = reference_run(start, "fedavg", hp, iteration="step")
    for name, value in want.items():
        got = as_reference(state.params)[name]
        np.testing.assert_allclose(got, value, rtol=2e-4, atol=2e-5)


def test_one_client_alone_has_all_the_weight():
    """Its model is the new one, whatever the rule."""
    one = problems.inputs(TAU * np.array([0, 0, 0, 1, 0]), SIZE)
    states = []
    for algorithm in ("fedavg", "dms"):
        _, state, history = problems.run(algorithm, DATA, PROBLEM, one, limits=INPUTS)
        assert history.rho.tolist() == [[0, 0, 0, 1, 0]] * 3
        states.append(state.params)
    chex.assert_trees_all_equal(*states)


def test_equal_tau_and_sizes_make_all_rules_the_plain_mean():
    same = problems.inputs(np.full((3, 5), 2), np.full((3, 5), 12))
    params, options = {}, {"hp": problems.hparams(gamma=0.0), "limits": INPUTS}
    for algorithm in ("fedavg", "dms", "fedasync"):
        _, state, history = problems.run(algorithm, DATA, PROBLEM, same, **options)
        np.testing.assert_allclose(history.rho, 0.2, rtol=1e-6)
        params[algorithm] = state.params
    for algorithm in ("dms", "fedasync"):
        chex.assert_trees_all_close(
            params[algorithm], params["fedavg"], rtol=1e-5, atol=1e-6
        )


def test_proximal_term_zero_is_fedavg_and_large_stays_near_the_global_model():
    _, fedavg, _ = problems.run("fedavg", DATA, PROBLEM, INPUTS)
    start, fedprox, _ = problems.run("fedprox", DATA, PROBLEM, INPUTS)
    chex.assert_trees_all_equal(fedavg.params, fedprox.params)
    hp = problems.hparams(mu=9.0)
    _, strong, _ = problems.run("fedprox", DATA, PROBLEM, INPUTS, hp=hp)

    def way(state):
        return optax.tree.norm(optax.tree.sub(state.params, start.params))

    assert way(strong) < 0.5 * way(fedavg)


def test_an_interval_without_work_keeps_the_model():
    idle = problems.inputs(np.zeros_like(TAU), SIZE)
    for algorithm in ("fedavg", "fedprox", "fedasync", "dms"):
        start, state, history = problems.run(
            algorithm, DATA, PROBLEM, idle, limits=INPUTS
        )
        chex.assert_trees_all_equal(start.params, state.params)
        assert not history.diverged.any()
        assert history.rho.sum() == history.samples.sum() == 0
        assert np.isfinite(history.test_loss).all()


@pytest.mark.parametrize(("mapping", "block"), [MAPPINGS[0], MAPPINGS[2]])
def test_non_finite_client_is_dropped_and_the_others_go_on(mapping, block):
    spoiled = PROBLEM.samples.x.at[PROBLEM.rows[1]].set(np.nan)
    only_first = ~np.isin(np.asarray(PROBLEM.rows), np.asarray(PROBLEM.rows[1]))
    rows = np.asarray(PROBLEM.rows).copy()
    for i in (0, 2, 3, 4):  # other clients may not touch a spoiled sample
        rows[i] = np.resize(rows[i][only_first[i]], 12)
    prob = PROBLEM._replace(
        samples=PROBLEM.samples._replace(x=spoiled), rows=jnp.asarray(rows)
    )
    clean = prob._replace(samples=PROBLEM.samples)
    one = problems.inputs(TAU * ONLY_FIRST, SIZE)
    options = {"mapping": mapping, "block": block, "limits": INPUTS}
    _, state, history = problems.run("fedavg", DATA, prob, one, **options)
    assert history.num_discarded.tolist() == [1, 0, 0]
    assert not history.diverged.any()
    # The same as if client 1 had stayed away.
    away = problems.inputs(TAU * ONLY_FIRST * np.array([1, 0, 1, 1, 1]), SIZE)
    _, without, _ = problems.run("fedavg", DATA, clean, away, **options)
    chex.assert_trees_all_close(state.params, without.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mapping", "block"), [MAPPINGS[0], MAPPINGS[2]])
def test_total_loss_freezes_the_last_good_model(mapping, block):
    hp = problems.hparams(lr=np.inf)
    start, state, history = problems.run(
        "fedavg", DATA, PROBLEM, INPUTS, hp=hp, mapping=mapping, block=block
    )
    assert history.diverged.tolist() == [True, True, True]
    assert history.num_discarded[0] == 4
    chex.assert_trees_all_equal(start.params, state.params)


@pytest.mark.parametrize(
    ("rho", "shares", "moved"),
    [
        # Weights −1, 1, 1 whose first client is lost are 1/2, 1/2 of the others.
        ([-1.0, 1.0, 1.0, 0.0, 0.0], [-1.0, 1.0, 1.0, 0.0, 0.0], [1.5, 4.5]),
        # A lost client's share counts where its weight has underflowed: all to the
        # other one.
        ([0.0, 0.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0, 0.0], [1.0, 3.0]),
    ],
)
@pytest.mark.parametrize(("mapping", "block"), [MAPPINGS[0], MAPPINGS[2]])
def test_the_weight_of_a_lost_client_goes_to_the_others(
    mapping, block, rho, shares, moved
):
    """Client 0 is lost, client i moves by i · [1, 3]."""
    number = PROBLEM.rows.shape[0]
    ones, start = jnp.ones(number, int), {"w": jnp.zeros(2)}
    clients = problems.members(jnp.arange(number), ones, SIZE[0], PROBLEM.rows)
    on_device = mappings.DeviceClients(
        clients, jnp.arange(number), jnp.array(rho), jnp.array(shares), ones
    )

    def train(client, limit):
        finite = client.id != 0
        model = {"w": jnp.where(finite, jnp.array([1.0, 3.0]), jnp.nan) * client.id}
        result = local.LocalResult(jnp.float32(0), jnp.int32(0), finite)
        return mappings.Trained(model, result)

    spec = ProgramSpec(batch_size=4, passes=1, mapping=mapping, block=block)
    run = jax.jit(
        lambda start: mappings.weighted_updates(train, on_device, start, spec)
    )
    weighted, _ = run(start)
    assert weighted.moved["w"].tolist() == moved


def test_losing_all_weighted_clients_keeps_the_model_and_goes_on():
    # A huge coupling gives all weight to client 3 (τ = 5), and its data are spoiled.
    own = np.asarray(PROBLEM.rows[3])
    rows = np.asarray(PROBLEM.rows).copy()
    for i in (0, 1, 2, 4):
        rows[i] = np.resize(rows[i][~np.isin(rows[i], own)], 12)
    x = PROBLEM.samples.x.at[own].set(np.nan)
    prob = PROBLEM._replace(
        samples=PROBLEM.samples._replace(x=x), rows=jnp.asarray(rows)
    )
    tau, size = np.zeros_like(TAU), SIZE[1:2].repeat(3, 0)
    tau[:2] = [1, 1, 1, 5, 1], [1, 1, 2, 0, 1]
    options = {"hp": problems.hparams(smoothness=1e9), "limits": INPUTS}
    start, state, history = problems.run(
        "dms", DATA, prob, problems.inputs(tau, size), **options
    )
    assert history.rho[0].tolist() == [0, 0, 0, 1, 0]
    assert history.num_discarded.tolist() == [1, 0, 0]
    assert not history.diverged.any()
    _, kept, _ = problems.run(
        "dms", DATA, prob, problems.inputs(tau * ONLY_FIRST, size), **options
    )
    chex.assert_trees_all_equal(kept.params, start.params)
    moved = jax.tree.map(lambda a, b: (a != b).any(), state.params, start.params)
    assert any(jax.tree.leaves(moved))


def test_evaluation_counts_every_test_sample_once():
    data = problems.dataset(samples=123)
    many = data._replace(
        x_test=np.resize(data.x_test, (611, 5)), y_test=np.resize(data.y_test, 611)
    )
    prob = problems.problem(many, 5, 12)
    assert prob.test.mask.sum() == 611
    assert prob.test.mask.size > 611  # the last batch is padded
    _, state, history = problems.run(
        "fedavg", many, prob, problems.inputs(TAU[:1], SIZE[:1])
    )
    w = as_reference(state.params)
    x = (many.x_test.astype(np.float64) - 0.3) / 1.7
    total, _ = reference.loss_and_gradient(w, x, many.y_test)
    hidden = np.maximum(x @ w["w1"] + w["b1"], 0)
    right = (hidden @ w["w2"] + w["b2"]).argmax(1) == many.y_test
    np.testing.assert_allclose(history.test_loss[0], total / 611, rtol=1e-4)
    np.testing.assert_allclose(history.test_accuracy[0], right.mean(), atol=1e-6)
