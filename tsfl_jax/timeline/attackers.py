"""Clients that attack: which they are, and how much work they report.

A share of all clients, drawn before training by client id, so that a client attacks or
not whatever the framework, the cohort and the horizon are. What attackers send is in
`uplink.attack` and `uplink.collusion`, what they train on in `data.poison`.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool

from tsfl_jax import rng
from tsfl_jax.components import changed, component, setting
from tsfl_jax.types import Schedule, UserError

# Strengths s by kind, where none is set; 0 of alie: by the number of attackers.
UPDATE = {"sign_flip": 1.0, "scale": 10.0, "gaussian": 10.0, "constant": 10.0}
COLLUDING = {"alie": 0.0, "ipm": 0.5}
DATA = ("label_flip", "backdoor")
KINDS = ("none", *UPDATE, *COLLUDING, *DATA)


@component("attack")
class AttackConfig:
    """A share of the clients that attack."""

    kind: str = setting("none", "what attackers do", KINDS)
    share: float = setting(
        0.0, "share of the clients that attack", low=0, below=1, used_by=("kind", ())
    )
    strength: float = setting(
        0.0,
        "s in uplink.attack and uplink.collusion; 0: that of the kind",
        low=0,
        used_by=("kind", (*UPDATE, *COLLUDING)),
    )
    target: int = setting(
        0,
        "backdoor: class of samples with the pattern",
        low=0,
        used_by=("kind", ("backdoor",)),
    )
    pattern: int = setting(
        2,
        "backdoor: pixels along a side of the bright square in the last corner",
        low=1,
        used_by=("kind", ("backdoor",)),
    )
    poisoned: float = setting(
        0.5,
        "backdoor: share of an attacker's samples that have the pattern",
        above=0,
        high=1,
        used_by=("kind", ("backdoor",)),
    )
    claim: int = setting(
        0, "τ that attackers report; 0: what they did", low=0, used_by=("kind", ())
    )

    def resolved(self) -> "AttackConfig":
        """With the strength of the kind, where none is set."""
        strength = self.strength or (UPDATE | COLLUDING).get(self.kind, 0.0)
        return changed(self, strength=strength)

    def check(self, config: Any, rule: Any) -> None:
        """Refuse attacks on what an experiment does not have."""
        del rule
        missing = {
            "train_all=False": self.kind in COLLUDING and not config.train_all,
            "partition.online=True": self.kind in DATA and config.partition.online,
        }
        for setting_text in (
            text for text, is_missing in missing.items() if is_missing
        ):
            raise UserError(
                f"--config.attack.kind={self.kind}: attackers need the updates and the "
                f"samples of all clients; leave out --config.{setting_text}"
            )


def draw(seed: int, num_clients: int, settings: AttackConfig) -> Bool[np.ndarray, " N"]:
    """Whether each client attacks: exactly ⌊share · N + ½⌋ do.

    They have the smallest random bits of (seed, id), so that a larger share adds
    attackers to those of a smaller one.

    Args:
      seed: of the fleet.
      num_clients: N ≥ 1.
      settings: `kind` and `share`.

    Returns:
      ``[N]`` bool, by client id; none without an attack.
    """
    is_attacker = np.zeros(num_clients, bool)
    count = int(settings.share * num_clients + 0.5) * (settings.kind != "none")
    if count:
        bits = rng.hashed(seed, "attackers", np.arange(num_clients))
        is_attacker[np.argpartition(bits, count - 1)[:count]] = True
    return is_attacker


def claiming(
    times: Schedule, is_attacker: Bool[np.ndarray, " N"], claim: int
) -> Schedule:
    """The schedule in which attackers that deliver report `claim` iterations."""
    claims = is_attacker[times.client] & (times.tau > 0)
    reported = np.where(claims, claim, times.reported).astype(np.int32)
    return times._replace(reported=reported)


def notes(is_attacker: Bool[np.ndarray, " N"], settings: AttackConfig) -> tuple:
    """Which clients attack, in a line."""
    ids = np.flatnonzero(is_attacker)
    if settings.kind == "none" or not settings.share:
        return ()
    first = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    count = f"{len(ids):,} of {len(is_attacker):,} clients attack"
    return (f"{count} ({settings.kind})" + (f": {first}" if first else ""),)
