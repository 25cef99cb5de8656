"""Networks of others with their convolutions and pools replaced."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from tests.models.numerics import close, outcomes
from tsfl_jax import rng
from tsfl_jax.engine import devices
from tsfl_jax.models import networks, replay
from tsfl_jax.models.convolution import stored
from tsfl_jax.models.model import Model


def convolution(numbers, **settings):
    """A convolution by `lax`, as a function of inputs and kernel."""

    def apply(x, w):
        return lax.conv_general_dilated(x, w, dimension_numbers=numbers, **settings)

    return apply


ONE, TWO = ("NHC", "HIO", "NHC"), ("NHWC", "HWIO", "NHWC")
THREE, FIRST = ("NDHWC", "DHWIO", "NDHWC"), ("NCHW", "OIHW", "NCHW")


def case(x, w, strides=None, padding="SAME", numbers=None, **more):
    """Shapes of inputs and kernel, and the convolution."""
    rank = len(x) - 2
    numbers = numbers or (ONE, TWO, THREE)[rank - 1]
    strides = strides or (1,) * rank
    return x, w, convolution(numbers, window_strides=strides, padding=padding, **more)


GROUPS = {"feature_group_count": 3}
BOTH = {"lhs_dilation": (2, 2), "rhs_dilation": (1, 2), "feature_group_count": 2}
CONVOLUTIONS = {
    "1-D": case((3, 9, 8), (3, 8, 5)),
    "1-D, strides": case((3, 11, 2), (4, 2, 5), (3,), ((2, 1),)),
    "3x3": case((3, 7, 6, 9), (3, 3, 9, 4)),
    "one pixel": case((3, 1, 1, 5), (3, 3, 5, 4)),
    "strides": case((3, 8, 7, 3), (3, 3, 3, 4), (2, 2)),
    "uneven padding": case((3, 5, 6, 9), (3, 3, 9, 4), None, ((2, 0), (0, 3))),
    "dilation": case((3, 9, 8, 3), (3, 2, 3, 4), (1, 2), rhs_dilation=(2, 3)),
    "groups": case((3, 5, 6, 6), (3, 3, 2, 12), (2, 1), **GROUPS),
    "apart, groups": case((3, 4, 5, 4), (3, 3, 2, 6), None, ((1, 2), (2, 2)), **BOTH),
    "channels first": case((3, 9, 7, 6), (4, 9, 3, 3), (1, 2), numbers=FIRST),
    "3-D": case((2, 4, 5, 3, 2), (3, 2, 3, 2, 4), (1, 2, 1)),
}


def close_with_gradients(functions, form, inputs):
    """Values and gradients in float64 agree within 1e-12 of the largest."""
    replayed = tuple(replay._replayed(function, form) for function in functions)
    for function, arguments in zip(replayed, inputs, strict=True):
        assert not replay._slow(jax.make_jaxpr(function)(*arguments).jaxpr)
    close(outcomes(replayed, inputs), outcomes(tuple(functions), inputs))


# Minimal filtering and taps, in two dimensions; all else is the same in both forms.
SLICES = ("3x3", "one pixel", "groups")


@pytest.mark.parametrize("form", ["fast", "slices"])
def test_convolutions_equal_lax_in_float64(form):
    names = CONVOLUTIONS if form == "fast" else SLICES
    *shapes, functions = zip(*map(CONVOLUTIONS.get, names), strict=True)
    with jax.enable_x64():
        draw, shapes = np.random.default_rng(0).normal, zip(*shapes, strict=True)
        inputs = [[jnp.asarray(draw(size=s)) for s in pair] for pair in shapes]
        close_with_gradients(functions, form, inputs)


POOLS = {
    "2x2": ((2, 2), (2, 2), "VALID", (3, 6, 8, 5)),
    "2x2, odd": ((2, 2), (2, 2), "VALID", (3, 7, 5, 5)),
    "2x2, padded": ((2, 2), (2, 2), ((1, 1), (1, 1)), (3, 6, 5, 5)),
    "3x3, overlapping": ((3, 3), (2, 2), "SAME", (3, 8, 7, 5)),
    "3-D": ((2, 1, 2), (2, 1, 1), "VALID", (2, 4, 3, 5, 2)),
}


@pytest.mark.parametrize("pool", [nn.max_pool, nn.avg_pool])
def test_pools_equal_lax_with_ties(pool):
    draws = np.random.default_rng(0)
    *settings, shapes = zip(*POOLS.values(), strict=True)
    functions = [
        lambda x, args=args: pool(x, *args) for args in zip(*settings, strict=True)
    ]
    with jax.enable_x64():
        inputs = [[jnp.asarray(draws.integers(0, 3, s).astype(float))] for s in shapes]
        close_with_gradients(functions, "fast", inputs)


class Stranger(nn.Module):
    """What others write: normalization, activations, dropout, a residual, a scan."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.gelu(nn.BatchNorm(use_running_average=not train)(x))
        y = nn.remat(nn.Conv)(16, (3, 3))(x)
        y = nn.leaky_relu(nn.GroupNorm(4)(y))
        x = nn.max_pool(nn.silu(x + y), (2, 2), (2, 2))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        kernel = self.param("again", nn.initializers.lecun_normal(), (3, 3, 16, 16))

        def block(carry, _):
            out = lax.conv_general_dilated(
                carry, kernel, (1, 1), "SAME", dimension_numbers=TWO
            )
            return jnp.tanh(out), out.mean()

        x, means = lax.scan(block, x, None, length=2)
        x = lax.cond(
            means[0] > 0, lambda v: nn.avg_pool(v, (2, 2)), lambda v: v[:, 1:, 1:], x
        )
        x = nn.ConvTranspose(4, (2, 2), (2, 2))(x).std(axis=(1, 2))
        return nn.Dense(3)(x)


class Newer(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
        return self.last(x.mean(axis=(1, 2)))


def outcome(model: Model, variables, x):
    """Outputs, changed collections and the gradient of a loss."""
    mask = jnp.arange(len(x)) < len(x) - 1

    def loss(params):
        out, changed = model.train({**variables, "params": params}, x, mask, rng.key(1))
        changed = {n: v for n, v in changed.items() if n != "params"}
        return jnp.square(out).sum(), (out, changed)

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


@pytest.mark.parametrize("module", [Stranger(), Newer], ids=["linen", "nnx"])
def test_a_network_of_others_is_the_same(module):
    with jax.enable_x64():
        model = networks.from_flax(module)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 1)))
        variables = jax.tree.map(
            lambda a: a.astype(float) if jnp.issubdtype(a.dtype, jnp.floating) else a,
            jax.jit(model.init)(rng.key(0), x),
        )
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        faster, notes = replay.replay(model, "fast", variables, shape)
        assert not notes
        expected = jax.jit(outcome, static_argnums=0)(model, variables, x)
        found = jax.jit(outcome, static_argnums=0)(faster, variables, x)
        chex.assert_trees_all_close(found, expected, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(
            jax.jit(faster.predict)(variables, x),
            jax.jit(model.predict)(variables, x),
            rtol=1e-9,
        )


def test_what_is_stored_is_in_memory_on_a_cpu_only():
    x = jnp.ones((2, 3, 4, 5))

    def loss(x):
        return (stored(2 * x).transpose(3, 1, 2, 0) + 1).sum()

    for function in (loss, jax.grad(loss)):
        for_gpu = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",))
        assert "optimization_barrier" not in for_gpu.as_text()
        options = devices.compiler_options(devices.make_mesh(1, 1))
        program = jax.jit(function, compiler_options=options).lower(x).compile()
        if jax.default_backend() == "cpu":  # XLA leaves it where it is
            assert "opt-barrier" in program.as_text()


def test_images_that_several_operations_read_are_stored():
    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(4, (3, 3))(x)
            y = nn.relu(x) + x  # x is read twice
            return nn.Dense(2)(y.mean(axis=(1, 2)))

    x = jnp.ones((2, 6, 6, 3))
    model = networks.from_flax(Residual())
    variables = model.init(jax.random.key(0), x)
    replayed, notes = replay.replay(model, "fast", variables, x)
    mask, key = jnp.ones(2, bool), rng.key(0)
    once = jax.make_jaxpr(replayed.train)(variables, x, mask, key)
    assert not notes
    # Before and after the convolution, its bias, which relu and + read.
    assert str(once).count("optimization_barrier") == 3
