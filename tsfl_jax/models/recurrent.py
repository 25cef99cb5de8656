"""A loop over time with as few products with weights in it as the network allows.

The gradient of a weight that is used in every step of a `lax.scan` is added up step by
step, which reads and writes the whole weight each time; with a mini-batch of ten that
takes longer than the products themselves. Here

- what depends on weights alone is computed once, before the loop;
- products of the loop's inputs with weights are one product over all steps, before it;
- the gradient of every other weight is one product over all steps, after it:
  Σ_t h_tᵀ g_t with h_t, what the weight was multiplied by in step t, and g_t, the
  gradient of that product.

`replay` brings a user's network to it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


class Loop(NamedTuple):
    """A scan that was traced, taken apart."""

    body: Any  # the jaxpr of a step
    outside: list[Any]  # equations that depend on constants alone
    early: list[Any]  # products of inputs with a weight
    late: list[Any]  # products of anything else with a weight
    inside: list[Any]  # the other equations


# (equation, values) → results
_Evaluate = Callable[[Any, Sequence[Any]], list[Any]]


def _variables_of(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _variables(equation: Any) -> list[Any]:
    return _variables_of(equation.invars)


def _is_product(equation: Any) -> bool:
    """Whether it is a plain matrix product of floats."""
    if equation.primitive.name != "dot_general":
        return False
    kinds = {v.aval.dtype for v in (*equation.invars, *equation.outvars)}
    _, batch = equation.params["dimension_numbers"]
    floats = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    return len(kinds) == 1 and floats and not any(batch)


def taken_apart(body: Any, constants: int, first_input: int) -> Loop:
    """Sort the equations of a scan's body.

    Args:
      body: an open jaxpr.
      constants: its first arguments, the same in every step.
      first_input: the place of the first argument that has one entry per step.
    """
    fixed = {*body.constvars, *body.invars[:constants]}
    inputs, loop = {*body.invars[first_input:]}, Loop(body, [], [], [], [])
    for equation in body.eqns:
        if not equation.effects and {*_variables(equation)} <= fixed:
            loop.outside.append(equation)
            fixed |= {*equation.outvars}
        elif _is_product(equation) and equation.invars[1] in fixed:
            early = equation.invars[0] in inputs
            (loop.early if early else loop.late).append(equation)
        else:
            loop.inside.append(equation)
    return loop


def has_products(body: Any, constants: int, first_input: int) -> bool:
    """Whether a scan has products with weights in its steps."""
    loop = taken_apart(body, constants, first_input)
    return bool(loop.early or loop.late)


def _read(known: dict[Any, Any], variables: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, core.Literal) else known[v] for v in variables]


def _over_steps(equation: Any, evaluate: _Evaluate, left: Any, weight: Any) -> Any:
    """A product of all steps' left sides ``[T, ...]`` with one weight."""
    return jax.vmap(lambda a: evaluate(equation, [a, weight])[0])(left)


def scan(
    loop: Loop,
    evaluate: _Evaluate,
    known: dict[Any, Any],
    carry: list[Any],
    xs: list[Any],
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Run a loop that was taken apart.

    Args:
      loop: from `taken_apart`.
      evaluate: an equation and its values → its results.
      known: values of the body's constants; those of `loop.outside` are added.
      carry, xs: as of `lax.scan`, as lists.
      **options: of `lax.scan`.

    Returns:
      The last carry, and what each step gave.
    """
    for equation in loop.outside:
        results = evaluate(equation, _read(known, equation.invars))
        known |= zip(equation.outvars, results, strict=True)
    args = loop.body.invars
    stacked = dict(zip(args[len(args) - len(xs) :], xs, strict=True))
    for equation in loop.early:
        left, weight = stacked[equation.invars[0]], known[equation.invars[1]]
        stacked[equation.outvars[0]] = _over_steps(equation, evaluate, left, weight)
    used = [v for e in loop.inside + loop.late for v in _variables(e)]
    weights = [known[equation.invars[1]] for equation in loop.late]
    used = dict.fromkeys([*used, *_variables_of(loop.body.outvars)])
    names = _Names(
        fixed=[v for v in used if v in known],
        carry=args[len(args) - len(xs) - len(carry) :][: len(carry)],
        stacked=list(stacked),
    )
    fixed = _read(known, names.fixed)
    whole = _with_late_gradients(loop, names, evaluate, options)
    return whole(weights, fixed, carry, list(stacked.values()))


class _Names(NamedTuple):
    """Variables of a step, in the order of their values."""

    fixed: list[Any]
    carry: list[Any]
    stacked: list[Any]


def _with_late_gradients(
    loop: Loop, names: _Names, evaluate: _Evaluate, options: dict[str, Any]
) -> Callable:
    """The scan of (weights, fixed, carry, stacked), with gradients after the loop."""
    late = {id(equation): place for place, equation in enumerate(loop.late)}
    kept = {id(equation) for equation in loop.inside} | late.keys()
    order = [equation for equation in loop.body.eqns if id(equation) in kept]

    def run(more: Any, weights: Any, fixed: Any, carry: Any, stacked: Any) -> Any:
        def step(carry: list[Any], given: tuple[Any, Any]) -> tuple[list[Any], Any]:
            values, lefts = (fixed, carry, given[0]), []
            here = {}
            for variables, found in zip(names, values, strict=True):
                here |= zip(variables, found, strict=True)
            for equation in order:
                place = late.get(id(equation))
                if place is None:
                    found = evaluate(equation, _read(here, equation.invars))
                else:
                    lefts += _read(here, equation.invars[:1])
                    found = evaluate(equation, [lefts[-1], weights[place]])
                    found = found if given[1] is None else [found[0] + given[1][place]]
                here |= zip(equation.outvars, found, strict=True)
            results = _read(here, loop.body.outvars)
            return results[: len(carry)], (results[len(carry) :], lefts)

        end, (ys, lefts) = lax.scan(step, carry, (stacked, more), **options)
        return (end, ys), lefts

    @jax.custom_vjp
    def whole(*given: Any) -> Any:
        return run(None, *given)[0]

    def forward(weights: Any, *given: Any) -> tuple[Any, Any]:
        # Zeros that are added to each product: their gradients are those of products.
        shapes = [equation.outvars[0].aval for equation in loop.late]
        zeros = [jnp.zeros((options["length"], *a.shape), a.dtype) for a in shapes]
        found, back, lefts = jax.vjp(
            lambda zeros, *given: run(zeros, weights, *given),
            zeros,
            *given,
            has_aux=True,
        )
        return found, (back, lefts, weights)

    def backward(kept: Any, gradient: Any) -> tuple[Any, ...]:
        back, lefts, weights = kept
        products, *given = back(gradient)
        found = []
        for equation, left, weight, product in zip(
            loop.late, lefts, weights, products, strict=True
        ):
            _, of = jax.vjp(
                lambda w, e=equation, a=left: _over_steps(e, evaluate, a, w), weight
            )
            found += of(product)
        return found, *given

    whole.defvjp(forward, backward)
    return whole
