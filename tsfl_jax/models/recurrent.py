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

# (equation, values) → results
Evaluate = Callable[[Any, Sequence[Any]], list[Any]]


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


def read(values: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    """The values of variables and literals."""
    return [v.val if isinstance(v, core.Literal) else values[v] for v in atoms]


def evaluated(
    equations: Sequence[Any], values: dict[Any, Any], evaluate: Evaluate
) -> dict[Any, Any]:
    """Values by variable, with those of the results of equations."""
    values = dict(values)
    for equation in equations:
        results = evaluate(equation, read(values, equation.invars))
        values |= zip(equation.outvars, results, strict=True)
    return values


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Those of the inputs of an operation that are no literals."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _is_product(equation: Any) -> bool:
    """Whether it is a plain matrix product of floats."""
    if equation.primitive.name != "dot_general":
        return False
    kinds = {v.aval.dtype for v in (*equation.invars, *equation.outvars)}
    _, batch = equation.params["dimension_numbers"]
    floats = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    return len(kinds) == 1 and floats and not any(batch)


def taken_apart(body: Any, first_carry: int, first_input: int) -> Loop:
    """Sort the arguments and the equations of a scan's body, an open jaxpr.

    Steps hand on the arguments from `first_carry` on; those from `first_input` on have
    one entry per step.
    """
    constants = [*body.constvars, *body.invars[:first_carry]]
    carry, inputs = body.invars[first_carry:first_input], body.invars[first_input:]
    loop = Loop(body, constants, carry, inputs, [], [], [], [])
    fixed, inputs = {*constants}, {*inputs}
    for equation in body.eqns:
        if not equation.effects and {*variables(equation.invars)} <= fixed:
            loop.outside.append(equation)
            fixed |= {*equation.outvars}
        elif _is_product(equation) and equation.invars[1] in fixed:
            early = equation.invars[0] in inputs
            (loop.early if early else loop.late).append(equation)
        else:
            loop.inside.append(equation)
    return loop


def _over_steps(equation: Any, evaluate: Evaluate, left: Any, weight: Any) -> Any:
    """A product of all steps' left sides ``[T, ...]`` with one weight."""
    return jax.vmap(lambda a: evaluate(equation, [a, weight])[0])(left)


def scan(
    loop: Loop,
    evaluate: Evaluate,
    values: Sequence[Any],
    backward: bool,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """The last carry of a loop that was taken apart, and what each step gave.

    The values are of the loop's constants, first carry and inputs, the options those of
    `lax.scan`. If gradients go `backward` only, those of weights are made after it.
    """
    args = [*loop.constants, *loop.carry, *loop.inputs]
    first = dict(zip(args, values, strict=True))
    constants = {v: first[v] for v in loop.constants}
    constants = evaluated(loop.outside, constants, evaluate)
    stacked = {v: first[v] for v in loop.inputs}
    for equation in loop.early:
        left, weight = stacked[equation.invars[0]], constants[equation.invars[1]]
        stacked[equation.outvars[0]] = _over_steps(equation, evaluate, left, weight)
    atoms = [v for e in loop.inside + loop.late for v in e.invars]
    used = dict.fromkeys(variables([*atoms, *loop.body.outvars]))
    fixed = [v for v in used if v in constants]
    run = _run_of(loop, [fixed, loop.carry, [*stacked]], evaluate, options)
    weights = [constants[equation.invars[1]] for equation in loop.late]
    arguments = [read(constants, fixed), read(first, loop.carry), [*stacked.values()]]
    if not (backward and loop.late):
        return run(None, weights, *arguments)[0]
    run = _with_late_gradients(loop, run, evaluate, options["length"])
    return run(weights, *arguments)


def _run_of(
    loop: Loop, names: list[list[Any]], evaluate: Evaluate, options: dict[str, Any]
) -> Callable:
    """The scan of (zeros, weights, fixed, carry, stacked), and left sides of products.

    In each step, `zeros` are added to its products with weights; None adds nothing. The
    names are the variables of the last three.
    """
    late = {id(equation): place for place, equation in enumerate(loop.late)}
    in_steps = {id(equation) for equation in loop.inside} | late.keys()
    order = [equation for equation in loop.body.eqns if id(equation) in in_steps]

    def run(zeros: Any, weights: Any, fixed: Any, carry: Any, stacked: Any) -> Any:
        def step(carry: list[Any], entries: tuple[Any, Any]) -> tuple[list[Any], Any]:
            inputs, zeros = entries
            values, lefts = {}, []
            for kind, parts in zip(names, (fixed, carry, inputs), strict=True):
                values |= zip(kind, parts, strict=True)

            def evaluate_late(equation: Any, factors: Sequence[Any]) -> list[Any]:
                place = late.get(id(equation))
                if place is None:
                    return evaluate(equation, factors)
                lefts.append(factors[0])
                (product,) = evaluate(equation, [factors[0], weights[place]])
                return [product if zeros is None else product + zeros[place]]

            values = evaluated(order, values, evaluate_late)
            results = read(values, loop.body.outvars)
            return results[: len(carry)], (results[len(carry) :], lefts)

        end, (ys, lefts) = lax.scan(step, carry, (stacked, zeros), **options)
        return (end, ys), lefts

    return run


def _with_late_gradients(
    loop: Loop, run: Callable, evaluate: Evaluate, length: int
) -> Callable:
    """The scan of (weights, fixed, carry, stacked), with gradients after the loop."""
    whole = jax.custom_vjp(lambda *arguments: run(None, *arguments)[0])

    def forward(weights: Any, *arguments: Any) -> tuple[Any, Any]:
        # Zeros that are added to each product: their gradients are those of products.
        shapes = [equation.outvars[0].aval for equation in loop.late]
        zeros = [jnp.zeros((length, *a.shape), a.dtype) for a in shapes]
        results, back, lefts = jax.vjp(
            lambda zeros, *arguments: run(zeros, weights, *arguments),
            zeros,
            *arguments,
            has_aux=True,
        )
        return results, (back, lefts, weights)

    def backward(saved: Any, gradient: Any) -> tuple[Any, ...]:
        back, lefts, weights = saved
        products, *gradients = back(gradient)
        of_weights = []
        for equation, left, weight, product in zip(
            loop.late, lefts, weights, products, strict=True
        ):
            _, transpose = jax.vjp(
                lambda w, e=equation, a=left: _over_steps(e, evaluate, a, w), weight
            )
            of_weights += transpose(product)
        return of_weights, *gradients

    whole.defvjp(forward, backward)
    return whole
