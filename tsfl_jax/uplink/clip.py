"""The L2 norm of each client's whole update is limited, by a fixed or adaptive C.

    u ← u · min(1, C/‖u‖₂)

over the parameters as one vector; other collections are not clipped. An update whose
norm is no finite float32 becomes 0. With a quantile γ the norm follows the updates:

    C ← C exp(−η_C (b̃ − γ)),   b̃ = (Σ_i (b_i − ½) + N(0, σ_b²))/m + ½

of the m clients that deliver, each one's last delivery; b_i is 1 where ‖u_i‖₂ ≤ C,
else 0. σ_b is 0 without `noise` and 5 z with it (the paper's m/20 for m = 100, z = 1):
1/100 of 1/z² is for the count, and the noise of the sum is z C/√0.99. Simplified: C is
that of the update in which a client delivers, also from an earlier model.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive
Clipping", NeurIPS 2021, Algorithm 1.
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
_COUNT_NOISE = 1 / (2 * COUNT_SHARE**0.5)  # σ_b/z; |b − ½| is ½


@component("clip")
class Clip:
    """A limit on the norm of updates."""

    norm: float = setting(1.0, "C, largest L2 norm of an update", above=0)
    quantile: float = setting(
        0.0, "γ, share below C that C adapts to; 0: fixed", low=0, below=1, static=True
    )
    rate: float = setting(0.2, "η_C, step of C", above=0, used_by=("quantile", ()))


class Adaptive(NamedTuple):
    """What the server keeps, the same for all clients, and each client's answer."""

    factor: Float[Array, "..."]  # C over `clip.norm`
    is_below: Float[Array, "..."]  # b of a delivery in this update; −1: none


def init(params: Params, settings: Clip) -> Any:
    """C as it is set; nothing where it is fixed."""
    del params
    return Adaptive(jnp.float32(1.0), jnp.float32(-1.0)) if settings.quantile else ()


def _norm(state: Any, settings: Clip) -> Any:
    return settings.norm * state.factor if settings.quantile else settings.norm


def bound(before: Any, state: Any, settings: Clip) -> Any:
    """What noise is scaled to: C, and C/√0.99 where the count has noise, too."""
    del before
    return _norm(state, settings) / (1 - COUNT_SHARE * bool(settings.quantile)) ** 0.5


def send(
    update: Params, state: Any, info: LinkInfo, settings: Clip
) -> tuple[Params, Any]:
    """The update with a norm of at most C, and whether it had one."""
    del info
    norm, limit = optax.tree.norm(update["params"]), _norm(state, settings)
    scale = jnp.where(norm > limit, limit / norm, 1.0)
    clipped = jax.tree.map(
        lambda u: jnp.where(jnp.isfinite(norm), scale.astype(u.dtype) * u, 0),
        update["params"],
    )
    if settings.quantile:
        state = state._replace(is_below=(norm <= limit).astype(jnp.float32))
    return {**update, "params": clipped}, state


def adapt(states: Any, info: SumInfo, settings: Clip) -> Any:
    """C of the next update, by all clients' answers ``[U]``."""
    if not settings.quantile:
        return states
    answers = jnp.where(states.is_below >= 0, states.is_below - 0.5, 0.0)
    noise = _COUNT_NOISE * info.multiplier * jax.random.normal(info.key)
    share = (answers.sum() + noise) / jnp.maximum(info.count, 1) + 0.5
    step = jnp.where(info.count > 0, settings.rate * (share - settings.quantile), 0.0)
    return Adaptive(states.factor * jnp.exp(-step), -jnp.ones_like(answers))


def bits(traffic: Traffic, settings: Clip) -> Traffic:
    """An adaptive C goes down, a float32, and b goes up."""
    down, up = (32, 1) if settings.quantile else (0, 0)
    return traffic._replace(download=traffic.download + down, extra=traffic.extra + up)


CLIP = Uplink(init=init, send=send, bound=bound, adapt=adapt, bits=bits, section=Clip)
