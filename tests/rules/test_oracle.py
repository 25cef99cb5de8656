"""The search of the oracle: numbers by hand, SLSQP, and its promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import tsfl_jax
from tests import problems
from tsfl_jax.rules import oracle

N = 6  # of the random quadratics: one compilation


def quadratic(hessian, linear):
    """F(ρ) = ½ρᵀAρ + bᵀρ with its slopes."""

    def objective(rho):
        slope = hessian @ rho + linear
        return 0.5 * rho @ (slope + linear), slope

    return objective


@functools.partial(jax.jit, static_argnames="steps")
def searched(hessian, linear, starts, present, steps=60, step=0.1):
    return oracle.search(quadratic(hessian, linear), starts, present, steps, step)


def equal(present):
    present = np.asarray(present, float)
    return jnp.array([present / present.sum()])


def test_a_parabola_by_hand():
    """½(x − 0.3)² with x = ρ_2 of two: ρ = (0.7, 0.3), reached in two steps.

    From ρ = ½: F' = 0.2 in ρ_2, 0 in ρ_1, so the first step of 0.1 per weight ends at
    0.4. Barzilai and Borwein's length is exact for one dimension.
    """
    hessian, linear = jnp.diag(jnp.array([0.0, 1.0])), jnp.array([0.0, -0.3])
    both = jnp.ones(2, bool)
    one, _ = searched(hessian, linear, equal(both), both, steps=1)
    np.testing.assert_allclose(one.rho, [0.6, 0.4], rtol=1e-6)
    two, first = searched(hessian, linear, equal(both), both, steps=2)
    np.testing.assert_allclose(two.rho, [0.7, 0.3], rtol=1e-6)
    np.testing.assert_allclose(first.rho, [0.5, 0.5])
    np.testing.assert_allclose(first.slope, [0.0, 0.2], rtol=1e-6)


@pytest.mark.parametrize("condition", [1.0, 100.0])
def test_quadratics_against_slsqp(condition):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for _ in range(12):
            basis = np.linalg.qr(rng.normal(size=(N, N)))[0]
            scale = np.geomspace(1, 1 / condition, N)
            hessian, linear = basis * scale @ basis.T, rng.normal(size=N) / 3
            present = rng.random(N) < 0.8
            present[:2] = True
            objective = quadratic(hessian, linear)  # of NumPy
            bounds = [(0.0, float(p)) for p in present]
            want = scipy.optimize.minimize(
                objective,
                np.asarray(equal(present)[0]),
                jac=True,
                bounds=bounds,
                constraints={"type": "eq", "fun": lambda r: r.sum() - 1},
                method="SLSQP",
                options={"ftol": 1e-14, "maxiter": 500},
            )
            given = map(jnp.asarray, (hessian, linear, equal(present), present))
            found, first = jax.device_get(searched(*given))
            assert found.loss - want.fun < 1e-7, (found.rho, want.x)
            assert found.rho.min() >= 0 and abs(found.rho.sum() - 1) < 1e-12
            assert not found.rho[~present].any()
            # The Frank–Wolfe gap bounds what is left from above.
            rho, slope = np.asarray(first.rho), np.asarray(first.slope)
            gap = rho @ slope - slope[present].min()
            assert gap >= first.loss - want.fun - 1e-12


def test_the_best_start_is_kept():
    """No step, and steps that only fail: the better of both starts is the answer."""
    starts = jnp.array([[0.5, 0.5, 0.0], [0.1, 0.1, 0.8]])
    target = starts[1]

    def hole(rho):  # wrong slopes: every step goes up
        away = rho - target
        return away @ away, -jnp.array([1.0, 2.0, 3.0]) - 9 * away

    present = jnp.ones(3, bool)
    for steps in (0, 3):
        found, first = oracle.search(hole, starts, present, steps, 0.1)
        np.testing.assert_allclose(found.rho, target, atol=1e-7)
        assert found.loss <= first.loss
    # A start that does not count is measured, but is not the answer.
    only = jnp.array([True, False])
    found, _ = oracle.search(hole, starts[::-1], present, 0, 0.1, counts=~only)
    np.testing.assert_array_equal(found.rho, starts[0])


def test_no_finite_loss_and_no_client():
    present = jnp.array([True, True, False])
    starts = jnp.array([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]])
    found, _ = oracle.search(
        lambda rho: (jnp.float32(jnp.nan), rho * jnp.nan), starts, present, 5, 0.1
    )
    np.testing.assert_array_equal(found.rho, starts[1])  # FedAvg's
    found, _ = oracle.search(
        quadratic(jnp.eye(3), jnp.ones(3)), 0 * starts, ~jnp.ones(3, bool), 5, 0.1
    )
    np.testing.assert_array_equal(found.rho, np.zeros(3))


def test_in_a_loop_of_ones_own():
    """min ‖w − (3, 1)‖² over the triangle (4, 0), (0, 4), (0, 0), w^t = (0, 0)."""
    rule = tsfl_jax.AGGREGATORS["oracle"]
    updates = {"w": jnp.array([[4.0, 0], [0, 4], [0, 0], [jnp.nan, 1]])}
    new, state = tsfl_jax.aggregate(
        rule,
        updates,
        {"w": jnp.zeros(2)},
        validation=lambda w: ((w["w"] - jnp.array([3.0, 1])) ** 2).sum(),
        hparams=problems.hparams(oracle__steps=40),
    )
    np.testing.assert_allclose(new["w"], [3, 1], atol=1e-4)
    assert state == ()
