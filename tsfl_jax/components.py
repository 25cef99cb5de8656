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
import math
import numbers
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import numpy as np

from tsfl_jax.types import UserError, nearest

T = TypeVar("T")


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


def setting(default: Any, *known: Any, **more: Any) -> Any:
    """Declare a setting: a dataclass field with its default and a `Setting`."""
    metadata = {"setting": Setting(*known, **more)}
    return dataclasses.field(default=default, metadata=metadata)


def known_of(field: dataclasses.Field) -> Setting:
    """What is known of a field's setting."""
    return field.metadata.get("setting", Setting())


@dataclass_transform(field_specifiers=(setting, dataclasses.field))
def component(section: str) -> Callable[[type[T]], type[T]]:
    """Make a class the settings of a component, a dataclass and a pytree.

    It is not frozen, since flags and users assign to a `Config`.

    Args:
      section: its name in `Config`, in flags and in sweeps.
    """

    def made(kind: type[T]) -> type[T]:
        kind = dataclasses.dataclass(kind)
        fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
        static = [field.name for field in fields if known_of(field).static]
        leaves = [field.name for field in fields if field.name not in static]

        def flatten(values: T) -> tuple[list, tuple]:
            keyed = [(jax.tree_util.GetAttrKey(n), getattr(values, n)) for n in leaves]
            return keyed, tuple(getattr(values, n) for n in static)

        def unflatten(shaping: tuple, several: Iterable) -> T:
            found = object.__new__(kind)  # leaves may be anything
            vars(found).update(zip(leaves, several, strict=True))
            vars(found).update(zip(static, shaping, strict=True))
            return found

        jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
        setattr(kind, "section", section)  # noqa: B010
        return kind

    return made


def section_of(kind: Any) -> str:
    """The name of a component's section, "" for what is no component."""
    return getattr(kind, "section", "") if dataclasses.is_dataclass(kind) else ""


def changed(values: T, **new: Any) -> T:
    """A copy with other values, whatever their type."""
    found = copy.copy(values)
    vars(found).update(new)
    return found


def narrowed(values: Any, kind: type[T]) -> T:
    """A component of a section that several share, with its own settings only."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return kind(**{field.name: getattr(values, field.name) for field in fields})


def resolved(values: T) -> T:
    """The component with values that follow from others filled in."""
    return getattr(values, "resolved", lambda: values)()


def arrays(values: T) -> T:
    """The component as a program takes it: float32, of choices int32 indices."""
    values = resolved(values)
    found = {}
    for field in dataclasses.fields(values):  # pyright: ignore[reportArgumentType]
        value, known = getattr(values, field.name), known_of(field)
        if known.choices:
            found[field.name] = np.asarray([*known.choices].index(value), np.int32)
        elif not known.static:
            found[field.name] = np.asarray(value, np.float32)
    return changed(values, **found)


def declared(kind: type) -> dict[str, tuple[type, Setting]]:
    """The settings of a component, or of a dataclass and its sections, by flat name."""
    found, prefix = {}, f"{section_of(kind)}.".lstrip(".")
    for field in dataclasses.fields(kind):
        if isinstance(field.default_factory, type):
            found |= declared(field.default_factory)
        else:
            found[prefix + field.name] = type(field.default), known_of(field)
    return found


def listed(names: Sequence[str]) -> str:
    """Join names, "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def check_name(name: str, value: Any, known: Collection[str]) -> None:
    """Check that a setting's value is one of the known names.

    Raises:
      UserError: an unknown name.
    """
    if value not in known:
        raise UserError(
            f"--config.{name}={value}: unknown name{nearest(value, known)} "
            f"(one of: {', '.join(known)})"
        )


def check(
    settings: Settings, name: str, value: Any, high: float = math.inf, high_is: str = ""
) -> None:
    """Check a value of the right type against a setting's names and range.

    Args:
      settings: those there are.
      name: flat name of the setting, such as "schedule.dropout".
      value: what it is to be; of a tuple nothing is checked here.
      high: largest value, where it depends on another setting.
      high_is: flat name of that setting.

    Raises:
      UserError: an unknown name, or a number outside the range.
    """
    kind, known = settings[name]
    if known.choices:
        check_name(name, value, known.choices)
    if high < min(known.high, known.below):
        known = known._replace(high=high, below=math.inf)
    if kind in (int, float) and not _fits(value, kind, known):
        source = f" = --config.{high_is}" if high_is else ""
        raise UserError(
            f"--config.{name}={value}: must be {_range(kind, known)}{source} "
            f"({known.help})"
        )


def checker(*kinds: type) -> Callable[..., None]:
    """`check` of the settings of these dataclasses."""
    return functools.partial(check, dict(ChainMap(*map(declared, kinds))))


def _fits(value: float, kind: type, known: Setting) -> bool:
    if not known.low <= value <= known.high:
        return False
    if not isinstance(value, numbers.Integral) and not math.isfinite(value):
        return False
    return known.above < value < known.below and (kind is float or value == int(value))


def _range(kind: type, known: Setting) -> str:
    """The numbers that a setting may be, in words."""
    least, most = max(known.low, known.above), min(known.high, known.below)
    if kind is float and most < math.inf:
        left, right = "[("[known.above > known.low], "])"[known.below < known.high]
        return f"in {left}{least:g}, {most:g}{right}"
    words = "finite and " if kind is float else "a whole number "
    above = ">" if known.above > known.low else ">="
    words += f"{above} {least}" if least > -math.inf else ""
    words += f" and <= {most}" if most < math.inf else ""
    return words.removesuffix(" and ")
