"""What a component is: settings in a dataclass, declared once, beside its functions.

`setting` keeps what is known about a setting as metadata of the field. `component`
makes the dataclass a pytree: fields are arrays in a compiled program and may be swept
in it, those marked static shape it. `Config` has a section per component, by its name;
components with the same section share it. A `Part` is a row of a folder's table.

A component may have these methods, called on the host before a run:

  resolved()           a copy in which values that follow from others are filled in
  check(config, rule)  raises `UserError` where it cannot work with other settings
  notes(config, rule, schedule)  what a user should know of this run
"""

import copy
import dataclasses
import functools
import inspect
import math
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import numpy as np

from tsfl_jax.types import INT32_MAX, UserError, nearest

T = TypeVar("T")
_HUGE = float(np.finfo(np.float32).max)


class Setting(NamedTuple):
    """What is known about a setting besides its type, which is that of its default."""

    help: str = ""  # what it is, in one line, with symbol and unit
    choices: Collection[str] = ()  # names; empty: any value
    low: float = -math.inf  # least value
    high: float = math.inf  # largest value
    above: float = -math.inf  # instead of `low`, a bound that is excluded
    below: float = math.inf  # instead of `high`, a bound that is excluded
    static: bool = False  # whether it shapes the compiled program
    effect: bool = True  # whether it can change a result
    swept: bool = True  # whether runs of a sweep may differ in it
    # Another setting of its section, and the values of that one that use it; none: any
    # but its default.
    used_by: tuple[str, tuple[str, ...]] | None = None


class Part(NamedTuple):
    """A row of a folder's table: a component that a setting chooses by its name."""

    make: Any = None  # its function, see the table
    # Settings and sections, by flat name, that not every part of the table reads.
    reads: tuple[str, ...] = ()
    sections: tuple[type, ...] = ()  # components that hold settings of its own


Settings = Mapping[str, tuple[type, Setting]]  # by flat name: type and what is known


def setting(default: Any, *values: Any, **by_name: Any) -> Any:
    """Declare a setting: a dataclass field with its default and a `Setting`."""
    metadata = {"setting": Setting(*values, **by_name)}
    return dataclasses.field(default=default, metadata=metadata)


def declaration_of(field: dataclasses.Field) -> Setting:
    """What is declared of a field besides its type."""
    return field.metadata.get("setting", Setting())


@dataclass_transform(field_specifiers=(setting, dataclasses.field))
def component(section: str) -> Callable[[type[T]], type[T]]:
    """Make a class the settings of a component, a dataclass and a pytree.

    It is not frozen, since flags and users assign to a `Config`.

    Args:
      section: its name in `Config`, in flags and in sweeps.
    """

    def register(kind: type[T]) -> type[T]:
        kind = dataclasses.dataclass(kind)
        fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
        static = [field.name for field in fields if declaration_of(field).static]
        leaves = [field.name for field in fields if field.name not in static]
        jax.tree_util.register_dataclass(kind, leaves, static)
        setattr(kind, "section", section)  # noqa: B010
        return kind

    return register


def section_of(kind: Any) -> str:
    """The name of a component's section, "" for what is no component."""
    return getattr(kind, "section", "") if dataclasses.is_dataclass(kind) else ""


def changed(values: T, **new: Any) -> T:
    """A copy with other values, whatever their type."""
    copied = copy.copy(values)
    vars(copied).update(new)
    return copied


def narrowed(values: Any, kind: type[T]) -> T:
    """A component of a section that several share, with its own settings only."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return kind(**{field.name: getattr(values, field.name) for field in fields})


def resolved(values: T) -> T:
    """The component with values that follow from others filled in."""
    return getattr(values, "resolved", lambda: values)()


def arrays(values: T) -> T:
    """The component as a program takes it: float32, of choices int32 indices."""
    values, leaves = resolved(values), {}
    for field in dataclasses.fields(values):  # pyright: ignore[reportArgumentType]
        value, declaration = getattr(values, field.name), declaration_of(field)
        if declaration.static:
            continue
        if declaration.choices:
            index = [*declaration.choices].index(value)
            leaves[field.name] = np.asarray(index, np.int32)
        else:
            leaves[field.name] = np.asarray(value, np.float32)
    return changed(values, **leaves)


def declared(kind: type) -> dict[str, tuple[type, Setting]]:
    """The settings of a component, or of a dataclass and its sections, by flat name."""
    settings, prefix = {}, f"{section_of(kind)}.".lstrip(".")
    for field in dataclasses.fields(kind):
        if isinstance(field.default_factory, type):
            settings |= declared(field.default_factory)
        else:
            settings[prefix + field.name] = type(field.default), declaration_of(field)
    return settings


def check_arguments(where: str, row: Any) -> None:
    """Raise `UserError` where a row's functions and its annotations differ."""
    for name, arguments in arguments_of(type(row)).items():
        if function := getattr(row, name):
            check_function(f"{where}: {name}", function, arguments)


def arguments_of(kind: type) -> dict[str, list[str]]:
    """Types of the arguments of each function that is a field of a NamedTuple."""
    named = {}
    for name, hint in kind.__annotations__.items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
        firsts = [typing.get_args(kind)[:1] for kind in kinds]
        arguments = next((first for (first,) in filter(None, firsts)), ...)
        if isinstance(arguments, list):
            named[name] = [getattr(kind, "__name__", str(kind)) for kind in arguments]
    return named


def check_function(where: str, function: Any, names: Sequence[str]) -> None:
    """Raise `UserError` where a function takes another number of arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C
        return
    try:
        signature.bind(*names)
    except TypeError:
        raise UserError(
            f"{where} takes {signature}; expected a function of {len(names)} "
            f"arguments: {', '.join(names)}"
        ) from None


def listed(names: Sequence[str]) -> str:
    """Join names, "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def check_name(flag: str, value: Any, names: Collection[str]) -> None:
    """Check that a value is one of the names.

    Args:
      flag: what the message begins with, such as "--config.algorithm".
      value: what the user wrote.
      names: those that there are.

    Raises:
      UserError: an unknown name.
    """
    if value not in names:
        raise UserError(
            f"{flag}={value}: unknown name{nearest(value, names)} "
            f"(one of: {', '.join(names) or 'there is none'})"
        )


def check(
    settings: Settings, name: str, value: Any, high: float = math.inf, high_is: str = ""
) -> None:
    """Check a value of the right type against a setting's names and range.

    Args:
      settings: those there are.
      name: flat name of the setting, such as "schedule.dropout".
      value: what it is to be; of a tuple each number is checked.
      high: largest value, where it depends on another setting.
      high_is: flat name of that setting.

    Raises:
      UserError: an unknown name, or a number outside the range.
    """
    kind, declaration = settings[name]
    if declaration.choices:
        check_name(f"--config.{name}", value, declaration.choices)
    if kind is str or kind is bool:
        return
    number_kind = float if kind is float else int
    if number_kind is int and min(declaration.high, declaration.below) == math.inf:
        declaration = declaration._replace(high=INT32_MAX)
    if high < min(declaration.high, declaration.below):
        declaration = declaration._replace(high=high, below=math.inf)
    numbers = value if kind is tuple else (value,)
    if not all(_fits(number, number_kind, declaration) for number in numbers):
        words = "finite float32" if number_kind is float else "whole"
        source = f" = --config.{high_is}" if high_is else ""
        raise UserError(
            f"--config.{name}={value}: must be a {words} number "
            f"{range_of(declaration)}{source} ({declaration.help})"
        )


def checker(*kinds: type) -> Callable[..., None]:
    """`check` of the settings of these dataclasses."""
    return functools.partial(check, dict(ChainMap(*map(declared, kinds))))


def _fits(value: float, kind: type, declaration: Setting) -> bool:
    """Whether a number is in the range, a float as the float32 that it becomes."""
    low, high, above, below = declaration[2:6]
    if kind is int:
        return low <= value <= high and above < value < below and value == int(value)
    if not abs(value) <= _HUGE:
        return False
    value, low, high, above, below = np.array(
        [value, low, high, above, below], np.float32
    )
    return bool(low <= value <= high and above < value < below)


def range_of(declaration: Setting) -> str:
    """The choices or bounds of a setting as text, "" if there are none."""
    low, high, above, below = declaration[2:6]
    bounds = {"≥": low, ">": above, "≤": high, "<": below}
    limits = [f"{sign} {b:,.10g}" for sign, b in bounds.items() if math.isfinite(b)]
    return ", ".join(declaration.choices) or " and ".join(limits)
