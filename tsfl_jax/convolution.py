"""Convolution and pooling that stay fast inside a compiled loop over clients.

XLA's CPU backend runs `lax.conv` inside a loop body 10 to 50 times slower than
outside (jax-ml/jax#12868), and `vmap` over clients with a kernel each turns it into
a grouped convolution, which is slow everywhere. So the default on CPU is: shifted
slices of the input stacked to patches, then one matrix product per client.

Layout is ``[C, H, W, B]``, the batch last: slices of it stay contiguous runs of B
floats, the patches need no transpose before the product, and pooling is an
elementwise maximum of slices. That alone was worth a factor of two.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax import winograd
from tsfl_jax.types import Array


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after, so that the output has ⌈size/stride⌉ entries."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def conv_slices(x: Array, kernel: Array, stride: int = 1, same: bool = True) -> Array:
    """Convolution as shifted slices and one matrix product.

    Args:
      x: ``[C, H, W, B]`` float.
      kernel: ``[h, w, C, K]`` float, as Flax stores it.
      stride: of both spatial axes.
      same: zero padding to ⌈H/stride⌉ (else none: "valid").

    Returns:
      ``[K, H', W', B]``.
    """
    kh, kw, channels, filters = kernel.shape
    if same:
        rows = _same_padding(x.shape[1], kh, stride)
        columns = _same_padding(x.shape[2], kw, stride)
        x = jnp.pad(x, ((0, 0), rows, columns, (0, 0)))
    height = (x.shape[1] - kh) // stride + 1
    width = (x.shape[2] - kw) // stride + 1
    patches = [
        x[
            :,
            i : i + (height - 1) * stride + 1 : stride,
            j : j + (width - 1) * stride + 1 : stride,
        ]
        for i in range(kh)
        for j in range(kw)
    ]
    patches = jnp.stack(patches).reshape(kh * kw * channels, -1)
    out = kernel.reshape(-1, filters).T @ patches
    return out.reshape(filters, height, width, x.shape[-1])


def conv_lax(x: Array, kernel: Array, stride: int = 1, same: bool = True) -> Array:
    """The same convolution by `lax.conv_general_dilated`; see `conv_slices`."""
    return lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding="SAME" if same else "VALID",
        dimension_numbers=("CHWN", "HWIO", "CHWN"),
    )


def conv_fast(x: Array, kernel: Array, stride: int = 1, same: bool = True) -> Array:
    """Winograd's form where it saves time, else `conv_slices`; see there."""
    if winograd.applies(x, kernel, stride, same):
        return winograd.conv_winograd(x, kernel)
    return conv_slices(x, kernel, stride, same)


CONVOLUTIONS = {"winograd": conv_fast, "slices": conv_slices, "lax": conv_lax}


def default_convolution(backend: str) -> str:
    """The form that wins on a backend. GPU: not measured, XLA's own is assumed."""
    return "winograd" if backend == "cpu" else "lax"


def _quarters(x: Array) -> list[Array]:
    """The four entries of every 2x2 window of ``[C, 2h, 2w, B]``."""
    c, h, w, b = x.shape
    x = x.reshape(c, h // 2, 2, w // 2, 2, b)
    return [x[:, :, i, :, j] for i in (0, 1) for j in (0, 1)]


@jax.custom_vjp
def _max_pool_even(x: Array) -> Array:
    first, second, third, fourth = _quarters(x)
    return jnp.maximum(jnp.maximum(first, second), jnp.maximum(third, fourth))


def _max_pool_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    out = _max_pool_even(x)
    return out, (x, out)


def _max_pool_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array]:
    # By hand because the derivative of three nested maxima passes over the data three
    # times. Among equal entries the first takes the gradient, as in lax and PyTorch.
    # Four simple loops over quarters, then two copies: one loop over the whole with a
    # select by place is not vectorised and takes six times as long.
    x, out = saved
    a, b, c, _ = (part == out for part in _quarters(x))
    winners = (a, ~a & b, ~(a | b) & c, ~(a | b | c))
    parts = [jnp.where(wins, grad, 0) for wins in winners]
    rows = [jnp.stack(parts[i : i + 2], axis=3) for i in (0, 2)]
    return (jnp.stack(rows, axis=2).reshape(x.shape),)


_max_pool_even.defvjp(_max_pool_forward, _max_pool_backward)


def max_pool(x: Array) -> Array:
    """2x2 maximum with stride 2 and ceiling division, ``[C, H, W, B]``.

    A last odd row or column forms a window of its own, so 7 becomes 4 and 1 stays 1.
    """
    odd = (x.shape[1] % 2, x.shape[2] % 2)
    if any(odd):
        # Edge values instead of -inf: the copy ties with the original, which comes
        # first and takes the gradient.
        x = jnp.pad(x, ((0, 0), (0, odd[0]), (0, odd[1]), (0, 0)), mode="edge")
    return _max_pool_even(x)
