"""Clients that attack: which they are, and how much work they report.

A share of all clients, drawn before training by client id, so that a client attacks or
not whatever the framework, the cohort and the horizon are. What attackers send is in
`uplink.attack`, what they train on in `data.poison`.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool

from tsfl_jax import rng
from tsfl_jax.components import changed, component, setting
from tsfl_jax.types import UserError

# Strengths s by kind, where none is set; 0 of alie: by the number of attackers.
UPDATE = {"sign_flip": 1.0, "scale": 10.0, "gaussian": 10.0, "constant": 10.0}
COLLUDING = {"alie": 0.0, "ipm": 0.5}
DATA = ("label_flip", "backdoor")
KINDS = ("none", *UPDATE, *COLLUDING, *DATA)
_ANY: Any = {"used_by": ("kind", ())}
_SENT: Any = {"used_by": ("kind", (*UPDATE, *COLLUDING))}
_BACKDOOR: Any = {"used_by": ("kind", ("backdoor",))}


@component("attack")
class AttackConfig:
    """A share of the clients that attack."""

    kind: str = setting("none", "what attackers do", KINDS)
    share: float = setting(0.0, "share of clients that attack", low=0, below=1, **_ANY)
    claim: int = setting(0, "τ that attackers report; 0: as done", low=0, **_ANY)
    strength: float = setting(0.0, "s of what is sent; 0: the kind's", low=0, **_SENT)
    target: int = setting(0, "class of samples with the pattern", low=0, **_BACKDOOR)
    pattern: int = setting(2, "pixels along its side", low=1, **_BACKDOOR)
    poisoned: float = setting(
        0.5, "share of an attacker's samples with it", above=0, high=1, **_BACKDOOR
    )

    def resolved(self) -> "AttackConfig":
        """With the strength of the kind, where none is set."""
        strength = self.strength or (UPDATE | COLLUDING).get(self.kind, 0.0)
        return changed(self, strength=strength)

    def check(self, config: Any, rule: Any) -> None:
        """Refuse attacks on what an experiment does not have."""
        del rule
        needs = f"--config.attack.kind={self.kind} needs the "
        if self.kind in COLLUDING and not config.train_all:
            raise UserError(f"{needs}updates of all: leave out --config.train_all")
        if self.kind in DATA and config.partition.online:
            raise UserError(f"{needs}same samples: leave out --config.partition.online")


def draw(seed: int, num_clients: int, settings: AttackConfig) -> Bool[np.ndarray, "N"]:
    """Whether each client attacks: exactly ⌊share · N + ½⌋ of N do.

    They have the smallest random bits of (seed, id), so that a larger share adds
    attackers to those of a smaller one.

    Args:
      seed: of the fleet.
      num_clients: N ≥ 1.
      settings: `kind` and `share`.
    """
    is_attacker = np.zeros(num_clients, bool)
    count = int(settings.share * num_clients + 0.5) * (settings.kind != "none")
    if count:
        bits = rng.hashed(seed, "attackers", np.arange(num_clients))
        is_attacker[np.argpartition(bits, count - 1)[:count]] = True
    return is_attacker


def notes(is_attacker: Bool[np.ndarray, "N"], settings: AttackConfig) -> tuple:
    """Which clients attack, in a line."""
    ids = np.flatnonzero(is_attacker)
    first = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    count = f"{len(ids):,} of {len(is_attacker):,} clients attack ({settings.kind})"
    return (f"{count}: {first}",) if len(ids) else ()
