"""q-FedAvg: clients with larger losses count more, so that accuracies are more even."""

from typing import Any

import jax.numpy as jnp

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.rules import apply, base, fednova
from tsfl_jax.rules.averages import BY_SIZE_SECTIONS, size_weights
from tsfl_jax.types import HParams

_LEAST = 1e-10  # of a loss, whose power q − 1 may be negative


@component("qfedavg")
class QFedAvg:
    """The objective Σ p_i F_i^{q+1}/(q + 1)."""

    q: float = setting(0.1, "q of F_i^{q+1}; 0: FedAvg", low=0)
    smoothness: float = setting(0.0, "L of the step 1/L; 0: of SGD, 1/η", low=0)


def fair_weights(
    outputs: base.ClientOutputs, state: Any, received: base.Received, hparams: HParams
) -> tuple[base.Weights, Any]:
    """Weights of the updates by the clients' losses, q-FedAvg.

    w^{t+1} = w^t + Σ_i ρ_i u_i,
    ρ_i = p_i F_i^q / Σ_j p_j (F_j^q + q F_j^{q−1} L‖u_j‖²)

    with u_i = w_i − base_i and p as FedAvg's ρ: the paper's Σ Δ_i/Σ h_i with L u_i as
    the gradient of F_i. Σ ρ < 1 where q > 0; with q = 0 it is FedAvg. L is given, or
    1/η, as in the authors' program; momentum counts as the larger η that it is, so that
    L = Σ p_i s_i/(η Σ p_i ‖a_i‖₁) of s_i steps, with FedNova's ‖a_i‖₁.

    Simplified: F_i is the mean sample loss while client i trained, not F_i(w^t), which
    would cost another pass. A loss that is not known counts as the mean of the others.

    Source: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated
    Learning", ICLR 2020, Algorithm 2.
    """
    settings, info, loss = hparams.of(QFedAvg), received.info, outputs.loss
    share = apply.of_present(received.rho, received.present, received.shares)
    is_known = received.present & jnp.isfinite(loss)
    loss = jnp.where(is_known, jnp.maximum(loss, _LEAST), 0.0)
    mean = loss.sum() / jnp.maximum(is_known.sum(), 1)
    loss = jnp.where(is_known, loss, jnp.where(mean > 0, mean, 1.0))
    most = loss.max()  # ρ depends on F_i/F_max: no power overflows
    power = (loss / most) ** settings.q
    work = (share * fednova.of_sgd(info.steps, hparams)).sum() * hparams.lr
    of_sgd = (share * info.steps).sum() / jnp.where(work > 0, work, 1.0)
    smoothness = jnp.where(settings.smoothness > 0, settings.smoothness, of_sgd)
    slope = settings.q * power / loss * smoothness * trees.square_norms(outputs.updates)
    total = (share * (power + slope)).sum()
    rho = share * power / jnp.where(total > 0, total, 1.0)
    return base.weights_of(rho, info.tau), state


QFEDAVG = base.Aggregator(
    base.Mixing(size_weights, deltas=True, from_updates=fair_weights, uses_losses=True),
    sections=(QFedAvg, *BY_SIZE_SECTIONS),
    label="q-FedAvg",
)
