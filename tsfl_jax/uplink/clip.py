"""The L2 norm of each client's whole update is limited, by a fixed or adaptive C.

    u ← u · min(1, C/‖u‖₂)

over the parameters as one vector; other collections are not clipped. An update whose
norm is no finite float32 becomes 0. With a quantile γ the norm follows the updates:

    C ← C · exp(−η_C (b̃ − γ)),   b̃ = (Σ_i (b_i − ½) + N(0, σ_b²))/m + ½,   b_i = 1[‖u_i‖₂ ≤ C]

over the m clients that deliver, each one's last delivery, unweighted. σ_b is 0 without
`noise`, and 5 z with it (the m/20 of the paper for z = 1, m = 100), so that the count
takes 1/100 of 1/z²: the noise of the sum is z C/√0.99 then. Simplified: C is that of
the update in which a client delivers, also where it started from an earlier model.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018; Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private
Learning with Adaptive Clipping", NeurIPS 2021, Algorithm 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float

from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, Params
from tsfl_jax.uplink.link import LinkInfo, SumInfo, Traffic, Uplink

COUNT_SHARE = 0.01  # of 1/z², for the noisy count of updates that are not clipped
COUNT_NOISE = 1 / (2 * COUNT_SHARE**0.5)  # σ_b/z: of b − ½, which is at most ½


@component("clip")
class Clip:
    """A limit on the norm of updates."""

    norm: float = setting(1.0, "C, largest L2 norm of an update", above=0)
    quantile: float = setting(
        0.0,
        "γ, share of updates that an adaptive norm leaves as they are; 0: C is fixed",
        low=0,
        below=1,
        static=True,
    )
    rate: float = setting(
        0.2, "η_C, step of an adaptive norm", above=0, used_by=("quantile", ())
    )


class Adaptive(NamedTuple):
    """What the server keeps, the same for all clients, and each client's answer."""

    factor: Float[Array, "..."]  # C over `clip.norm`
    is_below: Float[Array, "..."]  # b of a delivery in this update; −1: none


def init(params: Params, settings: Clip) -> Any:
    """The norm as it is set; nothing where it is fixed."""
    del params
    one = jnp.float32(1.0)
    return Adaptive(one, -one) if settings.quantile else ()


def norm_of(state: Any, settings: Clip) -> Any:
    """C of this update."""
    return settings.norm * state.factor if settings.quantile else settings.norm


def bound(before: Any, state: Any, settings: Clip) -> Any:
    """The norm that noise is scaled to: C, more where the count has noise of its own."""
    del before
    share = COUNT_SHARE if settings.quantile else 0.0
    return norm_of(state, settings) / (1 - share) ** 0.5


def send(
    update: Params, state: Any, info: LinkInfo, settings: Clip
) -> tuple[Params, Any]:
    """The update with a norm of at most C, and whether it had one."""
    del info
    norm, limit = optax.tree.norm(update["params"]), norm_of(state, settings)
    scale = jnp.where(norm > limit, limit / norm, 1.0)

    def clipped(u: Array) -> Array:
        return jnp.where(jnp.isfinite(norm), scale.astype(u.dtype) * u, 0)

    if settings.quantile:
        state = state._replace(is_below=(norm <= limit).astype(jnp.float32))
    return {**update, "params": jax.tree.map(clipped, update["params"])}, state


def adapt(states: Any, info: SumInfo, settings: Clip) -> Any:
    """The norm of the next update, by all clients' answers ``[U]``."""
    if not settings.quantile:
        return states
    is_below = states.is_below
    count = jnp.where(is_below >= 0, is_below - 0.5, 0.0).sum()
    noise = COUNT_NOISE * info.multiplier * jax.random.normal(info.key)
    share = (count + noise) / jnp.maximum(info.count, 1) + 0.5
    step = jnp.where(info.count > 0, settings.rate * (share - settings.quantile), 0.0)
    return Adaptive(states.factor * jnp.exp(-step), -jnp.ones_like(is_below))


def bits(traffic: Traffic, params: Params, settings: Clip) -> Traffic:
    """An adaptive norm goes down, a float32, and one bit goes up."""
    del params
    if not settings.quantile:
        return traffic
    return Traffic(traffic.download + 32, traffic.upload + 1)


CLIP = Uplink(init=init, send=send, bound=bound, adapt=adapt, bits=bits, section=Clip)
