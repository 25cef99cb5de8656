"""Rules outside of a simulation: what the state has of a client goes by its id."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems, reference
from tsfl_jax.rules import custom
from tsfl_jax.types import ClientGradients, Constants, UserError

RULES = tsfl_jax.AGGREGATORS
SIZES = [9, 9, 9, 9, 64]
BY_CLIENT = ["safa", "scaffold", "aso_fed"]
SETTINGS = {"safa__lag": 1, "server__lr": 0.5}
REFERENCE = {"staleness__kind": 0, "staleness__a": 0, "staleness__b": 0} | {
    **{"momentum": 0.0, "mu": 0.0, "lr": 0.5, **SETTINGS}
}


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
            number, more = 5, [np.zeros(2)] * 2
            state = custom.resized(rule, params, state, SIZES)
            server["size"] = np.array(SIZES, float)
            server["own"] = [*server["own"], *more]
            if "cache" in server:
                server["cache"] = [*server["cache"], w, w]
                server["age"] = [*server["age"], 0, 0]
            if "delays" in server:
                server["delays"] = [*server["delays"], [], []]
        who, delta = draws.permutation(number)[:3], draws.normal(size=(3, 2))
        counts = {"tau": draws.integers(1, 4, 3), "size": np.array(SIZES)[who]}
        lag = draws.integers(0, 40, 3) if name == "aso_fed" else np.zeros(3, int)
        new, state = step(
            {"w": delta},
            params,
            state,
            who,
            jax.tree.map(jnp.asarray, counts | {"lag": lag}),
        )
        w = reference.serve(
            name, w, [w] * 3, w + delta, counts["size"], lag, counts["tau"], who,
            [server["c"]] * 3, 0, server, REFERENCE,
        )  # fmt: skip
        np.testing.assert_allclose(new["w"], w, rtol=1e-5, atol=1e-5)
        params = new


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_the_clients_does_not_matter(name):
    rule, draws = RULES[name], np.random.default_rng(1)
    params, number = {"w": np.zeros(4, np.float32)}, 5
    given = {
        "updates": {"w": draws.normal(size=(number, 4)).astype(np.float32)},
        "client": np.array([6, 0, 3, 1, 5]),
        "tau": np.array([1, 2, 4, 0, 3]),
        "size": np.array([30, 10, 20, 50, 40]),
        "lag": np.array([0, 3, 1, 0, 2]),
        "losses": np.float32([0.5, 1.0, 2.0, 1.0, 1.5]),
    }
    gradients = np.float32([1.0, 2.0, 3.0, 4.0, 5.0])
    hparams = tsfl_jax.HParams(lr=0.01, constants=Constants(10.0, 4.0, 0.5))
    state = tsfl_jax.init_rule(rule, params, 7, size=[10, 50, 1, 20, 1, 40, 30])

    def applied(order):
        ordered = jax.tree.map(lambda a: a[order], given)
        noise = ClientGradients(gradients[order], gradients[order], np.float32(1.0))
        return tsfl_jax.aggregate(
            rule,
            ordered.pop("updates"),
            params,
            state,
            hparams=hparams,
            gradients=noise,
            validation=lambda w: ((w["w"] - 1) ** 2).sum(),
            **ordered,
        )

    one, other = applied(np.arange(number)), applied(np.array([3, 0, 4, 2, 1]))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert np.abs(one[0]["w"]).max() > 1e-3


def test_safa_has_the_sizes_of_all_clients():
    """Five updates of 10, p = 0.09 four times and 0.64; without lag."""
    updates, params = {"w": jnp.array([[10.0], [20], [30], [40], [0]])}, jnp.zeros(1)
    params = {"w": params}
    state = tsfl_jax.init_rule(RULES["safa"], params, 5, size=SIZES)
    new, _ = tsfl_jax.aggregate(RULES["safa"], updates, params, state)
    np.testing.assert_allclose(new["w"], [9.0], rtol=1e-6)


@pytest.mark.parametrize("name", BY_CLIENT)
def test_what_the_state_cannot_know_is_one_line(name):
    rule, params = RULES[name], {"w": jnp.zeros(1)}
    for size in (None, [1, 2]):
        with pytest.raises(UserError, match="expected the samples of each of 3 "):
            tsfl_jax.init_rule(rule, params, 3, size=size)
    state, updates = (
        tsfl_jax.init_rule(rule, params, 3, size=[1, 2, 3]),
        jnp.ones((2, 1)),
    )
    for client in (None, [0, 3], [-1, 0]):
        with pytest.raises(UserError, match="expected an id from 0 to 2 for each of 2"):
            tsfl_jax.aggregate(rule, {"w": updates}, params, state, client=client)


def test_under_jit_an_unknown_id_is_left_out_and_sizes_are_those_of_the_state():
    rule, params = RULES["aso_fed"], {"w": jnp.zeros(1)}
    state = tsfl_jax.init_rule(rule, params, 3, size=[2, 2, 6])

    @jax.jit
    def moved(client):
        updates = {"w": jnp.array([[10.0], [20.0]])}
        return tsfl_jax.aggregate(rule, updates, params, state, client=client)[0]["w"]

    np.testing.assert_allclose(moved(jnp.array([2, 3])), [6.0], rtol=1e-6)
    np.testing.assert_allclose(moved(jnp.array([-1, 0])), [4.0], rtol=1e-6)


def test_a_state_of_the_users_own_has_rows_by_client():
    rule = tsfl_jax.rule(
        lambda info: info.tau,
        init=lambda params, counts: jnp.zeros((counts.clients, 2)),
    )
    params, updates = {"w": jnp.zeros(1)}, {"w": jnp.ones((2, 1))}
    state = tsfl_jax.init_rule(rule, params, 3)
    with pytest.raises(UserError, match="as the state is of 3 clients"):
        tsfl_jax.aggregate(rule, updates, params, state)
    tsfl_jax.aggregate(rule, updates, params, state, client=[2, 0])


def test_weights_go_by_ids():
    """DMS filters by a random number of each client."""
    hparams = tsfl_jax.HParams(lr=0.01, constants=Constants(10.0, 4.0, 0.5))
    given = {"hparams": hparams, "key": jax.random.key(0)}
    tau, ids = np.array([1, 1, 1, 2, 2, 4]), np.array([4, 2, 0, 1, 5, 3])
    rho = tsfl_jax.weights(RULES["dms"], tau=tau, **given)
    shuffled = tsfl_jax.weights(RULES["dms"], tau=tau[ids], client=ids, **given)
    np.testing.assert_allclose(shuffled, rho[ids], rtol=1e-6)
    assert (rho == 0).any()


@pytest.mark.parametrize("name", ["fedavg", "safa"])
def test_float64_is_computed_in_float32(name):
    """Arrays of NumPy, without a warning of JAX."""
    params = {"w": np.zeros(1)}
    state = tsfl_jax.init_rule(RULES[name], params, 2, size=[1, 3])
    updates, size = {"w": np.array([[1.0], [5.0]])}, [1, 3]
    new, _ = tsfl_jax.aggregate(RULES[name], updates, params, state, size=size)
    assert new["w"].dtype == np.float32 and new["w"] == 4.0
