"""Quadratic programs over a simplex with an upper limit, by filling up to a level.

ρ_i = clip((ν − b_i)/a_i, 0, u): entry i grows from 0 at the level ν = b_i until it is
full, u, at ν = b_i + a_i u. Where rounding makes that the same number, in particular
where a_i = 0, it jumps; those that jump at the level at which Σρ = 1 share equally what
remains for them.

No numeric search: the level lies between two of the 2N at which an entry starts to grow
or is full. Halving finds them, with Σρ summed anew each time, as cumulated sums would
cancel where the a_i differ by many orders. Then the level is a closed form. O(N log N)
time, O(N) memory.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax.types import Array


def fill(a: Array, b: Array, inside: Array, upper: Array) -> jax.Array:
    """argmin Σ ½a_i ρ_i² + b_i ρ_i over {0 ≤ ρ ≤ u, Σρ = 1} on the entries `inside`.

    >>> a, b = jnp.array([2.0, 1.0, 0.0]), jnp.array([0.0, 0.5, 0.75])
    >>> print(fill(a, b, jnp.ones(3, bool), jnp.array(1.0)))
    [0.375 0.25  0.375]

    Args:
      a: ``[N]`` ≥ 0, finite.
      b: ``[N]`` finite; most exact where one near the level is subtracted from all.
      inside: ``[N]`` bool, M of them true.
      upper: u ``[]`` > 0.

    Returns:
      ρ ``[N]``. Where M·u ≤ 1 1/M each; all 0 if M = 0.
    """
    full = b + a * upper
    jumps = full <= b
    levels = jnp.concatenate([b, full])
    levels = jnp.sort(jnp.where(jnp.concatenate([inside, inside]), levels, jnp.inf))
    slope = jnp.where(jumps, 1, a)

    def total(level, jumped):
        """Σρ at ν = level, growing in ν also after rounding."""
        rho = jnp.clip((level - b) / slope, 0, upper)
        at_top = jnp.where(jumps, jumped, level >= full)
        rho = jnp.where(at_top, upper, jnp.where(jumps, 0, rho))
        return jnp.where(inside, rho, 0).sum()

    def halve(_, ends):
        low, high = ends
        middle = (low + high) // 2
        enough = total(levels[middle], b <= levels[middle]) >= 1
        open_ = low < high
        return (
            jnp.where(open_ & ~enough, middle + 1, low),
            jnp.where(open_ & enough, middle, high),
        )

    # The first of the levels with Σρ ≥ 1, and the last with Σρ < 1.
    ends = jnp.zeros((), jnp.int32), jnp.full((), levels.size - 1, jnp.int32)
    index = lax.fori_loop(0, levels.size.bit_length(), halve, ends)[0]
    high, low = levels[index], levels[jnp.maximum(index - 1, 0)]
    jumping = inside & jumps & (b == high)
    jumping &= total(high, b < high) < 1  # else Σρ = 1 is reached before they jump
    low = jnp.where(jumping.any(), high, low)  # then the level is this one
    free = inside & jnp.where(jumps, jumping, (b < high) & (full > low))
    above = inside & ~free & (full <= low)

    # Seen from the free entry with the smallest a, the level is known to a·u, so that
    # no large number is divided by a small one; a = 0 is nothing special.
    a = jnp.where(jumps, 0, a)
    least = jnp.argmin(jnp.where(free, a, jnp.inf))
    growing = free & (a > 0)
    rho = jnp.where(growing, (b[least] - b) / jnp.where(growing, a, 1), 0)
    share = jnp.where(a == a[least], 1, a[least] / jnp.where(a > 0, a, 1))
    share = jnp.where(free, share, 0)
    rest = 1 - above.sum() * upper - rho.sum()
    rho = jnp.clip(rho + share / jnp.maximum(share.sum(), 1) * rest, 0, upper)
    rho = jnp.where(free, rho, jnp.where(above, upper, 0))
    # Where all are forced, u = 1/M.
    crowd = jnp.maximum(inside.sum(), 1).astype(a.dtype)
    return jnp.where(inside, jnp.where(crowd * upper <= 1, 1 / crowd, rho), 0)
