"""The clients' optimizers: optax transformations made of swept hyper-parameters.

A client starts every interval with a fresh optimizer state.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from tsfl_jax.types import HParams, Params, UserError

Factory = Callable[[HParams], optax.GradientTransformation]
Optimizer = optax.GradientTransformation | Factory


def sgd(hparams: HParams) -> optax.GradientTransformation:
    """SGD with momentum after clipping: v ← m v + g, w ← w − η v."""
    return optax.chain(
        clip_by_global_norm(hparams.clip_norm),
        optax.sgd(hparams.lr, momentum=hparams.momentum),
    )


def clip_by_global_norm(limit) -> optax.GradientTransformation:
    """g ← g · min(1, limit/‖g‖); unlike optax's, an infinite limit keeps the bits.

    Args:
      limit: scalar > 0, may be traced or inf.
    """

    def clip(updates: Params, params: Params | None = None) -> Params:
        del params
        norm = optax.tree.norm(updates)
        factor = jnp.where(norm > limit, limit / norm, 1.0)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)

    return optax.stateless(clip)


def as_factory(optimizer: Optimizer | None) -> Factory:
    """A function of the hyper-parameters, whatever a user gave; None is `sgd`."""
    if optimizer is None:
        return sgd
    if isinstance(optimizer, optax.GradientTransformation):
        return lambda hparams: optimizer
    if not callable(optimizer):
        raise UserError(
            f"optimizer={optimizer!r}: expected an optax transformation, or a function "
            "that makes one of HParams"
        )
    return optimizer
