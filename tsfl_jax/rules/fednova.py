"""FedNova: updates are divided by the work that is in them."""

from typing import Any

from tsfl_jax.components import component
from tsfl_jax.rules import base, local_work
from tsfl_jax.types import HParams, UserError


@component("fednova")
class FedNova:
    """FedNova has no settings of its own."""

    def check(self, config: Any, rule: base.Aggregator) -> None:
        """Refuse clipping of the proximal term, which no normalizer describes."""
        if config.proximal and config.clip_norm > 0:
            raise UserError(
                f"--config.clip_norm={config.clip_norm}: with --config.proximal=True "
                "it clips the proximal term too, so that FedNova's normalizer ‖a_i‖₁ "
                "is undefined; leave out one of them"
            )


def fednova_weights(info: base.RoundInfo, hparams: HParams) -> base.Weights:
    """Weights of updates divided by their work: FedNova.

    w^{t+1} = w^t + τ_eff Σ_i p_i (w_i − base_i)/‖a_i‖₁, p_i = |D_i|/Σ|D_j|. Wang et
    al., "Tackling the base.Objective Inconsistency Problem in Heterogeneous Federated
    Optimization", NeurIPS 2020. If a model is lost, the others share its p_i; τ_eff is
    that of all who took part.
    """
    share = base.normalized(info.size, info.tau)
    work = local_work.of_sgd(info.steps, hparams)
    rho = local_work.nova_weights(share, work)
    return base.weights_of(rho, info.tau)._replace(shares=share)


FEDNOVA = base.Aggregator(
    base.Mixing(fednova_weights, deltas=True),
    base.ClientSide(counts_on_sgd=True),
    sections=(FedNova,),
    label="FedNova",
)
