"""The minimizer of Theorem 1's bound as an aggregation rule, to compare with DMS."""

import math
from typing import Any

import jax.numpy as jnp

from tsfl_jax.components import changed, component, setting
from tsfl_jax.rules.base import Aggregator, Mixing, RoundInfo, Weights, weights_of
from tsfl_jax.rules.dms_rule import check_limit
from tsfl_jax.theory.bounds import BoundConstants, estimated
from tsfl_jax.theory.minimum import bound_optimal_weights
from tsfl_jax.types import HParams


@component("bound_optimal")
class BoundOptimal:
    """The minimizer of Theorem 1's bound."""

    weight_limit: float = setting(0.0, "θ ≥ 1 in ρ_i ≤ θ/N; 0: no limit")

    def resolved(self) -> "BoundOptimal":
        """Infinite for no limit."""
        return changed(self, weight_limit=self.weight_limit or math.inf)

    def check(self, config: Any, rule: Aggregator) -> None:
        """Refuse a limit under which weights cannot sum to 1."""
        check_limit("bound_optimal.weight_limit", self.weight_limit)


def _weights(info: RoundInfo, hparams: HParams) -> Weights:
    """The weights that minimize Theorem 1's bound of this interval: T = 1, from w^t.

    The constants are estimated from gradients at w^t, see `bounds.estimated`. τ_i are
    local iterations, as for DMS, for any number of steps and any momentum. Where
    the bound is void, or a gradient was not finite, the clients that take part get
    equal weights. Source: `theory.minimum`.
    """
    weight_limit = hparams.of(BoundOptimal).weight_limit
    tau, constants = jnp.asarray(info.tau), info.constants
    measured = info.gradients
    assert measured is not None, "the table of rules declares that this rule uses them"
    present = tau > 0
    estimates = estimated(
        hparams.lr,
        weight_limit,
        constants.smoothness,
        constants.grad_sq_norm,
        measured,
        present,
    )
    estimates = [jnp.asarray(value) for value in estimates]
    finite = jnp.stack([jnp.isfinite(value).all() for value in estimates]).all()
    finite &= constants.smoothness > 0
    bound = BoundConstants(*(jnp.where(finite, value, 1.0) for value in estimates))
    limit = jnp.minimum(weight_limit, tau.shape[0])  # finite; N limits nothing
    minimum = bound_optimal_weights(tau, bound, limit=limit)
    equal = present / jnp.maximum(present.sum(), 1)
    rho = jnp.where(finite & minimum.valid, minimum.rho, equal)
    return weights_of(rho, tau)


BOUND_OPTIMAL = Aggregator(
    Mixing(_weights, uses_constants=True, uses_gradients=True),
    sections=(BoundOptimal,),
    label="minimizer of the bound",
)
