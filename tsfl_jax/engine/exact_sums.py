"""Sums of float32 terms whose bits do not depend on the order of the terms.

Every term is split into digits of 12 bits on one fixed lattice of powers of two,

    x ≈ Σ_s k_s · 2^(12 (top − s) − 126),   |k_s| ≤ 2^11,   s = 0, 1, 2,

and the digits are added as int32, which is exact. The highest digit kept is that of the
largest term so far; a larger term shifts the sum and lower digits are cut off. A
term's digits do not depend on when it is added, so the sum does not depend on the
order, on how terms are grouped, nor on how many devices share them. At least 24 bits
below the largest term are kept.

Source: Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions on
Computers 2015; here with integers in place of floating-point bins. NOT done: terms
beyond ±2^127 count as that, and what is below 2^-126 is lost.

Digits are integers, which have no derivatives. A sum is linear in its terms, so its
derivative is the plain sum of theirs, carried along in a field of its own.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, Shaped

from tsfl_jax import trees
from tsfl_jax.engine import devices
from tsfl_jax.types import Array

MOST_TERMS = 2**20  # more could overflow the int32 of a digit
_BITS = 12
_LARGEST = 2.0**127
_FEW = 8  # sums that are not worth a loop
_LEAST_TOP = 2  # all three digits are multiples of the least normal number


class Sum(NamedTuple):
    """Elementwise sums of arrays of one shape."""

    top: Int[Array, "..."]  # int32, position of the highest digit that is kept
    digits: tuple[Int[Array, "..."], ...]  # three, int32, the highest first
    # Always 0: only its tangent, the sum of the terms' tangents, is used.
    linear: Float[Array, "..."]


def _power(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """2^exponent as float32, of int32 in −126..127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _place(magnitude: Float[Array, "..."]) -> Int[Array, "..."]:
    """The position of the highest digit of float32 numbers ≥ 0 within the range."""
    exponent = lax.bitcast_convert_type(magnitude, jnp.int32) >> 23
    # exponent // 12 of 0..255; a division of integers is slow.
    return jnp.maximum((exponent * 171) >> 11, _LEAST_TOP)


def _digits(terms: Float[Array, "..."], top: Int[Array, "..."]) -> list[Array]:
    digits = []
    for s in range(3):
        unit = _BITS * (top - s) - 126
        digit = jnp.round(terms * _power(-unit))
        terms = terms - digit * _power(unit)  # exact
        digits.append(digit.astype(jnp.int32))
    return digits


def _raised(total: Sum, top: Int[Array, "..."]) -> list[Array]:
    """The digits of a sum whose highest position becomes `top`."""
    shift = top - total.top  # digit s comes from position s − shift
    return [
        jnp.asarray(
            sum(jnp.where(shift == s, total.digits[i - s], 0) for s in range(i + 1))
        )
        for i in range(3)
    ]


def zeros(shape: tuple[int, ...]) -> Sum:
    """The sum of no terms."""
    nothing = jnp.zeros(shape, jnp.int32)
    linear = jnp.zeros(shape, jnp.float32)
    return Sum(nothing + _LEAST_TOP, (nothing, nothing, nothing), linear)


def _add_in_one(total: Sum, terms: Float[Array, "n ..."]) -> Sum:
    top = jnp.maximum(total.top, _place(jnp.abs(terms).max(axis=0)))
    new = [d.sum(axis=0) for d in _digits(terms, top[None])]
    return Sum(top, tuple(map(jnp.add, _raised(total, top), new)), total.linear)


def _add_in_turn(total: Sum, terms: Float[Array, "n ..."]) -> Sum:
    number = terms.shape[0]

    def larger(i: Array, most: Array) -> Array:
        return jnp.maximum(most, jnp.abs(terms[i]))

    most = lax.fori_loop(1, number, larger, jnp.abs(terms[0]))
    top = jnp.maximum(total.top, _place(most))

    def added(i: Array, digits: list[Array]) -> list[Array]:
        return list(map(jnp.add, digits, _digits(terms[i], top)))

    digits = lax.fori_loop(0, number, added, _raised(total, top))
    return Sum(top, tuple(digits), total.linear)


def add_all(total: Sum, terms: Shaped[Array, "n ..."]) -> Sum:
    """The sum with n more arrays of finite terms, each of its shape."""
    # The clip also keeps the compiler from fusing the product that made the terms with
    # the subtraction of digits: one rounding less would be other bits.
    terms = terms.astype(jnp.float32)
    linear = total.linear + terms.sum(axis=0)
    total = total._replace(linear=trees.with_tangent_of(total.linear, linear))
    terms = jnp.clip(lax.stop_gradient(terms), -_LARGEST, _LARGEST)
    if terms.shape[0] == 1 or terms[0].size <= _FEW:
        return _add_in_one(total, terms)
    # XLA's CPU backend does not vectorize reductions over the leading axis.
    return lax.platform_dependent(total, terms, cpu=_add_in_turn, default=_add_in_one)


def over_devices(total: Sum, axis: str | None) -> Sum:
    """The sum over the devices of a mesh axis; None: one device."""
    if devices.count(axis) == 1:
        return total
    top = lax.pmax(total.top, axis)
    linear = trees.with_tangent_of(total.linear, lax.psum(total.linear, axis))
    return Sum(top, tuple(lax.psum(_raised(total, top), axis)), linear)


def value(total: Sum) -> Float[Array, "..."]:
    """The sum as float32."""
    parts = [
        digit.astype(jnp.float32) * _power(_BITS * (total.top - s) - 126)
        for s, digit in enumerate(total.digits)
    ]
    whole = parts[0] + (parts[1] + parts[2])
    return trees.with_tangent_of(whole, total.linear)


def scalar(terms: Float[Array, "n ..."], axis: str | None) -> Float[Array, "..."]:
    """Sum of n float32 terms, over the devices of an axis as well.

    Infinite terms and NaN make it infinite or NaN, as in any sum.
    """
    finite = jnp.isfinite(terms)
    total = add_all(zeros(terms.shape[1:]), jnp.where(finite, terms, 0.0))
    total = over_devices(total, axis)
    infinite = jnp.where(finite, 0.0, terms).sum(axis=0)  # the same in every order
    return value(total) + devices.total(infinite, axis)


def scalars(axis: str | None, *terms: Float[Array, "n"]) -> list[Float[Array, ""]]:
    """The `scalar` of each, as one sum: a program of fewer operations."""
    return [*scalar(jnp.stack(terms, axis=1), axis)]
