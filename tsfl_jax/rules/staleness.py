"""How much a late update still counts."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from tsfl_jax.components import component, setting

KINDS = ("constant", "polynomial", "hinge", "exponential")
EXPONENTIAL = 3  # the kind (e/2)^−l


@component("staleness")
class Staleness:
    """Factor s(lag) on updates of an earlier global model."""

    kind: str = setting("constant", "factor s(lag) on stale updates", KINDS)
    a: float = setting(
        0.5, "a of polynomial and hinge", low=0, used_by=("kind", KINDS[1:3])
    )
    b: float = setting(
        4.0, "b of hinge, in updates", low=0, used_by=("kind", KINDS[2:3])
    )


def of_lag(lag: Int[ArrayLike, "*N"], settings: Any) -> Float[Array, "*N"]:
    """`staleness_factor` with the `Staleness` of a program."""
    return staleness_factor(lag, settings.kind, settings.a, settings.b)


def staleness_factor(
    lag: Int[ArrayLike, "*N"], kind: ArrayLike, a: ArrayLike, b: ArrayLike
) -> Float[Array, "*N"]:
    """How much an update counts that is l global updates late.

    s(l) = 1, (l + 1)^−a, 1 if l ≤ b else 1/(a(l − b) + 1), or (e/2)^−l, by `kind`. The
    first three are from section 5 of Xie, Koyejo, Gupta, "Asynchronous Federated
    Optimization", 2019; the last is from Chen, Sun, Jin, "Communication-Efficient
    Federated Deep Learning with Layerwise Asynchronous Model Update and Temporally
    Weighted Aggregation", IEEE Transactions on Neural Networks and Learning Systems,
    2020.

    >>> print(staleness_factor(jnp.array([0, 2, 6]), 2, 0.5, 4))
    [1.  1.  0.5]

    Args:
      lag: l ≥ 0, global updates since the client's base model.
      kind: ``[]`` integer, index into `KINDS`.
      a: ``[]`` ≥ 0 of "polynomial" and "hinge"; not read, so it may be NaN, by others.
      b: ``[]`` ≥ 0, updates, of "hinge"; likewise.

    Returns:
      s in [0, 1].
    """
    kind = jnp.asarray(kind, jnp.int32)
    dtype = jnp.result_type(float, a, b)
    lag = jnp.asarray(lag, dtype)
    # Parameters that do not apply are replaced before use: NaN·0 would reach gradients.
    exponent, slope, free = (
        jnp.where(kind == owner, jnp.asarray(x, dtype), 0)
        for owner, x in ((1, a), (2, a), (2, b))
    )
    late = jnp.where(lag > free, lag - free, 0)
    factors = (
        jnp.ones_like(lag),
        jnp.exp(-exponent * jnp.log1p(lag)),
        1 / (slope * late + 1),
        jnp.exp(-lag * (1 - jnp.log(jnp.asarray(2, dtype)))),
    )
    return lax.select_n(kind, *factors)
