"""The clients' optimizers: optax transformations made of swept hyper-parameters.

A client starts every interval with a fresh optimizer state.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from tsfl_jax import trees
from tsfl_jax.models import tracing
from tsfl_jax.sections import LR_SCHEDULES
from tsfl_jax.types import HParams, Params, Scalar, UserError

Factory = Callable[[HParams], optax.GradientTransformation]
Optimizer = optax.GradientTransformation | Factory


Factors = tuple[Callable[[Scalar, HParams], Any], ...]


def lr_factors() -> Factors:
    """The functions of `sections.LR_SCHEDULES`, in its order."""
    return tuple(part.make for part in LR_SCHEDULES.values())


def in_interval(
    hparams: HParams, interval: Int[Array, ""], factors: Factors
) -> HParams:
    """The hyper-parameters with the learning rate of an interval.

    η_t = η f(t) min(1, (t + 1)/W), with the schedule's f and W updates of warm-up.
    """
    t, warmup = interval.astype(jnp.float32), jnp.float32(hparams.lr_warmup)
    chosen = jnp.stack([jnp.float32(factor(t, hparams)) for factor in factors])
    rising = jnp.minimum(1.0, (t + 1) / jnp.maximum(warmup, 1.0))
    return hparams._replace(lr=hparams.lr * chosen[hparams.lr_schedule] * rising)


class SGDTerms(NamedTuple):
    """Which terms the step of a client has; a program is compiled for its own."""

    clip_norm: bool = True
    momentum: bool = True
    mu: bool = True


def terms_of(hparams: HParams) -> SGDTerms:
    """The terms that hyper-parameters, which are known numbers, switch on."""
    # In NumPy: while a function is traced JAX's comparisons are traced, too.
    return SGDTerms(
        clip_norm=bool(np.asarray(hparams.clip_norm) < np.inf),
        momentum=bool(np.asarray(hparams.momentum) != 0),
        mu=bool(np.asarray(hparams.mu) != 0),
    )


def sgd(hparams: HParams, terms: SGDTerms = SGDTerms()) -> optax.GradientTransformation:  # noqa: B008
    """SGD with momentum after clipping: v ← m v + g, w ← w − η v.

    Of a small network's step, a norm that limits nothing would be a large part.
    """
    momentum = hparams.momentum if terms.momentum else None
    step = optax.sgd(hparams.lr, momentum=momentum)
    if not terms.clip_norm:
        return step
    return optax.chain(clip_by_global_norm(hparams.clip_norm), step)


def clip_by_global_norm(limit: Scalar) -> optax.GradientTransformation:
    """g ← g · min(1, limit/‖g‖), which leaves g unchanged if the limit is infinite.

    With optax's own an infinite limit still changes rounding (the division is compiled
    into the step), and a finite gradient whose norm overflows becomes NaN. Its
    derivatives are finite, too, where nothing is clipped.
    """

    def clip(updates: Params, params: Params | None = None) -> Params:
        del params
        square = optax.tree.norm(updates, squared=True)
        # Only a norm that is clipped is differentiated: ∞/‖g‖, and the root at 0, have
        # derivatives that are not finite.
        norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))
        over = (square > 0) & (norm > limit)
        shorter = jnp.where(over, limit, 1.0) / jnp.where(over, norm, 1.0)
        factor = jnp.where(over, shorter, 1.0)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)

    return optax.stateless(clip)


def without(
    optimizer: optax.GradientTransformation, frozen: tuple[str, ...]
) -> optax.GradientTransformation:
    """The optimizer of all parameters but those whose path has one of these parts.

    Those have no gradient either, so that a norm that is clipped is of the others.
    """
    if not frozen:
        return optimizer
    kinds: dict[Hashable, Any] = {False: optimizer, True: optax.set_to_zero()}
    return optax.partition(kinds, lambda params: trees.marked(params, frozen))


_EXPECTED = (
    "expected an optax transformation, like optax.sgd(0.01), or a function that makes "
    "one of HParams, like lambda h: optax.sgd(h.lr); h.lr is traced, so that schedules "
    "of optax cannot compare it: set lr_warmup, or lr_schedule= of simulate"
)


@functools.lru_cache(maxsize=64)
def _constant(optimizer: optax.GradientTransformation) -> Factory:
    """The same function for the same optimizer, so that runs share a program."""
    return lambda hparams: optimizer


def as_factory(optimizer: Any) -> Factory:
    """A function of the hyper-parameters from what a user passed; None is `sgd`.

    Args:
      optimizer: anything; what is not an `Optimizer` or None is answered in one line.

    Raises:
      UserError: neither an optax transformation nor a function.
    """
    if optimizer is None:
        return sgd
    if isinstance(optimizer, optax.GradientTransformation):
        return _constant(optimizer)
    if not callable(optimizer):
        raise UserError(f"optimizer={optimizer!r}: {_EXPECTED}")
    return cast(Factory, optimizer)


def check(factory: Factory, hparams: HParams, params: Params) -> None:
    """Check that the factory's transformation can update parameters.

    Args:
      factory: from `as_factory`.
      hparams: what it is called with.
      params: arrays or their shapes; nothing is computed.

    Raises:
      UserError: it cannot.
    """
    if factory is sgd:
        return

    def update(hparams: HParams, params: Params) -> Params:
        optimizer = factory(hparams)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise UserError(f"{name} makes {optimizer!r} of HParams; {_EXPECTED}")
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    name = f"optimizer={getattr(factory, '__qualname__', factory)}"
    message = f"{name} cannot update the model"
    tracing.attempt(message, _EXPECTED, update, hparams, params)
