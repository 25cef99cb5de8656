"""Weights of a cohort's updates, which go with how it is sampled: `cohort.weighting`.

With p_i = n_i/Σ_N n, N clients, a cohort S of those that deliver and π_i, how often
client i is in one on average: w^{t+1} = w^t + Σ_{i ∈ S} ρ_i (w_i − w^t) with

  ratio     ρ_i = n_i/Σ_S n, the rule's own; biased, what most programs do
  unbiased  ρ_i = (N/|S|) p_i where all are asked alike
  mean      ρ_i = 1/|S|; unbiased where clients are asked in proportion to n_i
  inverse   ρ_i = p_i/π_i, unbiased where each client is asked at times

Source: X. Li et al., "On the Convergence of FedAvg on Non-IID Data", ICLR 2020,
schemes I and II; D. Horvitz and D. Thompson, "A Generalization of Sampling Without
Replacement from a Finite Universe", 1952.
"""

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.config import Config
from tsfl_jax.rules.averages import FEDAT, FedAvg, given_weights, size_weights
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.staleness import Staleness
from tsfl_jax.timeline import deliveries
from tsfl_jax.types import Schedule, UserError


def applied(config: Config, rule: Aggregator) -> Aggregator:
    """The rule with the weights of `cohort.weighting` in place of those by size.

    Raises:
      UserError: its weights are others.
    """
    if config.cohort.weighting == "ratio":
        return rule
    if rule.mixing.weights is not size_weights or rule.stacks or rule == FEDAT:
        raise UserError(
            f"--config.cohort.weighting={config.cohort.weighting}: the weights of "
            f"--config.algorithm={config.algorithm} are its own, not those by size; "
            "leave it out, or use a rule like fedavg"
        )
    kept = tuple(k for k in rule.sections if k not in (FedAvg, Staleness))
    mixing = rule.mixing._replace(weights=given_weights, deltas=True)
    return rule._replace(mixing=mixing, sections=kept)


def shares(
    config: Config,
    times: Schedule,
    held: Int[np.ndarray, "N"],
    chance: Float[np.ndarray, "T K"],
) -> Float[np.ndarray, "T K"]:
    """ρ of each slot as `cohort.weighting` says, float32; NaN: as the rule says.

    Args:
      config: all settings.
      times: of cohorts; 0 where nobody delivers.
      held: samples of all clients.
      chance: π of each slot's client; NaN: unknown.

    Raises:
      UserError: it needs to know how often clients are asked.
    """
    chosen = config.cohort.weighting
    if chosen == "ratio":
        return times.share
    there = deliveries.claimed(times) > 0
    count = np.maximum(there.sum(axis=1, keepdims=True), 1)
    if chosen == "mean":
        return (there / count).astype(np.float32)
    unknown = bool(np.isnan(chance).any())
    if unknown or (chosen == "unbiased" and np.ptp(chance) > 1e-9):
        raise UserError(
            f"--config.cohort.weighting={chosen}: with this sampler and framework "
            + (
                "it is not known how often a client is asked; use ratio or mean"
                if unknown
                else "some clients are asked more often; use inverse"
            )
        )
    share = np.where(there, held[times.client] / held.sum(dtype=np.int64), 0.0)
    if chosen == "unbiased":
        return (share * len(held) / count).astype(np.float32)
    there_too = chance * (1 - config.schedule.dropout)  # asked, and delivers
    return (share / there_too).astype(np.float32)
