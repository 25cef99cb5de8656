"""The parts of a user's own, and checks of those that enter a client's training."""

from typing import Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import data, rng
from tsfl_jax.config import SETTINGS
from tsfl_jax.data import targets
from tsfl_jax.engine import optimizers
from tsfl_jax.engine.interval import History
from tsfl_jax.engine.program_spec import Hooks
from tsfl_jax.models import networks, tracing
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Dataset, UserError


class Custom(NamedTuple):
    """A user's own parts that have no name; None: those that the settings name."""

    model: Any = None  # a Flax module, linen or nnx, or a `networks.Model`
    dataset: Dataset | None = None
    optimizer: optimizers.Optimizer | None = None  # of the clients
    aggregator: Aggregator | None = None
    loss: Any = None  # (outputs [B, O], labels [B]) -> [B]
    metrics: Any = None  # functions like a loss, by name
    augment: Any = None  # (key, x [B, ...], y [B, ...]) -> (x, y)
    client_step: Any = None  # `hooks.Step` -> `hooks.Stepped`
    partition: Any = None  # N lists of indices into the training samples
    params: Any = None  # Flax variables, w^0


def input_dtype(dataset: Dataset) -> Any:
    """dtype of a network's input: int32 for tokens, else float32."""
    kind = dataset.x_train.dtype
    return np.int32 if kind.kind in "iu" and kind != np.uint8 else np.float32


def start_of(model: Any) -> dict[str, str]:
    """The digest of an instance that brings its own first parameters."""
    if not networks.is_nnx(model):
        return {}
    from tsfl_jax.models import nnx_modules

    return {"model": data.fingerprint(*nnx_modules.arrays_of(model))}


_TAKEN = {*History._fields, "interval", "virtual_time", "tau", "seconds"}
_TAKEN |= {"client", "run", "lane"}  # in the files of a sweep


def checked(custom: Custom, dataset: Dataset, batch_size: int) -> Hooks:
    """The hooks, each None or a function that can work; names of metrics are free.

    Args:
      custom: augment is (key, x ``[B, ...]``, y ``[B, ...]``) → (x, y) of the same
        shapes and dtypes, client_step `hooks.Step` → `hooks.Stepped`.
      dataset: for the shapes of a sample and of what the loss gets beside it.
      batch_size: B.
    """
    # Settings are columns of a sweep that has several values.
    for name in _TAKEN.union(SETTINGS) & {*(custom.metrics or ())}:
        raise UserError(
            f"metrics: {name!r} is a name of the history or of a setting; use another"
        )
    augment, client_step = custom.augment, custom.client_step
    expected = "expected a function (key, x, y) -> (x, y), same shapes and dtypes"
    if custom.client_step is not None and not callable(custom.client_step):
        raise UserError(f"client_step={client_step!r}: expected a function of a Step")
    if augment is not None:
        shape = (batch_size, *dataset.x_train.shape[1:])
        x = jax.ShapeDtypeStruct(shape, input_dtype(dataset))
        learned = targets.of(dataset)[0]
        y = jax.ShapeDtypeStruct((batch_size, *learned.shape[1:]), learned.dtype)
        key = jax.eval_shape(lambda: rng.key(0))
        _, pair = tracing.attempt("augment fails", expected, augment, key, x, y)
        pair = tuple(pair) if isinstance(pair, list | tuple) else pair
        kinds = [
            str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree))
            for tree in (pair, (x, y))
        ]
        if kinds[0] != kinds[1]:
            message = f"augment gives {kinds[0]} for {kinds[1]}; {expected}"
            raise UserError(message.replace("'", ""))
    return Hooks(augment, client_step)
