"""Adapters to and from the aggregators of `optax.experimental`.

An aggregator of optax maps per-element gradients ``[N, ...]`` to one update. Here an
element is a client, and its gradient the pseudo-gradient base_i − w_i (Reddi et al.,
"Adaptive Federated Optimization", ICLR 2021). That part of optax is experimental, so it
is imported only when an adapter is called.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from tsfl_jax.rules import custom
from tsfl_jax.rules.base import Aggregator, Counts, Received, equal_weights
from tsfl_jax.types import HParams, Params, UserError


def _aggregating() -> Any:
    try:
        from optax.experimental import aggregating
    except ImportError as error:
        raise UserError(
            f"optax {optax.__version__} has no optax.experimental.aggregating; install "
            "a newer optax (0.2.8 has it)"
        ) from error
    return aggregating


def from_optax(aggregator: Any, *, pseudo_gradients: bool = True) -> Aggregator:
    """Make a rule of an aggregator of optax.

    w^{t+1} = w^t + a(base_1 − w_1, …, base_N − w_N), a being its `update`. The clients
    that do not take part, or whose models are not finite, are replaced by the mean of
    the others, which leaves a mean unchanged. All models are stacked. The aggregator
    gets no parameters, so it cannot decay weights.

    Args:
      aggregator: an ``optax.experimental.aggregating.Aggregator``, as `process` makes
        it of a map per client, an aggregation and an optimizer of the server.
      pseudo_gradients: False: it gets the updates w_i − base_i instead, for one that
        ends without a negative learning rate, such as a plain mean.

    Raises:
      UserError: not an aggregator, or an optax without them.
    """
    _aggregating()
    if not (
        callable(getattr(aggregator, "init", None)) and hasattr(aggregator, "update")
    ):
        raise UserError(
            f"from_optax({aggregator!r}): expected an Aggregator of "
            "optax.experimental.aggregating"
        )
    sign = -1.0 if pseudo_gradients else 1.0

    def combine(
        updates: Params, state: Any, received: Received, hparams: HParams
    ) -> tuple[Params, Any]:
        del hparams

        def filled(u: Array) -> Array:
            mask = received.present.reshape(
                received.present.shape + (1,) * (u.ndim - 1)
            )
            count = jnp.maximum(received.present.sum(), 1).astype(u.dtype)
            mean = jnp.where(mask, u, jnp.zeros_like(u)).sum(axis=0) / count
            return jnp.where(mask, u, mean) * jnp.asarray(sign, u.dtype)

        mine = jax.tree.map(filled, updates["params"])
        change, state = aggregator.update(mine, state, None)
        return {"params": change}, state

    def init(params: Params, counts: Counts) -> Any:
        del counts
        return aggregator.init(params["params"])

    return Aggregator(equal_weights, init, combine=combine)


def to_optax(rule: Aggregator, num_clients: int) -> Any:
    """Make an aggregator of optax of a rule.

    Its ``update(gradients, state, params, **extra)`` takes pseudo-gradients
    base_i − w_i, leaves ``[N, ...]``, and returns (w^{t+1} − w^t, state), to be added
    by ``optax.apply_updates``. The parameters are needed; `extra` are the keyword
    arguments of `aggregate`, such as ``tau=`` and ``size=``.

    Args:
      rule: such as ``AGGREGATORS["krum"]``.
      num_clients: N.

    Raises:
      UserError: an optax without aggregators; a call without parameters.
    """

    def init(params: Params) -> Any:
        return custom.init_rule(rule, params, num_clients)

    def update(
        gradients: Params, state: Any, params: Params | None = None, **extra: Any
    ) -> tuple[Params, Any]:
        if params is None:
            raise UserError("update(gradients, state, params): the rule needs params")
        updates = jax.tree.map(jnp.negative, gradients)
        new, state = custom.aggregate(rule, updates, params, state, **extra)
        return optax.tree.sub(new, params), state

    return _aggregating().Aggregator(init, update)
