"""Whether a part of the user's own changed: what it is, as a name and a digest.

A function is its compiled code, its defaults, what it closes over, and those globals it
names that are callables, numbers, text, arrays or collections. A class is its members,
an object its class and attributes. Of Python, installed packages and tsfl_jax the code
is left out, so that those may be upgraded.

NOT seen: what is reached as an attribute of a module or of a global object, such as
``helpers.scale(x)``; what objects keep in C and do not pickle; files.
"""

import contextlib
import functools
import hashlib
import inspect
import pathlib
import sys
import types
from collections.abc import Mapping, Set
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import data

_PLAIN = (bool, bytes, complex, float, int, str, type(None), type(...))
_ARRAYS = (np.ndarray, np.generic, jax.Array)
_COLLECTIONS = (dict, frozenset, list, set, tuple, types.MappingProxyType)
_HOLDERS = {  # by what they hold
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget",),
    staticmethod: ("__func__",),
    types.BuiltinMethodType: ("__self__", "__name__"),
    types.CodeType: ("co_code", "co_names", "co_varnames", "co_consts"),
    types.MethodType: ("__func__", "__self__"),
}
_FOLLOWED = (*_PLAIN, *_ARRAYS, *_COLLECTIONS, *_HOLDERS)
# What JAX and Flax keep in objects for themselves.
_PRIVATE = {"_jit_info", "_object__state", "_pytree__state", "_trace_state"}
_PRIVATE_IN_LINEN = {"_id", "_parent_ref", "_state", "parent", "scope"}


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
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if not isinstance(name, str):
        return ""
    # A user's wrapper of a library's function has the module of that in `__module__`.
    space = thing.__globals__ if isinstance(thing, types.FunctionType) else {}
    module = space.get("__name__") or getattr(thing, "__module__", None)
    module = module or type(thing).__module__
    return f"{module}.{name}"


def _is_library(module: str) -> bool:
    """Whether a module is Python's, installed or of this package, not a user's."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    installed = {"dist-packages", "site-packages"} & {*pathlib.Path(file).parts}
    return bool(installed) or top == "tsfl_jax" or top in sys.stdlib_module_names


def _parts(thing: Any) -> list[Any]:
    """What tells a thing from others of its name."""
    if isinstance(thing, _ARRAYS):
        return _parts_of_array(thing)
    module, _, name = _name(thing).rpartition(".")
    library = _is_library(module)
    if library and getattr(sys.modules.get(module), name, None) is thing:
        return []
    for kind, names in _HOLDERS.items():
        if isinstance(thing, kind):
            return [getattr(thing, n) for n in names]
    if isinstance(thing, types.FunctionType):
        return _parts_of_function(thing, library)
    if isinstance(thing, type):
        members = vars(thing)
        return [type(thing), *thing.__bases__, *_followed(members, members.keys())]
    if isinstance(thing, dict | types.MappingProxyType):
        return [type(thing), *thing.items()]
    if isinstance(thing, _COLLECTIONS):
        return [type(thing), *thing]
    return [type(thing), *_state(thing)]


def _parts_of_array(array: Any) -> list[Any]:
    if array.dtype == object:
        return array.tolist()
    key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return [data.fingerprint(jax.random.key_data(array) if key else array)]


def _parts_of_function(thing: types.FunctionType, library: bool) -> list[Any]:
    code, cells = thing.__code__, thing.__closure__ or ()
    if code.co_filename.startswith("<@beartype") or "jaxtyping" in _name(thing):
        return [inspect.unwrap(thing)]  # checks of annotations change no result
    held = [c.cell_contents for c in cells if c != types.CellType()]  # an empty one
    held += [thing.__defaults__, thing.__kwdefaults__]
    named = _followed(thing.__globals__, _names(code))
    return held if library else [code, *held, *named]


def _names(code: types.CodeType) -> set[str]:
    """Names in code and in the functions inside of it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _followed(space: Mapping[str, Any], names: Set[str]) -> list[Any]:
    """Globals or members of some names, as far as they are followed."""
    return [
        (name, space[name])
        for name in sorted(space.keys() & names)
        if callable(space[name])
        or (isinstance(space[name], _FOLLOWED) and not name.startswith("__"))
    ]


def _state(thing: Any) -> list[Any]:
    """Attributes of an object; of one without, what it would be pickled to."""
    state: Any = object.__getstate__(thing)  # with slots a tuple of two
    found = dict[str, Any]()
    for part in state if isinstance(state, tuple) else (state,):
        found |= part or {}
    private = _PRIVATE | (_PRIVATE_IN_LINEN if isinstance(thing, nn.Module) else set())
    private |= {n for n in found if n.startswith("__") and n != "__wrapped__"}
    if found:
        return sorted((n, found[n]) for n in found.keys() - private)
    with contextlib.suppress(Exception):  # of a lock, a generator, …
        return [thing.__reduce_ex__(2)]
    return []
