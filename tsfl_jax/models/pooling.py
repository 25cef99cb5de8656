"""Pooling in layout ``[C, *S, B]``, and 2x2 pooling after a convolution.

An elementwise maximum of shifted slices with a custom gradient: automatic
differentiation of nested maxima passes over the data three times, and that of
lax.reduce_window is a scatter. For windows of 2x2 the slices are quarters of the image.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tsfl_jax.models import convolution
from tsfl_jax.models.convolution import Window
from tsfl_jax.models.winograd import Images, Kernel, Outputs

Halved = Float[Array, "C _ _ B"]  # images of half the height and width
Spread = Float[Array, "C *S B"]
Pooled = Float[Array, "C *O B"]


_TWO_APART = Window((2, 2), ((0, 0), (0, 0)), (1, 1))


def _quarters(x: Images) -> list[Halved]:
    """The four entries of every 2x2 window of ``[C, 2h, 2w, B]``."""
    c, h, w, b = x.shape
    x = x.reshape(c, h // 2, 2, w // 2, 2, b)
    return [x[:, :, i, :, j] for i in (0, 1) for j in (0, 1)]


def _to_first(parts: list[Array], largest: Array, grad: Array) -> list[Array]:
    """The gradients of arrays: the first that equals the maximum takes all.

    PyTorch does the same.
    """
    taken, grads = jnp.zeros(grad.shape, bool), []
    for part in parts:
        wins = part == largest
        grads.append(jnp.where(wins & ~taken, grad, 0))
        taken |= wins
    return grads


@jax.custom_vjp
def _max_pool_even(x: Images) -> Halved:
    """2x2 maximum of images with even H and W."""
    return functools.reduce(jnp.maximum, _quarters(x))


def _max_pool_forward(x: Images) -> tuple[Halved, tuple[Images, Halved]]:
    out = _max_pool_even(x)
    return out, (x, out)


def _max_pool_backward(saved: tuple[Images, Halved], grad: Halved) -> tuple[Images]:
    # Four simple loops over quarters, then two copies: one loop over all entries with
    # a select by position is not vectorized and took six times as long.
    x, out = saved
    parts = _to_first(_quarters(x), out, grad)
    rows = [jnp.stack(parts[i : i + 2], axis=3) for i in (0, 2)]
    return (jnp.stack(rows, axis=2).reshape(x.shape),)


_max_pool_even.defvjp(_max_pool_forward, _max_pool_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _max_of_slices(x: Array, sizes: tuple[int, ...], window: Window) -> Array:
    return functools.reduce(
        jnp.maximum, convolution.shifted(x, sizes, window, fill=-jnp.inf)
    )


def _max_of_slices_forward(
    x: Array, sizes: tuple[int, ...], window: Window
) -> tuple[Array, tuple[Array, Array]]:
    out: Array = _max_of_slices(x, sizes, window)  # pyright: ignore
    return out, (x, out)


def _max_of_slices_backward(
    sizes: tuple[int, ...], window: Window, saved: tuple[Array, Array], grad: Array
) -> tuple[Array]:
    x, out = saved
    slices = convolution.shifted(x, sizes, window, fill=-jnp.inf)
    back = jax.linear_transpose(lambda x: convolution.shifted(x, sizes, window), x)
    return tuple(back(_to_first(slices, out, grad)))


_max_of_slices.defvjp(_max_of_slices_forward, _max_of_slices_backward)


def max_windows(x: Spread, sizes: tuple[int, ...], window: Window) -> Pooled:
    """Compute the maximum of every window, as `lax.reduce_window`; padding is −∞."""
    halves = sizes == window.strides == (2, 2) and set(window.dilation) == {1}
    if not halves:
        return _max_of_slices(x, sizes, window)
    around = tuple(
        (low, high - (size + low + high) % 2)  # the last row may be cut off
        for size, (low, high) in zip(x.shape[1:-1], window.padding, strict=True)
    )
    return _max_pool_even(convolution.padded(x, around, -jnp.inf))


def max_pool(x: Images) -> Halved:
    """Compute the 2x2 maximum with stride 2 and ceiling division.

    A last odd row or column forms a window of its own, so 7 becomes 4 and 1 stays 1.
    """
    after = tuple((0, size % 2) for size in x.shape[1:3])
    return max_windows(x, (2, 2), Window((2, 2), after, (1, 1)))


def sum_windows(x: Spread, sizes: tuple[int, ...], window: Window) -> Pooled:
    """Compute the sum of every window, as `max_windows`; its padding is 0."""
    return functools.reduce(jnp.add, convolution.shifted(x, sizes, window))


def conv_pool_quarters(x: Images, kernel: Kernel) -> Outputs:
    """Compute a convolution and 2x2 pooling by one product for all four of a window.

    The four outputs of a window see (h+1)x(w+1) inputs. With the kernel written four
    times into a frame of that size, one product makes all four, from patches two apart:
    (h+1)(w+1) / 4hw of the patches of `conv_slices` for (h+1)(w+1) / hw of its
    products. Faster if patches cost most: one input channel, a large kernel, few
    filters. The images are already padded, H − h + 1 and W − w + 1 even.
    """
    kh, kw, channels, filters = kernel.shape
    dtype, sums = x.dtype, jnp.promote_types(x.dtype, jnp.float32)  # of the gradients
    x, kernel = x.astype(sums), kernel.astype(sums)
    slices = convolution.shifted(x, (kh + 1, kw + 1), _TWO_APART)
    patches = jnp.stack(slices).reshape((kh + 1) * (kw + 1) * channels, -1)
    frames = [
        jnp.pad(kernel, ((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)))
        for i in (0, 1)
        for j in (0, 1)
    ]
    frames = jnp.stack(frames, axis=-1).reshape(-1, 4 * filters).astype(dtype)
    product = frames.T @ patches.astype(dtype)
    # The four outputs of a window, as an image of 2x2 pixels.
    out = _max_pool_even(product.reshape(filters, 2, 2, -1))
    return out.reshape(filters, *slices[0].shape[1:])


def conv_pool(x: Images, kernel: Kernel, same: bool, form: str) -> Outputs:
    """Compute `max_pool` of a convolution with stride 1 in a form of `CONVOLUTIONS`."""
    # By the roofline of an H100 (benchmarks.structure): products of more filters take
    # longer than the patches that they save.
    few = kernel.shape[-1] <= 4 * kernel.shape[0] * kernel.shape[1]
    one = not same and x.shape[0] == 1
    if (form == "quarters" and few) or (form == "fast" and one):
        wide = convolution.padded(x, convolution.around(x, kernel, 1, same))
        if (wide.shape[1] - kernel.shape[0]) % 2 and (
            wide.shape[2] - kernel.shape[1]
        ) % 2:
            return conv_pool_quarters(wide, kernel)
    return max_pool(convolution.CONVOLUTIONS[form](x, kernel, 1, same))
