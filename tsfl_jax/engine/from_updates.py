"""The validation loss of an interval as a function of the aggregation weights.

After training all updates u_i are known, and F_val(w^t + Σ_i ρ_i u_i) and its
derivatives ⟨∇F_val, u_i⟩ can be had for any ρ by one forward and backward pass over the
validation samples. Rules with weights from updates use it. Derivatives of a
whole interval do not go through that choice: ρ is a constant there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from tsfl_jax.engine import devices, exact_sums
from tsfl_jax.engine.client import Samples, scaled
from tsfl_jax.engine.evaluation import HeldOut
from tsfl_jax.engine.program_spec import Parts
from tsfl_jax.rules import oracle
from tsfl_jax.rules.apply import model_at, of_present
from tsfl_jax.rules.base import Objective, Received
from tsfl_jax.types import Array, HParams, Params


def objective(
    parts: Parts,
    params: Params,
    updates: Params,
    samples: Samples,
    held_out: HeldOut | None,
    combined: Params | None = None,
) -> Objective | None:
    """ρ → (F_val(w^t + Σ_i ρ_i u_i), its derivatives); None without validation samples.

    A function of float32 ``[N]``; with `combined`, Δ of a rule whose update is no
    weighted sum, of ``[N + 1]``: the last number is the share of Δ that is added; its
    derivative is not computed, but 0. F_val is the mean loss; its sums over samples
    have the same bits on any number of devices. The updates u_i ``[N, ...]``, 0 where
    not finite, are the same on all devices.
    """
    if not held_out:
        return None
    axis, num_updates = parts.spec.axis, jax.tree.leaves(updates)[0].shape[0]
    params, updates, combined = lax.stop_gradient((params, updates, combined))
    rows, mask = jnp.asarray(held_out.rows), jnp.asarray(held_out.mask)
    number, count = rows.shape[0], mask.sum()
    batches = devices.own_share(number, axis)
    rows = rows[batches % number]
    mask = mask[batches % number] & (batches < number)[:, None]

    def batch_loss(
        rho: Float[Array, "n"], rows: Int[Array, "b"], mask: Bool[Array, "b"]
    ) -> Float[Array, ""]:
        share = lax.stop_gradient(rho[-1])
        extra = (share, combined) if combined else None
        model = model_at(params, updates, rho[:num_updates], extra)
        outputs = parts.model.predict(model, scaled(samples, samples.x[rows]))
        loss = parts.model.loss(outputs, samples.y[rows])
        return jnp.where(mask, loss, 0.0).sum(dtype=jnp.float32)

    def evaluate(rho: Float[Array, "n"]) -> tuple[Float[Array, ""], Float[Array, "n"]]:
        both = jax.value_and_grad(batch_loss)
        sums, slopes = lax.map(lambda batch: both(rho, *batch), (rows, mask))
        total = exact_sums.zeros(rho.shape)
        good = jnp.isfinite(slopes)
        total = exact_sums.add_all(total, jnp.where(good, slopes, 0.0))
        slope = exact_sums.value(exact_sums.over_devices(total, axis)) / count
        bad = devices.total((~good).any(axis=0).astype(jnp.int32), axis) > 0
        loss = exact_sums.scalar(sums, axis) / count
        return loss, jnp.where(bad, jnp.nan, slope)

    return evaluate


class Regret(NamedTuple):
    """What better weights would have won in an interval, float32."""

    validation_loss: Float[Array, ""]  # F_val at the rule's weights
    regret: Float[Array, ""]  # that less the smallest F_val found on the simplex
    # Frank–Wolfe gap Σ ρ_i s_i − min_i s_i, s_i below; NaN: ρ is not on the simplex
    gap: Float[Array, ""]
    slope: Float[Array, "N"]  # s_i = ∂F_val/∂ρ_i there; NaN: not present


def regret_of(
    objective: Objective, received: Received, by_weights: bool, hparams: HParams
) -> Regret:
    """The regret of an interval's weights, before the server's own step.

    regret = F_val(w(ρ)) − min_q F_val(w(q)) over the q of the present clients' simplex
    that `oracle.search` finds, starting from ρ itself, equal weights and FedAvg's: ≥ 0
    where ρ is on the simplex. A rule that combines updates in another way than by
    weights is measured at its own model and may have a regret below 0.

    gap = max_q ⟨∇_ρ F_val, ρ − q⟩, Frank and Wolfe's. Where F_val is convex in ρ it is
    an upper bound of F_val(w(ρ)) − min_q F_val(w(q)), so regret ≤ gap; networks are not
    convex, and there it says how steep the best exchange of weight is at ρ. The
    objective has Δ unless `by_weights`. NaN where no client is present.
    """
    present, count = received.present, received.present.shape[0]
    rho = of_present(received.rho, present, received.shares)
    simple = (jnp.abs(rho.sum() - 1) < 1e-5) & (rho >= -1e-6).all() & by_weights
    first = rho if by_weights else jnp.zeros(count + 1).at[-1].set(1.0)
    padding = (0, len(first) - count)
    starts = oracle.starting_weights(received.info, present)
    starts = jnp.concatenate([first[None], jnp.pad(starts, ((0, 0), padding))])
    best, at = oracle.search(
        objective,
        starts,
        jnp.pad(present, padding),
        *oracle.lengths(hparams),
        jnp.stack([simple, jnp.bool_(True), jnp.bool_(True)]),
    )
    slope = jnp.where(present, at.slope[:count], jnp.nan)
    least = jnp.where(present, slope, jnp.inf).min()
    gap = jnp.where(present, rho * slope, 0.0).sum() - least
    some = present.any()
    return Regret(
        jnp.where(some, at.loss, jnp.nan),
        jnp.where(some, at.loss - best.loss, jnp.nan),
        jnp.where(some & simple, gap, jnp.nan),
        slope,
    )
