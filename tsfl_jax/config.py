"""All settings of an experiment: the general ones, and a section per component.

`Config` is assembled from `sections.General` and the table of rules. A flat name is
that of the flag and of the sweep, such as "fedasync.gamma".
"""

import ast
import copy
import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flax import traverse_util

from tsfl_jax import components
from tsfl_jax.components import Settings
from tsfl_jax.rules import SECTIONS
from tsfl_jax.sections import General
from tsfl_jax.types import UserError


def _extended(kind: type, sections: dict[str, type]) -> type:
    """A dataclass with these sections as well."""
    fields = [
        (name, own, dataclasses.field(default_factory=own))
        for name, own in sections.items()
    ]
    return dataclasses.make_dataclass("Config", fields, bases=(kind,))


if TYPE_CHECKING:

    class Config(General):
        """All settings of an experiment."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Config = _extended(General, SECTIONS)
    Config.__module__, Config.__doc__ = __name__, "All settings of an experiment."

# Every setting by its flat name, such as "data.name": its type and what is known of it.
SETTINGS: Settings = components.declared(Config)
# Settings that runs of the same experiment may differ in.
SEEDS = ("seed", *(name for name in SETTINGS if name.startswith("seeds.")))
# Settings that cannot change a result: a checkpoint may be resumed with others. Data is
# compared by its fingerprint.
WITHOUT_EFFECT = frozenset(name for name, (_, s) in SETTINGS.items() if not s.effect)


def get(config: Config, name: str) -> Any:
    """The value of a setting by its flat name."""
    return functools.reduce(getattr, name.split("."), config)


def value(text: str, kind: type, shown: str) -> Any:
    """One value of a setting from its text, such as ``0.1``, ``true`` or ``(1,4)``.

    Args:
      text: the value as written.
      kind: type of the setting.
      shown: what the user wrote, for messages.
    """
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{shown}: {text!r} is neither True nor False")
        return text.lower() == "true"
    try:
        found = ast.literal_eval(text) if kind is tuple else kind(text)
    except (ValueError, SyntaxError, TypeError):
        found = None
    if not isinstance(found, kind):
        names = {int: "a whole number", float: "a number"}
        expected = names.get(kind, "a tuple of whole numbers like (1,4)")
        raise UserError(f"{shown}: {text!r} is not {expected}")
    return found


def seed_of(config: Config, source: str) -> int:
    """The seed of a source of randomness: a name in `SeedsConfig`."""
    own = getattr(config.seeds, source)
    return config.seed if own < 0 else own


def replace(config: Config, values: dict[str, Any]) -> Config:
    """A copy of a config with settings changed by their flat names."""
    config = copy.deepcopy(config)
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        setattr(get(config, section) if section else config, last, value)
    return config


def with_sections(config: Config, several: Iterable[Any]) -> Config:
    """A copy of a config with the settings of custom components as further sections."""
    new = {components.section_of(own): own for own in several}
    if not new:
        return config
    kind = _extended(type(config), {name: type(own) for name, own in new.items()})
    return kind(**vars(copy.deepcopy(config)), **copy.deepcopy(new))


def settings_of(config: Config) -> Settings:
    """`SETTINGS`, with those of custom components."""
    return SETTINGS if type(config) is Config else components.declared(type(config))


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as one dict, ``{"data.name": "mnist"}``."""
    return traverse_util.flatten_dict(settings, sep=".")
