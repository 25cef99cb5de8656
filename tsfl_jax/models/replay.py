"""A network of anyone's, with its convolutions and pools in the forms that are fast.

The network is traced to a jaxpr, which is evaluated again operation by operation, with
`lax.conv_general_dilated` and `lax.reduce_window` replaced, before anything is
differentiated. Whatever library wrote the network, nothing of it and of JAX is touched.

The replaced operations are batch-last, ``[C, *S, B]``. Elementwise operations and
reductions of their results stay in that layout, so that a whole block of convolution,
normalization, activation and pooling is computed in it; other operations get the layout
that they were traced with.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array

from tsfl_jax import rng
from tsfl_jax.models import convolution, pooling
from tsfl_jax.models.convolution import Window
from tsfl_jax.models.model import Model
from tsfl_jax.types import Params

MOST_TAPS = 64  # of a pool that is made of slices

_ELEMENTWISE = frozenset(
    """
    add add_any sub mul div rem max min pow neg sign abs exp exp2 expm1 log log1p
    tanh sin cos tan logistic sqrt rsqrt cbrt erf erfc erf_inv integer_pow square
    floor ceil round is_finite not and or xor eq ne lt le gt ge select_n
    convert_element_type clamp copy copy_p stop_gradient reduce_precision
    """.split()  # noqa: SIM905
)
_REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])
_INLINED = frozenset(("jit", "pjit", "closed_call", "core_call"))
_SLOW = ("conv_general_dilated", "reduce_window_max", "reduce_window_sum")


class _Moved(NamedTuple):
    """A value in another order of its axes: ``array = value.transpose(order)``."""

    array: Array
    order: tuple[int, ...]

    def plain(self) -> Array:
        return self.array.transpose(np.argsort(self.order))


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, _Moved) else value


def _in_order(value: Any, order: tuple[int, ...]) -> Array:
    if isinstance(value, _Moved) and value.order == order:
        return value.array
    return _plain(value).transpose(order)


def _bodies(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an operation."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                yield getattr(one, "jaxpr", one)


def _is_elementwise(equation: Any) -> bool:
    """Whether each entry of the results depends on those at its own place alone."""
    name = equation.primitive.name
    if name == "broadcast_in_dim":  # of a number
        return not equation.invars[0].aval.shape
    if name in _INLINED or name == "custom_jvp_call":
        return all(map(_is_elementwise, next(_bodies(equation.params)).eqns))
    return name in _ELEMENTWISE


def _elementwise(equation: Any, values: Sequence[Any]) -> list[Any] | None:
    """The results in the order of a moved operand, or None: not elementwise.

    The moved arrays are given the shapes that the operation was traced with: it does
    not matter to it which entry lies where.
    """
    order = next((v.order for v in values if isinstance(v, _Moved)), None)
    if order is None or not _is_elementwise(equation):
        return None
    shape = next(v.aval.shape for v in equation.invars if v.aval.shape)
    variables = (*equation.invars, *equation.outvars)
    if any(v.aval.shape not in ((), shape) for v in variables):
        return None

    given = [
        _in_order(v, order).reshape(shape) if np.ndim(_array(v)) else v for v in values
    ]
    moved = tuple(shape[axis] for axis in order)
    results = [
        _Moved(out.reshape(moved), order) if out.ndim else out
        for out in _bind(equation, given)
    ]
    return results


def _array(value: Any) -> Any:
    return value.array if isinstance(value, _Moved) else value


def _reduced(equation: Any, value: _Moved) -> list[Any]:
    """A reduction of a moved value; its result is small and goes back."""
    axes = equation.params["axes"]
    places = tuple(value.order.index(axis) for axis in axes)
    params = {**equation.params, "axes": places}
    out = equation.primitive.bind(value.array, **params)
    kept = [axis for axis in value.order if axis not in axes]
    return [out.transpose(np.argsort(kept))]


def _precision(given: Any) -> Any:
    """The context of the products of a convolution that was traced with a precision."""
    first = given[0] if isinstance(given, tuple) else given
    return jax.default_matmul_precision(getattr(first, "name", "default").lower())


def _convolution(equation: Any, values: Sequence[Any], form: str) -> list[Any] | None:
    """A convolution in a form of `CONVOLUTIONS`, or None: there is none."""
    p, (lhs, rhs) = equation.params, equation.invars
    numbers, wider = p["dimension_numbers"], p["preferred_element_type"]
    known = isinstance(p["precision"], tuple | lax.Precision | None)
    floats = jnp.issubdtype(lhs.aval.dtype, jnp.floating)
    same = lhs.aval.dtype == rhs.aval.dtype and wider in (None, lhs.aval.dtype)
    apart, strides = p["lhs_dilation"], p["window_strides"]
    both = max(apart) > 1 and max(strides) > 1
    if p["batch_group_count"] > 1 or both or not (known and floats and same):
        return None
    (batch, channel, *spatial) = numbers.lhs_spec
    x = _in_order(values[0], (channel, *spatial, batch))
    (filters, channel, *spatial) = numbers.rhs_spec
    kernel = _plain(values[1]).transpose(*spatial, channel, filters)
    around = tuple((int(lo), int(hi)) for lo, hi in p["padding"])
    window = Window(
        tuple(strides), around, tuple(p["rhs_dilation"]), p["feature_group_count"]
    )
    with _precision(p["precision"]):
        if max(apart) > 1:
            window = window._replace(strides=tuple(apart))
            out = convolution.conv_transposed(x, kernel, window)
        else:
            out = convolution.conv_general(x, kernel, window, form)
    (batch, channel, *spatial) = numbers.out_spec
    return [_Moved(out, (channel, *spatial, batch))]


def _pool(equation: Any, value: Any) -> list[Any] | None:
    """Pooling over all axes but two as slices, or None: not of that kind."""
    p, aval = equation.params, equation.invars[0].aval
    sizes, rank = p["window_dimensions"], len(equation.invars[0].aval.shape)
    if rank < 3 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    order = (
        value.order if isinstance(value, _Moved) else (rank - 1, *range(1, rank - 1), 0)
    )
    ends, spatial = (order[0], order[-1]), order[1:-1]
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
    pool = (
        pooling.max_windows
        if equation.primitive.name == "reduce_window_max"
        else pooling.sum_windows
    )
    out = pool(_in_order(value, order), tuple(sizes[a] for a in spatial), window)
    return [_Moved(out, order)]


def _bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an operation as it was traced."""
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _nested(equation: Any, values: Sequence[Any], form: str) -> list[Any] | None:
    """An operation with a body that holds something to replace, or None."""
    name, p = equation.primitive.name, equation.params
    if not any(_count(body) for body in _bodies(p)):
        return None
    values = list(map(_plain, values))
    if name in ("checkpoint", "remat2", "remat"):
        body = functools.partial(_outputs, p["jaxpr"], (), form)
        kept = {k: p[k] for k in ("prevent_cse", "policy")}
        return list(jax.checkpoint(body, **kept)(*values))
    if name == "scan":
        first, middle = p["num_consts"], p["num_consts"] + p["num_carry"]
        body, carried = p["jaxpr"], p["num_carry"]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            given = (*values[:first], *carry, *xs)
            found = _outputs(_open(body), _consts(body), form, *given)
            return found[:carried], found[carried:]

        ends, ys = lax.scan(
            step,
            values[first:middle],
            values[middle:],
            p["length"],
            p["reverse"],
            p["unroll"],
        )
        return [*ends, *ys]
    if name == "cond":
        bodies = [
            functools.partial(_outputs, _open(b), _consts(b), form)
            for b in p["branches"]
        ]
        return list(lax.switch(values[0], bodies, *values[1:]))
    return None


def _open(body: Any) -> Any:
    return getattr(body, "jaxpr", body)


def _consts(body: Any) -> Sequence[Any]:
    return getattr(body, "consts", ())


def _replaced(equation: Any, values: Sequence[Any], form: str) -> list[Any]:
    """The results of one operation, in whatever order of axes is at hand."""
    name = equation.primitive.name
    found = None
    if name == "conv_general_dilated":
        found = _convolution(equation, values, form)
    elif name in ("reduce_window_max", "reduce_window_sum"):
        found = _pool(equation, values[0])
    elif name in _REDUCTIONS and isinstance(values[0], _Moved):
        found = _reduced(equation, values[0])
    else:
        found = _elementwise(equation, values)
        if found is None and name in _INLINED:
            body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            found = _evaluate(_open(body), _consts(body), form, values)
        elif found is None:
            found = _nested(equation, values, form)
    return _bind(equation, list(map(_plain, values))) if found is None else found


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], form: str, values: Sequence[Any]
) -> list[Any]:
    """The results of a jaxpr, operation by operation."""
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= zip(jaxpr.invars, values, strict=True)

    def read(variable: Any) -> Any:
        literal = isinstance(variable, core.Literal)
        return variable.val if literal else known[variable]

    for equation in jaxpr.eqns:
        results = _replaced(equation, list(map(read, equation.invars)), form)
        known |= zip(equation.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def _outputs(jaxpr: Any, consts: Sequence[Any], form: str, *values: Any) -> list[Any]:
    return list(map(_plain, _evaluate(jaxpr, consts, form, values)))


def _count(jaxpr: Any) -> Counter[str]:
    """The operations of a jaxpr that are slow in a loop, with those of its bodies."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name in _SLOW:
            found[equation.primitive.name] += 1
        for body in _bodies(equation.params):
            found += _count(body)
    return found


def _replayed(function: Callable, form: str) -> Callable:
    """A function whose convolutions and pools are those of a form."""

    @functools.wraps(function)
    def replayed(*given: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*given)
        if not _count(_open(traced)):
            return function(*given)
        found = _outputs(_open(traced), traced.consts, form, *jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return replayed


def replay(
    model: Model, form: str, variables: Params, x: jax.ShapeDtypeStruct
) -> tuple[Model, tuple[str, ...]]:
    """A network with its convolutions and pools in a form that is fast in a loop.

    Args:
      model: any network.
      form: a key of `convolution.CONVOLUTIONS`; "lax" leaves it as it is.
      variables: shapes of its variables.
      x: shape of a mini-batch ``[B, ...]``.

    Returns:
      The network, the same but for rounding, and a note on what could not be replaced.
    """
    if form == "lax":
        return model, ()
    replayed = model._replace(
        train=_replayed(model.train, form), predict=_replayed(model.predict, form)
    )
    mask, key = jax.ShapeDtypeStruct(x.shape[:1], bool), jax.eval_shape(rng.key, 0)
    found = _count(_open(jax.make_jaxpr(replayed.train)(variables, x, mask, key)))
    if not found:
        return replayed, ()
    kinds = ", ".join(f"{count} x {name}" for name, count in sorted(found.items()))
    return replayed, (
        f"the network's {kinds} stay as they are, with gradients that are slow in a "
        "loop on a CPU: inside of a while loop or a custom gradient, with strides of "
        "inputs and outputs at once, or of large windows",
    )
