"""Networks in bfloat16 and TF32 with float32 master weights."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsfl_jax
from tests.problems import small
from tsfl_jax.models import losses, networks
from tsfl_jax.models.precision import with_precision

KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(model, variables, x, y):
    mask = jnp.ones(len(y), bool)

    def loss(params):
        outputs, changed = model.train({**variables, "params": params}, x, mask, KEY)
        return losses.cross_entropy(outputs, y).mean(), (outputs, changed)

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_gradients_are_those_of_float32_within_the_rounding(precision):
    model = networks.from_flax(networks.MnistCNN())
    x = jax.random.uniform(KEY, (8, 28, 28, 1))
    y = jnp.arange(8)
    variables = jax.jit(model.init)(KEY, x)
    lower = with_precision(model, precision)
    (exact, _), expected = loss_and_gradient(model, variables, x, y)
    (found, (outputs, changed)), gradient = loss_and_gradient(lower, variables, x, y)
    assert outputs.dtype == jnp.float32
    kinds = {a.dtype for a in jax.tree.leaves((changed, gradient))}
    assert kinds == {jnp.dtype("float32")}
    np.testing.assert_allclose(found, exact, rtol=0.02)
    trees = optax.tree.sub(gradient, expected), expected
    norms = [optax.tree.norm(tree) for tree in trees]
    if precision == "bfloat16":
        # Pooling picks other maxima among values that round to the same number.
        assert 1e-4 * norms[1] < norms[0] < 0.15 * norms[1]
    else:  # a CPU has no TF32
        assert norms[0] < 1e-5 * norms[1]


def test_statistics_of_batches_stay_float32():
    model = networks.from_flax(networks.VGG11(norm="batch"))
    x = jax.random.uniform(KEY, (2, 32, 32, 3))
    shapes = jax.eval_shape(model.init, KEY, x)
    lower = with_precision(model, "bfloat16")
    mask = jax.ShapeDtypeStruct((2,), bool)
    _, changed = jax.eval_shape(lower.train, shapes, x, mask, KEY)
    kinds, expected = (jax.tree.map(lambda a: a.dtype, t) for t in (changed, shapes))
    assert kinds == expected


def products(function, *arguments):
    """Matrix products and convolutions of a function: operands, precision, count."""
    found = collections.Counter()
    for line in jax.jit(function).lower(*arguments).as_text().splitlines():
        if re.search(r"stablehlo\.(dot_general|convolution)", line):
            operand = re.findall(r": \(tensor<[\dx]*(\w+)>", line)[0]
            precision = set(re.findall(r"\b(HIGHEST|HIGH|DEFAULT)\b", line))
            found[operand, *(precision or {"DEFAULT"})] += 1
    return found


def of_run(config):
    run, arguments = tsfl_jax.as_function(config)
    return products(run, *arguments)


def test_aggregation_in_ones_own_loop_is_in_float32():
    rule, params = tsfl_jax.AGGREGATORS["oracle"], {"w": jnp.ones((3, 2))}
    state = tsfl_jax.init_rule(rule, params, num_clients=4, size=[1] * 4)

    def aggregate(updates):
        given = {"validation": lambda w: (w["w"] ** 2).sum()}
        return tsfl_jax.aggregate(rule, updates, params, state, **given)

    assert set(products(aggregate, {"w": jnp.ones((4, 3, 2))})) == {("f32", "HIGHEST")}


@pytest.mark.slow
def test_products_are_what_the_setting_says_on_every_device():
    """A GPU takes TF32 for products that do not say more: float32 has to be said."""
    config = tsfl_jax.Config(num_intervals=2, num_clients=4, batch_size=8)
    config.algorithm, config.convolution = "dms_adaptive", "fast"
    config.data.name, config.model.name = "synthetic", "mnist_cnn"
    config.data.validation, config.schedule.data_size = 8, 16
    full = of_run(config)
    assert set(full) == {("f32", "HIGHEST")}
    config.precision = "tf32"
    found = of_run(config)
    assert set(found) == {("f32", "HIGHEST"), ("f32", "HIGH")}
    assert found.total() == full.total() and found["f32", "HIGH"] >= 12
    config.precision = "bfloat16"
    found = of_run(config)
    assert set(found) <= {("f32", "HIGHEST"), ("bf16", "DEFAULT"), ("bf16", "HIGHEST")}
    assert found["bf16", "DEFAULT"] >= 12


@pytest.mark.slow
def test_estimates_of_a_short_step_are_those_of_float32():
    """A step of 3e-4 ‖g‖ vanishes in bfloat16's 8 bits: L was ten times too small."""
    config = small(algorithm="dms", lr=3e-4, num_intervals=1)
    full = tsfl_jax.simulate(config)
    config.precision = "bfloat16"
    found = tsfl_jax.simulate(config)
    for name in ("smoothness", "grad_sq_norm", "grad_variance", "coupling"):
        np.testing.assert_allclose(
            found.history[name], full.history[name], rtol=1e-4, err_msg=name
        )
