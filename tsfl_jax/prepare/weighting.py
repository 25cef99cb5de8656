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

from tsfl_jax.rules.averages import (
    FEDAT,
    FedAvg,
    Staleness,
    given_weights,
    size_weights,
)
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.timeline import deliveries
from tsfl_jax.types import Schedule, UserError


def applied(weighting: str, rule: Aggregator, algorithm: str) -> Aggregator:
    """The rule with the weights of `cohort.weighting` in place of those by size.

    Raises:
      UserError: its weights are others.
    """
    if weighting == "ratio":
        return rule
    if rule.mixing.weights is not size_weights or rule.stacks or rule == FEDAT:
        raise UserError(
            f"--config.cohort.weighting={weighting}: the weights of "
            f"--config.algorithm={algorithm} are its own, not those by size; "
            "leave it out, or use a rule like fedavg"
        )
    kept = tuple(k for k in rule.sections if k not in (FedAvg, Staleness))
    mixing = rule.mixing._replace(weights=given_weights, deltas=True)
    return rule._replace(mixing=mixing, sections=kept)


def shares(
    weighting: str,
    times: Schedule,
    num_samples: Int[np.ndarray, "N"],
    chance: Float[np.ndarray, "T K"],
    dropout: float = 0.0,
) -> Float[np.ndarray, "T K"]:
    """ρ of each slot as `cohort.weighting` says, float32; NaN: as the rule says.

    Args:
      weighting: of the table above.
      times: of cohorts; τ = 0 in slots without a delivery.
      num_samples: of all clients.
      chance: how often each slot's client is asked; NaN: unknown.
      dropout: chance that one who is asked does not deliver.

    Raises:
      UserError: it needs to know how often clients are asked.
    """
    if weighting == "ratio":
        return times.share
    delivers = deliveries.claimed(times) > 0
    count = np.maximum(delivers.sum(axis=1, keepdims=True), 1)
    if weighting == "mean":
        return (delivers / count).astype(np.float32)
    # NaN, unknown, is not <= either.
    if not np.ptp(chance) <= (1e-9 if weighting == "unbiased" else np.inf):
        raise UserError(
            f"--config.cohort.weighting={weighting}: with this sampler and framework "
            "it is not known how often a client is asked, or some are asked more "
            "often; use inverse for these, else ratio or mean"
        )
    total = num_samples.sum(dtype=np.int64)
    share = np.where(delivers, num_samples[times.client] / total, 0.0)
    if weighting == "unbiased":
        return (share * len(num_samples) / count).astype(np.float32)
    return (share / (chance * (1 - dropout))).astype(np.float32)
