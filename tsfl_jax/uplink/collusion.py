"""Attackers that know the honest updates of an interval, all of them with one update.

    alie:  μ − z σ     a little is enough
    ipm:   −s μ        inner-product manipulation

with the mean μ and the standard deviation σ of each coordinate over the honest updates.
z = s, or with s = 0 the largest one with which s' = ⌊n/2⌋ + 1 − m honest ones of n
updates are farther from μ than m attackers, if the updates are normal:
z = Φ⁻¹((n − m − s')/(n − m)). All updates must be known at once, so they are stacked
under every rule: memory grows with the clients of an interval.

G. Baruch, M. Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For
Distributed Learning", NeurIPS 2019; there attackers estimate μ and σ from their own
honest updates. Xie, Koyejo, Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by
Inner Product Manipulation", UAI 2020. Simplified: what they send passes no other link,
and has no effect in an interval without an honest update.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax.rules.robust import average
from tsfl_jax.timeline.attackers import COLLUDING, KINDS, AttackConfig
from tsfl_jax.types import Params
from tsfl_jax.uplink.link import Uplink


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
    """The updates of the parameters, leaves ``[K, ...]``, as they are sent."""
    honest, s = present & ~is_attacker, jnp.asarray(settings.strength)
    attacks, number = present & is_attacker & honest.any(), present.sum()
    z = jnp.where(s > 0, s, largest_z(number, number - honest.sum()))
    is_alie = jnp.asarray(settings.kind) == KINDS.index("alie")

    def leaf(u: Array) -> Array:
        center = average(u, honest)
        spread = jnp.sqrt(average((u - center[None]) ** 2, honest))
        sent = jnp.where(is_alie, center - z * spread, -s * center)
        return jnp.where(attacks.reshape(-1, *(1,) * (u.ndim - 1)), sent[None], u)

    return jax.tree.map(leaf, updates)


COLLUSION = Uplink(
    collude=collude,
    section=AttackConfig,
    applies=lambda settings: settings.kind in COLLUDING and settings.share > 0,
)
