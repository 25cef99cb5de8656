"""FedNova: updates are divided by the work that is in them."""

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from tsfl_jax.components import component
from tsfl_jax.rules import local_work
from tsfl_jax.rules.base import (
    Aggregator,
    Situation,
    Weights,
    normalized,
    weights_of,
)
from tsfl_jax.types import HParams, UserError


@component("fednova")
class FedNova:
    """FedNova has no settings of its own."""

    def check(self, config: Any, rule: Aggregator) -> None:
        """Refuse clipping of the proximal term, which no normalizer describes."""
        if config.proximal and config.clip_norm > 0:
            raise UserError(
                f"--config.clip_norm={config.clip_norm}: with --config.proximal=True "
                "it clips the proximal term too, so that FedNova's normalizer ‖a_i‖₁ "
                "is undefined; leave out one of them"
            )


Work = Callable[[Int[Array, "N"], HParams], Float[Array, "N"]]


def normalized_by_work(work: Work = local_work.of_sgd) -> Aggregator:
    """A rule that divides updates by their work: FedNova.

    w^{t+1} = w^t + τ_eff Σ_i p_i (w_i − base_i)/‖a_i‖₁, p_i = |D_i|/Σ|D_j|. Wang et
    al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization", NeurIPS 2020. If a model is lost, the others share its p_i; τ_eff is
    that of all who took part.

    Args:
      work: (steps, `HParams`) → ‖a_i‖₁ ≥ 0 up to a common factor.
    """

    def weights(situation: Situation, hparams: HParams) -> Weights:
        share = normalized(situation.size, situation.tau)
        rho = local_work.nova_weights(share, work(situation.steps, hparams))
        return weights_of(rho, situation.tau)._replace(shares=share)

    return Aggregator(weights, deltas=True, adapted=_adapted, sections=(FedNova,))


@functools.lru_cache(maxsize=8)
def _measured(optimizer: Any, most: int) -> Aggregator:
    """The same function for the same optimizer, so that runs share a program."""
    return normalized_by_work(local_work.measured_accumulation(optimizer, most))


def _adapted(optimizer: Any, hparams: HParams, most: int) -> Aggregator:
    """FedNova for clients with a linear optimizer, whose ‖a_i‖₁ is measured."""
    if not local_work.is_linear(optimizer(hparams)):
        raise UserError(
            "--config.algorithm=fednova: optimizer= is not linear in the gradients "
            "(Adam, clipping and weight decay are not), so that its normalizer ‖a_i‖₁ "
            "is undefined; use SGD with any momentum, or another rule"
        )
    # A power of two, so that different schedules share a program.
    return _measured(optimizer, 1 << most.bit_length())


FEDNOVA = normalized_by_work()
