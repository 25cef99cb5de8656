"""FLOP counted before anything is compiled."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax.models import flop

A, B = jnp.ones((3, 5)), jnp.ones((5, 7))


def test_products_and_convolutions():
    assert flop.count(jnp.matmul, A, B) == 2 * 3 * 5 * 7
    images, kernel = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 6))
    order = "NHWC", "HWIO", "NHWC"
    convolve = lambda x, k: lax.conv_general_dilated(  # noqa: E731
        x, k, (1, 1), "VALID", dimension_numbers=order
    )
    assert flop.count(convolve, images, kernel) == 2 * (2 * 6 * 6 * 6) * 3 * 3 * 4


def test_inside_of_functions_and_loops():
    def step(a, _):
        return jnp.tanh(jax.jit(jnp.matmul)(a, jnp.ones((5, 5)))), None

    once = 2 * 3 * 5 * 5
    assert flop.count(lambda a: lax.scan(step, a, None, length=9)[0], A) == 9 * once

    def until(a, steps):
        return lax.fori_loop(0, steps, lambda _, a: step(a, None)[0], a)

    assert flop.count(until, A, 3) == math.inf
    choose = lambda a: lax.cond(a[0, 0] > 0, lambda a: step(a, 0)[0], jnp.sin, a)  # noqa: E731
    assert flop.count(choose, A) == once
