"""The minimiser of the bound as a rule: what it is told, and what it does without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import problems
from tests.test_runner import small
from tsfl_jax import runner, sweeps
from tsfl_jax.aggregate import Situation
from tsfl_jax.bound_constants import BoundConstants
from tsfl_jax.bound_minimum import bound_optimal_weights
from tsfl_jax.bound_rule import bound_optimal
from tsfl_jax.prepare import prepare
from tsfl_jax.types import ClientGradients, Constants

TAU = jnp.array([1, 2, 0, 4, 4])
VARIANCE = jnp.array([2.0, 1.0, jnp.nan, 3.0, 1.0])
APART = jnp.array([0.4, -0.1, jnp.nan, 0.2, 1.0])  # an estimate may be below 0
HP = problems.hparams(lr=0.02, weight_limit=3.0)


def situation(
    tau=TAU, variance=VARIANCE, apart=APART, square=0.8, L=5.0, square_norm=7.0
):
    zeros = jnp.zeros_like(tau)
    constants = Constants(jnp.float32(L), jnp.float32(square_norm), jnp.float32(9.0))
    gradients = ClientGradients(variance, apart, jnp.float32(square))
    client = jnp.arange(len(tau))
    return Situation(
        jax.random.key(0),
        client,
        tau,
        zeros + 8,
        tau,
        zeros,
        jnp.int32(0),
        constants,
        gradients,
    )


def test_weights_are_the_minimum_for_what_was_measured():
    # Γ_i = ‖∇F_i − ∇F‖²/L², the negative one 0; ‖w − w*‖² = 0.8/25.
    known = BoundConstants(
        lr=0.02,
        smoothness=5.0,
        grad_sq_norm=7.0,
        weight_limit=3.0,
        distance=0.8 / 25,
        grad_variance=np.array([2.0, 1.0, 0.0, 3.0, 1.0]),
        dissimilarity=np.array([0.4, 0.0, 0.0, 0.2, 1.0]) / 25,
    )
    rho = bound_optimal(situation(), HP).rho
    np.testing.assert_allclose(rho, bound_optimal_weights(TAU, known).rho, atol=1e-6)
    assert rho[2] == 0 and rho.dtype == jnp.float32
    np.testing.assert_allclose(rho.sum(), 1, rtol=1e-6)


def test_without_a_limit_theta_is_n():
    free = HP._replace(weight_limit=jnp.float32(jnp.inf))
    limited = HP._replace(weight_limit=jnp.float32(5.0))
    one, other = (bound_optimal(situation(), hp).rho for hp in (free, limited))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "changes",
    [
        dict(L=jnp.nan),  # not finite
        dict(L=0.0),
        dict(square_norm=jnp.inf),
        dict(variance=VARIANCE.at[0].set(jnp.inf)),
        dict(L=400.0),  # W ≤ 0 whatever the weights: void
    ],
)
def test_without_a_bound_all_who_took_part_are_equal(changes):
    rho = bound_optimal(situation(**changes), HP).rho
    np.testing.assert_allclose(rho, [0.25, 0.25, 0, 0.25, 0.25])


def test_nobody_has_weight_where_nobody_worked():
    nan = jnp.full(5, jnp.nan)
    nobody = situation(jnp.zeros(5, int), nan, nan, jnp.nan, 0.0, 0.0)
    assert bound_optimal(nobody, HP).rho.tolist() == [0] * 5


def test_the_rule_in_a_run_is_the_minimum_of_what_it_reports():
    config = small(algorithm="bound_optimal", num_intervals=2, momentum=0.0)
    config.dms.weight_limit = 2.0
    found = runner.simulate(config).history
    N, tau = config.num_clients, prepare(config).times.tau
    for t in range(2):
        L = found["smoothness"][t]
        known = BoundConstants(
            lr=config.lr,
            smoothness=L,
            grad_sq_norm=found["grad_sq_norm"][t],
            weight_limit=2.0,
            distance=max(found["grad_square"][t], 0) / L**2,
            grad_variance=np.nan_to_num(found["client_variance"][t]),
            dissimilarity=np.maximum(found["client_dissimilarity"][t], 0) / L**2,
        )
        known = known._replace(dissimilarity=np.nan_to_num(known.dissimilarity))
        best = bound_optimal_weights(tau[t], known)
        assert best.valid
        np.testing.assert_allclose(found["rho"][t], best.rho, atol=1e-5)
    assert found["rho"].max() <= 2 / N * (1 + 1e-6)


def test_it_shares_a_program_with_rules_that_measure_nothing():
    swept = {"algorithm": ["bound_optimal", "dms", "fedavg"]}
    result = sweeps.run(small(num_intervals=2), swept)
    measured = np.isfinite(result.history["grad_square"]).all(axis=1)
    estimated = np.isfinite(result.history["smoothness"]).all(axis=1)
    assert measured.tolist() == [True, False, False]
    assert estimated.tolist() == [True, True, False]
