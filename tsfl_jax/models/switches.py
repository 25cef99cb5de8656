"""What a user's module takes besides x: the training switch, and a batch's mask."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsfl_jax.types import Array


def values(names: Iterable[str], train: bool) -> dict[str, Any]:
    """Those of the names that switch between training and tests, with their values.

    >>> values(["x", "is_training", "eval_mode"], True)
    {'is_training': True, 'eval_mode': False}
    """
    tests = "deterministic", "use_running_average", "eval", "inference", "test"
    by_stem = {"train": train} | dict.fromkeys(tests, not train)
    stems = {n: n.removeprefix("is_").removesuffix("_mode") for n in names}
    stems = {n: stem.removesuffix("ing") for n, stem in stems.items()}
    return {n: by_stem[stem] for n, stem in stems.items() if stem in by_stem}


def in_fields(fields: dict[str, Any], train: bool) -> dict[str, Any]:
    """Values of those fields that are such a switch: False, True or None before."""
    return values([n for n, v in fields.items() if isinstance(v, bool | None)], train)


def caller(
    parameters: Mapping[str, inspect.Parameter],
) -> Callable[..., tuple[list[bool], dict[str, Any]]]:
    """(train, mask) → (args, named): the arguments of ``__call__`` besides x."""
    after_x = list(parameters.values())[2:]
    first = [p.name for p in after_x if p.kind is p.POSITIONAL_ONLY]
    first = list(itertools.takewhile(lambda name: values([name], True), first))
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    names = [p.name for p in after_x if p.kind in kinds]

    def arguments(
        train: bool, mask: Array | None = None
    ) -> tuple[list[bool], dict[str, Any]]:
        named = values(names, train)
        if mask is not None and "mask" in names:
            named["mask"] = mask
        return list(values(first, train).values()), named

    return arguments


def with_mask(layer: Any, x: Array, named: dict[str, Any], mask: Array) -> dict:
    """Add the mini-batch's mask to the arguments of a normalization that needs it.

    The layer, of Flax, has feature axes `axis` or `reduction_axes`. Of x ``[k·B, ...]``
    k rows in a row are of one sample. The mask is False in rows that fill up a batch.
    """
    is_batch_norm = hasattr(layer, "axis")
    axes = layer.axis if is_batch_norm else layer.reduction_axes
    axes = np.ravel(-1 if axes is None else axes) % x.ndim
    over_rows = (0 in axes) != is_batch_norm and x.shape[0] % len(mask) == 0
    takes = "mask" in inspect.signature(type(layer).__call__).parameters
    if not (over_rows and takes) or named.get("mask") is not None:
        return named
    rows = jnp.repeat(mask, x.shape[0] // len(mask))
    rows = rows.reshape(-1, *[1] * (x.ndim - 1))
    return named | {"mask": jnp.broadcast_to(rows, x.shape)}
