"""What a user's own function, class or object is, as text: the same in every process.

A function is its code and all that the code names: globals, helpers, classes, closures.
A class is its members and bases, an object its class and attributes, an array a digest.
What comes from Python, JAX's family, SciPy or tsfl_jax is its name; what comes from any
other installed package is its name and a digest of the package's files, as it may be a
user's. Left out are addresses, file names, line numbers and docstrings.

NOT seen: what a function makes of text (`getattr` with computed names, `__getattr__` of
a module), the state inside of libraries (`numpy.random`, `os.environ`), and files.
"""

import builtins
import contextlib
import copyreg
import dataclasses
import functools
import hashlib
import inspect
import random
import secrets
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import data
from tsfl_jax.experiment import bytecode, packages

_MOST_CHARACTERS = 200  # of a part; the rest is in its digest
_MOST_PARTS = 1_000_000  # of a thing; what has more is not followed
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
_NOTED_IN_MODULES = {
    *("__annotations__", "__builtins__", "__cached__", "__doc__", "__file__"),
    *("__loader__", "__name__", "__package__", "__path__", "__spec__"),
}
_NOTED_BY_LINEN = {"_id", "_parent_ref", "_state", "parent", "scope"}
_NOTED_BY_VARIABLES = {"_trace_state"}
# With these code reaches names that it does not have.
_DYNAMIC = {"__import__", "eval", "exec", "globals"}
# Of the modules `random` and `numpy.random`, whose functions are its methods.
_GENERATORS: tuple[Any, ...] = (random.random.__self__, np.random.random.__self__)
_PROCESS = secrets.token_hex(6)
# Objects that cannot be described, kept so that no other one gets the same address.
_UNKNOWN: dict[int, tuple[int, Any]] = {}


class _Walk(NamedTuple):
    """What is known on the way through a thing."""

    done: dict[int, tuple[Any, str]]  # by address, with the object to keep it in use
    open: list[int]  # from the first one to the present one
    unknown: dict[str, None]  # what could not be described
    own: list[str]  # a user's functions, those that others name first
    modules: dict[tuple[int, str], str]  # what code uses of them, by address and code
    visits: list[None]  # one for each part, also of copies of this walk


def describe(thing: Any) -> str:
    """Describe a thing so that two are equal if their texts are, in any process.

    Args:
      thing: a function, a class, an object, an array, or a structure of those.

    Returns:
      Its parts as text, long ones as digests. If a part cannot be described (a lock, an
      open file), the text is another one in every process, and names it.
    """
    walk = _Walk({}, [], {}, [], {}, [])
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
    walk.visits.append(None)
    if len(walk.visits) > _MOST_PARTS:
        walk.unknown[f"more than {_MOST_PARTS:,} parts"] = None
        return secrets.token_hex(6)
    walk.open.append(here)
    try:
        text = _short(_compose(thing, walk), most)
    except RecursionError:
        text = _unknown(thing, walk, "what is nested too deeply")
    except Exception:  # of a property or `__reduce__` of the object's
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
    if any(thing is one for one in _GENERATORS):
        return _unknown(thing, walk, "the state of a random generator of all code")
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


def _known_name(thing: Any) -> str:
    """The name under which a library has this very thing, else empty."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or packages.is_own(
        module
    ):
        return ""
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}{packages.release(module)}" if found is thing else ""


def _function(thing: Any, walk: _Walk) -> str:
    """A function: its code, what it closes over and, of a user's own, its globals."""
    space, read = thing.__globals__, bytecode.read(thing.__code__)
    library = str(space.get("__name__")).partition(".")[0]
    checks = thing.__code__.co_filename.startswith("<@beartype")
    if (checks or library == "jaxtyping") and hasattr(thing, "__wrapped__"):
        return _of(thing.__wrapped__, walk)  # checks of annotations change no result
    if isinstance(getattr(thing, "registry", None), types.MappingProxyType):
        return f"singledispatch {_of(thing.registry, walk)}"  # it has a cache besides
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
    own = packages.is_own(space.get("__name__"), space.get("__file__"))
    if own:
        for name in read.loaded:
            if name in space and name not in _NOTED_IN_MODULES:
                parts[f"global {name}"] = _used(name, space[name], read, walk)
            elif name in _DYNAMIC and hasattr(builtins, name):
                why = f"{name}() in {thing.__qualname__}"
                parts[name] = _unknown(thing, walk, why)
        parts |= _imports(space, read, walk)
    text = f"{thing.__module__}.{thing.__qualname__}:{read.digest}"
    text += packages.release(space.get("__name__"))
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
    if not packages.is_own(thing.__name__, getattr(thing, "__file__", None)):
        return f"{thing.__name__}{packages.release(thing.__name__)}"
    if id(thing) in walk.open:
        return "^"
    known = id(thing), f"{read.digest} {name in read.bare}"
    if known in walk.modules:
        return walk.modules[known]
    # Where else it goes, other attributes may be used.
    whole = _of(thing, walk) if name in read.bare else thing.__name__
    walk.open.append(id(thing))
    try:
        parts = {
            attribute: _used("", vars(thing)[attribute], read, walk)
            for attribute in read.names
            if attribute in vars(thing) and attribute not in _NOTED_IN_MODULES
        }
    finally:
        walk.open.pop()
    walk.modules[known] = f"{whole}{{{_named(parts)}}}"
    return walk.modules[known]


def _imports(space: dict, read: bytecode.Read, walk: _Walk) -> dict[str, str]:
    """A user's own modules that a function itself imports."""
    found = {}
    for name, fromlist, level, into in read.imports:
        if level == 0 and not packages.is_own(name.partition(".")[0]):
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
    """A library's module is its name, a user's own its code and what that imports."""
    if not packages.is_own(thing.__name__, getattr(thing, "__file__", None)):
        return f"{thing.__name__}{packages.release(thing.__name__)}"
    spec: Any = thing.__spec__  # without one in a script: not to be described
    read = bytecode.read(spec.loader.get_code(thing.__name__))
    imports = _imports(vars(thing), read, walk)
    return f"{thing.__name__}:{read.digest}[{_named(imports)}]"


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
        return _NOTED_BY_LINEN
    return _NOTED_BY_VARIABLES if issubclass(kind, _of_nnx("Variable")) else set()


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
    """An object: its class, its attributes, and what it has in C."""
    kind = type(thing)
    attributes = _attributes(thing)
    text = _of(kind, walk)
    wrapped = attributes.get("__wrapped__")
    if callable(wrapped) and kind.__module__.startswith("jaxlib"):  # jax.jit
        return f"{text} of {_of(wrapped, walk)}"
    if callable(wrapped) or isinstance(thing, _of_nnx()):  # attributes are all there is
        return f"{text}{{{_items(attributes.items(), walk)}}}"
    pickled, whole = _pickled(thing)
    if whole:
        attributes = {}
    text += f"({', '.join(_of(part, walk) for part in pickled)})" if pickled else ""
    return f"{text}{{{_items(attributes.items(), walk)}}}" if attributes else text


def _pickled(thing: Any) -> tuple[list[Any], bool]:
    """What an object gives to pickle, and whether its attributes are in it.

    Raises:
      TypeError: what it has in C cannot be read.
    """
    kind = type(thing)
    reduce = copyreg.dispatch_table.get(kind)
    by_default = not reduce and all(
        getattr(kind, name) is getattr(object, name)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )
    parts: Any = reduce(thing) if reduce else thing.__reduce_ex__(4)
    own = packages.is_own(kind.__module__)
    if isinstance(parts, str):  # its name, which says little of what a user made
        module = getattr(thing, "__module__", None)
        if packages.is_own(module) and not own and kind.__module__ != "typing":
            raise TypeError(f"{parts} is all that is known")
        parts = (f"{module}.{parts}",)
    make, args, state, *items = (*parts, *(None,) * (6 - len(parts)))
    listed = [None if found is None else list(found) for found in items[:2]]
    # By default the state is the attributes, the first argument the class.
    first = [(args or ())[1:]] if by_default else [make, args, state]
    given = [
        part
        for part in (*first, *listed)
        if not (part is None or (type(part) is tuple and not part))
    ]
    # What a user's own class gives to pickle need not be all there is.
    return given, not by_default and not own


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
    if module and packages.is_own(module):
        raise TypeError(f"{module} is in C")
    name = thing.__qualname__
    if thing.__self__ is None or isinstance(thing.__self__, types.ModuleType):
        return f"{module}.{name}{packages.release(module)}"
    return f"{name} of {_of(thing.__self__, walk)}"


def _ufunc(thing: np.ufunc, walk: _Walk) -> str:
    """A universal function: its name, if a library has it.

    Raises:
      TypeError: `numpy.frompyfunc` made it of another function.
    """
    name = thing.__name__
    for module in list(sys.modules.values()):
        library = (
            getattr(module, "__name__", "").partition(".")[0] in packages.LIBRARIES
        )
        if library and vars(module).get(name) is thing:
            return f"ufunc {name}"
    raise TypeError(f"{name} is in C")


def _set(thing: Any, walk: _Walk) -> str:
    # The order differs from process to process, and so must not matter.
    alone = (walk._replace(done={}, modules={}) for _ in thing)
    parts = sorted(_of(part, one) for part, one in zip(thing, alone, strict=True))
    return f"{{{', '.join(parts)}}}{_of_own_kind(thing, walk)}"


def _of_own_kind(thing: Any, walk: _Walk) -> str:
    """What an object has besides, if its class is a user's."""
    kind = type(thing)
    if not (kind.__flags__ & _HEAP and packages.is_own(kind.__module__)):
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
    (np.ufunc, _ufunc),
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
