"""Every aggregation rule: numbers by hand, limit cases, and a slow reference."""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.engine.test_scan import PROBLEM, TAU, as_reference
from tests.problems import small
from tests.timeline.test_deliveries import SIZES, damaged, reference_of
from tsfl_jax import config
from tsfl_jax.prepare import prepare
from tsfl_jax.rules import AGGREGATORS, averages, dms, fednova
from tsfl_jax.rules.base import Counts, Received, RoundInfo
from tsfl_jax.run import lanes, sweeps
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.types import Constants

RULES = list(AGGREGATORS)
SIZE = np.broadcast_to(SIZES, TAU.shape)
# One of each kind in the fast suite; every rule has its numbers by hand there, too.
FEW = {"fedat", "scaffold", "fedadam"}
every_rule = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in RULES],
)
HP = problems.hparams(momentum=0.9, lr=0.03, mu=0.1, trim=0.26)


def dense(tau, size=SIZE):
    """τ ``[T, N]`` of clients in step."""
    return complete(np.array(tau, np.int32), np.array(size[: len(tau)], np.int32))


def run(name, tau=TAU, prob=PROBLEM, *, hp=HP, size=SIZE, **options):
    """(start, state, history); local iterations are steps, and compile once a rule."""
    options = {"iteration": "step"} | options
    return problems.replayed(name, prob, dense(tau, size), hp=hp, **options)


def close(a, b, rtol=1e-4, atol=1e-5):
    chex.assert_trees_all_close(a, b, rtol=rtol, atol=atol)


# ---- Numbers by hand: models of one or two weights ----


def params(*values):
    return {"params": {"w": jnp.array(values)}}


def stacked(*rows):
    return {"params": {"w": jnp.array(rows)}}


def numbers(tree):
    return np.asarray(tree["params"]["w"]).tolist()


def received(tau, size=None, *, rho=None, lag=None, group=0, client=None, steps=None):
    """A info by hand and who is present; τ steps each."""
    tau = jnp.array(tau, jnp.int32)
    zeros = jnp.zeros_like(tau)
    info = RoundInfo(
        key=jax.random.key(0),
        client=jnp.arange(len(tau)) if client is None else jnp.array(client),
        tau=tau,
        size=zeros + 1 if size is None else jnp.array(size),
        steps=tau if steps is None else jnp.array(steps),
        lag=zeros if lag is None else jnp.array(lag),
        group=jnp.int32(group),
        constants=Constants(1.0, 1.0, 1.0),
    )
    rho = jnp.zeros(len(tau)) if rho is None else jnp.array(rho)
    return Received(info, rho, tau > 0)


@functools.cache
def compiled(name, part, function):
    """Of a rule: one program in place of one per operation."""
    return jax.jit(getattr(getattr(AGGREGATORS[name], part), function))


def weights(name, happened, **changes):
    hp = problems.hparams(**changes)
    return compiled(name, "mixing", "weights")(happened.info, hp).rho


def update(name, mean, old, state=(), happened=None, **changes):
    hp = problems.hparams(**changes)
    happened = received([1]) if happened is None else happened
    return compiled(name, "server", "update")(mean, old, state, happened, hp)


def combine(name, updates, happened, state=(), **changes):
    hp = problems.hparams(**changes)
    return compiled(name, "mixing", "combine")(updates, state, happened, hp)


LATE = {"staleness__kind": 1, "staleness__a": 1.0}  # s = 1/(1 + lag)
HALVES = {"tau": [2, 4, 1, 0], "size": [10, 30, 20, 20]}
# A rule, what is reported, settings, and ρ.
WEIGHTS = [
    # Client 1 is absent: 10/40 and 30/40; 1/(1 + 2) for client 2 makes it 10 : 10.
    *(
        ("fedavg", {"tau": [1, 0, 5], "size": [10, 20, 30]} | late, LATE, rho)
        for late, rho in (({}, [0.25, 0, 0.75]), ({"lag": [0, 0, 2]}, [0.5, 0, 0.5]))
    ),
    # Half a vote each; one late by 1 halves the second: lost to the global model.
    *(
        (name, {"tau": [2, 0, 3], "lag": [0, 0, 1]}, LATE, [0.5, 0, 0.25])
        for name in ("fedasync", "fedbuff")
    ),
    # Equal τ: no client is filtered, and every weight is the same.
    ("dms", {"tau": [2, 2, 2, 2]}, {}, [0.25] * 4),
    # p = 1/8, 3/8, 2/8, 2/8 of all four; E = 4 of the second.
    ("flexible", HALVES, {}, [0.25, 0.375, 1.0, 0]),
    ("flexible", HALVES, {"flexible__scheme": 1}, [0.125, 0.375, 0.25, 0]),
    ("flexible", HALVES, {"flexible__scheme": 0}, [0, 4 * 0.375, 0, 0]),
    # E = 2: the second has done more than asked for.
    ("flexible", HALVES, {"flexible__target": 2}, [0.125, 0.1875, 0.5, 0]),
    # p = 1/4, 3/4; 2 and 4 steps: τ_eff = 2/4 + 12/4 = 3.5; ρ = 3.5/4/2, 3.5·3/4/4.
    ("fednova", {"tau": [2, 4, 0], "size": [10, 30, 50]}, {}, [0.4375, 0.65625, 0]),
    # Momentum 0.5: 1 + 1.5 = 2.5 for two steps, 1 for one; p = 1/2: τ_eff = 1.75.
    ("fednova", {"tau": [2, 1]}, {"momentum": 0.5}, [0.875 / 2.5, 0.875]),
    ("krum", {"tau": [1, 0, 2, 1]}, {}, [1 / 3, 0, 1 / 3, 1 / 3]),
]


@pytest.mark.parametrize(("name", "reported", "changes", "rho"), WEIGHTS)
def test_weights_by_hand(name, reported, changes, rho):
    got = weights(name, received(**reported), **changes)
    np.testing.assert_allclose(got, rho, rtol=1e-6)


def test_dms_by_hand():
    # c = η L (H − 1) G²/(2 N σ²) = 0.1 · 1 · 2 · 1/(2 · 2 · 1) = 0.05; τ − mean = ±1.
    # Client 0, with τ = 1 < K = 2, is dropped with a chance of 1/3.
    for seed in range(20):
        happened = received([1, 3])
        info = happened.info._replace(key=jax.random.key(seed))
        got = weights("dms", Received(info, None, None), grad_sq_norm=1.0)
        kept = float(got[0]) > 0
        np.testing.assert_allclose(got, [0.45, 0.55] if kept else [0, 1], rtol=1e-6)


# A rule, Σ ρ w, w^t, Σ ρ, settings, and w^{t+1}.
STEPS = [
    ("fedavg", 3.0, 1.0, 1.0, {}, 3.0),
    # γ = 0.75: 0.75 · 4 + 0.25 · 8 = 5.
    ("fedasync", 8.0, 4.0, 1.0, {"gamma": 0.75}, 5.0),
    # Half as fresh, Σ ρ w = 0.5 · 8: 4 + 0.25 · 0.5 · (8 − 4) = 4.5.
    ("fedasync", 4.0, 4.0, 0.5, {"gamma": 0.75}, 4.5),
    # The mean is w^t + Δ: 1 + 0.5 · (3 − 1) = 2.
    *((n, 3.0, 1.0, 1.0, {"server__lr": 0.5}, 2.0) for n in ("fedbuff", "krum")),
]


@pytest.mark.parametrize(("name", "mean", "old", "rho", "changes", "new"), STEPS)
def test_a_step_of_the_server_by_hand(name, mean, old, rho, changes, new):
    happened = received([1], rho=[rho])
    got, _ = update(name, params(mean), params(old), (), happened, **changes)
    assert numbers(got) == [new]


def test_fedat_by_hand():
    # Two tiers from w = 0. Tier 0 delivers 4, T = (1, 0): 0 · 4 + 1 · w_1 = 0.
    rule, old = AGGREGATORS["fedat"], params(0.0)
    state = rule.server.init(old, Counts(3, 2))
    new, state = update("fedat", params(4.0), old, state, received([1], group=0))
    assert numbers(new) == [0]
    # Tier 1 delivers 8, T = (1, 1): (4 + 8)/2.
    new, state = update("fedat", params(8.0), new, state, received([1], group=1))
    assert numbers(new) == [6]
    # Tier 0 delivers 5 and 2, T = (3, 1): 1/4 · 2 + 3/4 · 8.
    new, state = update("fedat", params(5.0), new, state, received([1], group=0))
    new, state = update("fedat", params(2.0), new, state, received([1], group=0))
    assert numbers(new) == [6.5]
    assert state[1].tolist() == [3, 1]


def test_safa_by_hand():
    """Three clients with p = 1/4, 1/4, 1/2 and w^0 = 8; lag = 1."""
    rule, hp = AGGREGATORS["safa"], problems.hparams(safa__lag=1)
    state = rule.server.init(params(8.0), Counts(3, 1, jnp.array([10, 10, 20])))

    def step(w, state, tau, updates):
        given = stacked(*updates), received(tau), state
        delta, state = combine("safa", *given, safa__lag=1)
        new = jax.tree.map(jnp.add, w, delta)
        return rule.server.update(new, w, state, received(tau), hp)

    # 1 is away: 12/4 + 8/4 + 4/2.
    w, state = step(params(8.0), state, [1, 0, 1], [[4.0], [np.nan], [-4.0]])
    assert numbers(w) == [7.0]
    # Of 0 alone, from w^1: 11/4 + 4/2, and the entry of 1 is 2 > 1 updates old: 7/4.
    w, state = step(w, state, [1, 0, 0], [[4.0], [0.0], [0.0]])
    assert numbers(w) == [6.5] and state.local[1].tolist() == [0, 0, 1]
    # Of 1 alone; that of 2 has become too old: 11/4 + 8.5/4 + 6.5/2.
    w, state = step(w, state, [0, 1, 0], [[0.0], [2.0], [0.0]])
    assert numbers(w) == [8.125] and state.local[1].tolist() == [1, 0, 0]


def test_aso_fed_by_hand():
    """n = 40; client 1 is 19 updates late, then 1: d̄ = 20 and 11."""
    rule = AGGREGATORS["aso_fed"]
    state = rule.server.init(params(0.0), Counts(3, 1, jnp.array([10, 10, 20])))
    happened = received([1, 1, 0], [10, 10, 20], lag=[0, 19, 0])
    updates = stacked([4.0], [8.0], [0.0])
    delta, state = combine("aso_fed", updates, happened, state)
    np.testing.assert_allclose(numbers(delta), [1 + np.log(20) * 2], rtol=1e-6)
    # Client 1 has 30 samples now, of 60; e < 11, so it still takes longer steps.
    happened = received([1], [30], lag=[1], client=[1])
    delta, state = combine("aso_fed", stacked([8.0]), happened, state)
    np.testing.assert_allclose(numbers(delta), [np.log(11) * 4], rtol=1e-6)


def test_scaffold_by_hand():
    # η = 0.5; three clients know of each other, two take part, equal sizes.
    old, rule = params(0.0), AGGREGATORS["scaffold"]
    state = rule.server.init(old, Counts(3, 1, jnp.ones(3)))
    happened = received([2, 0, 4], rho=[0.5, 0, 0.5])
    updates = stacked([-2.0], [0.0], [-8.0])
    delta, state = combine("scaffold", updates, happened, state, lr=0.5)
    # Δ = −5. c_0 = 2/(0.5 · 2) = 2, c_2 = 8/(0.5 · 4) = 4; c = (2 + 4)/3 = 2.
    assert numbers(delta) == [-5]
    assert state.common["w"].tolist() == [2]
    assert state.local["w"].tolist() == [[2], [0], [4]]
    # c − c_i is added to the gradients.
    broadcast = rule.clients.broadcast(state)
    corrections = [
        rule.clients.gradient_correction(state, broadcast, jnp.int32(i))["w"]
        for i in range(3)
    ]
    assert np.array(corrections).tolist() == [[0], [2], [-2]]
    # Client 1 alone, in another place, 1 step of −3: c_1 = 0 − 2 + 6 = 4, c += 4/3.
    happened = received([0, 1], rho=[0, 1.0], client=[0, 1])
    delta, state = combine("scaffold", stacked([0.0], [-3.0]), happened, state, lr=0.5)
    np.testing.assert_allclose(state.common["w"], [10 / 3], rtol=1e-6)
    assert state.local["w"].tolist() == [[2], [4], [4]]
    assert numbers(delta) == [-3]


def test_fedyogi_by_hand():
    # Both moments begin at 10⁻⁶. g = −2: v = 10⁻⁶ + 0.5 · 4, v̂ = v/0.5 = 4 + 2·10⁻⁶;
    # m = 0.5 · 10⁻⁶ − 1, m̂ = −2 + 10⁻⁶: a step of 2/(2 + 0.5) = 0.8.
    state = AGGREGATORS["fedyogi"].server.init(params(0.0), Counts(1, 1))
    settings = {f"fedopt__{n}": 0.5 for n in ("momentum", "second", "floor")}
    settings |= {"fedopt__lr": 1.0}
    new, state = update("fedyogi", params(2.0), params(0.0), state, **settings)
    np.testing.assert_allclose(numbers(new), [0.8], rtol=1e-5)
    # g = −1: v = 2 − 0.5 = 1.5, v̂ = 1.5/0.75 = 2; m = −1/2 − 1/2, m̂ = −1/0.75.
    newer, _ = update("fedyogi", params(1.8), new, state, **settings)
    want = 0.8 + (1 / 0.75) / (np.sqrt(2) + 0.5)
    np.testing.assert_allclose(numbers(newer), [want], rtol=1e-5)


def test_integer_leaves_have_no_update():
    updates = {"count": jnp.zeros((3, 2), jnp.int32), "w": jnp.array([[1.0], [2], [4]])}
    for name in ("median", "krum"):
        got, _ = combine(name, updates, received([1, 1, 1]))
        assert got["count"].tolist() == [0, 0] and got["count"].dtype == jnp.int32


@pytest.mark.parametrize(("module", "least"), [(dms, 7), (fednova, 2), (averages, 1)])
def test_examples_in_the_documentation(module, least):
    results = problems.run_examples(module)
    assert results.attempted >= least and not results.failed


# ---- Properties of all rules; outside of a simulation: test_aggregate ----


# Where an update is nearly 0, g/(√v + ε) makes its rounding errors larger.
ROUNDING = dict.fromkeys(("fedadam", "fedyogi", "fadas"), 2e-4)
# Rules that count the absent, as w^0: how much further five go than one of five. Under
# FedDyn one moves by its update and a fifth of it, five by it and all of it.
FURTHER = {"safa": 5, "aso_fed": 5, "feddyn": 2 / 1.2}


@every_rule
def test_equal_clients_are_one(name):
    """Five clients with the data and the random numbers of one."""
    prob = PROBLEM._replace(
        rows=jnp.tile(PROBLEM.rows[:1], (5, 1)), client=jnp.zeros(5, jnp.int32)
    )
    first = np.array([[3] * 5, [0] * 5, [0] * 5])
    alone = first * [1, 0, 0, 0, 0]
    # Flexible participation counts the absent, but in its scheme "complete".
    changes = {"flexible__scheme": 0} if name == "flexible" else {}
    hp = problems.hparams(momentum=0.9, lr=0.03, mu=0.1, trim=0.26, **changes)
    given = {"size": np.full((3, 5), 12), "hp": hp}
    _, state, _ = run(name, first, prob, **given)
    start, single, _ = run(name, alone, prob, **given)
    expected = single.params
    if name in FURTHER:
        more = FURTHER[name]
        expected = jax.tree.map(lambda w, s: w + more * (s - w), start.params, expected)
    close(state.params, expected, atol=ROUNDING.get(name, 1e-6))


LOST = np.array([[2, 4, 2, 3, 1], [0] * 5, [0] * 5])


@every_rule
def test_a_spoiled_client_is_left_out(name):
    clean, bad = damaged(1)
    start, state, history = run(name, LOST, bad)
    assert history.num_discarded.tolist() == [1, 0, 0]
    assert not history.diverged.any()
    assert all(
        np.isfinite(a).all() for a in jax.tree.leaves((state, history.test_loss))
    )
    if name == "dms_adaptive":  # its record has the weights that counted
        assert history.rho[0, 1] == 0
        np.testing.assert_allclose(history.rho[0].sum(), 1, rtol=1e-5)
        return
    # The same as if client 1 had stayed away; other weights depend on its τ.
    if name not in ("dms", "fednova", "bound_optimal", "flexible"):
        _, without, _ = run(name, LOST * [1, 0, 1, 1, 1], clean)
        close(state, without, atol=ROUNDING.get(name, 1e-5))


# ---- The slow reference ----

REFERENCE = {
    "fednova": {"momentum": 0.0, "lr": 0.1},
    "fednova, momentum": {"momentum": 0.9},
    "flexible": {},
    "flexible, complete": {"flexible__scheme": 0},
    "flexible, kept": {"flexible__scheme": 1},
    "scaffold": {"momentum": 0.0, "lr": 0.1},
    "scaffold, momentum": {"momentum": 0.9, "server__lr": 0.7},
    "fedavgm": {},
    "fedadam": {"fedopt__lr": 0.05, "fedopt__floor": 0.01},
    "fedyogi": {"fedopt__lr": 0.05, "fedopt__floor": 0.01},
    "median": {},
    "trimmed_mean": {"trim": 0.26},  # 1 of 4 from each end
    "geometric_median": {"server__lr": 0.7},
    "geometric_mean": {},
    "krum": {"trim": 0.26},
    "multi_krum": {"trim": 0.0},
    "fedbuff": {"server__lr": 0.7},
    "secure_buffer": {"secure_buffer__levels": 2**20},
    "aso_fed": {"server__lr": 0.7, "mu": 0.1},
    "safa": {"safa__lag": 1},
    "fedat": {},
    "feddyn": {"mu": 0.2},
    "fedexp": {"fedexp__epsilon": 1e-4},
    "qfedavg": {"qfedavg__q": 0.5},
    "qfedavg, given": {"momentum": 0.0, "lr": 0.1, "qfedavg__smoothness": 3.0},
    "ca2fl": {"server__lr": 0.7},
    "fadas": {"fedopt__lr": 0.05, "fedopt__floor": 0.01},
}


def in_step(tau):
    """τ ``[T, N]`` as the reference's timeline."""
    intervals, clients = tau.shape
    column = np.arange(intervals)[:, None] + 0 * tau
    return SimpleNamespace(
        client=np.arange(clients) + 0 * tau,
        version=column,
        task=column,
        iterations=tau,
        group=np.zeros(intervals, int),
    )


SLOWER = {"fednova", "scaffold, momentum", "fedyogi", "multi_krum", "geometric_median"}
SLOWER |= {"trimmed_mean", "fedbuff", "krum", "flexible, complete", "flexible, kept"}
SLOWER |= {"fedexp", "qfedavg, given", "fadas"}
# Of the kinds of FedNova, FedAdam, SCAFFOLD, the median and SAFA.
SLOWER |= {"flexible", "fedavgm", "feddyn", "geometric_mean", "secure_buffer"}
SLOWER |= {"aso_fed", "ca2fl"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOWER)) for c in REFERENCE],
)
def test_matches_plain_reference(case):
    name = case.split(",")[0]
    hp = problems.hparams(**{"momentum": 0.9, "lr": 0.03} | REFERENCE[case])
    start, state, _ = run(name, hp=hp)
    versions = reference_of(start, name, hp, in_step(TAU))
    got = as_reference(state.params)
    for n, value in versions[-1].items():
        assert np.abs(value - versions[0][n]).max() > 5e-3
        np.testing.assert_allclose(got[n], value, rtol=5e-4, atol=5e-5)


def test_mappings_agree():
    _, state, history = run("scaffold")
    _, other, measured = run("scaffold", mapping="vmap", block=2)
    close((state, history), (other, measured))


# Yogi's moments begin at 10⁻⁶, Adam's at 0; FedAT keeps a model per tier, FedBuff and
# FedNova add up updates.
OWN_STATES = ["dms", "fedadam", "fedyogi", "fedat", "fedbuff", "fednova", "fedavg"]
SHARED = small(num_intervals=3, mu=0.0)


def test_rules_with_states_and_deltas_of_their_own_share_a_program():
    several = prepare.prepare_all(
        [config.replace(SHARED, {"algorithm": name}) for name in OWN_STATES]
    )
    assert lanes.group(several) == [list(range(len(OWN_STATES)))]


@pytest.mark.slow
def test_a_rule_in_a_shared_program_gives_what_it_gives_alone():
    together = sweeps.run(SHARED, {"algorithm": OWN_STATES}).history["test_loss"]
    for name, loss in zip(OWN_STATES, together, strict=True):
        single = tsfl_jax.simulate(config.replace(SHARED, {"algorithm": name}))
        np.testing.assert_allclose(loss, single.history["test_loss"], rtol=1e-5)


def test_rules_that_share_no_program():
    # All updates at once, and updates measured against earlier models.
    names = ["median", "fedavg", "krum"]
    several = prepare.prepare_all([small(algorithm=name, mu=0.0) for name in names])
    assert lanes.group(several) == [[0], [1], [2]]
