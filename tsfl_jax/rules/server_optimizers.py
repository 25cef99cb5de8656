"""Rules with a step of the server: those of optimizers, and FedExP.

FedAvgM, FedAdam, FedYogi: Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2; for momentum Hsu, Qi and Brown, "Measuring the Effects of Non-Identical
Data Distribution for Federated Visual Classification", 2019.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsfl_jax import trees
from tsfl_jax.components import arrays, changed, component, section_of, setting
from tsfl_jax.rules.apply import of_present
from tsfl_jax.rules.averages import BY_SIZE, BY_SIZE_SECTIONS, FEDBUFF, Staleness
from tsfl_jax.rules.base import Aggregator, Counts, Received, ServerSide
from tsfl_jax.types import HParams, Params

# Under the root, so that what never moved has a derivative; it changes no bit.
_LEAST = float(np.finfo(np.float32).tiny)


@component("fedavgm")
class FedAvgM:
    """The server's SGD with momentum.

    With β an update counts 1/(1 − β) times in all, but late: η_g = 1 is far too large
    for β = 0.9, and 1 − β slow at the start.
    """

    lr: float = setting(0.0, "η_g; 0: min(1, 2(1 − β₁))", low=0)
    momentum: float = setting(0.9, "β₁", low=0, below=1)

    def resolved(self) -> "FedAvgM":
        """The default step of this momentum."""
        step = self.lr or min(1.0, 2 * (1 - self.momentum))
        return changed(self, lr=step)


@component("fedopt")
class FedOpt:
    """The server's Adam, Yogi and AMSGrad: fedadam, fedyogi, fadas."""

    lr: float = setting(0.01, "η_g", above=0)
    momentum: float = setting(0.9, "β₁", low=0, below=1)
    second: float = setting(0.99, "β₂", low=0, below=1)
    floor: float = setting(1e-3, "added to √v", above=0)


def server_optimizer(
    make: Callable[[Any], optax.GradientTransformation], kind: type
) -> Aggregator:
    """A rule whose server applies an optax optimizer to the pseudo-gradient −Δ.

    w^{t+1} = w^t + optimizer(−Δ), Δ = Σ_i ρ_i (w_i − base_i), ρ as in FedAvg. optax's
    Adam and Yogi correct the bias of their moments, which Algorithm 2 of Reddi et al.
    omits.

    Args:
      make: settings → optax transformation; they do not decide its initial state.
      kind: component of the settings.
    """

    def init(params: Params, counts: Counts) -> Any:
        del counts
        return make(arrays(kind())).init(params)

    def update(
        mean: Params, params: Params, state: Any, received: Received, hparams: HParams
    ) -> tuple[Params, Any]:
        del received
        pseudo = jax.tree.map(jnp.subtract, params, mean)
        change, state = make(hparams.of(kind)).update(pseudo, state, params)
        return optax.apply_updates(params, change), state

    mixing, sections = BY_SIZE._replace(deltas=True), (kind, *BY_SIZE_SECTIONS)
    return Aggregator(mixing, server=ServerSide(update, init), sections=sections)


def fed_opt(make: Callable[..., Any], label: str, **options: float) -> Aggregator:
    """A rule whose server applies `make(η_g, b1=, b2=, eps=, **options)` of optax."""

    def optimizer(settings: FedOpt) -> optax.GradientTransformation:
        b1, b2, eps = settings.momentum, settings.second, settings.floor
        return make(settings.lr, b1=b1, b2=b2, eps=eps, **options)

    return server_optimizer(optimizer, FedOpt)._replace(label=label)


FEDAVGM = server_optimizer(
    lambda settings: optax.sgd(settings.lr, momentum=settings.momentum), FedAvgM
)._replace(label="FedAvgM")
FEDADAM = fed_opt(optax.adam, "FedAdam", eps_root=_LEAST)
FEDYOGI = fed_opt(optax.yogi, "FedYogi")


@component("fadas")
class Fadas:
    """How late an update may be."""

    delay: float = setting(1.0, "τ_c, lag beyond which η_g becomes smaller", above=0)


_AMSGRAD = fed_opt(optax.amsgrad, "AMSGrad", eps_root=_LEAST)


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


@component("fedexp")
class FedExP:
    """How far the server extrapolates."""

    epsilon: float = setting(1e-3, "ε, added to ‖Δ‖² of the mean update", low=0)


def extrapolated_mean(
    updates: Params, state: Any, received: Received, hparams: HParams
) -> tuple[Params, Any]:
    """The mean update, made longer where the clients' updates cancel each other.

    w^{t+1} = w^t + η_g Δ,  Δ = Σ_i ρ_i u_i,
    η_g = max(1, Σ_i ρ_i ‖u_i‖² / (2 (‖Δ‖² + ε)))

    with u_i = w_i − base_i and ρ as in FedAvg, where the paper has 1/M. Equal updates,
    and one client alone, have η_g = 1; M orthogonal ones of the same length M/2, if
    that is above 1 and ε = 0. Simplified: the result is w^T, where the paper takes the
    mean of the last two models.

    Source: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via
    Extrapolation", ICLR 2023, equation 7.
    """
    rho = of_present(received.rho, received.present, received.shares)
    mean, squares = trees.weighted(updates, rho), trees.square_norms(updates)
    length = optax.tree.norm(mean, squared=True) + hparams.of(FedExP).epsilon
    # No update at all: 0/0, and any step is the same.
    ratio = rho @ squares / jnp.where(length > 0, 2 * length, 1.0)
    step = jnp.maximum(ratio, 1.0)
    return trees.map_inexact(lambda u: step.astype(u.dtype) * u, mean), state


FEDEXP = Aggregator(
    BY_SIZE._replace(combine=extrapolated_mean),
    sections=(FedExP, *BY_SIZE_SECTIONS),
    label="FedExP",
)
