"""What a user's own function, class or object is, as text: the same in every process.

A function is its code and all that the code names: globals, helpers, classes, closures.
A class is its members and bases, an object its class and attributes, an array a digest.
What comes from a library is its name: its code is of a version, ours of a setting. Left
out are addresses, file names, line numbers and docstrings.

NOT seen: what a function makes of text (`getattr` with computed names), and files.
"""

import builtins
import contextlib
import copyreg
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import os
import secrets
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import data
from tsfl_jax.experiment import bytecode

_MOST_CHARACTERS = 200  # of a part; the rest is in its digest
_MOST_PARTS = 1_000_000  # of a thing; what has more is not followed
# Also where they are installed from a checkout.
_LIBRARIES = {"chex", "flax", "jax", "jaxlib", "jaxtyping", "numpy", "optax"}
_LIBRARIES |= {"tsfl_jax", "typing_extensions"}
_INSTALLED = {"site-packages", "dist-packages"}
_PLAIN = {bool, bytes, complex, float, int, range, str}
_PLAIN |= {type(None), type(...), type(NotImplemented)}
_HEAP = 1 << 9  # flag of types that are not part of Python or a library in C
# What Python and Flax note in classes and objects, some of it when they are used.
_NOTED = {
    *("__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__"),
    *("__annotations_cache__", "__classcell__", "__dataclass_params__", "__dict__"),
    *("__doc__", "__firstlineno__", "__module__", "__name__", "__orig_bases__"),
    *("__parameters__", "__qualname__", "__slotnames__", "__slots__"),
    *("__static_attributes__", "__type_params__", "__weakref__", "_abc_impl"),
    *("_object__state", "_pytree__state"),
}
_OF_MODULES = {
    *("__annotations__", "__builtins__", "__cached__", "__doc__", "__file__"),
    *("__loader__", "__name__", "__package__", "__path__", "__spec__"),
}
_OF_LINEN = {"_id", "_parent_ref", "_state", "parent", "scope"}
_OF_VARIABLES = {"_trace_state"}
# With these code reaches names that it does not have.
_DYNAMIC = {"__import__", "eval", "exec", "globals"}
_PROCESS = secrets.token_hex(6)
# Objects that cannot be described, kept so that no other one gets the same address.
_UNKNOWN: dict[int, tuple[int, Any]] = {}


class _Walk(NamedTuple):
    """What is known on the way through a thing."""

    done: dict[int, tuple[Any, str]]  # by address, with the object to keep it in use
    open: list[int]  # from the first one to the present one
    unknown: dict[str, None]  # what could not be described
    own: list[str]  # a user's functions, those that others name first


def describe(thing: Any) -> str:
    """Describe a thing so that two are equal if their texts are, in any process.

    Args:
      thing: a function, a class, an object, an array, or a structure of those.

    Returns:
      Its parts as text, long ones as digests. If a part cannot be described (a lock, an
      open file), the text is another one in every process, and names it.
    """
    walk = _Walk({}, [], {}, [])
    text = _of(thing, walk, 3 * _MOST_CHARACTERS)
    if "…" in text and walk.own and walk.own[-1] not in text:
        text += f" of {walk.own[-1]}"  # for a reader, the digest has it
    if not walk.unknown:
        return text
    return f"{text}, with what cannot be compared: {', '.join(sorted(walk.unknown))}"


def _of(thing: Any, walk: _Walk, most: int = _MOST_CHARACTERS) -> str:
    if type(thing) in _PLAIN:
        return _short(repr(thing), most)
    here = id(thing)
    if here in walk.done:
        return walk.done[here][1]
    if here in walk.open:  # a function that calls itself, say
        return f"^{len(walk.open) - walk.open.index(here)}"
    if len(walk.done) > _MOST_PARTS:
        walk.unknown[f"more than {_MOST_PARTS:,} parts"] = None
        return secrets.token_hex(6)
    walk.open.append(here)
    try:
        text = _short(_compose(thing, walk), most)
    except Exception:  # of a property or `__reduce__` of the object's, or too deep
        text = _unknown(thing, walk)
    finally:
        walk.open.pop()
    walk.done[here] = thing, text
    return text


def _short(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: most // 3]}…{digest[:16]}"


def _unknown(thing: Any, walk: _Walk, why: str = "") -> str:
    number, _ = _UNKNOWN.setdefault(id(thing), (len(_UNKNOWN), thing))
    kind = why or f"{type(thing).__module__}.{type(thing).__qualname__}"
    walk.unknown[kind] = None
    return f"{kind} {_PROCESS}-{number}"


def _compose(thing: Any, walk: _Walk) -> str:
    name = _known_name(thing)
    if name:
        return name
    if type(thing) in (list, tuple):
        text = ", ".join(_of(part, walk) for part in thing)
        return f"[{text}]" if type(thing) is list else f"({text})"
    if type(thing) is dict:
        return f"{{{_items(thing.items(), walk)}}}"
    for kind, compose in _KINDS:
        if isinstance(thing, kind):
            return compose(thing, walk)
    return _object(thing, walk)


def _items(items: Iterable[tuple[Any, Any]], walk: _Walk) -> str:
    return ", ".join(f"{_of(key, walk)}: {_of(part, walk)}" for key, part in items)


def _named(parts: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {text}" for name, text in parts.items())


@functools.lru_cache(maxsize=4096)
def _is_own(module: str | None, file: str | None = None) -> bool:
    """Whether a module is a user's: in no folder of installed packages."""
    top = (module or "").partition(".")[0]
    if top in ("", "__main__"):  # text given to `exec`, a script, a notebook
        return True
    if top in _LIBRARIES or top in sys.builtin_module_names:
        return False
    if not file:
        found = sys.modules.get(module or "") or sys.modules.get(top)
        spec = None if found else importlib.util.find_spec(top)
        file = getattr(found, "__file__", None) or (spec and spec.origin)
    if not file or file in ("built-in", "frozen"):
        return top not in sys.stdlib_module_names
    path = os.path.realpath(file)
    if _INSTALLED & set(path.split(os.sep)):
        return False
    folders = {sysconfig.get_path(n) for n in ("stdlib", "platstdlib")}
    roots = [os.path.realpath(f) + os.sep for f in folders]
    return not path.startswith(tuple(roots))


def _known_name(thing: Any) -> str:
    """The name under which a library has this very thing, else empty."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or _is_own(module):
        return ""
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is thing else ""


def _function(thing: Any, walk: _Walk) -> str:
    """A function: its code, what it closes over and, of a user's own, its globals."""
    space, read = thing.__globals__, bytecode.read(thing.__code__)
    library = str(space.get("__name__")).partition(".")[0]
    checks = thing.__code__.co_filename.startswith("<@beartype")
    if (checks or library == "jaxtyping") and hasattr(thing, "__wrapped__"):
        return _of(thing.__wrapped__, walk)  # checks of annotations change no result
    parts = {}
    for name, part in (
        ("defaults", thing.__defaults__),
        ("keywords", thing.__kwdefaults__),
        ("attributes", _without_notes(vars(thing))),
    ):
        if part:
            parts[name] = _of(part, walk)
    names = thing.__code__.co_freevars
    for name, cell in zip(names, thing.__closure__ or (), strict=True):
        try:
            parts[name] = _used(name, cell.cell_contents, read, walk)
        except ValueError:
            parts[name] = "not yet filled"
    own = _is_own(space.get("__name__"), space.get("__file__"))
    if own:
        for name in read.loaded:
            if name in space and name not in _OF_MODULES:
                parts[f"global {name}"] = _used(name, space[name], read, walk)
            elif name in _DYNAMIC and hasattr(builtins, name):
                why = f"{name}() in {thing.__qualname__}"
                parts[name] = _unknown(thing, walk, why)
        parts |= _imports(space, read, walk)
    text = f"{thing.__module__}.{thing.__qualname__}:{read.digest}"
    text = _short(f"{text}[{_named(parts)}]" if parts else text, _MOST_CHARACTERS)
    if own and thing.__code__.co_filename != "<string>":  # as of a dataclass
        walk.own.append(text)
    return text


def _without_notes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in sorted(attributes.items()) if n not in _NOTED}


def _used(name: str, thing: Any, read: bytecode.Read, walk: _Walk) -> str:
    """What code uses of a thing that it names: of a user's own module, attributes."""
    if not isinstance(thing, types.ModuleType):
        return _of(thing, walk)
    if not _is_own(thing.__name__, getattr(thing, "__file__", None)):
        return thing.__name__
    if id(thing) in walk.open:
        return "^"
    # Where else it goes, other attributes may be used.
    whole = _of(thing, walk) if name in read.bare else thing.__name__
    walk.open.append(id(thing))
    try:
        parts = {
            attribute: _used("", vars(thing)[attribute], read, walk)
            for attribute in read.names
            if attribute in vars(thing) and attribute not in _OF_MODULES
        }
    finally:
        walk.open.pop()
    return f"{whole}{{{_named(parts)}}}"


def _imports(space: dict, read: bytecode.Read, walk: _Walk) -> dict[str, str]:
    """A user's own modules that a function itself imports."""
    found = {}
    for name, fromlist, level, into in read.imports:
        if level == 0 and not _is_own(name.partition(".")[0]):
            continue
        try:  # as it will when it is called
            module = builtins.__import__(name, space, None, fromlist, level)
        except Exception as error:
            text = f"fails: {type(error).__name__}"
        else:
            text = _used(into, module, read, walk)
        found[f"import {'.' * level}{name}"] = text
    return found


def _module(thing: types.ModuleType, walk: _Walk) -> str:
    """A library's module is its name, a user's own the code in its file."""
    if not _is_own(thing.__name__, getattr(thing, "__file__", None)):
        return thing.__name__
    spec: Any = thing.__spec__  # without one in a script: not to be described
    code = spec.loader.get_code(thing.__name__)
    return f"{thing.__name__}:{bytecode.read(code).digest}"


def _class(kind: type, walk: _Walk) -> str:
    """A class, also one that a library makes of a user's own: members and bases."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not kind.__flags__ & _HEAP:
        return name
    parts = {
        member: _of(value, walk)
        for member, value in _without_notes(vars(kind)).items()
        if member not in _private(kind)
    }
    bases = [_of(base, walk) for base in kind.__bases__ if base is not object]
    if type(kind) is not type:
        bases.append(f"metaclass {_of(type(kind), walk)}")
    return f"{name}({', '.join(bases)}){{{_named(parts)}}}"


def _of_nnx(*names: str) -> tuple[type, ...]:
    """Classes of nnx, all by default; none unless the user has imported nnx."""
    nnx = sys.modules.get("flax.nnx")  # slow to import
    names = names or ("Module", "Object", "Pytree", "Variable")
    return tuple(getattr(nnx, n) for n in names if hasattr(nnx, n))


def _private(kind: type) -> set[str]:
    """What Flax keeps in its classes and objects for itself."""
    if issubclass(kind, nn.Module):
        return _OF_LINEN
    return _OF_VARIABLES if issubclass(kind, _of_nnx("Variable")) else set()


def _attributes(thing: Any) -> dict[str, Any]:
    """Attributes of an object, also in slots, without those that others follow from."""
    kind, found = type(thing), {}
    left_out = _NOTED | _private(kind)
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, functools.cached_property):
                left_out |= {name}
            slot = isinstance(member, types.MemberDescriptorType)
            # Members of types in C are in what they are pickled to.
            if slot and "__slots__" in vars(base):
                with contextlib.suppress(AttributeError):  # not set
                    found[name] = member.__get__(thing)
    with contextlib.suppress(AttributeError):  # there are only slots
        found |= object.__getattribute__(thing, "__dict__")
    return {n: v for n, v in sorted(found.items()) if n not in left_out}


def _object(thing: Any, walk: _Walk) -> str:
    """An object: its class, its attributes, and what it has in C.

    Raises:
      TypeError: what it has in C cannot be read.
    """
    kind = type(thing)
    attributes = _attributes(thing)
    text = _of(kind, walk)
    wrapped = attributes.get("__wrapped__")
    if callable(wrapped) and kind.__module__.startswith("jaxlib"):  # jax.jit
        return f"{text} of {_of(wrapped, walk)}"
    if callable(wrapped) or isinstance(thing, _of_nnx()):  # attributes are all there is
        return f"{text}{{{_items(attributes.items(), walk)}}}"
    kept = [
        getattr(kind, name) is getattr(object, name)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    ]
    reduce = copyreg.dispatch_table.get(kind)
    parts: Any = reduce(thing) if reduce else thing.__reduce_ex__(4)
    own = _is_own(kind.__module__)
    if isinstance(parts, str):  # its name, which says little of what a user made
        module = getattr(thing, "__module__", None)
        if _is_own(module) and not own and kind.__module__ != "typing":
            raise TypeError(f"{parts} is all that is known")
        parts = (f"{module}.{parts}",)
    make, args, state, *items = (*parts, *(None,) * (6 - len(parts)))
    listed = [None if found is None else list(found) for found in items[:2]]
    if reduce or not all(kept):
        # What a user's own class gives to pickle need not be all there is.
        attributes = attributes if own else {}
        told = [make, args, state, *listed]
    else:
        args = args or ()  # the class is the first one
        told = [args[1:], *listed]
    told = [p for p in told if not (p is None or (type(p) is tuple and not p))]
    text += f"({', '.join(_of(part, walk) for part in told)})" if told else ""
    return f"{text}{{{_items(attributes.items(), walk)}}}" if attributes else text


def _array(thing: Any, walk: _Walk) -> str:
    if isinstance(thing, np.ndarray) and type(thing) is not np.ndarray:
        return _object(thing, walk)  # with a mask, say
    if jnp.issubdtype(thing.dtype, jax.dtypes.prng_key):
        bits = _array(jax.random.key_data(thing), walk)
        return f"key {jax.random.key_impl(thing)} {bits}"
    array = np.asarray(thing)
    text = f"{array.dtype}{list(array.shape)}"
    text += " weak" * bool(getattr(thing, "weak_type", False))
    if array.dtype.hasobject:
        return f"{text} {_of(array.tolist(), walk)}"
    return f"{text} {data.fingerprint(array)}"


def _builtin(thing: Any, walk: _Walk) -> str:
    """A function in C: its name, or its method's and the object.

    Raises:
      TypeError: it is of a user's own module in C.
    """
    module = getattr(thing, "__module__", None)
    if module and _is_own(module):
        raise TypeError(f"{module} is in C")
    name = thing.__qualname__
    if thing.__self__ is None or isinstance(thing.__self__, types.ModuleType):
        return f"{module}.{name}"
    return f"{name} of {_of(thing.__self__, walk)}"


def _set(thing: Any, walk: _Walk) -> str:
    # The order differs from process to process, and so must not matter.
    parts = sorted(_of(part, walk._replace(done={})) for part in thing)
    return f"{{{', '.join(parts)}}}{_of_own_kind(thing, walk)}"


def _of_own_kind(thing: Any, walk: _Walk) -> str:
    """What an object has besides, if its class is a user's."""
    kind = type(thing)
    if not (kind.__flags__ & _HEAP and _is_own(kind.__module__)):
        return ""
    return f"{_of(kind, walk)}{{{_items(_attributes(thing).items(), walk)}}}"


def _parts_of(*names: str) -> Callable[[Any, _Walk], str]:
    """A description by type and some attributes."""

    def compose(thing: Any, walk: _Walk) -> str:
        parts = [_of(getattr(thing, name), walk) for name in names]
        text = f"{type(thing).__name__}({', '.join(parts)})"
        return text + _of_own_kind(thing, walk)

    return compose


_KINDS: tuple[tuple[Any, Callable[[Any, _Walk], str]], ...] = (
    (types.FunctionType, _function),
    (types.MethodType, _parts_of("__func__", "__self__")),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
    (
        (
            *(types.WrapperDescriptorType, types.MethodDescriptorType),
            *(types.ClassMethodDescriptorType, types.GetSetDescriptorType),
            types.MemberDescriptorType,
        ),
        _parts_of("__qualname__"),
    ),
    (type, _class),
    (types.ModuleType, _module),
    ((staticmethod, classmethod), _parts_of("__func__")),
    (property, _parts_of("fget", "fset", "fdel")),
    (functools.cached_property, _parts_of("func")),
    (functools.partial, _parts_of("func", "args", "keywords")),
    (
        dataclasses.Field,
        _parts_of("default", "default_factory", "metadata", "init", "kw_only"),
    ),
    (types.MappingProxyType, lambda thing, walk: _of(dict(thing), walk)),
    ((np.ndarray, np.generic, jax.Array), _array),
    ((set, frozenset), _set),
    (jax.Device, lambda thing, walk: str(thing)),
    (inspect.Parameter, _parts_of("name", "kind", "default")),  # not its annotation
)
