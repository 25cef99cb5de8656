"""The training switch of a user's module: arguments and fields of many names."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from tsfl_jax.types import Array

# Those that are tried where a call passes its arguments on through **.
_NAMES = ("train", "training", "is_training", "is_train", "eval", "inference")
_NAMES += ("deterministic", "use_running_average")


def values(names: Iterable[str], train: bool) -> dict[str, Any]:
    """Those of the names that switch between training and tests, with their values.

    >>> values(["x", "is_training", "eval_mode"], True)
    {'is_training': True, 'eval_mode': False}
    """
    tests = "deterministic", "use_running_average", "eval", "inference", "test"
    known = {"train": train} | dict.fromkeys(tests, not train)
    stem = {n: n.removeprefix("is_").removesuffix("_mode") for n in names}
    stem = {n: text.removesuffix("ing") for n, text in stem.items()}
    return {n: known[text] for n, text in stem.items() if text in known}


def in_fields(fields: dict[str, Any], train: bool) -> dict[str, Any]:
    """Values of those fields that are such a switch: False, True or None before."""
    return values([n for n, v in fields.items() if isinstance(v, bool | None)], train)


def caller(
    taken: Mapping[str, inspect.Parameter], attempt: Callable[..., Any]
) -> Callable[..., tuple[list[bool], dict[str, Any]]]:
    """Find the arguments besides x with which a module is called.

    Args:
      taken: parameters of ``__call__`` of its class.
      attempt: (x, *args, **named) → anything; calls the module, to find a switch behind
        a ``**``.

    Returns:
      (x, train, mask) → (args, named): switches, and ``mask=`` if it is taken.
    """
    parameters = list(taken.values())[2:]
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    first = list(itertools.takewhile(lambda name: values([name], True), first))
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [p.name for p in parameters if p.kind in kinds]
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def arguments(
        x: Array, train: bool, mask: Array | None = None
    ) -> tuple[list[bool], dict[str, Any]]:
        args, given = list(values(first, train).values()), values(named, train)
        shape, found = jax.ShapeDtypeStruct(x.shape, x.dtype), {}
        for name in _NAMES if passes_on else ():
            one = values([name], train)
            try:
                jax.eval_shape(lambda x, o=one: attempt(x, *args, **given | o), shape)
            except Exception:  # noqa: S112  a user's module may raise anything
                continue
            found |= one
        masked = mask is not None and "mask" in named
        return args, given | found | ({"mask": mask} if masked else {})

    return arguments
