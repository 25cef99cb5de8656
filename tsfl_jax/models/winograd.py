"""Convolution with fewer multiplications: minimal filtering along the rows.

F(m, k) of Winograd, in the construction of Toom and Cook (Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks", CVPR 2016, section 4): m outputs of a
filter with k taps from n = m + k − 1 inputs d take n multiplications and not m·k,

    y = Aᵀ [(G g) ⊙ (Bᵀ d)].

F(4, 3) and F(2, 5) have n = 6: half and three fifths of the multiplications. With fewer
than 64 channels it is F(2, 3) with n = 4, two thirds: all factors of its Bᵀ and Aᵀ are
0 and ±1, so that equal patches of a constant area have equal outputs, and max pooling
breaks their ties as after other convolutions.

Along the rows of an image the entries of d are whole slices ``[C, H/m, W, B]``, the
transforms are sums of slices, and ⊙ is one matrix product over channels and columns
of the kernel for each of the n points. Only one axis is transformed: the second would
save more multiplications, but was measured slower, because its slices are short runs.

The custom gradient reuses the transformed input and transforms the output's gradient
once for both products. Layout ``[C, H, W, B]`` as in `convolution`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

# Where the polynomials are evaluated, besides ∞. More points, or larger ones, would
# lose more digits than float32 training can spare.
POINTS = (0, 1, -1, 2, -2)
FEW_POINTS = POINTS[:3]

Matrix = list[list[float]]
Images = Float[Array, "C H W B"]
Kernel = Float[Array, "h w C F"]  # as Flax stores it
Outputs = Float[Array, "F _ _ B"]
# Transformed inputs [n, w·C, H/m·W·B], transformed kernel [n, w·C, F], kernel.
Saved = tuple[Float[Array, "n wC P"], Float[Array, "n wC F"], Kernel]


def cook_toom(
    taps: int, points: tuple[int, ...] = POINTS
) -> tuple[Matrix, Matrix, Matrix]:
    """Compute the matrices Aᵀ ``[m, n]``, G ``[n, k]`` and Bᵀ ``[n, n]`` of F(m, k).

    Row i of G evaluates the filter at point i, divided by Π_{j≠i} (p_i − p_j); column
    i of Aᵀ holds the point's powers; row i of Bᵀ the coefficients of Π_{j≠i} (x − p_j).
    """
    at = np.array(points, float)  # small integers: all but the division is exact
    without = [np.delete(at, i) for i in range(len(at))]  # point i

    def powers(count: int) -> np.ndarray:
        return np.vstack([np.vander(at, count, increasing=True), np.eye(count)[-1]])

    scales = [np.prod(p - zeros) for p, zeros in zip(at, without, strict=True)]
    g = powers(taps) / np.array([*scales, 1.0])[:, None]  # the last point is ∞
    bt = [[*np.poly(zeros)[::-1], 0.0] for zeros in without] + [[*np.poly(at)[::-1]]]
    a = powers(len(at) + 2 - taps)
    return a.T.tolist(), g.tolist(), np.array(bt).tolist()


MATRICES = {taps: cook_toom(taps) for taps in (3, 5)}
_EXACT = cook_toom(3, FEW_POINTS)


def matrices(kernel: Kernel) -> tuple[Matrix, Matrix, Matrix]:
    """Aᵀ, G and Bᵀ for a kernel; of F(2, 3) where images are large and have ties."""
    taps, _, channels, _ = kernel.shape
    return _EXACT if taps == 3 and channels < 64 else MATRICES[taps]


def applies(x: Images, kernel: Kernel, stride: int, same: bool) -> bool:
    """Whether this form exists for a convolution and saves more than it costs."""
    taps = kernel.shape[0]
    height = x.shape[1] if same else x.shape[1] - taps + 1
    if same and kernel.shape[1] % 2 == 0:
        return False  # padding would be uneven
    # Few channels: the transforms cost more than the products save. Few rows: most
    # of a block of m would be padding.
    return taps in MATRICES and stride == 1 and x.shape[0] >= 8 and height > 2


def _combine(matrix: Matrix, parts: list[Array]) -> list[Array]:
    """The sums Σ_j matrix[i][j] · parts[j] of each row i, without the zeros."""

    def row(factors: list[float]) -> Array:
        terms = [
            part if factor == 1 else factor * part
            for factor, part in zip(factors, parts, strict=True)
            if factor
        ]
        return sum(terms[1:], start=terms[0])

    return [row(factors) for factors in matrix]


def _transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def _any_nonzero(x: Images, taps: int, width: int) -> Bool[Array, "_ _ B"]:
    """Whether the patch of each output has a nonzero input."""
    # Barriers keep XLA from repeating this for every shift, and for every channel.
    nonzero = lax.optimization_barrier(jnp.any(x != 0, axis=0))
    height, columns = nonzero.shape[0] - taps + 1, nonzero.shape[1] - width + 1
    rows = [nonzero[i : i + height] for i in range(taps)]
    rows = functools.reduce(jnp.logical_or, rows)
    shifts = [rows[:, j : j + columns] for j in range(width)]
    return lax.optimization_barrier(functools.reduce(jnp.logical_or, shifts))


def product_of(
    filter_: Float[Array, "*n c F"], columns: Float[Array, "*n c P"]
) -> Float[Array, "*n F P"]:
    """Compute filterᵀ · columns, transposed first if that is faster.

    XLA's CPU backend copies a transposed left factor to panels, slowly. With many
    columns that is little of the work; with few columns and a large filter it halved
    the speed, and a product that has the filter on the right does not transpose it.
    """
    batch = tuple(range(filter_.ndim - 2))
    contracted = filter_.ndim - 2
    dims = ((contracted,), (contracted,)), (batch, batch)
    if filter_.shape[-1] >= 256 and columns.shape[-1] <= filter_.shape[-1] // 4:
        # The barrier keeps XLA from swapping the factors back.
        turned = lax.dot_general(columns, filter_, dims)
        return jnp.swapaxes(lax.optimization_barrier(turned), -1, -2)
    return lax.dot_general(filter_, columns, dims)


def _forward(x: Images, kernel: Kernel) -> tuple[Outputs, Saved]:
    taps, width, channels, filters = kernel.shape
    at, g, bt = matrices(kernel)
    step, points = len(at), len(bt)  # m, n
    blocks = (x.shape[1] - taps + 1) // step
    columns, batch = x.shape[2] - width + 1, x.shape[3]
    rows = [x[:, i : i + step * (blocks - 1) + 1 : step] for i in range(points)]
    tiles = jnp.stack(_combine(bt, rows))  # [n, C, H/m, W, B]
    tiles = jnp.stack([tiles[:, :, :, j : j + columns] for j in range(width)], axis=1)
    tiles = tiles.reshape(points, width * channels, -1)
    filter_ = jnp.stack(_combine(g, list(kernel))).reshape(points, -1, filters)
    products = product_of(filter_, tiles)
    products = products.reshape(points, filters, blocks, columns * batch)
    out = jnp.stack(_combine(at, list(products)), axis=2)
    out = out.reshape(filters, blocks * step, columns, batch)
    # Where the patch is all zeros, as in the background of digits, the transforms leave
    # rounding noise, through which ReLU would pass a gradient that must be 0.
    out = jnp.where(_any_nonzero(x, taps, width), out, 0)
    return out, (tiles, filter_, kernel)


@jax.custom_vjp
def _valid(x: Images, kernel: Kernel) -> Outputs:
    """Convolution without padding whose output has a multiple of m rows."""
    return _forward(x, kernel)[0]


def _backward(saved: Saved, grad: Outputs) -> tuple[Images, Kernel]:
    tiles, filter_, kernel = saved
    taps, width, channels, filters = kernel.shape
    at, g, bt = matrices(kernel)
    step, points = len(at), len(bt)
    _, height, columns, batch = grad.shape
    blocks = height // step

    grad = grad.reshape(filters, blocks, step, columns * batch)
    parts = [grad[:, :, i] for i in range(step)]
    products = jnp.stack(_combine(_transposed(at), parts))
    products = products.reshape(points, filters, -1)
    d_filter = jnp.einsum("ncp,nkp->nck", tiles, products)
    d_filter = d_filter.reshape(points, width, channels, filters)
    d_kernel = jnp.stack(_combine(_transposed(g), list(d_filter)))

    d_tiles = jnp.einsum("nck,nkp->ncp", filter_, products)
    d_tiles = d_tiles.reshape(points, width, channels, blocks, columns, batch)
    d_columns = [  # back from shifted columns
        jnp.pad(d_tiles[:, j], ((0, 0),) * 3 + ((j, width - 1 - j), (0, 0)))
        for j in range(width)
    ]
    d_tiles = jnp.asarray(sum(d_columns))
    d_rows = _combine(_transposed(bt), list(d_tiles))  # n of [C, H/m, W, B]
    # Row i of block t is row m·t + i of x: row i mod m of block t + ⌊i/m⌋.
    last = (points - 1) // step
    d_x = [
        sum(
            jnp.pad(d_rows[i], ((0, 0), (i // step, last - i // step), (0, 0), (0, 0)))
            for i in range(first, points, step)
        )
        for first in range(step)
    ]
    d_x = jnp.stack(d_x, axis=2)
    d_x = d_x.reshape(channels, -1, columns + width - 1, batch)
    return d_x[:, : height + taps - 1], d_kernel


_valid.defvjp(_forward, _backward)


def conv_winograd(x: Images, kernel: Kernel, same: bool = True) -> Outputs:
    """Compute a convolution with stride 1 of images of any height; see `applies`."""
    taps, width = kernel.shape[:2]
    around = (taps // 2, width // 2) if same else (0, 0)
    height = x.shape[1] + 2 * around[0] - taps + 1
    missing = -height % len(matrices(kernel)[0])  # up to a whole number of blocks
    rows, columns = (around[0], around[0] + missing), (around[1], around[1])
    if same or missing:
        x = jnp.pad(x, ((0, 0), rows, columns, (0, 0)))
    return _valid(x, kernel)[:, :height]
