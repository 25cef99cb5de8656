"""Rules outside of a simulation: one matrix, ids, lost models, arrays of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems, reference
from tsfl_jax.config import replace
from tsfl_jax.rules import custom
from tsfl_jax.rules.averages import KINDS
from tsfl_jax.types import ClientGradients, Constants, UserError

RULES = tsfl_jax.AGGREGATORS
SIZES = [9, 9, 9, 9, 64]
BY_CLIENT = ["safa", "scaffold", "aso_fed", "feddyn", "ca2fl"]
HPARAMS = tsfl_jax.HParams(lr=0.01, constants=Constants(10.0, 4.0, 0.5))
GIVEN = {
    "updates": {"w": np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)},
    "client": np.array([6, 0, 3, 1, 5]),
    "tau": np.array([1, 2, 4, 0, 3]),
    "size": np.array([30, 10, 20, 50, 40]),
    "lag": np.array([0, 3, 1, 0, 2]),
    "losses": np.float32([0.5, 1.0, 2.0, 1.0, 1.5]),
    "gradients": ClientGradients(*np.float32([[1, 2, 3, 4, 5]] * 2), np.ones(5)),
}
PLAIN = ("fedavg", "fedprox", "dms", "bound_optimal", "fednova", "flexible")


@functools.cache
def compiled(name):
    """One program for all that the matrix asks of a rule."""

    def applied(params, state, updates, gradients, **inputs):
        return tsfl_jax.aggregate(
            RULES[name],
            updates,
            params,
            state,
            hparams=HPARAMS,
            validation=lambda w: ((w["w"] - 1) ** 2).sum(),
            server_update=jax.tree.map(lambda u: u.mean(axis=0), updates),
            gradients=gradients._replace(square=gradients.square[0]),
            **inputs,
        )

    return jax.jit(applied)


def applied(name, order=slice(None), *, start=0.0, state=None, **changes):
    """(w^{t+1}, state) of a rule for five of seven clients in any order."""
    inputs = jax.tree.map(lambda a: jnp.asarray(a)[order], GIVEN | changes)
    params = {"w": jnp.full(4, start, jnp.float32)}
    if state is None:
        sizes = [10, 50, 1, 20, 1, 40, 30]
        state = tsfl_jax.init_rule(RULES[name], params, 7, size=sizes)
    return compiled(name)(params, state, **inputs)


@pytest.mark.parametrize("name", RULES)
def test_every_rule(name):
    """In any order, without whom is lost, without anybody, and as weights alone."""
    new, state = applied(name)
    assert np.abs(new["w"]).max() > 1e-3
    # The order of the clients does not matter.
    other = applied(name, np.array([3, 0, 4, 2, 1]))
    for a, b in zip(*map(jax.tree.leaves, ((new, state), other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # Without a model that counts, the global one and the state stay: all τ are 0, all
    # updates NaN, or what the rule makes of them is not finite.
    nothing = {"tau": np.zeros(5, int)}, {"updates": {"w": np.full((5, 4), np.nan)}}
    for changes in (*nothing, {"start": np.inf}):
        start = changes.get("start", 2.0)
        same, after = applied(name, **{"start": start, "state": state} | changes)
        np.testing.assert_array_equal(same["w"], np.full(4, start))
        jax.tree.map(np.testing.assert_array_equal, after, state)
    # Arrays of NumPy in and out, and what the weights make of the updates.
    inputs = {n: GIVEN[n] for n in ("tau", "size", "lag", "client")}
    inputs["gradients"] = GIVEN["gradients"]._replace(square=np.float32(1))
    if RULES[name].stacks:
        with pytest.raises(UserError, match=r"use tsfl_jax\.aggregate"):
            tsfl_jax.weights(RULES[name], **inputs)
        return
    rho = tsfl_jax.weights(RULES[name], hparams=HPARAMS, **inputs)
    assert type(rho) is np.ndarray and rho.dtype == np.float32
    assert rho.shape == (5,) and rho[3] == 0 and np.isfinite(rho).all()
    if name in PLAIN:
        moved = rho @ GIVEN["updates"]["w"]
        np.testing.assert_allclose(new["w"], moved, rtol=1e-5, atol=1e-6)


def test_weights_by_hand_from_lists_and_by_ids():
    rho = tsfl_jax.weights(RULES["fedavg"], tau=[3, 1, 0], size=[10, 30, 60])
    np.testing.assert_allclose(rho, [0.25, 0.75, 0.0])
    with pytest.raises(UserError, match="expected gradients="):
        tsfl_jax.weights(RULES["bound_optimal"], tau=[1, 2])
    # DMS filters by a random number of each client.
    given = {"hparams": HPARAMS, "key": jax.random.key(0)}
    tau, ids = np.array([1, 1, 1, 2, 2, 4]), np.array([4, 2, 0, 1, 5, 3])
    rho = tsfl_jax.weights(RULES["dms"], tau=tau, **given)
    shuffled = tsfl_jax.weights(RULES["dms"], tau=tau[ids], client=ids, **given)
    np.testing.assert_allclose(shuffled, rho[ids], rtol=1e-6)
    assert (rho == 0).any()


# ---- What the state has of a client goes by its id ----

SETTINGS = {"safa__lag": 1, "server__lr": 0.5, "mu": 0.5}
REFERENCE = {f"staleness__{name}": 0 for name in ("kind", "a", "b")}
REFERENCE |= {"momentum": 0.0, "lr": 0.5, **SETTINGS}


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("name", BY_CLIENT)
def test_shuffled_subsets_are_the_papers_formulas(name, joins):
    """Three of five in any order; or two clients that are only known from round 2."""
    rule, hparams = RULES[name], problems.hparams(lr=0.5, **SETTINGS)
    draws, w, number = np.random.default_rng(0), np.zeros(2), 3 if joins else 5
    params = {"w": jnp.zeros(2)}
    state = tsfl_jax.init_rule(rule, params, number, size=SIZES[:number])
    server = {"size": np.array(SIZES[:number], float), "first": w, "c": np.zeros(2)}
    server["own"] = [np.zeros(2)] * number

    @jax.jit
    def step(updates, params, state, client, counts):
        return tsfl_jax.aggregate(
            rule, updates, params, state, client=client, hparams=hparams, **counts
        )

    for turn in range(5):
        if joins and turn == 2:
            number = 5
            state = custom.resized(rule, params, state, SIZES)
            server["size"] = np.array(SIZES, float)
            new = {"own": [np.zeros(2)] * 2, "cache": [w, w], "age": [0, 0]}
            new |= {"delays": [[], []], "memory": [np.zeros(2)] * 2}
            for column, rows in new.items():
                if column in server:
                    server[column] = [*server[column], *rows]
        ids, delta = draws.permutation(number)[:3], draws.normal(size=(3, 2))
        counts = {"tau": draws.integers(1, 4, 3), "size": np.array(SIZES)[ids]}
        lag = draws.integers(0, 40, 3) if name == "aso_fed" else np.zeros(3, int)
        given = jax.tree.map(jnp.asarray, counts | {"lag": lag})
        params, state = step({"w": delta}, params, state, ids, given)
        w = reference.serve(
            name, w, [w] * 3, w + delta, counts["size"], lag, counts["tau"], ids,
            [server["c"]] * 3, 0, server, REFERENCE,
        )  # fmt: skip
        np.testing.assert_allclose(params["w"], w, rtol=1e-5, atol=1e-5)


def test_what_the_state_cannot_know_is_one_line():
    rule, params = RULES["scaffold"], {"w": jnp.zeros(1)}
    with pytest.raises(UserError, match="expected the samples of each of 3 "):
        tsfl_jax.init_rule(rule, params, 3, size=[1, 2])
    updates = {"w": jnp.ones((2, 1))}
    state = tsfl_jax.init_rule(rule, params, 3, size=[1, 2, 3])
    for client in (None, [0, 3], [-1, 0]):
        with pytest.raises(UserError, match="an id from 0 to 2 for each of 2"):
            tsfl_jax.aggregate(rule, updates, params, state, client=client)


def test_under_jit_an_unknown_id_is_left_out_and_sizes_are_those_of_the_state():
    rule, params = RULES["aso_fed"], {"w": jnp.zeros(1)}
    state = tsfl_jax.init_rule(rule, params, 3, size=[2, 2, 6])

    @jax.jit
    def moved(client):
        updates = {"w": jnp.array([[10.0], [20.0]])}
        return tsfl_jax.aggregate(rule, updates, params, state, client=client)[0]["w"]

    np.testing.assert_allclose(moved(jnp.array([2, 3])), [6.0], rtol=1e-6)
    np.testing.assert_allclose(moved(jnp.array([-1, 0])), [4.0], rtol=1e-6)


def test_float64_is_computed_in_float32():
    """Arrays of NumPy, without a warning of JAX."""
    params = {"w": np.zeros(1)}
    state = tsfl_jax.init_rule(RULES["safa"], params, 2, size=[1, 3])
    updates, size = {"w": np.array([[1.0], [5.0]])}, [1, 3]
    new, _ = tsfl_jax.aggregate(RULES["safa"], updates, params, state, size=size)
    assert new["w"].dtype == np.float32 and new["w"] == 4.0


# ---- The share of a client whose model is not finite ----


def moved(name, updates, **changes):
    """w^{t+1} − w^t of a rule; the updates are numbers."""
    rule, params = RULES[name], {"w": jnp.zeros(1)}
    state = tsfl_jax.init_rule(rule, params, len(updates))
    given = {"w": jnp.asarray(updates, jnp.float32)[:, None]}
    new, _ = tsfl_jax.aggregate(rule, given, params, state, **changes)
    return float(new["w"][0])


def test_fednova_divides_the_share_not_the_weight():
    # ρ = τ_eff p_i/‖a_i‖ is largest for the client with the least work.
    tau, updates = [1, 100, 100], [-1.0, -100.0, -100.0]
    assert moved("fednova", updates, tau=tau) == pytest.approx(-67)
    # τ_eff = 67, the others' p = 1/2 each: 67·(½·1 + ½·1).
    assert moved("fednova", [np.nan, *updates[1:]], tau=tau) == pytest.approx(-67)
    assert moved("fednova", [*updates[:2], np.nan], tau=tau) == pytest.approx(-67)


def test_a_stale_model_does_not_count_for_a_fresh_one():
    kind = KINDS.index("polynomial")
    hparams = problems.hparams(staleness__kind=kind, staleness__a=1.0)
    given = {"lag": [0, 9], "hparams": hparams}
    # s(0)/2 + s(9)/2 = 0.55; s(9)/1 = 0.1, times 1 − γ = ½ for FedAsync.
    for name, factor in (("fedbuff", 1.0), ("fedasync", 0.5)):
        assert moved(name, [1.0, 1.0], **given) == pytest.approx(0.55 * factor)
        assert moved(name, [np.nan, 1.0], **given) == pytest.approx(0.1 * factor)


def test_in_a_simulation_as_the_others_alone():
    """Of three clients the samples of the first overflow; both rules in one program."""
    draws, tau = np.random.default_rng(0), (2, 30, 30)
    y = draws.integers(0, 3, 400)
    x = (draws.normal(size=(400, 4)) + 2 * y[:, None]).astype(np.float32)
    x[:100] *= 1e30
    dataset = tsfl_jax.make_dataset(x[:300], y[:300], x[300:], y[300:])
    lists = [np.arange(100), np.arange(100, 200), np.arange(200, 300)]
    config = tsfl_jax.Config(
        num_intervals=1, num_clients=3, batch_size=100, lr=0.01, momentum=0.0
    )
    config = replace(config, {"model.hidden": 0, "devices": 1})
    config = replace(config, {"schedule.kind": "explicit", "schedule.tau": tau})
    nova = replace(config, {"algorithm": "fednova"})
    two = replace(nova, {"schedule.tau": (0, 30, 30)})
    points = {"algorithm": ["fednova", "fedavg"]}
    swept = tsfl_jax.sweep(nova, points, dataset=dataset, partition=lists)
    assert (swept.history["num_discarded"] == 1).all()
    losses = swept.history["test_loss"][:, 0]
    found = tsfl_jax.simulate(nova, dataset=dataset, partition=lists)
    # Another program: without optimization, as in tests, its loss is the next float32
    # on some processors.
    np.testing.assert_array_max_ulp(losses[0], found.history["test_loss"][0], 1)
    assert found.history["num_discarded"].tolist() == [1]
    # Both alone have ‖a‖ = 30; with all three τ_eff is 62/3.
    parts = {"dataset": dataset, "partition": lists}
    alone, still = (
        tsfl_jax.simulate(replace(two, {"lr": lr}), **parts) for lr in (0.01, 1e-30)
    )
    loss = alone.history["test_loss"][0]
    assert losses[1] == pytest.approx(loss, rel=1e-5)  # FedAvg's
    leaves = map(jax.tree.leaves, (found.params, still.params, alone.params))
    for new, start, other in zip(*leaves, strict=True):
        expected = start + 62 / 3 / 30 * (np.asarray(other) - start)
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-6)
