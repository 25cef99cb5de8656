"""TiFL: a tier of clients of similar speed is drawn, and the cohort from that tier.

So that no fast client waits for a slow one. The static selection: with chances and
credits, how often a tier may be drawn, that are given. Chai et al., "TiFL: A Tier-based
Federated Learning System", HPDC 2020, section 4.2 and the credits of Algorithm 2.

Simplified: tiers are equally large, by the mean seconds of a task, where the paper
measures some rounds and splits their histogram. NOT done: chances that follow the
accuracies of the tiers' clients, which only training gives; who is asked is drawn
before it.
"""

import functools

import numpy as np
from jaxtyping import Int

from tsfl_jax import rng


@functools.lru_cache(maxsize=8)
def tier_sequence(
    seed: int,
    group: int,
    chances: tuple[int, ...],
    credits: tuple[int, ...],
    rounds: int,
) -> list[int]:
    """The tier of each round, until all credits are spent; of fewer rounds the first.

    Args:
      seed: of all draws.
      group: ≥ 0, a stream of its own for each; FedAT's tier.
      chances: ≥ 0, of each tier, in proportion.
      credits: ≥ 0, rounds that each tier may have; (): any number.
      rounds: most rounds.
    """
    left, sequence = np.array(credits or (rounds,) * len(chances)), []
    for uniform in rng.generator(seed, "cohort", group, 0, 1).random(rounds):
        edges = np.where(left > 0, chances, 0).cumsum()
        if not edges[-1]:
            break
        tier = int(np.searchsorted(edges, uniform * edges[-1], "right"))
        left[tier] -= 1
        sequence.append(tier)
    return sequence


def members(
    by_speed: Int[np.ndarray, " n"],
    seed: int,
    group: int,
    number: int,
    tiers: int,
    chances: tuple[int, ...],
    credits: tuple[int, ...],
) -> Int[np.ndarray, " k"]:
    """The tier of a round; nobody where all credits are spent.

    Args:
      by_speed: candidates, the fastest first.
      seed, group, chances, credits: of `tier_sequence`; chances (): all the same.
      number: ≥ 0, of the round.
      tiers: m ≥ 1; of fewer candidates the first ones.
    """
    count = min(tiers, len(by_speed))
    chances = (chances or (1,) * tiers)[:count]
    rounds = 1 << max(number.bit_length(), 6)  # the same for many numbers
    sequence = tier_sequence(seed, group, chances, credits[:count], rounds)
    if number >= len(sequence):
        return by_speed[:0]
    return np.array_split(by_speed, count)[sequence[number]]
