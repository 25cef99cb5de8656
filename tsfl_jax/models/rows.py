"""Rows that fill up a short mini-batch: masked in normalizations, else noted.

Their losses are masked. An operation that reduces over the rows of a mini-batch before
that, as batch normalization does, needs the mask, too.
"""

import functools
import inspect
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import rng
from tsfl_jax.models.flop import bodies
from tsfl_jax.models.model import Model
from tsfl_jax.types import Array, Params

ROWS = 997  # of a trial batch: a prime of which no other axis is a multiple


def with_mask(layer: Any, x: Array, named: dict[str, Any], mask: Array) -> dict:
    """Add the mini-batch's mask to the arguments of a normalization that needs it.

    Args:
      layer: of Flax, with feature axes `axis` or with `reduction_axes`.
      x: its input; of ``[k·B, ...]`` k rows in a row are of one sample.
      named: its other arguments, which are returned.
      mask: ``[B]`` bool, False in rows that fill up a short batch.
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


# What a traced value is made of: x, the mask, several rows of x.
_OF_X, _OF_MASK, _MIXED = 1, 2, 4


def _axes(variable: Any) -> list[int]:
    """The axes along which a value has the rows of the trial batch."""
    shape = enumerate(getattr(variable.aval, "shape", ()))
    return [axis for axis, size in shape if size and size % ROWS == 0]


def _moves(equation: Any) -> bool:
    """Whether an operation that keeps the axis of rows mixes them nevertheless."""
    p, name = equation.params, equation.primitive.name
    axis = next(iter(_axes(equation.invars[0])), None)
    if name == "gather":  # x[order], but not x[arange(B), last]
        return p["dimension_numbers"].start_index_map == (axis,)
    key = {"sort": "dimension", "rev": "dimensions"}.get(name, "axis")
    along = name in ("sort", "rev") or name.startswith("cum")
    return along and axis in np.ravel(p[key])


def _results(jaxpr: Any, kinds: list[int]) -> list[int]:
    """What the results of a jaxpr are made of, by its inputs."""
    kind_of = dict(zip(map(id, jaxpr.invars), kinds, strict=True))
    for equation in jaxpr.eqns:
        outputs, parts = equation.outvars, []
        kinds = [kind_of.get(id(variable), 0) for variable in equation.invars]
        loops = equation.primitive.name in ("scan", "while")
        for body in bodies(equation.params):
            inputs = body.invars
            if any(map(_axes, inputs)) and len(body.outvars) == len(outputs):
                inner = zip(kinds[-len(inputs) :], inputs, strict=True)
                # What a loop carries is made of x after its first turn.
                inner = [kind or loops * bool(_axes(v)) for kind, v in inner]
                parts.append(_results(body, inner))
        parts = parts or [[kind] * len(outputs) for kind in kinds or [0]]
        results = [functools.reduce(operator.or_, k) for k in zip(*parts, strict=True)]
        moves = kinds and kinds[0] & _OF_X and _moves(equation)
        keeps = [len(_axes(out)) == 1 and not moves for out in outputs]
        pairs = [*zip(results, keeps, strict=True)]
        mixes = any(k & (_OF_X | _OF_MASK) == _OF_X and not keep for k, keep in pairs)
        results = [mixes * _MIXED | (k if keep else k & _MIXED) for k, keep in pairs]
        kind_of |= zip(map(id, outputs), results, strict=True)
    return [kind_of.get(id(variable), 0) for variable in jaxpr.outvars]


def notes(
    model: Model, variables: Params, shape: tuple[int, ...], dtype: Any
) -> tuple[str, ...]:
    """A note if training reduces over rows that are not masked.

    The network is only traced, for `ROWS` samples. NOT seen: rows in another order by
    a reshape, and loops whose length depends on several rows.

    Args:
      model: the network.
      variables: shapes of its variables.
      shape: of one sample.
      dtype: of the network's input.
    """
    x = jax.ShapeDtypeStruct((ROWS, *shape), dtype)
    mask, key = jax.ShapeDtypeStruct((ROWS,), bool), jax.eval_shape(rng.key, 0)
    jaxpr = jax.make_jaxpr(model.train)(variables, x, mask, key).jaxpr
    kinds = [0] * (len(jaxpr.invars) - 3) + [_OF_X, _OF_MASK, 0]
    if not max(_results(jaxpr, kinds)) & _MIXED:
        return ()
    return (
        f"model={model.name}: outputs of a sample depend on the other samples of its "
        "mini-batch; a short batch is filled up with copies, which count; take mask= "
        "[B] in __call__, or choose sizes that are multiples of the batch size",
    )
