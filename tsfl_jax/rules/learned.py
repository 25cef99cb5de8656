"""Learned weights: ρ = softmax(θ · features) of what clients have done.

ρ_i ∝ exp(Σ_k θ_k f_ik) over the clients that are present, with features that have no
unit, so that θ means the same for other fleets:

  tau    τ_i / max τ
  left   (1 − t/T) τ_i / max τ, which fades as the run ends
  size   log(|D_i| / mean |D|); with θ = 1 and all others 0: FedAvg
  lag    lag_i / (1 + lag_i)
  loss   log(F_i / mean F) of the mean sample losses in training, within ±3

θ is a setting each. Its defaults were found by evolution strategies on
a set of small fleets, see `studies.learned`; how they do on others is in docs/results.
The losses are known after training only, so all updates are stacked.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tsfl_jax import types
from tsfl_jax.components import component, setting
from tsfl_jax.rules import base
from tsfl_jax.types import HParams


@component("learned")
class Learned:
    """θ of ρ = softmax(θ · features); see rules/learned.py.

    Trained by `studies.learned`; docs/results has how it did elsewhere.
    """

    tau: float = setting(0.541, "θ of τ_i/max τ")
    left: float = setting(2.772, "θ of (1 − t/T) τ_i/max τ")
    size: float = setting(1.023, "θ of log(|D_i|/mean)")
    lag: float = setting(0.0, "θ of lag_i/(1 + lag_i); not trained")
    loss: float = setting(1.693, "θ of log(F_i/mean F), F_i the training loss")


FEATURES = ("tau", "left", "size", "lag", "loss")
_MOST = 3.0  # of |log(F_i/mean F)|: a loss near 0 must not decide alone


def _mean(values: Float[Array, "N"], present: Bool[Array, "N"]) -> Float[Array, ""]:
    """The mean over the present clients, 1 if there are none or it is not above 0."""
    total = jnp.where(present, values, 0.0).sum() / jnp.maximum(present.sum(), 1)
    return jnp.where(total > 0, total, 1.0)


def features(
    info: base.RoundInfo,
    loss: Float[types.Array, "N"],
    present: Bool[Array, "N"],
    intervals: types.Scalar,
) -> Float[Array, "N 5"]:
    """The features of `FEATURES`, 0 where a client is not present.

    Args:
      info: τ, sizes, lags and the interval t.
      loss: mean sample loss of each client's training; NaN or 0: not known, feature 0.
      present: clients that may have weight.
      intervals: T of the run.
    """
    tau = jnp.asarray(info.tau, jnp.float32)
    most = jnp.where(present, tau, 0.0).max()
    share = tau / jnp.where(most > 0, most, 1.0)
    left = 1 - jnp.asarray(info.interval) / jnp.maximum(intervals, 1)
    size = jnp.asarray(info.size, jnp.float32)
    size = jnp.log(jnp.maximum(size, 1.0) / _mean(size, present))
    lag = jnp.asarray(info.lag, jnp.float32)
    has_loss = present & jnp.isfinite(loss) & (loss > 0)
    mean = _mean(jnp.where(has_loss, loss, 0.0), has_loss)
    relative = jnp.log(jnp.where(has_loss, loss, 1.0) / mean)
    relative = jnp.where(has_loss, jnp.clip(relative, -_MOST, _MOST), 0.0)
    columns = jnp.stack([share, left * share, size, lag / (1 + lag), relative], axis=1)
    return jnp.where(present[:, None], columns, 0.0)


def learned_weights(
    outputs: base.ClientOutputs, state: tuple, received: base.Received, hparams: HParams
) -> tuple[base.Weights, tuple]:
    """ρ = softmax(θ · features) over the present clients."""
    info, present = received.info, received.present
    inputs = features(info, outputs.loss, present, hparams.lr_total)
    settings = hparams.of(Learned)
    theta = jnp.stack([jnp.asarray(getattr(settings, name)) for name in FEATURES])
    score = jnp.where(present, inputs @ theta.astype(jnp.float32), -jnp.inf)
    rho = jax.nn.softmax(jnp.where(present.any(), score, 0.0))
    rho = jnp.where(present, rho, 0.0)
    return base.weights_of(rho, info.tau), state


LEARNED = base.Aggregator(
    base.Mixing(from_updates=learned_weights),
    sections=(Learned,),
    label="learned weights",
)
