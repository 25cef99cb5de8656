"""FADAS: the server's AMSGrad on buffered updates, slower where these are late."""

from typing import Any

import jax.numpy as jnp
import optax

from tsfl_jax.components import changed, component, section_of, setting
from tsfl_jax.rules.averages import FEDBUFF, Staleness
from tsfl_jax.rules.base import Aggregator, Received, ServerSide
from tsfl_jax.rules.server_optimizers import LEAST, FedOpt, fed_opt
from tsfl_jax.types import HParams, Params


@component("fadas")
class Fadas:
    """How late an update may be."""

    delay: float = setting(1.0, "τ_c, lag beyond which η_g becomes smaller", above=0)


_AMSGRAD = fed_opt(optax.amsgrad, "AMSGrad", eps_root=LEAST)


def delayed_step(
    mean: Params, params: Params, state: Any, received: Received, hparams: HParams
) -> tuple[Params, Any]:
    """The server's step of AMSGrad, with a rate for the latest update of the buffer.

    m ← β₁ m + (1 − β₁) Δ,  v ← β₂ v + (1 − β₂) Δ²,  v̂ ← max(v̂, v),
    w^{t+1} = w^t + η_t m/(√v̂ + ε),  η_t = η_g/max(1, max_i lag_i/τ_c)

    with Δ = Σ_i ρ_i (w_i − base_i), ρ as in FedBuff. Without delay it is AMSGrad.
    Simplified: beyond τ_c the rate falls from η_g on, where the paper bounds it by a
    number that falls with 1/lag; m and v are corrected for their bias, as in FedAdam.

    Source: Y. Wang, S. Wang, S. Lu, J. Chen, "FADAS: Towards Federated Adaptive
    Asynchronous Optimization", ICML 2024, Algorithm 1.
    """
    lag = jnp.where(received.present, received.info.lag, 0).max()
    late = jnp.maximum(1.0, lag / hparams.of(Fadas).delay)
    optimizer = hparams.of(FedOpt)
    slower = changed(optimizer, lr=optimizer.lr / late)
    settings = {**hparams.settings, section_of(FedOpt): slower}
    hparams = hparams._replace(settings=settings)
    return _AMSGRAD.server.update(mean, params, state, received, hparams)


FADAS = Aggregator(
    FEDBUFF.mixing,
    server=ServerSide(delayed_step, _AMSGRAD.server.init),
    sections=(FedOpt, Fadas, Staleness),
    label="FADAS",
)
