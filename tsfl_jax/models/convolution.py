"""Convolution that stays fast inside a compiled loop over clients.

XLA's CPU backend runs `lax.conv` inside a loop body 10 to 50 times slower than
outside (jax-ml/jax#12868), and `vmap` over clients with one kernel per client turns it
into a grouped convolution, which is slow on all backends. So the default on CPU is:
shifted slices of the input stacked to patches, then one matrix product per client; with
fewer multiplications if `winograd` applies; tap by tap on images of one or two pixels.

The layout is ``[C, H, W, B]``, the batch last: slices of it are contiguous runs of B
floats, and the patches need no transpose before the product. The layout alone gave a
factor of two.
"""

import jax.numpy as jnp
from jax import lax

from tsfl_jax.models import winograd
from tsfl_jax.models.winograd import Images, Kernel, Outputs


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after, so that the output has ⌈size/stride⌉ entries."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def conv_slices(
    x: Images, kernel: Kernel, stride: int = 1, same: bool = True
) -> Outputs:
    """Compute a convolution as shifted slices and one matrix product.

    Args:
      x: images.
      kernel: of any odd or even size.
      stride: of both spatial axes, ≥ 1.
      same: zero padding to ⌈H/stride⌉ and ⌈W/stride⌉ (False: no padding, "valid").
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
    odd = kernel.shape[0] % 2 and kernel.shape[1] % 2
    if stride == 1 and same and odd and max(x.shape[1:3]) <= 2:
        return conv_taps(x, kernel)
    if winograd.applies(x, kernel, stride, same):
        return winograd.conv_winograd(x, kernel, same)
    return conv_slices(x, kernel, stride, same)


CONVOLUTIONS = {"fast": conv_fast, "slices": conv_slices, "lax": conv_lax}
