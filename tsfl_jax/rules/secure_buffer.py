"""FedBuff with sums in a finite field, as secure aggregation makes them.

Only the arithmetic: clients round updates and staleness weights to integers, the server
adds these modulo p and maps the sum back. Masks, keys and dropouts are not simulated,
and nothing is secret here: for the model, the protocol is this rounding.

Source: J. So, R. E. Ali, B. Güler, A. S. Avestimehr, "Secure Aggregation for Buffered
Asynchronous Federated Learning", arXiv 2110.02177, 2021.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, UInt32

from tsfl_jax import rng
from tsfl_jax.components import component, setting
from tsfl_jax.rules import base
from tsfl_jax.rules.averages import Server, Staleness, of_lag, server_step
from tsfl_jax.types import HParams, Params, PRNGKey

PRIME = 2**32 - 5
_BITS = 10  # of c_g


@component("secure_buffer")
class SecureBuffer:
    """How finely updates and weights are rounded."""

    levels: int = setting(2**16, "c_l, steps per unit of an update", low=1, high=2**24)
    weight_levels: int = setting(
        2**6, "c_g, steps per unit of a staleness weight", low=1, high=2**_BITS
    )


def rounded(
    x: Float[Array, "..."], levels: ArrayLike, key: PRNGKey
) -> Int[Array, "..."]:
    """Round c·x to one of its two integer neighbors, c·x in the mean.

    Args:
      x: |c·x| < 2^31; beyond that it is cut off.
      levels: c ``[]``.
      key: of this client and leaf.

    Returns:
      int32.
    """
    scaled = x * levels
    low = jnp.floor(scaled)
    up = jax.random.uniform(key, x.shape) < scaled - low
    most = 2.0**31 - 128  # the largest float32 that int32 holds
    return jnp.clip(low + up, -most, most).astype(jnp.int32)


def to_field(k: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """k modulo p of an int32 k: negative numbers are the upper half."""
    return k.astype(jnp.uint32) - jnp.where(k < 0, jnp.uint32(5), jnp.uint32(0))


def from_field(k: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """The number with the least magnitude that is k modulo p, as float32."""
    negative = k > PRIME // 2
    below = (jnp.uint32(PRIME) - k).astype(jnp.float32)
    return jnp.where(negative, -below, k.astype(jnp.float32))


def add(a: UInt32[Array, "..."], b: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """a + b modulo p, of numbers below p."""
    total = a + b  # modulo 2^32, and 2^32 is 5 modulo p
    total = jnp.where(total < a, total + jnp.uint32(5), total)
    return jnp.where(total >= jnp.uint32(PRIME), total - jnp.uint32(PRIME), total)


def times(count: Int[Array, ""], k: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """count · k modulo p, of 0 ≤ count ≤ 2^10, by doubling: no product overflows."""
    total = jnp.zeros_like(k)
    for bit in range(_BITS + 1):
        total = jnp.where((count >> bit) & 1 == 1, add(total, k), total)
        k = add(k, k)
    return total


def _keys(info: base.RoundInfo) -> PRNGKey:
    """A key for each client in this update."""
    stream = rng.fold(info.key, "secure rounding")
    return jax.vmap(lambda i: jax.random.fold_in(stream, i))(info.client)


def _counts(info: base.RoundInfo, hparams: HParams) -> Int[Array, "N"]:
    """c_g s(lag) of each client as an integer; 0 of those that did nothing."""
    levels = hparams.of(SecureBuffer).weight_levels
    late = of_lag(info.lag, hparams.of(Staleness))
    draw = jax.vmap(lambda x, key: rounded(x, levels, key))
    return jnp.where(info.tau > 0, draw(late, _keys(info)), 0)


def secure_weights(info: base.RoundInfo, hparams: HParams) -> base.Weights:
    """ρ_i = s̄_i/Σ_j s̄_j with s̄_i = c_g s(lag_i), rounded to an integer at random."""
    return base.weights_of(base.normalized(_counts(info, hparams), info.tau), info.tau)


def secure_sum(
    updates: Params, state: Any, received: base.Received, hparams: HParams
) -> tuple[Params, Any]:
    """The mean update by way of integers modulo p = 2^32 − 5.

    Δ = φ⁻¹(Σ_i s̄_i φ(c_l u_i) mod p) / (c_l Σ_i s̄_i); c_l u_i is rounded at random to
    an integer, φ(k) = k mod p. So E Δ = Σ ρ_i u_i, each entry off by less than 1/c_l.
    Σ s̄_i c_l |u_i| has to stay below p/2: with the defaults Σ_i |u_i| < 512 in each
    entry. Beyond that the sum wraps around, as that of the protocol does.

    Simplified: ‖·‖ clipping and noise are not added. A client that delivers twice in
    one update rounds with the same random numbers.
    """
    levels = hparams.of(SecureBuffer).levels
    counts = jnp.where(received.present, _counts(received.info, hparams), 0)
    keys, total = _keys(received.info), counts.sum()

    def mean(number: int, stack: Float[Array, "N ..."]) -> Float[Array, "..."]:
        def one(sums: Array, row: tuple[Array, Array, PRNGKey]) -> tuple[Array, None]:
            update, count, key = row
            key = jax.random.fold_in(key, number)
            finite = jnp.where(count > 0, update, 0.0)  # absent ones may be NaN
            k = to_field(rounded(finite.astype(jnp.float32), levels, key))
            return add(sums, times(count, k)), None

        zeros = jnp.zeros(stack.shape[1:], jnp.uint32)
        sums, _ = lax.scan(one, zeros, (stack, counts, keys))
        scale = jnp.float32(levels) * jnp.maximum(total, 1)
        return (from_field(sums) / scale).astype(stack.dtype)

    leaves, tree = jax.tree.flatten(updates)
    means = [mean(number, leaf) for number, leaf in enumerate(leaves, 1)]
    return jax.tree.unflatten(tree, means), state


SECURE_BUFFER = base.Aggregator(
    base.Mixing(secure_weights, combine=secure_sum),
    server=base.ServerSide(server_step),
    sections=(SecureBuffer, Server, Staleness),
    label="secure buffer",
)
