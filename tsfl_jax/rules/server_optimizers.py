"""Rules whose server makes steps of an optimizer: FedAvgM, FedAdam, FedYogi.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2; for momentum
Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification", 2019.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsfl_jax.rules.averages import size_weights
from tsfl_jax.rules.base import Aggregator, Counts, Event, Settings
from tsfl_jax.types import HParams, Params

Optimizer = Callable[[HParams], optax.GradientTransformation]


def server_optimizer(make: Optimizer, settings: Settings) -> Aggregator:
    """A rule whose server applies an optax optimizer to the pseudo-gradient −Δ.

    w^{t+1} = w^t + optimizer(−Δ), Δ = Σ_i ρ_i (w_i − base_i), ρ as in FedAvg. optax's
    Adam and Yogi correct the bias of their moments, which Algorithm 2 of Reddi et al.
    omits.

    Args:
      make: `HParams` → optax transformation; they do not decide its initial state.
      settings: what the rule reads.
    """

    def init(params: Params, counts: Counts) -> Any:
        del counts
        return make(HParams(*[0.1] * len(HParams._fields))).init(params)

    def update(
        mean: Params, params: Params, state: Any, event: Event, hparams: HParams
    ) -> tuple[Params, Any]:
        del event
        pseudo = jax.tree.map(jnp.subtract, params, mean)
        change, state = make(hparams).update(pseudo, state, params)
        return optax.apply_updates(params, change), state

    return Aggregator(size_weights, init, update, deltas=True, settings=settings)


def _momentum(hparams: HParams) -> optax.GradientTransformation:
    return optax.sgd(hparams.server_lr, momentum=hparams.server_momentum)


def _gentle_step(momentum: float) -> float:
    """η_g of FedAvgM: with β an update counts 1/(1 − β) times in all, but late.

    η_g = 1 is far too large for β = 0.9, and 1 − β slow at the start.
    """
    return min(1.0, 2 * (1 - momentum))


def _adaptive(make: Callable[..., optax.GradientTransformation]) -> Aggregator:
    def transformation(hparams: HParams) -> optax.GradientTransformation:
        return make(
            hparams.server_lr,
            b1=hparams.server_momentum,
            b2=hparams.server_second,
            eps=hparams.server_floor,
        )

    reads = ("lr", "momentum", "second", "floor")
    return server_optimizer(transformation, Settings(reads, "others", lambda _: 0.01))


FEDAVGM = server_optimizer(
    _momentum, Settings(("lr", "momentum"), "others", _gentle_step)
)
# Under the root, so that what never moved has a derivative; it changes no bit.
_LEAST = float(np.finfo(np.float32).tiny)

FEDADAM = _adaptive(functools.partial(optax.adam, eps_root=_LEAST))
FEDYOGI = _adaptive(optax.yogi)
