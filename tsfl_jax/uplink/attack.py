"""What attackers send in place of their own update u, of d numbers.

    sign_flip:  −s u
    scale:       s u
    gaussian:    s ‖u‖/√d · n,   n ~ N(0, I), drawn anew for each upload
    constant:    s ‖u‖/√d · 1,   the same direction from all attackers
    alie:        μ − z σ         a little is enough
    ipm:        −s μ             inner-product manipulation

The last two know all honest updates of an interval: μ and σ are their mean and standard
deviation by coordinate, and updates are stacked under every rule, in memory that grows
with the clients. z = s, or with s = 0 the largest one with which s' = ⌊n/2⌋ + 1 − m
honest ones of n updates are farther from μ than m attackers, if the updates are normal:
z = Φ⁻¹((n − m − s')/(n − m)).

Sign flips and the same value from all: Li, Xu, Chen, Giannakis, Ling, "RSA:
Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
Heterogeneous Datasets", AAAI 2019. Gaussian: Xie, Koyejo, Gupta, "Generalized
Byzantine-tolerant SGD", 2018. Scaled, as in model replacement: Bagdasaryan et al.,
"How to Backdoor Federated Learning", AISTATS 2020. alie: G. Baruch, M. Baruch,
Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS
2019; there attackers estimate μ and σ from their own honest updates. ipm: Xie, Koyejo,
Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation",
UAI 2020. Simplified: noise and constants are measured by ‖u‖ of the honest update, so
that s means the same for every network; in the papers they are numbers. What is made of
honest updates passes no other link, and there is none in an interval without an honest
one. Other collections than the parameters are sent as they are.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax import trees
from tsfl_jax.rules.robust import average
from tsfl_jax.timeline.attackers import COLLUDING, KINDS, UPDATE, AttackConfig
from tsfl_jax.types import Params
from tsfl_jax.uplink.link import LinkInfo, Uplink


def send(
    update: Params, state: tuple, info: LinkInfo, settings: AttackConfig
) -> tuple[Params, tuple]:
    """What an attacker sends; the update of an honest client as it is."""
    u, to_params = ravel_pytree(update["params"])
    s = settings.strength
    root = optax.tree.norm(u) / jnp.sqrt(jnp.float32(u.size))
    by_kind = {
        "sign_flip": lambda: -s * u,
        "scale": lambda: s * u,
        "gaussian": lambda: s * root * jax.random.normal(info.key, u.shape),
        "constant": lambda: jnp.full_like(u, s * root),
    }
    branches = [by_kind[kind] for kind in UPDATE]
    sent = lax.switch(jnp.asarray(settings.kind) - KINDS.index("sign_flip"), branches)
    return {**update, "params": to_params(jnp.where(info.is_attacker, sent, u))}, state


def largest_z(number: Int[Array, ""], attackers: Int[Array, ""]) -> Float[Array, ""]:
    """z = Φ⁻¹((n − m − s')/(n − m)) ≥ 0, with s' ≥ 1, of n updates and m attackers.

    >>> print(largest_z(jnp.int32(50), jnp.int32(24)).round(2))  # Φ⁻¹(24/26)
    1.43
    """
    honest = number - attackers
    needed = jnp.maximum(number // 2 + 1 - attackers, 1)
    share = (honest - needed) / jnp.maximum(honest, 1)
    return jax.scipy.stats.norm.ppf(jnp.clip(share, 0.5, None))


def collude(
    updates: Params,
    present: Bool[Array, "K"],
    is_attacker: Bool[Array, "K"],
    settings: AttackConfig,
) -> Params:
    """The updates, leaves ``[K, ...]``, as they are sent."""
    honest, s = present & ~is_attacker, jnp.asarray(settings.strength)
    attacks, number = present & is_attacker & honest.any(), present.sum()
    z = jnp.where(s > 0, s, largest_z(number, number - honest.sum()))
    is_alie = jnp.asarray(settings.kind) == KINDS.index("alie")

    def leaf(u: Array) -> Array:
        center = average(u, honest)
        spread = jnp.sqrt(average((u - center[None]) ** 2, honest))
        sent = jnp.where(is_alie, center - z * spread, -s * center)
        return jnp.where(attacks.reshape(-1, *(1,) * (u.ndim - 1)), sent[None], u)

    moved, collections = trees.parted(updates)
    return {**jax.tree.map(leaf, moved), **collections}


ATTACK = Uplink(
    send=send,
    section=AttackConfig,
    applies=lambda settings: settings.kind in UPDATE and settings.share > 0,
)
COLLUSION = Uplink(
    collude=collude,
    section=AttackConfig,
    applies=lambda settings: settings.kind in COLLUDING and settings.share > 0,
)
