"""Count the FLOP of a network before anything is compiled."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


def count(function: Callable, *arguments: Any) -> float:
    """FLOP of the matrix products and convolutions in one call of a function.

    Args:
      function: a function of arrays.
      *arguments: trees of arrays or of their shapes.

    Returns:
      The number; inf if they are in a loop whose length depends on values.
    """
    return _of(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of(jaxpr: Any) -> float:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        terms = math.prod(shape[axis] for axis in contracted)
        return 2.0 * terms * equation.outvars[0].aval.size
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        filters = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * kernel.size / filters * equation.outvars[0].aval.size
    inner = [_of(part) for part in bodies(params)]
    if name == "cond":
        return max(inner)
    if name == "while":
        return math.inf if sum(inner) else 0.0
    return params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)


def bodies(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one
