"""All settings of an experiment: the general ones, and a section per component.

`Config` is assembled from `sections.General` and the tables of components, to which
`extend` adds a user's own. A flat name
is that of the flag and of the sweep, such as "fedasync.gamma". `validate` checks one
before anything slow starts: what one setting may be is declared with it; components
check what goes together, see `prepare.rule_settings`, and values that depend on the
data are checked where it is read.
"""

import ast
import contextlib
import copy
import dataclasses
import difflib
import functools
import json
import numbers
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from flax import traverse_util

from tsfl_jax import components, host_memory, timeline
from tsfl_jax.components import Settings, component, section_of
from tsfl_jax.data.builtin import DATASETS
from tsfl_jax.data.client_test import EvaluationConfig
from tsfl_jax.data.partition import PARTITIONS, PartitionConfig
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.data.skew import SkewConfig
from tsfl_jax.models.networks import MODELS, ModelConfig
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.sections import (
    LR_SCHEDULES,
    ConstantsConfig,
    General,
    SeedsConfig,
    StopConfig,
)
from tsfl_jax.timeline.attackers import AttackConfig
from tsfl_jax.timeline.cohort import SAMPLERS, CohortConfig
from tsfl_jax.timeline.presets import PRESETS
from tsfl_jax.timeline.schedule import SCHEDULES
from tsfl_jax.timeline.timeline_settings import ScheduleConfig, TimelineConfig
from tsfl_jax.types import UserError, nearest, parts_of, user_code
from tsfl_jax.uplink import UPLINKS, UplinkConfig, part_of
from tsfl_jax.uplink.local_layers import LocalLayers

T = TypeVar("T")
_DRAWS = 1024  # of a client's seconds, at least; see `fleet.draw_fleet`
# NumPy's numbers will do, and an int for a float; a tuple holds whole numbers.
_ACCEPTED = {int: numbers.Integral, float: numbers.Real}

# The setting that chooses → the parts by name: what they read, and their own sections.
TABLES: dict[str, MutableMapping[str, Any]] = {
    "algorithm": AGGREGATORS,
    "lr_schedule": LR_SCHEDULES,
    "data.name": DATASETS,
    "partition.kind": PARTITIONS,
    "schedule.kind": SCHEDULES,
    "timeline.framework": ChainMap(timeline.FRAMEWORKS, {"none": timeline.NONE}),
    "timeline.fleet": PRESETS,
    "model.name": MODELS,
    "cohort.sampler": SAMPLERS,
}
# Likewise, of a setting that lists names.
LISTS: dict[str, MutableMapping[str, Any]] = {"uplink.chain": UPLINKS}
# A user's own parts of these tables, see `extend`.
OWN: dict[str, dict[str, Any]] = {by: {} for by in (*TABLES, *LISTS)}
# Components that are in every experiment.
COMMON = (
    *(DataConfig, PartitionConfig, ScheduleConfig, TimelineConfig, ModelConfig),
    *(ConstantsConfig, SeedsConfig, CohortConfig, SkewConfig, EvaluationConfig),
    *(StopConfig, UplinkConfig, LocalLayers, AttackConfig),
)


def by_section(kinds: Iterable[type]) -> dict[str, type]:
    """Components by section; those that share one become one."""
    sections: dict[str, type] = {}
    for kind in dict.fromkeys(kinds):
        name = section_of(kind)
        sections[name] = _joined(kind, sections[name]) if name in sections else kind
    return sections


@functools.cache  # a `Config` stays valid where the same components are joined again
def _joined(kind: type, first: type) -> type:
    body = {"__doc__": first.__doc__}
    return component(section_of(kind))(type(first.__name__, (kind, first), body))


def _extended(kind: type[T], sections: Mapping[str, type]) -> type[T]:
    """A dataclass with these sections as well."""
    fields = [
        (name, section, dataclasses.field(default_factory=section))
        for name, section in sections.items()
    ]
    return dataclasses.make_dataclass("Config", fields, bases=(kind,))


def _base() -> type[General]:
    """What `Config` inherits: the general settings and all sections."""
    parts = [part for table in (TABLES | LISTS).values() for part in table.values()]
    kinds = (*COMMON, *(kind for part in parts for kind in part.sections))
    return _extended(General, by_section(kinds))


class Config(_base()):
    """All settings of an experiment."""

    def __getattr__(self, name: str) -> Any:
        """A section that came into the tables since this config was made."""
        if field := type(self).__dataclass_fields__.get(name):
            return vars(self).setdefault(name, field.default_factory())
        raise AttributeError(f"a Config has no {name!r}", name=name, obj=self)


def _settings() -> Settings:
    settings = components.declared(Config)
    return settings | {
        name: (str, settings[name][1]._replace(choices=table))
        for name, table in TABLES.items()
    }


# Every setting by its flat name, such as "data.name": its type and declaration.
SETTINGS = dict(_settings())
# The sections of the package's own components.
SECTIONS = frozenset(n.partition(".")[0] for n in SETTINGS if "." in n)
_NAMES = frozenset(SETTINGS)  # likewise
# Settings that runs of the same experiment may differ in.
SEEDS = ("seed", *(name for name in SETTINGS if name.startswith("seeds.")))


def reads(part: Any) -> set[str]:
    """The settings that a part of a table reads and others of it may not."""
    return {*part.reads}.union(*map(components.declared, part.sections))


def _readers() -> dict[str, dict[str, list[str]]]:
    readers: dict[str, dict[str, list[str]]] = {name: {} for name in SETTINGS}
    for by, table in (TABLES | LISTS).items():
        for chosen, part in table.items():
            for name in reads(part) & {*SETTINGS}:
                readers[name].setdefault(by, []).append(chosen)
    for name, (_, declaration) in SETTINGS.items():
        if declaration.used_by:
            by, values = declaration.used_by
            readers[name][f"{name.rpartition('.')[0]}.{by}"] = [*values]
    return {name: values for name, values in readers.items() if values}


# Setting of a component → the settings that decide whether it is read, and by which
# of their values.
READERS = _readers()


def extend(by: str, name: str, part: Any) -> None:
    """Put a user's part into the table of the setting `by`.

    From then on a `Config` has its settings. One of the user's own may be replaced.

    Raises:
      UserError: the name is one of the package's, or a setting another component's.
    """
    if is_taken(by, name):
        raise UserError(f"{name}: {by} has one of that name; choose another")
    for kind in part.sections:
        _check_section(f"{by}={name}", kind, OWN[by].get(name))
    (TABLES | LISTS)[by][name] = OWN[by][name] = part
    assemble()


def _check_section(where: str, kind: Any, replaced: Any) -> None:
    """Raise `UserError` where `Config` cannot have the settings of a user's class."""
    with user_code(f"{where}: {kind}", "expected a tsfl_jax.component with defaults"):
        if kind.__module__.startswith("tsfl_jax."):
            return
        section, settings = section_of(kind), components.declared(type(kind()))
    rows = (p for parts in OWN.values() for p in parts.values() if p is not replaced)
    # One of the same name is the same, defined anew.
    kinds = (k for p in rows for k in p.sections if k.__qualname__ != kind.__qualname__)
    for name in _NAMES.union(*map(components.declared, kinds)) & {section, *settings}:
        raise UserError(f"{where}: another component has --config.{name}; rename it")


def is_taken(by: str, name: str) -> bool:
    """Whether a table has a part of the package's own under that name."""
    return name in (TABLES | LISTS)[by] and name not in OWN[by]


def assemble() -> None:
    """Make `Config`, `SETTINGS` and `READERS` of what is in the tables now."""
    Config.__bases__ = (_base(),)
    SETTINGS.clear()
    SETTINGS.update(_settings())
    READERS.clear()
    READERS.update(_readers())


def own_parts(config: "Config") -> dict[str, Any]:
    """The chosen parts that are a user's own, such as "cohort.sampler=mine"."""
    chosen = {by: [get(config, by)] for by in TABLES}
    chosen |= {by: parts_of(get(config, by)) for by in LISTS}
    pairs = [(by, name) for by, names in chosen.items() for name in names]
    return {f"{by}={n}": OWN[by][n] for by, n in pairs if n in OWN[by]}


def chosen_parts(config: Config) -> dict[str, Any]:
    """The chosen part of each table, by the setting that chooses it."""
    parts = {by: table[get(config, by)] for by, table in TABLES.items()}
    return parts | {by: part_of(get(config, by)) for by in LISTS}


def unread(config: Config, custom: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Settings that nothing chosen reads → the setting that decides so.

    Args:
      config: all settings.
      custom: a user's parts, by the setting that would choose them.
    """
    parts = chosen_parts(config) | dict(custom or {})
    read_by = {by: reads(part) for by, part in parts.items()}
    return {
        name: by
        for name, readers in READERS.items()
        for by, values in readers.items()
        if (name not in read_by[by] if by in parts else not _uses(config, by, values))
    }


def _uses(config: Config, by: str, values: list[str]) -> bool:
    """Whether a setting has one of the values; none: any but its default."""
    value = get(config, by)
    return value in values if values else value != get(Config(), by)


def get(config: Config, name: str) -> Any:
    """The value of a setting by its flat name."""
    return functools.reduce(getattr, name.split("."), config)


def value(text: str, kind: type, argument: str) -> Any:
    """One value of a setting from its text, such as ``0.1``, ``true`` or ``(1,4)``.

    Args:
      text: the value as written.
      kind: type of the setting.
      argument: what the user wrote, for messages.

    Raises:
      UserError: the text is no such value.
    """
    parse, expected = {
        bool: (lambda text: json.loads(text.lower()), "True or False"),
        int: (int, "a whole number"),
        float: (float, "a number"),
        str: (str, "a text"),
        tuple: (ast.literal_eval, "a tuple of whole numbers like (1,4)"),
    }[kind]
    with contextlib.suppress(ValueError, SyntaxError, TypeError):
        if isinstance(parsed := parse(text), kind):
            return parsed
    raise UserError(f"{argument}: {text!r} is not {expected}")


def seeds_of(config: Config) -> SeedsConfig:
    """The seed of each source of randomness: `seed`, where it has none of its own."""
    seeds = vars(config.seeds).items()
    seeds = {name: config.seed if seed < 0 else seed for name, seed in seeds}
    return SeedsConfig(**seeds)


def replace(config: Config, values: dict[str, Any]) -> Config:
    """A copy of a config with settings changed by their flat names."""
    config = copy.deepcopy(config)
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        setattr(get(config, section) if section else config, last, value)
    return config


def of_fleet(config: Config) -> dict[str, Any]:
    """What `timeline.fleet` puts in place of defaults, by flat name."""
    fleet, default = config.timeline.fleet, Config()
    with user_code(f"timeline.fleet={fleet}", "expected settings by their flat names"):
        values = PRESETS[fleet].make.items()
        return {n: v for n, v in values if get(config, n) == get(default, n) != v}


def filled(config: Config) -> Config:
    """A copy with the settings of `timeline.fleet` in place of defaults."""
    if values := of_fleet(config):
        config = replace(config, values)
        validate(config)
    return config


def renewed(config: Config) -> Config:
    """A copy with the settings of parts that came into the tables since it was made."""
    _check_kind(config)
    new = Config()
    for name, value in vars(copy.deepcopy(config)).items():
        is_section = dataclasses.is_dataclass(value) and hasattr(new, name)
        values = vars(getattr(new, name) if is_section else new)
        values.update(vars(value) if is_section else {name: value})
    return new


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as one dict, ``{"data.name": "mnist"}``."""
    return traverse_util.flatten_dict(settings, sep=".")


def suggestion(name: object) -> str:
    """ "; did you mean 'x' (what it is)?", or nothing where no setting is close."""
    close = difflib.get_close_matches(str(name), SETTINGS, n=1)
    words = str(name).rpartition(".")[2].replace("_", " ")
    # learning_rate is not like lr, but what lr is: the first whose help has the words.
    if " " in words:
        close = [n for n, (_, s) in SETTINGS.items() if words in s.help][:1] or close
    hints = [f"; did you mean {n!r} ({SETTINGS[n][1].help})?" for n in close]
    return "".join(hints)


def _check_kind(config: Any) -> None:
    if not isinstance(config, Config):
        raise UserError(f"expected a tsfl_jax.Config, got {type(config).__name__}")


def _check_types(config: Any, prefix: str = "") -> None:
    """A field has the type of its default; an int will do for a float."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    for last, value in vars(config).items():
        name, field = prefix + last, fields.get(last)
        if field is None:
            hint = nearest(name, [prefix + n for n in fields]) or suggestion(name)
            raise UserError(f"config.{name}: there is no such setting{hint}")
        section: Any = field.default_factory
        is_section = dataclasses.is_dataclass(section)
        kind: Any = section if is_section else type(field.default)
        if not _has_type(value, kind):
            expected = "whole numbers like (1,4)" if kind is tuple else kind.__name__
            raise UserError(
                f"--config.{name}={value!r}: expected {expected}, "
                f"got {type(value).__name__}"
            )
        if is_section:
            _check_types(value, f"{name}.")


def _has_type(value: Any, expected: type) -> bool:
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    if expected is tuple and isinstance(value, tuple | list):
        return all(_has_type(number, int) for number in value)
    return isinstance(value, _ACCEPTED.get(expected, expected))


def _check_memory(config: Config) -> None:
    """What is drawn before training must fit; later steps check what they make."""
    intervals, clients = config.num_intervals, config.num_clients
    clients = config.cohort.slots(clients)
    if config.timeline.framework == "none":
        host_memory.require(
            f"--config.num_clients={clients} with --config.num_intervals={intervals}",
            # τ, sizes and drop-outs in 64 bits, then two of them in 32.
            32 * intervals * clients,
            "the schedule",
        )
        return
    host_memory.require(
        f"--config.num_clients={clients}",
        64 * _DRAWS * clients,  # seconds and ticks of all work, losses
        "the clients' drawn seconds",
    )
    iterations = config.timeline.local_iterations
    host_memory.require(
        f"--config.timeline.local_iterations={iterations}",
        24 * iterations,  # numbers, places and seconds of one task's iterations
        "one task",
    )


def validate(config: Config) -> None:
    """Check the type and range of each setting, and the memory of what is drawn.

    Raises:
      UserError: one line about the first setting that cannot work.
    """
    _check_kind(config)
    _check_types(config)
    for name in SETTINGS:
        components.check(SETTINGS, name, get(config, name))
    _check_memory(config)
