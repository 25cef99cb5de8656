"""Loops over time against those of JAX, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tests.models.numerics import close
from tsfl_jax.models import flop, networks, replay


class Recurrent(nn.Module):
    cell: type = nn.LSTMCell
    options: tuple = ()
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(20, 8, param_dtype=self.dtype)(x)
        x = nn.RNN(self.cell(6, param_dtype=self.dtype), **dict(self.options))(x)
        return nn.Dense(5, param_dtype=self.dtype)(x[:, -1])


def loss_and_variables(module):
    x = np.random.default_rng(0).integers(0, 20, (3, 7))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    return lambda v: jnp.sum(module.apply(v, x) ** 2), variables


def test_values_and_derivatives_equal_those_of_jax():
    with jax.enable_x64(True):
        module = Recurrent(nn.GRUCell, (("reverse", True),), jnp.float64)
        loss, variables = loss_and_variables(module)
        replayed = replay._replayed(loss, "fast")
        stacked = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), variables)

        def outcome(loss):
            def both(v):  # as in `estimates`, forward through a derivative
                return jax.jvp(jax.value_and_grad(loss), (v,), (v,))

            return jax.jit(jax.vmap(both))(stacked)

        close(outcome(replayed), outcome(loss))


def test_a_loop_that_uses_a_weight_in_other_ways_too():
    """Summed, as a left operand, and in a nested jit; steps return integers, too."""

    def loss(weight, x):
        def step(carry, x):
            h, count = carry
            h = jnp.tanh(h @ weight + x @ (2 * weight) + jnp.sum(weight))
            h = jax.jit(lambda h: h @ weight.T)(h) + (weight @ h.T).T
            return (h, count + 1), (h[0], count)

        (h, count), (ys, counts) = jax.lax.scan(step, (x[0], 0), x)
        return jnp.sum(h) * count + jnp.sum(ys**2) + jnp.sum(counts)

    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        weight = jnp.asarray(rng.normal(size=(4, 4))) / 4
        x = jnp.asarray(rng.normal(size=(5, 2, 4)))
        ours, theirs = (
            jax.jit(jax.value_and_grad(f, (0, 1)))(weight, x)
            for f in (replay._replayed(loss, "fast"), loss)
        )
        close(ours, theirs)


def test_predictions_have_derivatives_forward():
    """As before they were replayed: nothing of them is made after the loop."""
    model = networks.from_flax(Recurrent(nn.SimpleCell))
    x = jnp.zeros((3, 7), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    shapes = jax.eval_shape(lambda: (variables, x))
    assert replay.replay(model, "lax", *shapes) == (model, ())
    replayed, _ = replay.replay(model, "fast", *shapes)
    assert replayed.predict is not model.predict

    @functools.partial(jax.jit, static_argnums=0)
    def derivative(predict):
        return jax.jvp(lambda v: predict(v, x), (variables,), (variables,))

    chex.assert_trees_all_close(
        derivative(replayed.predict), derivative(model.predict), rtol=1e-4, atol=1e-6
    )


def carried(jaxpr):
    """Shapes of what the scans of a jaxpr hand from one step to the next."""
    for equation in jaxpr.eqns:
        for body in flop.bodies(equation.params):
            yield from carried(body)
            if equation.primitive.name == "scan":
                pairs = zip(body.outvars, equation.outvars, strict=True)
                shapes = ((step.aval.shape, whole.aval.shape) for step, whole in pairs)
                # What is stacked instead has an axis of time outside.
                yield from (step for step, whole in shapes if step == whole)


def test_no_gradient_of_a_weight_is_added_up_in_the_loop():
    loss, variables = loss_and_variables(Recurrent())
    kernels = {w.shape for w in jax.tree.leaves(variables) if w.ndim == 2}

    def within(loss):
        return kernels & {*carried(jax.make_jaxpr(jax.grad(loss))(variables).jaxpr)}

    assert within(loss) >= {(6, 6)}
    assert not within(replay._replayed(loss, "fast"))
