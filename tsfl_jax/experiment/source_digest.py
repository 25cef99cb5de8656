"""Whether a part of the user's own changed: what it is, as a name and a digest.

A function is its compiled code, its defaults, what it closes over, and the functions,
numbers, text and arrays that it names in its own module; an object its class and
attributes. Code of Python, installed packages and tsfl_jax is left out, so that those
may be upgraded.

NOT seen: what is reached as an attribute of a module, such as ``helpers.scale(x)``;
properties; what objects keep in C or in slots; files.
"""

import functools
import hashlib
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import data

_PLAIN = (bool, bytes, complex, float, int, str, type(None), type(...))
_ARRAYS = (np.ndarray, np.generic, jax.Array)
_COLLECTIONS = (frozenset, list, set, tuple)
_HOLDERS = {  # by what they hold
    classmethod: ("__func__",),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    types.CodeType: ("co_code", "co_names", "co_varnames", "co_consts"),
    types.MethodType: ("__func__", "__self__"),
}
# What JAX and Flax keep in objects for themselves.
_PRIVATE = {"_jit_info", "_object__state", "_pytree__state", "_trace_state"}
_PRIVATE |= {"_id", "_parent_ref", "_state", "parent", "scope"}


def describe(thing: Any) -> str:
    """Name a thing so that two are equal if their texts are, in every process.

    Args:
      thing: a function, a class, an object, an array, or a collection of those.

    Returns:
      Its name, and 16 hex digits of a digest of its parts if it has any.
    """
    return _text(thing, {})


def _text(thing: Any, done: dict[int, tuple[Any, str]]) -> str:
    if type(thing) in _PLAIN:
        return repr(thing)
    if id(thing) not in done:
        done[id(thing)] = thing, "itself"  # kept, so that no other has its address
        texts = [_text(part, done) for part in _parts(thing)]
        texts = sorted(texts) if isinstance(thing, frozenset | set) else texts
        digest = hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass"))
        words = [_name(thing) or _name(type(thing))]
        words += [digest.hexdigest()[:16]] if texts else []
        done[id(thing)] = thing, " ".join(words)
    return done[id(thing)][1]


def _name(thing: Any) -> str:
    """Module and name of a function, class or module; an object has none."""
    name = getattr(thing, "__qualname__", None)
    return f"{_module(thing)}.{name}" if isinstance(name, str) else ""


def _module(thing: Any) -> str:
    # A user's wrapper of a library's function has the module of that in `__module__`.
    space = thing.__globals__ if isinstance(thing, types.FunctionType) else {}
    found = space.get("__name__") or getattr(thing, "__module__", None)
    return found or type(thing).__module__


def _is_library(module: str) -> bool:
    """Whether a module is Python's, installed or of this package, not a user's."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    installed = {"dist-packages", "site-packages"} & {*pathlib.Path(file).parts}
    return bool(installed) or top == "tsfl_jax" or top in sys.stdlib_module_names


def _parts(thing: Any) -> list[Any]:
    """What tells a thing from others of its name."""
    if isinstance(thing, _ARRAYS):
        key = jnp.issubdtype(thing.dtype, jax.dtypes.prng_key)
        plain: Any = jax.random.key_data(jnp.asarray(thing)) if key else thing
        return [data.fingerprint(plain)]
    for kind, names in _HOLDERS.items():
        if isinstance(thing, kind):
            return [getattr(thing, n) for n in names]
    library = _is_library(_module(thing))
    if isinstance(thing, types.FunctionType):
        held = [c.cell_contents for c in thing.__closure__ or ()]
        held += [thing.__defaults__, thing.__kwdefaults__]
        named = _named(thing.__globals__, _names(thing.__code__))
        return held if library else [thing.__code__, *held, *named]
    if isinstance(thing, type):
        if library and getattr(sys.modules.get(_module(thing)), thing.__name__, None):
            return []  # else a library has made it of a user's, as nn.remat does
        return [*thing.__bases__, *_named(vars(thing), {*vars(thing)})]
    if isinstance(thing, dict | types.MappingProxyType):
        return [*thing.items()]
    if isinstance(thing, _COLLECTIONS):
        return [type(thing), *thing]
    state = {"__wrapped__": getattr(thing, "__wrapped__", None)}  # by jax.jit
    state |= {n: v for n, v in getattr(thing, "__dict__", {}).items() if n[:2] != "__"}
    return [type(thing), *((n, state[n]) for n in sorted(state.keys() - _PRIVATE))]


def _names(code: types.CodeType) -> set[str]:
    """Names in code and in the functions inside of it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _named(space: Any, names: set[str]) -> list[Any]:
    """Globals or members of some names, without modules and other objects."""
    followed = (*_PLAIN, *_ARRAYS, *_COLLECTIONS, dict, *_HOLDERS)
    return [
        (name, space[name])
        for name in sorted(space.keys() & names)
        if callable(space[name])
        or (isinstance(space[name], followed) and not name.startswith("__"))
    ]
