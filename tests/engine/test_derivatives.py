"""Derivatives through whole intervals, against differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tsfl_jax.engine import exact_sums, optimizers, scan
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.models import networks
from tsfl_jax.rules.base import Counts

DATA = problems.dataset(samples=40)
PROBLEM = problems.problem(DATA, 3, 8)
INPUTS = problems.inputs([[1, 2, 1], [2, 1, 2]], np.full((2, 3), 8))
RHO = jnp.array([0.5, 0.2, 0.3])
LINEAR = networks.from_flax(networks.MLP(3, 0))  # smooth: no ReLU


def final_loss(rho, lr, clip_norm, mapping="vmap"):
    """The test loss after two intervals with fixed weights."""
    rule = tsfl_jax.rule(lambda info: rho, normalize=False)
    spec = ProgramSpec(batch_size=4, passes=2, mapping=mapping, block=3, longest=4)
    run = scan.make_run(Parts(LINEAR, (rule,), optimizers.sgd, spec))
    hparams = problems.hparams(momentum=0.5)._replace(lr=lr, clip_norm=clip_norm)
    start = scan.init_state(
        LINEAR, (rule,), jax.random.key(0), jnp.zeros((1, 5)), Counts(3, 1)
    )
    _, history = run(start, jax.random.key(1), hparams, PROBLEM, INPUTS)
    return history.test_loss[-1]


LOSS = jax.jit(final_loss)
SLOPES = jax.jit(jax.grad(final_loss, (0, 1)))


def differences(function, rho, lr, step=1e-2):
    """Fourth-order differences, accurate to some 1e-4 in float32."""

    def slope(at):
        near = (at(step) - at(-step)) / (2 * step)
        far = (at(2 * step) - at(-2 * step)) / (4 * step)
        return (4 * near - far) / 3

    of_rho = [slope(lambda h, i=i: function(rho.at[i].add(h), lr)) for i in range(3)]
    return np.array(of_rho), slope(lambda h: function(rho, lr + h))


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [np.inf, 0.5])
def test_the_test_loss_after_two_intervals_has_derivatives(clip_norm):
    of_rho, of_lr = SLOPES(RHO, 0.1, clip_norm)
    want_rho, want_lr = differences(lambda *at: LOSS(*at, clip_norm), RHO, 0.1)
    assert np.abs(want_rho).min() > 0.01 and abs(want_lr) > 0.01
    np.testing.assert_allclose(of_rho, want_rho, rtol=5e-3, atol=5e-4)
    np.testing.assert_allclose(of_lr, want_lr, rtol=5e-3)


def test_one_after_another_has_forward_derivatives():
    """Loops of unknown length have no reverse mode, but a forward one."""

    def along(lr):
        return final_loss(RHO, lr, np.inf, "sequential")

    _, slope = jax.jit(lambda lr: jax.jvp(along, (lr,), (1.0,)))(0.1)
    np.testing.assert_allclose(slope, SLOPES(RHO, 0.1, np.inf)[1], rtol=1e-4)


@pytest.mark.parametrize("limit", [100.0, 1.0])
@pytest.mark.parametrize("gradient", [[3.0, 4.0], [0.0, 0.0]])
def test_clipping_has_finite_derivatives(gradient, limit):
    def clipped(gradient, limit):
        transformation = optimizers.clip_by_global_norm(limit)
        return transformation.update(gradient, ())[0].sum()

    given = jnp.array(gradient), jnp.float32(limit)
    of_gradient, of_limit = jax.grad(clipped, (0, 1))(*given)
    if not gradient[0] or limit > 5:  # unchanged
        np.testing.assert_array_equal(of_gradient, 1.0)
        assert of_limit == 0
    else:  # d(g/‖g‖)/dg = (I − gg'/‖g‖²)/‖g‖
        np.testing.assert_allclose(of_gradient, [4 / 125, -3 / 125], rtol=1e-5)
        np.testing.assert_allclose(of_limit, 7 / 5, rtol=1e-6)


def test_an_exact_sum_has_the_derivative_of_a_sum():
    terms = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def total(terms):
        found = exact_sums.add_all(exact_sums.zeros((2,)), terms)
        return jnp.dot(exact_sums.value(found), jnp.array([1.0, 10.0]))

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(terms), [[1, 10]] * 3)
    forward = jax.jacfwd(lambda t: exact_sums.scalar(t[:, 0], None))
    jacobian = jax.jit(forward)(terms)
    np.testing.assert_array_equal(jacobian, [[1, 0]] * 3)
