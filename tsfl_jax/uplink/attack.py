"""Attackers that change their own update u, of d numbers, before they send it.

    sign_flip:  −s u
    scale:       s u
    gaussian:    s ‖u‖/√d · n,   n ~ N(0, I), drawn anew for each upload
    constant:    s ‖u‖/√d · 1,   the same direction from all attackers

Sign flips and the same value from all: Li, Xu, Chen, Giannakis, Ling, "RSA:
Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
Heterogeneous Datasets", AAAI 2019. Gaussian: Xie, Koyejo, Gupta, "Generalized
Byzantine-tolerant SGD", 2018. Scaled, as in model replacement: Bagdasaryan et al.,
"How to Backdoor Federated Learning", AISTATS 2020. Simplified: noise and constants are
measured by the norm of the honest update, ‖u‖, so that s means the same for every
network; in the papers they are numbers. Other collections than the parameters are sent
as they are.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from tsfl_jax.timeline.attackers import KINDS, UPDATE, AttackConfig
from tsfl_jax.types import Params
from tsfl_jax.uplink.link import LinkInfo, Uplink

_FIRST = KINDS.index("sign_flip")


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
    sent = lax.switch(jnp.asarray(settings.kind) - _FIRST, branches)
    return {**update, "params": to_params(jnp.where(info.is_attacker, sent, u))}, state


ATTACK = Uplink(
    send=send,
    section=AttackConfig,
    applies=lambda settings: settings.kind in UPDATE and settings.share > 0,
)
