"""Local work: hand-worked numbers, loops, optax, limits, gradients."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tsfl_jax.rules import fednova as local_work

accumulation = jax.jit(local_work.accumulation)


@jax.jit
def nova_weights(share, steps, momentum):
    return local_work.nova_weights(share, accumulation(steps, momentum))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.9999])
def test_accumulation_is_fine_in_float32(momentum):
    """Against the closed form in rational arithmetic, at the float32 momentum."""
    steps = [0, 1, 2, 3, 10, 99, 1000, 10_000]
    found = accumulation(jnp.array(steps), momentum)
    assert found.dtype == jnp.float32
    for s, a in zip(steps, found, strict=True):
        m = Fraction(float(np.float32(momentum)))
        exact = (s - m * (1 - m**s) / (1 - m)) / (1 - m)
        np.testing.assert_allclose(float(a), float(exact), rtol=1e-6)


def test_accumulation_has_a_slope_in_the_momentum():
    """a_3 = 3 + 2m + m²: slope 2 + 2m, 2 at m = 0; nothing for 0 and 1 steps."""
    slope = jax.jacobian(local_work.accumulation, argnums=1)
    np.testing.assert_array_equal(slope(jnp.array([0, 1, 3]), 0.5), [0, 0, 3])
    np.testing.assert_array_equal(slope(jnp.array([0, 1, 3]), 0.0), [0, 0, 2])
    assert np.isfinite(slope(jnp.array([10_000]), 0.99)).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("alpha", [1e-6, 0.003, 0.9])
def test_accumulation_with_a_proximal_term_agrees_with_the_loop(momentum, alpha):
    steps = [0, 1, 2, 3, 7, 50, 333, 4000]
    m, a = float(np.float32(momentum)), float(np.float32(alpha))
    expected = [reference.times_counted(s, m, a) for s in steps]
    assert expected[-1] < 0.999 * reference.times_counted(4000, m)
    found = accumulation(jnp.array(steps), momentum, alpha)
    np.testing.assert_allclose(found, expected, rtol=5e-5)


def test_nova_weights_remove_the_objective_inconsistency():
    """Every step of every client has the weight τ_eff·p_i: ρ_i‖a_i‖₁ ∝ p_i."""
    share, steps = jnp.array([0.1, 0.3, 0.6]), jnp.array([50, 2, 7])
    moved = nova_weights(share, steps, 0.9) * accumulation(steps, 0.9)
    np.testing.assert_allclose(moved / moved.sum(), share, rtol=1e-6)


def test_no_client_worked():
    def total(share, momentum):
        return nova_weights(share, jnp.zeros(3, int), momentum).sum()

    value, slopes = jax.value_and_grad(total, (0, 1))(jnp.zeros(3), 0.9)
    assert value == 0
    assert all(np.isfinite(x).all() for x in slopes)
