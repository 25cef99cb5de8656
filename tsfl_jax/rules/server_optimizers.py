"""Rules whose server has an optimizer: FedAvgM, FedAdam, FedYogi.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2; for momentum Hsu, Qi and Brown, "Measuring the Effects of Non-Identical
Data Distribution for Federated Visual Classification", 2019.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsfl_jax.components import arrays, changed, component, setting
from tsfl_jax.rules.averages import BY_SIZE, BY_SIZE_SECTIONS
from tsfl_jax.rules.base import Aggregator, Counts, Received, ServerSide
from tsfl_jax.types import HParams, Params

# Under the root, so that what never moved has a derivative; it changes no bit.
LEAST = float(np.finfo(np.float32).tiny)


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
FEDADAM = fed_opt(optax.adam, "FedAdam", eps_root=LEAST)
FEDYOGI = fed_opt(optax.yogi, "FedYogi")
