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
    # Its arguments: the same in every step, handed on, one entry per step.
    constants: list[Any]
    carry: list[Any]
    inputs: list[Any]
    outside: list[Any]  # equations that depend on constants alone
    early: list[Any]  # products of inputs with a weight
    late: list[Any]  # products of anything else with a weight
    inside: list[Any]  # the other equations

    @property
    def has_products(self) -> bool:
        """Whether there are products with weights in its steps."""
        return bool(self.early or self.late)


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


def taken_apart(body: Any, first_carry: int, first_input: int) -> Loop:
    """Sort the arguments and the equations of a scan's body.

    Args:
      body: an open jaxpr.
      first_carry: the place of the first argument that steps hand on.
      first_input: the place of the first argument that has one entry per step.
    """
    args = body.invars
    loop = Loop(
        body,
        constants=[*body.constvars, *args[:first_carry]],
        carry=args[first_carry:first_input],
        inputs=args[first_input:],
        outside=[],
        early=[],
        late=[],
        inside=[],
    )
    fixed, inputs = {*loop.constants}, {*loop.inputs}
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


def _read(known: dict[Any, Any], variables: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, core.Literal) else known[v] for v in variables]


def _over_steps(equation: Any, evaluate: _Evaluate, left: Any, weight: Any) -> Any:
    """A product of all steps' left sides ``[T, ...]`` with one weight."""
    return jax.vmap(lambda a: evaluate(equation, [a, weight])[0])(left)


class _Names(NamedTuple):
    """Variables of a step, in the order of their values."""

    fixed: list[Any]
    carry: list[Any]
    stacked: list[Any]


def scan(
    loop: Loop,
    evaluate: _Evaluate,
    values: Sequence[Any],
    backward: bool,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Run a loop that was taken apart.

    Args:
      loop: from `taken_apart`.
      evaluate: an equation and its values → its results.
      values: of the loop's constants, first carry and inputs, in this order.
      backward: whether gradients go backward only, so that those of weights can be made
        after the loop.
      **options: of `lax.scan`.

    Returns:
      The last carry, and what each step gave.
    """
    args = [*loop.constants, *loop.carry, *loop.inputs]
    first = dict(zip(args, values, strict=True))
    known = {v: first[v] for v in loop.constants}
    for equation in loop.outside:
        results = evaluate(equation, _read(known, equation.invars))
        known |= zip(equation.outvars, results, strict=True)
    stacked = {v: first[v] for v in loop.inputs}
    for equation in loop.early:
        left, weight = stacked[equation.invars[0]], known[equation.invars[1]]
        stacked[equation.outvars[0]] = _over_steps(equation, evaluate, left, weight)
    used = [v for e in loop.inside + loop.late for v in _variables(e)]
    used = dict.fromkeys([*used, *_variables_of(loop.body.outvars)])
    fixed = [v for v in used if v in known]
    names = _Names(fixed, loop.carry, list(stacked))
    run = _run_of(loop, names, evaluate, options)
    weights = [known[equation.invars[1]] for equation in loop.late]
    carry = _read(first, loop.carry)
    given = (weights, _read(known, fixed), carry, list(stacked.values()))
    if not (backward and loop.late):
        return run(None, *given)[0]
    return _with_late_gradients(loop, run, evaluate, options["length"])(*given)


def _run_of(
    loop: Loop, names: _Names, evaluate: _Evaluate, options: dict[str, Any]
) -> Callable:
    """The scan of (more, weights, fixed, carry, stacked), and left sides of products.

    Of each step, ``more`` is added to its products with weights; None adds nothing.
    """
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

    return run


def _with_late_gradients(
    loop: Loop, run: Callable, evaluate: _Evaluate, length: int
) -> Callable:
    """The scan of (weights, fixed, carry, stacked), with gradients after the loop."""
    whole = jax.custom_vjp(lambda *given: run(None, *given)[0])

    def forward(weights: Any, *given: Any) -> tuple[Any, Any]:
        # Zeros that are added to each product: their gradients are those of products.
        shapes = [equation.outvars[0].aval for equation in loop.late]
        zeros = [jnp.zeros((length, *a.shape), a.dtype) for a in shapes]
        found, back, lefts = jax.vjp(
            lambda zeros, *given: run(zeros, weights, *given),
            zeros,
            *given,
            has_aux=True,
        )
        return found, (back, lefts, weights)

    def back_through(kept: Any, gradient: Any) -> tuple[Any, ...]:
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

    whole.defvjp(forward, back_through)
    return whole
