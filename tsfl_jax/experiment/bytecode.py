"""What Python's code does and names, without the place where it was written."""

import dis
import functools
import hashlib
import inspect
import types
from typing import Any, NamedTuple

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_CLOSED = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
# A class's body stores these of itself; the first one is a line number.
_OF_ITS_PLACE = {"__firstlineno__", "__static_attributes__", "__doc__"}


class Import(NamedTuple):
    """An import statement in a function."""

    name: str
    fromlist: tuple[str, ...]
    level: int  # of dots
    into: str  # the variable that holds it


class Read(NamedTuple):
    """What there is to know of a code object and those inside of it."""

    digest: str  # of what it does
    loaded: tuple[str, ...]  # names of globals
    bare: frozenset[str]  # variables that are loaded for more than an attribute
    names: tuple[str, ...]  # all that can be names of attributes
    imports: tuple[Import, ...]


@functools.lru_cache(maxsize=4096)
def read(code: types.CodeType) -> Read:
    """Read a code object, without line numbers, file names and docstrings."""
    steps = [s for s in dis.get_instructions(code) if s.opname != "EXTENDED_ARG"]
    inner = [read(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    loaded, bare = set[str](), set[str]()
    names, imports, texts = set(code.co_names), [], []
    for index, step in enumerate(steps):
        after = steps[min(index + 1, len(steps) - 1)]
        if after.opname == "STORE_NAME" and after.argval in _OF_ITS_PLACE:
            continue
        texts.append(f"{step.opname} {_argument(step)}")
        if step.opname in _GLOBAL:
            loaded.add(step.argval)
        used = _loaded(step)
        bare |= {*(used[:-1] if after.opname in _ATTRIBUTE else used)}
        if step.opname == "IMPORT_NAME":
            level, fromlist = (s.argval for s in steps[index - 2 : index])
            into = after.argval if after.opname.startswith("STORE_") else ""
            into = into[0] if isinstance(into, tuple) else into
            imports.append(Import(step.argval, tuple(fromlist or ()), level or 0, into))
        elif step.opcode in dis.hasconst and isinstance(step.argval, str):
            names |= {step.argval} if step.argval.isidentifier() else set()
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    star = bool(code.co_flags & inspect.CO_VARARGS)
    double = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    given = code.co_varnames[: arguments[0] + arguments[2] + star + double]
    about = f"{code.co_name} {arguments} {given} {code.co_flags} {code.co_freevars}"
    imports += [found for one in inner for found in one.imports]
    text = "\n".join([about, *texts, repr(code.co_exceptiontable)])
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Read(
        digest=digest[:16],
        loaded=tuple(sorted(loaded.union(*(i.loaded for i in inner)))),
        bare=frozenset(bare.union(*(i.bare for i in inner))),
        names=tuple(sorted(names.union(*(i.names for i in inner)))),
        imports=tuple(dict.fromkeys(imports)),
    )


def _loaded(step: dis.Instruction) -> tuple[str, ...]:
    """The variables that a step loads; some versions of Python load two at once."""
    if step.opname in _GLOBAL | _CLOSED:
        return (step.argval,)
    if "LOAD_FAST" not in step.opname:
        return ()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names[1:] if step.opname.startswith("STORE_") else names


def _argument(step: dis.Instruction) -> str:
    if step.opcode in dis.hasconst:
        return _constant(step.argval)
    # Places in tables of names depend on names that do not matter.
    return step.argrepr if step.opcode in dis.hasname else str(step.arg)


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return read(value).digest
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # its order differs from process to process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return repr(value)
