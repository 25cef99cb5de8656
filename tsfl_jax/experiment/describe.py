"""A user's own functions in words, so that two runs can be told apart.

Without memory addresses: the same program in another process gives the same text.
"""

import functools
import hashlib
import re
import types
from typing import Any

_DEPTH = 10


def _code(code: types.CodeType) -> str:
    def constant(value):
        if isinstance(value, types.CodeType):
            return _code(value)
        # A set's order differs from process to process.
        return sorted(map(repr, value)) if isinstance(value, frozenset) else value

    inner = [constant(value) for value in code.co_consts]
    text = f"{code.co_code!r}{inner!r}{code.co_names!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe(thing: Any, depth: int = _DEPTH) -> str:
    """Name, code, defaults and closure of a function; values of anything else."""
    if depth == 0:
        return "…"

    def inner(part):
        return describe(part, depth - 1)

    if isinstance(thing, functools.partial):
        parts = (thing.func, thing.args, thing.keywords)
        return f"partial({', '.join(map(inner, parts))})"
    if isinstance(thing, types.MethodType):
        return f"{inner(thing.__func__)} of {inner(thing.__self__)}"
    if isinstance(thing, types.FunctionType):
        cells = []
        for cell in thing.__closure__ or ():
            try:
                cells.append(inner(cell.cell_contents))
            except ValueError:  # not yet filled
                cells.append("empty")
        name = f"{thing.__module__}.{thing.__qualname__}"
        defaults = inner(thing.__defaults__)
        return f"{name}:{_code(thing.__code__)}{defaults}[{', '.join(cells)}]"
    if isinstance(thing, tuple | list):
        return f"({', '.join(inner(part) for part in thing)})"
    if isinstance(thing, set | frozenset):
        return f"{{{', '.join(sorted(map(inner, thing)))}}}"
    if isinstance(thing, dict):
        return f"{{{', '.join(f'{k}: {inner(v)}' for k, v in thing.items())}}}"
    text = " ".join(repr(thing).split())
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
