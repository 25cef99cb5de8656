"""Quadratic programs over a simplex with an upper limit, in closed form.

`project` is the Euclidean projection (the problem of Wang and Lu, "Projection onto the
Capped Simplex", arXiv:1503.01002, 2015), `fill` minimizes Σ ½a_i ρ_i² + b_i ρ_i for any
a ≥ 0. They search for the level differently. `fill` is not accurate for entries that
differ by many orders of magnitude from those near the level, which `project` clips; the
cumulative sums of `project` would cancel where the a_i differ by many orders.

In `fill`, ρ_i = clip((ν − b_i)/a_i, 0, u): entry i grows from 0 at the level ν = b_i
until it is full, ρ_i = u, at ν = b_i + a_i u. Entries for which these two levels are
the same number after rounding, in particular those with a_i = 0, jump from 0 to u;
entries that jump at the level at which Σρ = 1 share the remaining weight equally.

The level lies between two adjacent ones of the 2N levels at which an entry starts to
grow or becomes full. Bisection over these, which computes Σρ anew each time, finds
them. Then the level has a closed form. O(N log N) time, O(N) memory.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


def _divide(
    a: Float[Array, "N"],
    b: Float[Array, "N"],
    inside: Bool[Array, "N"],
    upper: Float[Array, ""],
) -> tuple[Bool[Array, "N"], Bool[Array, "N"], Bool[Array, "N"]]:
    """Where the entries are at the level at which Σρ = 1, by bisection.

    Where 0 < ρ < u, or one of the jumping entries that share; where ρ = u; and which
    entries jump from 0 to u at one level.
    """
    full = b + a * upper
    jumps = full <= b
    levels = jnp.concatenate([b, full])
    levels = jnp.sort(jnp.where(jnp.concatenate([inside, inside]), levels, jnp.inf))
    slope = jnp.where(jumps, 1, a)

    def total(level: Float[Array, ""], jumped: Bool[Array, "N"]) -> Float[Array, ""]:
        """Σρ at ν = level, monotone in ν also after rounding."""
        rho = jnp.clip((level - b) / slope, 0, upper)
        at_top = jnp.where(jumps, jumped, level >= full)
        rho = jnp.where(at_top, upper, jnp.where(jumps, 0, rho))
        return jnp.where(inside, rho, 0).sum()

    def bisect(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle, is_open = (low + high) // 2, low < high
        enough = total(levels[middle], b <= levels[middle]) >= 1
        low = jnp.where(is_open & ~enough, middle + 1, low)
        return low, jnp.where(is_open & enough, middle, high)

    # The first of the levels with Σρ ≥ 1, and the last with Σρ < 1.
    ends = jnp.zeros((), jnp.int32), jnp.full((), levels.size - 1, jnp.int32)
    index = lax.fori_loop(0, levels.size.bit_length(), bisect, ends)[0]
    high, low = levels[index], levels[jnp.maximum(index - 1, 0)]
    jumping = inside & jumps & (b == high)
    jumping &= total(high, b < high) < 1  # else Σρ = 1 is reached before they jump
    low = jnp.where(jumping.any(), high, low)  # then the level is this one
    free = inside & jnp.where(jumps, jumping, (b < high) & (full > low))
    return free, inside & ~free & (full <= low), jumps


def fill(
    a: Float[Array, "N"],
    b: Float[Array, "N"],
    inside: Bool[Array, "N"],
    upper: Float[Array, ""],
) -> Float[Array, "N"]:
    """Minimize Σ ½a_i ρ_i² + b_i ρ_i over {0 ≤ ρ ≤ u, Σρ = 1} on the entries `inside`.

    >>> a, b = jnp.array([2.0, 1.0, 0.0]), jnp.array([0.0, 0.5, 0.75])
    >>> print(fill(a, b, jnp.ones(3, bool), jnp.array(1.0)))
    [0.375 0.25  0.375]

    Args:
      a: ≥ 0, finite.
      b: finite; most accurate if an entry near the level is subtracted from all.
      inside: M of them true.
      upper: u > 0.

    Returns:
      ρ. Where M·u ≤ 1, 1/M each; all 0 if M = 0.
    """
    free, above, jumps = _divide(a, b, inside, upper)
    # Relative to the free entry with the smallest a, the level is known up to a·u, so
    # that no large number is divided by a small one, and a = 0 needs no special case.
    a = jnp.where(jumps, 0, a)
    least = jnp.argmin(jnp.where(free, a, jnp.inf))
    growing = free & (a > 0)
    rho = jnp.where(growing, (b[least] - b) / jnp.where(growing, a, 1), 0)
    share = jnp.where(a == a[least], 1, a[least] / jnp.where(a > 0, a, 1))
    share = jnp.where(free, share, 0)
    missing = 1 - above.sum() * upper - rho.sum()
    rho = jnp.clip(rho + share / jnp.maximum(share.sum(), 1) * missing, 0, upper)
    rho = jnp.where(free, rho, jnp.where(above, upper, 0))
    # Where all entries must be full, u = 1/M.
    count = jnp.maximum(inside.sum(), 1).astype(a.dtype)
    return jnp.where(inside, jnp.where(count * upper <= 1, 1 / count, rho), 0)


def _free_and_full(
    x: Float[Array, "N"],
    scale: Float[Array, ""],
    mask: Bool[Array, "N"],
    upper: Float[Array, ""],
) -> tuple[Float[Array, ""], Bool[Array, "N"], Bool[Array, "N"]]:
    """Find how the projection of scale·x divides the entries.

    With m = ⌈1/u⌉ and p the m-th largest of v = scale·x, the level λ in ρ = clip(v − λ,
    0, u) lies in [p − u, p]: at λ = p fewer than m entries are above 0, at λ = p − u at
    least m are full. So only w = clip(v − p, −u, u) matters, however large v is. The
    entry of x that is the pivot p/scale, where 0 < ρ < u, and where ρ = u.
    """
    entries = mask.sum()
    rank = jnp.minimum(jnp.ceil(1 / upper), entries).astype(int)
    falling = jnp.sort(jnp.where(mask, x, -jnp.inf), descending=True)
    pivot = jnp.where(entries > 0, falling[jnp.maximum(rank - 1, 0)], 0.0)
    w = jnp.clip(scale * jnp.where(mask, x - pivot, 0.0), -upper, upper)
    # f(λ) = Σ clip(w − λ, 0, u) for λ decreasing from max w. It starts at 0, so that
    # the sums are small where f reaches 1. An entry grows from λ = w to λ = w − u.
    level = jnp.concatenate([w, w - upper])
    growing = jnp.concatenate([mask, mask]).astype(x.dtype).at[x.shape[0] :].mul(-1)
    order = jnp.argsort(level, descending=True)
    level, slope = level[order], jnp.cumsum(growing[order])
    steps = slope[:-1] * (level[:-1] - level[1:])
    total = jnp.concatenate([jnp.zeros(1, x.dtype), jnp.cumsum(steps)])
    last = jnp.maximum((total < 1).sum() - 1, 0)
    level = level[last] - (1 - total[last]) / jnp.maximum(slope[last], 1.0)
    level = jnp.clip(level, -upper, 0.0)  # rounding must not free a clipped entry
    empty, full = w <= level, w - level >= upper
    return pivot, mask & ~empty & ~full, mask & full


@jax.jit  # not op by op, where the caller is not compiled
def project(
    x: Float[Array, "N"],
    scale: Float[Array, ""],
    mask: Bool[Array, "N"],
    upper: Float[Array, ""],
) -> Float[Array, "N"]:
    """Project scale·x onto {0 ≤ ρ ≤ u, Σρ = 1} on the entries in `mask`.

    The minimizer of `fill` for a = 1 and b = −scale·x, with gradients, and accurate
    however large scale·x is.

    Args:
      x: finite.
      scale: ≥ 0, finite; scale·x may overflow.
      mask: M of them true.
      upper: 0 < u ≤ 1.

    Returns:
      ρ. Where M·u ≤ 1 (up to rounding), 1/M each; all 0 if M = 0.
    """
    pivot, free, full = _free_and_full(*map(lax.stop_gradient, (x, scale, mask, upper)))
    # λ in closed form from the free entries alone: they lie within u of the pivot, so
    # nothing here is large, and differentiating it differentiates the projection.
    v = scale * jnp.where(free, x - pivot, 0.0)
    level = (v.sum() + full.sum() * upper - 1) / jnp.maximum(free.sum(), 1)
    rho = jnp.where(free, jnp.clip(v - level, 0, upper), jnp.where(full, upper, 0))
    size = jnp.maximum(mask.sum(), 1).astype(x.dtype)
    too_few = size * upper <= 1 + 4 * jnp.finfo(x.dtype).eps
    return jnp.where(mask, jnp.where(too_few, 1 / size, rho), 0.0)
