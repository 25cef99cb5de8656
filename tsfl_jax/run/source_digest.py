"""Whether a part of the user's own changed: what it is, as a name and a digest.

A function or class is its source text; a function also its defaults and what it closes
over; an object its class and attributes. The source of Python, installed packages and
tsfl_jax is left out, so that those may be upgraded.

NOT seen: what a function reads from its module, such as a global number or a helper
function; attributes in C or in slots; files. Functions typed into a prompt have no
source: of them the byte code counts.
"""

import functools
import hashlib
import inspect
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


def _text(thing: Any, texts: dict[int, tuple[Any, str]]) -> str:
    if type(thing) in _PLAIN:
        return repr(thing)
    if id(thing) not in texts:
        texts[id(thing)] = thing, "itself"  # kept, so that no other has its address
        parts = [_text(part, texts) for part in _parts(thing)]
        parts = sorted(parts) if isinstance(thing, frozenset | set) else parts
        digest = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass"))
        named: Any = thing if hasattr(thing, "__qualname__") else type(thing)
        words = [f"{_module(named)}.{named.__qualname__}"]
        words += [digest.hexdigest()[:16]] if parts else []
        texts[id(thing)] = thing, " ".join(words)
    return texts[id(thing)][1]


def _module(thing: Any) -> str:
    # A user's wrapper of a library's function has the module of that in `__module__`.
    space = thing.__globals__ if isinstance(thing, types.FunctionType) else {}
    return space.get("__name__") or getattr(thing, "__module__", None) or ""


def _source(thing: Any) -> str:
    """The text of a user's function or class; of a library's the name is enough."""
    top = _module(thing).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    installed = {"dist-packages", "site-packages"} & {*pathlib.Path(file).parts}
    if installed or top == "tsfl_jax" or top in sys.stdlib_module_names:
        return ""
    try:
        return inspect.getsource(getattr(thing, "__code__", thing))
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {code.co_consts}"


def _parts(thing: Any) -> list[Any]:
    """What tells a thing from others of its name."""
    if isinstance(thing, _ARRAYS):
        key = jnp.issubdtype(thing.dtype, jax.dtypes.prng_key)
        plain: Any = jax.random.key_data(jnp.asarray(thing)) if key else thing
        return [data.fingerprint(plain)]
    if isinstance(thing, types.FunctionType):
        closure = [c.cell_contents for c in thing.__closure__ or ()]
        return [_source(thing), *closure, thing.__defaults__, thing.__kwdefaults__]
    if isinstance(thing, type):
        return [_source(thing), *thing.__bases__] if thing is not object else []
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, dict | types.MappingProxyType):
        return [*thing.items()]
    if isinstance(thing, frozenset | list | set | tuple):
        return [type(thing), *thing]
    state = {"__wrapped__": getattr(thing, "__wrapped__", None)}  # by jax.jit
    state |= {n: v for n, v in getattr(thing, "__dict__", {}).items() if n[:2] != "__"}
    return [type(thing), *((n, state[n]) for n in sorted(state.keys() - _PRIVATE))]
