"""3x3 convolution with 16 multiplications for 4 outputs instead of 36.

Winograd's minimal filtering F(2x2, 3x3) (Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", CVPR 2016): with 4x4 input tiles d, two apart, and
kernel g, every 2x2 output tile is

    Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A,

where ⊙ becomes one matrix product over channels for each of the 16 places of a tile.
Layout ``[C, H, W, B]`` as in `convolution`; the transforms are sums of slices. The
gradient is by hand: it reuses the transformed input and transforms the output's
gradient once for both products. Stride 1, zero padding 1, even H and W only.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax.types import Array


def applies(x: Array, kernel: Array, stride: int, same: bool) -> bool:
    """Whether this form exists for a convolution and is worth its transforms."""
    height, width = x.shape[1:3]
    exists = kernel.shape[:2] == (3, 3) and stride == 1 and same
    exists = exists and height % 2 == 0 and width % 2 == 0
    # Few channels: the transforms cost more than the products save. One tile per
    # image: transforming the kernel does. Many tiles: they fall out of the cache.
    return exists and x.shape[0] >= 32 and 4 <= min(height, width) <= 16


def _bt(d: list[Array]) -> list[Array]:
    """Bᵀ d: four rows of an input tile → four."""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _b(r: list[Array]) -> list[Array]:
    """B r, the transpose of `_bt`."""
    return [r[0], r[1] - r[2] + r[3], r[1] + r[2] - r[0], -r[3]]


def _g(k: list[Array]) -> list[Array]:
    """G k: three rows of a kernel → four."""
    even = k[0] + k[2]
    return [k[0], 0.5 * (even + k[1]), 0.5 * (even - k[1]), k[2]]


def _gt(u: list[Array]) -> list[Array]:
    """Gᵀ u, the transpose of `_g`."""
    middle = 0.5 * (u[1] + u[2])
    return [u[0] + middle, 0.5 * (u[1] - u[2]), middle + u[3]]


def _at(m: list[Array]) -> list[Array]:
    """Aᵀ m: four rows of a product → two rows of the output."""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def _a(y: list[Array]) -> list[Array]:
    """A y, the transpose of `_at`."""
    return [y[0], y[0] + y[1], y[0] - y[1], -y[1]]


def _both(transform, grid: list[list[Array]]) -> list[list[Array]]:
    """A transform along the rows and along the columns of a grid of arrays."""
    grid = [transform(row) for row in grid]
    columns = [transform(list(column)) for column in zip(*grid, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _stack(grid: list[list[Array]]) -> Array:
    return jnp.stack([array for row in grid for array in row])


def _grid(stacked: Array) -> list[list[Array]]:
    return [[stacked[4 * i + j] for j in range(4)] for i in range(4)]


def _tiles(x: Array) -> Array:
    """Bᵀ d B of all tiles of ``[C, H, W, B]``: ``[16, C, P]``, P = H/2 · W/2 · B."""
    channels, height, width, batch = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))

    def place(i, j):
        return x[:, i : i + height - 1 : 2, j : j + width - 1 : 2]

    grid = [[place(i, j) for j in range(4)] for i in range(4)]
    return _stack(_both(_bt, grid)).reshape(16, channels, -1)


def _overlap(rows: list[Array], axis: int) -> Array:
    """Adds tiles of four, two apart, along an axis, without the padding at both ends.

    Entry 2t + 1 lies in tiles t (second place) and t − 1 (fourth), entry 2t in tiles t
    (first) and t − 1 (third).
    """

    def shifted(a, before, after):
        pads = [(0, 0)] * a.ndim
        pads[axis] = (before, after)
        a = jnp.pad(a, pads)
        return lax.slice_in_dim(a, after, a.shape[axis] - before, axis=axis)

    odd = rows[1] + shifted(rows[3], 1, 0)
    even = rows[2] + shifted(rows[0], 0, 1)
    shape = list(odd.shape)
    shape[axis] *= 2
    return jnp.stack([odd, even], axis=axis + 1).reshape(shape)


def _untile(tiles: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of `_tiles`: ``[16, C, P]`` → ``[C, H, W, B]``."""
    channels, height, width, batch = shape
    tiles = tiles.reshape(16, channels, height // 2, width // 2, batch)
    grid = _both(_b, _grid(tiles))
    return _overlap([_overlap(row, 2) for row in grid], 1)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple]:
    _, height, width, batch = x.shape
    filters = kernel.shape[-1]
    tiles = _tiles(x)
    taps = _stack(_both(_g, [[kernel[i, j] for j in range(3)] for i in range(3)]))
    products = jnp.einsum("tck,tcp->tkp", taps, tiles)
    grid = _both(_at, _grid(products))
    shape = (filters, height // 2, width // 2, batch)
    rows = [
        jnp.stack([a.reshape(shape) for a in row], axis=3).reshape(
            filters, height // 2, width, batch
        )
        for row in grid
    ]
    out = jnp.stack(rows, axis=2).reshape(filters, height, width, batch)
    return out, (tiles, taps)


@jax.custom_vjp
def conv_winograd(x: Array, kernel: Array) -> Array:
    """``[C, H, W, B]`` and ``[3, 3, C, K]`` → ``[K, H, W, B]``, zero padding 1."""
    return _forward(x, kernel)[0]


def _backward(saved: tuple, grad: Array) -> tuple[Array, Array]:
    tiles, taps = saved
    filters, height, width, batch = grad.shape
    quarters = grad.reshape(filters, height // 2, 2, width // 2, 2, batch)
    grid = [[quarters[:, :, i, :, j] for j in range(2)] for i in range(2)]
    products = _stack(_both(_a, grid)).reshape(16, filters, -1)
    d_taps = jnp.einsum("tcp,tkp->tck", tiles, products)
    d_kernel = _stack(_both(_gt, _grid(d_taps)))
    d_tiles = jnp.einsum("tck,tkp->tcp", taps, products)
    channels = taps.shape[1]
    d_x = _untile(d_tiles, (channels, height, width, batch))
    return d_x, d_kernel.reshape(3, 3, channels, filters)


conv_winograd.defvjp(_forward, _backward)
