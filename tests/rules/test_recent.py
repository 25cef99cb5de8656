"""FedDyn, FedExP, q-FedAvg, CA²FL, FADAS: numbers by hand and limit cases.

Float64 references over several intervals are in test_rules and test_deliveries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.rules.test_rules import combine, numbers, params, received, stacked, update
from tsfl_jax.rules import AGGREGATORS, qfedavg
from tsfl_jax.rules.base import ClientOutputs, Counts
from tsfl_jax.types import UserError

SIZES = jnp.array([10.0, 10.0, 20.0])


def first_state(name, sizes=SIZES):
    return AGGREGATORS[name].server.init(params(0.0), Counts(len(sizes), 1, sizes))


def close(tree, expected):
    np.testing.assert_allclose(numbers(tree), expected, rtol=1e-6)


def test_feddyn_by_hand():
    """μ = 0.5; client 1 is away: λ = 2, 0, −1 and p = 1/4, 1/4, 1/2."""
    happened = received([1, 0, 1], [10, 10, 20], rho=[1 / 3, 0, 2 / 3])
    updates = stacked([4.0], [np.nan], [-2.0])
    updates = jax.tree.map(lambda u: jnp.where(jnp.isnan(u), 0, u), updates)
    delta, state = combine("feddyn", updates, happened, first_state("feddyn"), mu=0.5)
    assert state.local["w"].tolist() == [[2], [0], [-1]]
    # Σ ρ u = 0, and (1/μ) Σ p λ = 2 (2/4 − 1/2) = 0.
    close(delta, [0.0])
    # Of two deliveries of client 1 the last decides: λ_1 = 0.5 · 6; Σ ρ u = 4.
    happened = received([1, 1], [10, 10], rho=[0.5, 0.5], client=[1, 1])
    given = stacked([2.0], [6.0]), happened, state
    delta, state = combine("feddyn", *given, mu=0.5)
    assert state.local["w"].tolist() == [[2], [3], [-1]]
    close(delta, [4 + 2 * 3 / 4])
    term = AGGREGATORS["feddyn"].clients.gradient_correction(state, (), 1)
    assert term["w"].tolist() == [3]
    # Unlike SCAFFOLD's c, λ_i is known where it is used.
    sends = [name for name, rule in AGGREGATORS.items() if rule.clients.sends_variates]
    assert sends == ["scaffold"]


def test_feddyn_of_no_and_of_a_small_mu():
    """μ = 0 is FedAvg; μ → 0 is not, the server adds the sum of the mean updates."""
    happened = received([1, 1, 1], [10, 10, 20], rho=[0.25, 0.25, 0.5])
    given = stacked([4.0], [8.0], [-2.0]), happened, first_state("feddyn")
    plain, state = combine("feddyn", *given, mu=0.0)
    close(plain, [2.0])
    assert not state.local["w"].any()
    close(combine("feddyn", *given, mu=1e-6)[0], [4.0])


def extrapolated(rows, rho, **settings):
    happened = received([1] * len(rows), rho=rho)
    return combine("fedexp", stacked(*rows), happened, **settings)[0]


def test_fedexp_by_hand():
    # Four orthogonal updates of length 1: ‖Δ‖² = 1/4, η_g = 1/(2/4) = 2.
    found = extrapolated(np.eye(4, dtype=np.float32), [0.25] * 4, epsilon=0.0)
    close(found, [0.5] * 4)
    # ε = 1/4: η_g = 1.
    found = extrapolated(np.eye(4, dtype=np.float32), [0.25] * 4, epsilon=0.25)
    close(found, [0.25] * 4)
    # 3 and −1, weights ¾ and ¼: Δ = 2, (27 + 1)/4/(2 · 4) < 1.
    close(extrapolated([[3.0], [-1.0]], [0.75, 0.25], epsilon=0.0), [2.0])
    # ½ each: Δ = 1, η_g = 5/2. One alone, equal ones, and none at all: η_g = 1.
    close(extrapolated([[3.0], [-1.0]], [0.5, 0.5], epsilon=0.0), [2.5])
    close(extrapolated([[3.0]], [1.0], epsilon=0.0), [3.0])
    close(extrapolated([[3.0], [3.0]], [0.5, 0.5], epsilon=0.0), [3.0])
    close(extrapolated([[0.0], [0.0]], [0.5, 0.5], epsilon=0.0), [0.0])


fair_weights = jax.jit(qfedavg.fair_weights)


def fair(loss, square=(1.0, 4.0), present=(True, True), steps=1, **settings):
    n = len(loss)
    happened = received([steps] * n, rho=[1 / n] * n)
    happened = happened._replace(present=jnp.array(present))
    outputs = ClientOutputs(jnp.array(loss), None, jnp.sqrt(jnp.array(square)))
    hparams = problems.hparams(**{"lr": 0.5} | settings)
    return fair_weights(outputs, (), happened, hparams)[0].rho


def test_qfedavg_by_hand():
    # L = 1/η = 2, q = 1: Σ p (F + L‖u‖²) = (1 + 2)/2 + (4 + 8)/2 = 7.5.
    np.testing.assert_allclose(fair([1.0, 4.0], q=1.0), [1 / 15, 4 / 15], rtol=1e-6)
    # q = 2: Σ p (F² + 2 F L‖u‖²) = (1 + 4)/2 + (16 + 64)/2 = 42.5.
    expected = [0.5 / 42.5, 8 / 42.5]
    np.testing.assert_allclose(fair([1.0, 4.0], q=2.0), expected, rtol=1e-6)
    # L is given; or with momentum ½ two steps count 2.5 times: L = 2 · 2/2.5.
    rho = fair([1.0, 4.0], q=1.0, qfedavg__smoothness=2.0, lr=9.0)
    np.testing.assert_allclose(rho, [1 / 15, 4 / 15], rtol=1e-6)
    rho = fair([1.0, 4.0], q=1.0, steps=2, momentum=0.5)
    np.testing.assert_allclose(rho, [0.5 / 6.5, 2 / 6.5], rtol=1e-6)


def test_qfedavg_in_the_limits():
    np.testing.assert_allclose(fair([1.0, 400.0], q=0.0), [0.5, 0.5], rtol=1e-6)
    # Steps of length 0: ρ ∝ F^q. Its largest power would be 10⁶⁰, an unknown loss is
    # the mean of the others, and who is lost gives its share to them.
    still = {"square": (0.0, 0.0, 0.0), "present": (True, True, True)}
    rho = fair([1e6, 1e6, 5e5], q=10.0, **still)
    np.testing.assert_allclose(rho[2] / rho[0], 2.0**-10, rtol=1e-5)
    rho = fair([1.0, 3.0, jnp.nan], q=1.0, **still)
    np.testing.assert_allclose(rho, [1 / 6, 3 / 6, 2 / 6], rtol=1e-6)
    still["present"] = (True, False, True)
    rho = fair([1.0, 3.0, 3.0], q=1.0, **still)
    np.testing.assert_allclose(rho, [1 / 4, 0, 3 / 4], rtol=1e-6)
    np.testing.assert_array_equal(fair([jnp.nan, jnp.nan], q=0.0), [0.5, 0.5])
    with pytest.raises(UserError, match="expected losses="):
        tsfl_jax.aggregate(AGGREGATORS["qfedavg"], stacked([1.0]), params(0.0))


def test_ca2fl_by_hand():
    # Client 1 is away, h = 0: ρ = 1/3 and 2/3 of 3 and 6.
    happened = received([1, 0, 1], [10, 10, 20])
    updates = stacked([3.0], [0.0], [6.0])
    mean, state = combine("ca2fl", updates, happened, first_state("ca2fl"))
    close(mean, [5.0])
    assert state.local["w"].tolist() == [[3], [0], [6]]
    # Client 0 twice: h̄ = 3/4 + 6/2 and −1, +5 beside h_0 = 3; the last is kept.
    happened = received([1, 1], [10, 10], client=[0, 0])
    mean, state = combine("ca2fl", stacked([2.0], [8.0]), happened, state)
    close(mean, [3.75 + (-1 + 5) / 2])
    assert state.local["w"].tolist() == [[8], [0], [6]]
    # All of them: the mean update, whatever the cache.
    happened = received([1, 1, 1], [10, 10, 20])
    mean, _ = combine("ca2fl", stacked([4.0], [8.0], [-2.0]), happened, state)
    close(mean, [2.0])


OPTIMIZER = {f"fedopt__{n}": 0.5 for n in ("momentum", "second", "floor")}
OPTIMIZER |= {"fedopt__lr": 1.0}


def test_fadas_by_hand():
    state = AGGREGATORS["fadas"].server.init(params(0.0), Counts(1, 1))
    # Δ = 2: m̂ = 2, v̂ = 4; without delay it is FedAdam's step, 2/(2 + ½).
    new, state = update("fadas", params(2.0), params(0.0), state, **OPTIMIZER)
    close(new, [0.8])
    adam = AGGREGATORS["fedadam"].server.init(params(0.0), Counts(1, 1))
    close(update("fedadam", params(2.0), params(0.0), adam, **OPTIMIZER)[0], [0.8])
    # Δ = 0: m̂ = ½/¾, and v̂ stays 4, where Adam's is 1/0.75. A lag of 6 of those
    # present, τ_c = 2: a third of the step.
    late = received([1, 0, 1], lag=[6, 9, 1])
    given = {"happened": late, "fadas__delay": 2.0} | OPTIMIZER
    newer, _ = update("fadas", new, new, state, **given)
    close(newer, [0.8 + (0.5 / 0.75) / 2.5 / 3])


@pytest.mark.parametrize("name", ["feddyn", "ca2fl"])
def test_a_client_that_never_works_counts_in_the_shares(name):
    """60 samples of 100 are of clients without a place, whose entries are 0."""
    counts = Counts(2, 1, jnp.array([10.0, 30.0]), 60.0)
    state = AGGREGATORS[name].server.init(params(0.0), counts)
    happened = received([1, 1], [10, 30], rho=[0.25, 0.75])
    given = stacked([4.0], [4.0]), happened
    delta, state = combine(name, *given, state, mu=0.5)
    # FedDyn: 4 + 2 · (0.1 + 0.3) · 2; CA²FL: 4, then 1.6 + 4 − 4.
    close(delta, [5.6 if name == "feddyn" else 4.0])
    again = combine(name, stacked([4.0], [4.0]), happened, state, mu=0.5)[0]
    close(again, [4 + 2 * 0.4 * 4 if name == "feddyn" else 1.6])
