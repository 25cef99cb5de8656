"""FedNova: updates are divided by the work that is in them.

How often a client's gradients count in its update, by its number of local steps, is
also what SCAFFOLD's control variates are divided by. These functions are pure and work
under jit, vmap and grad; values are not checked.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", NeurIPS 2020.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from tsfl_jax.components import component
from tsfl_jax.rules import base
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


def accumulation(
    steps: Int[ArrayLike, "N"], momentum: ArrayLike, proximal: ArrayLike = 0.0
) -> Float[Array, "N"]:
    """How often the gradients of s steps of SGD count in the client's update.

    Σ_k a_k of v ← m v + g + μ(w − w^t), w ← w − η v: with every g = 1 the update is −η
    Σ a_k. It is ‖a‖₁ where all a_k ≥ 0. For α = ημ = 0 it is [s − m(1 − m^s)/(1 −
    m)]/(1 − m), for m = 0 it is [1 − (1 − α)^s]/α. Section 4 of Wang et al.

    >>> print(accumulation(jnp.array([0, 1, 2, 3]), 0.5))  # + 1, + 1.5, + 1.75
    [0.   1.   2.5  4.25]

    Args:
      steps: s ≥ 0.
      momentum: m ``[]`` in [0, 1].
      proximal: α = ημ ``[]`` in [0, 2).

    Returns:
      ≥ 0, in steps: s for m = α = 0. A few units in the last place
      off, and up to 5e-5 where a large m and α make it swing.
    """
    dtype = jnp.result_type(float, momentum, proximal)
    momentum, alpha = jnp.asarray(momentum, dtype), jnp.asarray(proximal, dtype)
    steps = jnp.asarray(steps)

    # (v, u) with w = w^t − η u and unit gradients: v ← m v − α u + 1, u ← u + v. The
    # closed form cancels where s(1 − m) is small. With A the matrix of that step and
    # z_s its s-th state from 0, z_{s+t} = z_t + A^t z_s, for each bit of s. A^t − I is
    # what is kept: squaring A^t itself would double its error.
    def bit(i: Int[Array, ""], carry: tuple) -> tuple:
        (a, b, c, d), v_t, u_t, v, u = carry  # A^t − I, t = 2^i
        have = (steps >> i) & 1 == 1
        v, u = (
            jnp.where(have, v_t + v + a * v + b * u, v),
            jnp.where(have, u_t + u + c * v + d * u, u),
        )
        twice = 2 * v_t + a * v_t + b * u_t, 2 * u_t + c * v_t + d * u_t
        square = a * a + b * c, a * b + b * d, c * a + d * c, c * b + d * d
        power = tuple(2 * x + y for x, y in zip((a, b, c, d), square, strict=True))
        return power, *twice, v, u

    one, zeros = jnp.ones_like(momentum), jnp.zeros(steps.shape, dtype)
    start = (momentum - 1, -alpha, momentum, -alpha)
    bits = jnp.iinfo(steps.dtype).bits - 1
    return lax.fori_loop(0, bits, bit, (start, one, one, zeros, zeros))[-1]


def of_sgd(steps: Int[Array, "N"], hparams: HParams) -> Float[Array, "N"]:
    """‖a_i‖₁ of the package's own SGD, with momentum and proximal term."""
    return accumulation(steps, hparams.momentum, hparams.lr * hparams.mu)


def nova_weights(
    share: Float[Array, "N"], work: Float[Array, "N"]
) -> Float[Array, "N"]:
    """Weights of the updates that take out the clients' different amounts of work.

    ρ_i = τ_eff·p_i/‖a_i‖₁ with τ_eff = Σ_i p_i‖a_i‖₁, for w + Σ_i ρ_i (w_i − w).

    >>> print(nova_weights(jnp.array([0.5, 0.5]), jnp.array([1.0, 4.0])))
    [1.25   0.3125]

    Args:
      share: p ≥ 0 of sum 1; 0 for absent clients.
      work: ‖a_i‖₁ ≥ 0 up to a common factor.

    Returns:
      ρ ≥ 0; 0 where ‖a_i‖₁ = 0. Equal work gives ρ = p; otherwise
      the sum is not 1, so ρ applies to the updates and not to the models.
    """
    worked = work > 0
    amount = jnp.where(worked, work, 1)
    share = jnp.where(worked, share, 0)
    return (share * amount).sum() * (share / amount)


def fednova_weights(info: base.RoundInfo, hparams: HParams) -> base.Weights:
    """Weights of updates divided by their work: FedNova.

    w^{t+1} = w^t + τ_eff Σ_i p_i (w_i − base_i)/‖a_i‖₁, p_i = |D_i|/Σ|D_j|. If a
    model is lost, the others share its p_i; τ_eff is that of all who took part.
    """
    share = base.normalized(info.size, info.tau)
    work = of_sgd(info.steps, hparams)
    rho = nova_weights(share, work)
    return base.weights_of(rho, info.tau)._replace(shares=share)


FEDNOVA = base.Aggregator(
    base.Mixing(fednova_weights, deltas=True),
    base.ClientSide(counts_on_sgd=True),
    sections=(FedNova,),
    label="FedNova",
)
