"""Convolution that stays fast inside a compiled loop over clients.

The gradient of `lax.conv_general_dilated` inside a loop body is 10 to 50 times slower
on XLA's CPU backend than outside (jax-ml/jax#12868), and `vmap` over clients with one
kernel per client turns it into a grouped convolution, which is slow on all backends. So
the default on CPU is: shifted slices of the input stacked to patches, then one matrix
product per client; in float32 with fewer multiplications if `winograd` applies; tap by
tap on images of one or two pixels.

The layout is ``[C, *S, B]``, the batch last, with S the spatial axes: slices of it are
contiguous runs of B floats, and the patches need no transpose before the product. The
layout alone gave a factor of two. `replay` brings a user's network to it.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from tsfl_jax.models import winograd
from tsfl_jax.models.winograd import Images, Kernel, Outputs


class Window(NamedTuple):
    """Where the taps of a kernel lie, with one entry for each spatial axis."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # zeros before and after; < 0: cut off
    dilation: tuple[int, ...]  # distance of two taps
    groups: int = 1  # G


def stored(x: Array) -> Array:
    """The array itself, which a program for a CPU writes to memory at this point.

    There XLA fuses a change of layout with all that reads it, which for each of its
    readers is computed again, element by element: 10 ns each, where loops over what is
    in memory take 1. A program for a GPU is left as it is. Derivatives are stored, too.
    See `devices.compiler_options`.
    """
    barrier = lax.optimization_barrier
    return lax.platform_dependent(x, cpu=barrier, default=lambda x: x)


def around(
    x: Images, kernel: Kernel, stride: int, same: bool
) -> tuple[tuple[int, int], ...]:
    """Zeros before and after each axis, to ⌈H/stride⌉ and ⌈W/stride⌉, or none."""
    if not same:
        return (0, 0), (0, 0)
    sizes = zip(x.shape[1:3], kernel.shape[:2], strict=True)
    totals = [max((-(-n // stride) - 1) * stride + k - n, 0) for n, k in sizes]
    return tuple((total // 2, total - total // 2) for total in totals)


def padded(
    x: Float[Array, "C *S B"], padding: tuple[tuple[int, int], ...], fill: float = 0
) -> Float[Array, "C *P B"]:
    """Put a value around the spatial axes, or cut them off where padding is < 0."""
    around = ((0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0))
    return lax.pad(x, jnp.asarray(fill, x.dtype), around)


def shifted(
    x: Float[Array, "C *S B"], sizes: tuple[int, ...], window: Window, fill: float = 0
) -> list[Float[Array, "C *O B"]]:
    """What each tap of a window of some size sees: one slice per tap, in order."""
    x = padded(x, window.padding, fill)
    reach = [(k - 1) * d for k, d in zip(sizes, window.dilation, strict=True)]
    spans = [
        (n - r - 1) // s * s + 1
        for n, r, s in zip(x.shape[1:-1], reach, window.strides, strict=True)
    ]
    slices = []
    for tap in itertools.product(*map(range, sizes)):
        first = [i * d for i, d in zip(tap, window.dilation, strict=True)]
        end = [a + span for a, span in zip(first, spans, strict=True)]
        limits = (x.shape[0], *end, x.shape[-1])
        slices.append(lax.slice(x, (0, *first, 0), limits, (1, *window.strides, 1)))
    return slices


def conv_windows(
    x: Float[Array, "C *S B"], kernel: Float[Array, "*k c F"], window: Window
) -> Float[Array, "F *O B"]:
    """Compute a convolution of any window as shifted slices and one matrix product.

    A depthwise one, with one channel in each group, is a sum of products of slices with
    a number per channel.
    """
    *sizes, channels, filters = kernel.shape
    groups, batch = window.groups, x.shape[-1]
    # bfloat16 is added up in float32: slices of depthwise ones, gradients of all.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    slices = shifted(wide, tuple(sizes), window)
    shape = filters, *slices[0].shape[1:-1], batch
    if groups == 1:
        patches = jnp.stack(slices).astype(x.dtype)
        patches = patches.reshape(len(slices) * channels, -1)
        return (kernel.reshape(-1, filters).T @ patches).reshape(shape)
    if channels == 1:
        factors = kernel.reshape(len(slices), groups, -1, 1)
        parts = [part.reshape(groups, 1, -1) for part in slices]
        terms = [f * part for f, part in zip(factors, parts, strict=True)]
        return functools.reduce(jnp.add, terms).reshape(shape).astype(x.dtype)
    parts = [part.reshape(groups, channels, -1) for part in slices]
    patches = jnp.stack(parts, axis=1).astype(x.dtype)
    patches = patches.reshape(groups, len(slices) * channels, -1)
    filter_ = kernel.reshape(-1, channels, groups, filters // groups)
    filter_ = filter_.transpose(2, 0, 1, 3).reshape(groups, -1, filters // groups)
    return jnp.einsum("gkf,gkp->gfp", filter_, patches).reshape(shape)


def conv_transposed(
    x: Float[Array, "C *S B"], kernel: Float[Array, "*k c F"], window: Window
) -> Float[Array, "F *O B"]:
    """Compute a transposed convolution: as many zeros between inputs as strides say.

    The transpose of the convolution that goes back, so that no product is with a zero.

    Args:
      x: inputs.
      kernel: as it slides over the inputs with zeros between them.
      window: `strides` are the distances of two inputs, those of outputs are 1.
    """
    *sizes, channels, filters = kernel.shape
    axes, groups = tuple(range(len(sizes))), window.groups
    back = lax.rev(kernel, axes).reshape(*sizes, channels, groups, filters // groups)
    back = jnp.moveaxis(back, -1, len(sizes)).swapaxes(-1, -2)
    back = back.reshape(*sizes, filters // groups, channels * groups)
    outputs, padding = [], []
    by_axis = zip(x.shape[1:-1], sizes, *window[:3], strict=True)
    for size, taps, stride, (before, after), dilation in by_axis:
        reach, span = (taps - 1) * dilation, (size - 1) * stride + 1
        outputs.append(span + before + after - reach)
        padding.append((reach - before, reach - after))
    shape = jax.ShapeDtypeStruct((filters, *outputs, x.shape[-1]), x.dtype)
    window = window._replace(padding=tuple(padding))
    (out,) = jax.linear_transpose(lambda y: conv_windows(y, back, window), shape)(x)
    return out


def conv_slices(
    x: Images, kernel: Kernel, stride: int = 1, same: bool = True
) -> Outputs:
    """Compute a convolution as shifted slices and one matrix product.

    The padding is zeros to ⌈H/stride⌉ and ⌈W/stride⌉, or none ("valid").
    """
    padding = around(x, kernel, stride, same)
    return conv_windows(x, kernel, Window((stride, stride), padding, (1, 1)))


def conv_lax(x: Images, kernel: Kernel, stride: int = 1, same: bool = True) -> Outputs:
    """Compute the same as `conv_slices` by `lax.conv_general_dilated`."""
    return lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding="SAME" if same else "VALID",
        dimension_numbers=("CHWN", "HWIO", "CHWN"),
    )


def conv_taps(x: Images, kernel: Kernel) -> Outputs:
    """Compute a convolution by one matrix product per tap that overlaps the image.

    For images of one or two pixels, on which most of `conv_slices`' products are with
    padding: 1 of 9 remains on 1x1, 16 of 36 on 2x2. Stride 1, a kernel with odd h and
    w, zero padding that keeps H and W.
    """
    kh, kw, _, filters = kernel.shape
    channels, height, width, batch = x.shape

    def overlap(tap: int, size: int, taps: int) -> tuple[int, int, int]:
        # (first, end) of the inputs, shift to the outputs
        shift = tap - taps // 2
        return max(shift, 0), size + min(shift, 0), shift

    out = jnp.zeros((filters, height, width, batch), x.dtype)
    for i in range(kh):
        for j in range(kw):
            top, bottom, down = overlap(i, height, kh)
            left, right, across = overlap(j, width, kw)
            if top >= bottom or left >= right:
                continue
            part = x[:, top:bottom, left:right]
            product = winograd.product_of(kernel[i, j], part.reshape(channels, -1))
            product = product.reshape(filters, bottom - top, right - left, batch)
            rows = (top - down, height - bottom + down)
            columns = (left - across, width - right + across)
            out += jnp.pad(product, ((0, 0), rows, columns, (0, 0)))
    return out


def conv_fast(x: Images, kernel: Kernel, stride: int = 1, same: bool = True) -> Outputs:
    """Compute the same as `conv_slices` in the form measured fastest for the shape."""
    if x.dtype.itemsize < 4:  # the others multiply the rounding of bfloat16, up to 10x
        return conv_slices(x, kernel, stride, same)
    odd = kernel.shape[0] % 2 and kernel.shape[1] % 2
    if stride == 1 and same and odd and max(x.shape[1:3]) <= 2:
        return conv_taps(x, kernel)
    if winograd.applies(x, kernel, stride, same):
        return winograd.conv_winograd(x, kernel, same)
    return conv_slices(x, kernel, stride, same)


def conv_general(
    x: Float[Array, "C *S B"], kernel: Float[Array, "*k c F"], window: Window, form: str
) -> Float[Array, "F *O B"]:
    """Compute a convolution of any window in the form "fast" or "slices"."""
    sizes, strides = kernel.shape[:-2], set(window.strides)
    plain = window.groups == 1 and set(window.dilation) == {1} and len(strides) == 1
    if form != "fast" or not plain or len(sizes) > 2:
        return conv_windows(x, kernel, window)
    padding, one = window.padding, len(sizes) == 1
    if one:  # an image of one column
        x, kernel, padding = x[:, :, None], kernel[:, None], (*padding, (0, 0))
    same = strides == {1} and all(
        k % 2 and pads == (k // 2, k // 2)
        for k, pads in zip(kernel.shape[:2], padding, strict=True)
    )
    if not same:
        x = padded(x, padding)
    out = conv_fast(x, kernel, window.strides[0], same)
    return out[:, :, 0] if one else out


CONVOLUTIONS = {
    "fast": conv_fast,
    "slices": conv_slices,
    "quarters": conv_slices,  # with a pool: `pooling.conv_pool_quarters`
    "lax": conv_lax,
}
