"""TiFL: a tier of clients of similar speed is drawn, and the cohort from that tier.

So that no fast client waits for a slow one. The static selection: chances of the tiers
and credits, how often each may be drawn, are given. Chai et al., "TiFL: A Tier-based
Federated Learning System", HPDC 2020, section 4.2 and the credits of Algorithm 2.

Simplified: tiers are equally large, by the mean seconds of a task, where the paper
measures some rounds and splits their histogram. NOT done: chances that follow the
accuracies of the tiers' clients, which only training gives; who is asked is drawn
before it.
"""

import functools
from typing import Any

import numpy as np
from jaxtyping import Int

from tsfl_jax import rng


@functools.lru_cache(maxsize=8)
def tier_sequence(
    seed: int, group: int, chances: tuple[int, ...], credits: tuple[int, ...], most: int
) -> list[int]:
    """The tier of each of at most so many rounds, until all credits are spent.

    Fewer rounds have the first of these. `credits` () are any number; `group` names a
    stream, FedAT's tier.
    """
    left, sequence = np.array(credits or (most,) * len(chances)), []
    for uniform in rng.generator(seed, "cohort", group, 0, 1).random(most):
        edges = np.where(left > 0, chances, 0).cumsum()
        if not edges[-1]:
            break
        sequence.append(int(np.searchsorted(edges, uniform * edges[-1], "right")))
        left[sequence[-1]] -= 1
    return sequence


def from_tier(draw: Any) -> Int[np.ndarray, " K"]:
    """Without replacement, alike among one tier; nobody once the credits are spent."""
    settings, number = draw.settings, draw.number
    tiers = np.array_split(draw.by_speed(), min(settings.tiers, draw.candidates))
    chances = (tuple(settings.tier_chances) or (1,) * settings.tiers)[: len(tiers)]
    credits = tuple(settings.tier_credits)[: len(tiers)]
    most = 1 << max(number.bit_length(), 6)  # the same for many numbers
    sequence = tier_sequence(draw.seed, draw.tier, chances, credits, most)
    ids = tiers[sequence[number]] if number < len(sequence) else tiers[0][:0]
    ids = np.setdiff1d(ids, draw.away)
    return draw.rng.choice(ids, min(draw.size, len(ids)), replace=False)
