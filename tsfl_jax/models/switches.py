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
    by_stem = {"train": train} | dict.fromkeys(tests, not train)
    stems = {n: n.removeprefix("is_").removesuffix("_mode") for n in names}
    stems = {n: stem.removesuffix("ing") for n, stem in stems.items()}
    return {n: by_stem[stem] for n, stem in stems.items() if stem in by_stem}


def in_fields(fields: dict[str, Any], train: bool) -> dict[str, Any]:
    """Values of those fields that are such a switch: False, True or None before."""
    return values([n for n, v in fields.items() if isinstance(v, bool | None)], train)


def caller(
    parameters: Mapping[str, inspect.Parameter], attempt: Callable[..., Any]
) -> Callable[..., tuple[list[bool], dict[str, Any]]]:
    """Find the arguments besides x with which a module is called.

    Args:
      parameters: of ``__call__`` of its class.
      attempt: (x, *args, **named) → anything; calls the module, to find a switch behind
        a ``**``.

    Returns:
      (x, train, mask) → (args, named): switches, and ``mask=`` if it is taken.
    """
    after_x = list(parameters.values())[2:]
    first = [p.name for p in after_x if p.kind is p.POSITIONAL_ONLY]
    first = list(itertools.takewhile(lambda name: values([name], True), first))
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    names = [p.name for p in after_x if p.kind in kinds]
    passes_on = any(p.kind is p.VAR_KEYWORD for p in after_x)

    def arguments(
        x: Array, train: bool, mask: Array | None = None
    ) -> tuple[list[bool], dict[str, Any]]:
        args, named = list(values(first, train).values()), values(names, train)
        shape, passed_on = jax.ShapeDtypeStruct(x.shape, x.dtype), {}
        for name in _NAMES if passes_on else ():
            switch = values([name], train)
            both = named | switch
            try:
                jax.eval_shape(lambda x, both=both: attempt(x, *args, **both), shape)
            except Exception:  # noqa: S112  a user's module may fail in any way
                continue
            passed_on |= switch
        masked = {"mask": mask} if mask is not None and "mask" in names else {}
        return args, named | passed_on | masked

    return arguments
