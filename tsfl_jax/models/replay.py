"""A network of anyone's, with convolutions, pools and loops in fast forms.

The network is traced to a jaxpr, which is evaluated again operation by operation, with
`lax.conv_general_dilated`, `lax.reduce_window` and `lax.scan` replaced, before anything
is differentiated. Whatever library wrote the network, nothing of it and of JAX is
touched.

The replaced operations are batch-last, ``[C, *S, B]``, with a transpose before and
after. On a CPU both are `stored`, and so is what several operations read.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax import rng
from tsfl_jax.models import convolution, pooling, recurrent
from tsfl_jax.models.convolution import Window, stored
from tsfl_jax.models.flop import bodies
from tsfl_jax.models.model import Model
from tsfl_jax.types import Params

MOST_TAPS = 64  # of a pool that is made of slices

_INLINED = frozenset(("jit", "pjit", "closed_call", "core_call"))
_SLOW = ("conv_general_dilated", "reduce_window_max", "reduce_window_sum")


class _Form(NamedTuple):
    """How operations are replaced."""

    name: str  # a key of `convolution.CONVOLUTIONS`, but "lax"
    backward: bool  # gradients go backward; else derivatives may go forward, too


def _open(body: Any) -> Any:
    return getattr(body, "jaxpr", body)


def _consts(body: Any) -> Sequence[Any]:
    return getattr(body, "consts", ())


def _precision(precision: Any) -> Any:
    """The context of the products of a convolution that was traced with a precision."""
    first = precision[0] if isinstance(precision, tuple) else precision
    if isinstance(first, lax.DotAlgorithmPreset):
        return jax.default_matmul_precision(first.name)
    return jax.default_matmul_precision(getattr(first, "name", "default").lower())


def _convolution(equation: Any, values: Sequence[Any], form: _Form) -> list[Any] | None:
    """A convolution in a form of `CONVOLUTIONS`, or None: there is none."""
    p, (lhs, rhs) = equation.params, equation.invars
    numbers, wider = p["dimension_numbers"], p["preferred_element_type"]
    by_name = not isinstance(p["precision"], lax.DotAlgorithm)
    floats = jnp.issubdtype(lhs.aval.dtype, jnp.floating)
    same = lhs.aval.dtype == rhs.aval.dtype and wider in (None, lhs.aval.dtype)
    apart, strides = p["lhs_dilation"], p["window_strides"]
    both = max(apart) > 1 and max(strides) > 1
    if p["batch_group_count"] > 1 or both or not (by_name and floats and same):
        return None
    (batch, channel, *spatial) = numbers.lhs_spec
    x = stored(values[0].transpose(channel, *spatial, batch))
    (filters, channel, *spatial) = numbers.rhs_spec
    kernel = values[1].transpose(*spatial, channel, filters)
    around = tuple((int(lo), int(hi)) for lo, hi in p["padding"])
    window = Window(
        tuple(strides), around, tuple(p["rhs_dilation"]), p["feature_group_count"]
    )
    with _precision(p["precision"]):
        if max(apart) > 1:
            window = window._replace(strides=tuple(apart))
            out = convolution.conv_transposed(x, kernel, window)
        else:
            out = convolution.conv_general(x, kernel, window, form.name)
    (batch, channel, *spatial) = numbers.out_spec
    return [stored(out).transpose(np.argsort((channel, *spatial, batch)))]


def _pool(equation: Any, value: Any) -> list[Any] | None:
    """Pooling over all axes but two as slices, or None: not of that kind."""
    p, aval = equation.params, equation.invars[0].aval
    sizes, rank = p["window_dimensions"], len(aval.shape)
    if rank < 3 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    ends, spatial = (0, rank - 1), range(1, rank - 1)
    still = all(
        sizes[a] == p["window_strides"][a] == 1 and tuple(p["padding"][a]) == (0, 0)
        for a in ends
    )
    if not still or max(p["base_dilation"]) > 1 or math.prod(sizes) > MOST_TAPS:
        return None
    window = Window(
        tuple(p["window_strides"][a] for a in spatial),
        tuple((int(p["padding"][a][0]), int(p["padding"][a][1])) for a in spatial),
        tuple(p["window_dilation"][a] for a in spatial),
    )
    is_max = equation.primitive.name == "reduce_window_max"
    pool = pooling.max_windows if is_max else pooling.sum_windows
    last = stored(value.swapaxes(0, -1))  # batch-last
    out = stored(pool(last, tuple(sizes[1:-1]), window))
    return [out.swapaxes(0, -1)]


def _bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an operation as it was traced."""
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _loop(equation: Any) -> recurrent.Loop:
    """A scan taken apart."""

    # By rank, since versions of JAX name their numbers differently.
    def num_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)

    body = _open(equation.params["jaxpr"])
    first_input = num_whole(equation.invars, body.invars)
    carried = num_whole(equation.outvars, body.outvars)
    return recurrent.taken_apart(body, first_input - carried, first_input)


def _is_replaced(equation: Any) -> bool:
    """Whether it is slow in a loop, or a loop with products, or holds such a one."""
    name = equation.primitive.name
    has_products = name == "scan" and _loop(equation).has_products
    return name in _SLOW or has_products or any(map(_replaces, bodies(equation.params)))


def _replaces(jaxpr: Any) -> bool:
    return any(map(_is_replaced, jaxpr.eqns))


def _nested(equation: Any, values: Sequence[Any], form: _Form) -> list[Any] | None:
    """An operation with a body that holds something to replace, or None."""
    name, p = equation.primitive.name, equation.params
    if not _is_replaced(equation):
        return None
    if name in ("checkpoint", "remat2", "remat"):
        body = p["jaxpr"]
        body = functools.partial(_evaluate, _open(body), _consts(body), form)
        options = {k: p[k] for k in ("prevent_cse", "policy")}
        return list(jax.checkpoint(body, **options)(*values))
    if name == "scan":
        ends, ys = recurrent.scan(
            _loop(equation),
            functools.partial(_replaced, form=form),
            (*_consts(p["jaxpr"]), *values),
            form.backward,
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        return [*ends, *ys]
    if name == "cond":
        branches = [
            functools.partial(_evaluate, _open(b), _consts(b), form)
            for b in p["branches"]
        ]
        return list(lax.switch(values[0], branches, *values[1:]))
    return None


def _replaced(equation: Any, values: Sequence[Any], form: _Form) -> list[Any]:
    """The results of one operation."""
    name = equation.primitive.name
    if name == "conv_general_dilated":
        results = _convolution(equation, values, form)
    elif name in ("reduce_window_max", "reduce_window_sum"):
        results = _pool(equation, values[0])
    elif name in _INLINED:
        body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        results = _evaluate(_open(body), _consts(body), form, *values)
    else:
        results = _nested(equation, values, form)
    return _bind(equation, values) if results is None else results


def _is_large(variable: Any) -> bool:
    """Whether it is an image or a sequence, of which no reader is to compute it."""
    aval = variable.aval
    return len(aval.shape) > 2 and jnp.issubdtype(aval.dtype, jnp.floating)


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], form: _Form, *arguments: Any
) -> list[Any]:
    """The results of a jaxpr, operation by operation."""
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*consts, *arguments], strict=True))
    uses = Counter(v for e in jaxpr.eqns for v in recurrent.variables(e.invars))

    def replaced(equation: Any, values: Sequence[Any]) -> list[Any]:
        results = _replaced(equation, values, form)
        pairs = zip(equation.outvars, results, strict=True)
        return [stored(x) if uses[v] > 1 and _is_large(v) else x for v, x in pairs]

    return recurrent.read(
        recurrent.evaluated(jaxpr.eqns, values, replaced), jaxpr.outvars
    )


def _slow(jaxpr: Any) -> Counter[str]:
    """The operations of a jaxpr that are slow in a loop, with those of its bodies."""
    counts = Counter(e.primitive.name for e in jaxpr.eqns if e.primitive.name in _SLOW)
    return sum((_slow(b) for e in jaxpr.eqns for b in bodies(e.params)), counts)


def _replayed(function: Callable, name: str, backward: bool = True) -> Callable:
    """A function whose convolutions, pools and loops are those of a form."""
    form = _Form(name, backward)

    @functools.wraps(function)
    def replayed(*arguments: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = jax.tree.leaves(arguments)
        results = _evaluate(_open(traced), traced.consts, form, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return replayed


def traced_training(model: Model, variables: Params, x: jax.ShapeDtypeStruct) -> Any:
    """The jaxpr of a network in training; arguments as of `replay`."""
    mask, key = jax.ShapeDtypeStruct(x.shape[:1], bool), jax.eval_shape(rng.key, 0)
    return jax.make_jaxpr(model.train)(variables, x, mask, key).jaxpr


def replay(
    model: Model, form: str, variables: Params, x: jax.ShapeDtypeStruct
) -> tuple[Model, tuple[str, ...]]:
    """A network with convolutions, pools and loops in a form that is fast in a loop.

    Args:
      model: any network.
      form: a key of `convolution.CONVOLUTIONS`; "lax" leaves it as it is.
      variables: shapes of its variables.
      x: shape of a mini-batch ``[B, ...]``.

    Returns:
      The network, the same but for rounding, and a note on what could not be replaced.
    """
    if form == "lax" or not _replaces(traced_training(model, variables, x)):
        return model, ()
    replayed = model._replace(
        train=_replayed(model.train, form),
        predict=_replayed(model.predict, form, backward=False),
    )
    if not (counts := _slow(traced_training(replayed, variables, x))):
        return replayed, ()
    kinds = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    return replayed, (
        f"the network's {kinds} stay as they are, with gradients that are slow in a "
        "loop on a CPU: inside of a while loop or a custom gradient, with strides of "
        "inputs and outputs at once, or of large windows",
    )
