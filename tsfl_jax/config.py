"""All settings of an experiment: the general ones, and a section per component.

`Config` is assembled from `sections.General` and the tables of components. A flat name
is that of the flag and of the sweep, such as "fedasync.gamma".
"""

import ast
import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flax import traverse_util

from tsfl_jax import components, timeline
from tsfl_jax.components import Settings, component, section_of
from tsfl_jax.data.builtin import DATASETS
from tsfl_jax.data.client_test import EvaluationConfig
from tsfl_jax.data.partition import PARTITIONS, PartitionConfig
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.data.skew import SkewConfig
from tsfl_jax.models.networks import MODELS, ModelConfig
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.sections import LR_SCHEDULES, ConstantsConfig, General, SeedsConfig
from tsfl_jax.stopping import StopConfig
from tsfl_jax.timeline.cohort import CHOOSING, SAMPLERS, CohortConfig
from tsfl_jax.timeline.schedule import SCHEDULES
from tsfl_jax.timeline.timeline_settings import ScheduleConfig, TimelineConfig
from tsfl_jax.types import UserError
from tsfl_jax.uplink import PARTS, UplinkConfig, part_of
from tsfl_jax.uplink.local_layers import LocalLayers

# The setting that chooses → the parts by name: what they read, and their own sections.
TABLES: dict[str, Mapping[str, Any]] = {
    "algorithm": AGGREGATORS,
    "lr_schedule": LR_SCHEDULES,
    "data.name": DATASETS,
    "partition.kind": PARTITIONS,
    "schedule.kind": SCHEDULES,
    "timeline.framework": {"none": timeline.NONE} | timeline.FRAMEWORKS,
    "model.name": MODELS,
    "cohort.sampler": SAMPLERS | CHOOSING,
}
# Likewise, of a setting that lists names.
LISTS: dict[str, Mapping[str, Any]] = {"uplink.chain": PARTS}
# Components that are in every experiment.
COMMON = (
    *(DataConfig, PartitionConfig, ScheduleConfig, TimelineConfig, ModelConfig),
    *(ConstantsConfig, SeedsConfig, CohortConfig, SkewConfig, EvaluationConfig),
    *(StopConfig, UplinkConfig, LocalLayers),
)


def _joined(several: Iterable[type]) -> dict[str, type]:
    """Components by section; those that share one become one."""
    found: dict[str, type] = {}
    for own in dict.fromkeys(several):
        name, first = section_of(own), found.get(section_of(own))
        if first is not None:
            more = {"__doc__": first.__doc__}
            own = component(name)(type(first.__name__, (own, first), more))
        found[name] = own
    return found


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

        data: DataConfig
        partition: PartitionConfig
        schedule: ScheduleConfig
        model: ModelConfig
        constants: ConstantsConfig
        seeds: SeedsConfig
        cohort: CohortConfig
        evaluation: EvaluationConfig
        stop: StopConfig

        def __getattr__(self, name: str) -> Any: ...

else:
    _parts = (part for table in (TABLES | LISTS).values() for part in table.values())
    _own = (kind for part in _parts for kind in part.sections)
    Config = _extended(General, _joined((*COMMON, *_own)))
    Config.__module__, Config.__doc__ = __name__, "All settings of an experiment."


@functools.cache
def settings_of(kind: type) -> Settings:
    """The settings of a kind of `Config`, also with custom components, by flat name."""
    found = components.declared(kind)
    chosen = {n: (str, found[n][1]._replace(choices=TABLES[n])) for n in TABLES}
    return found | chosen


# Every setting by its flat name, such as "data.name": its type and what is known of it.
SETTINGS: Settings = settings_of(Config)
# Settings that runs of the same experiment may differ in.
SEEDS = ("seed", *(name for name in SETTINGS if name.startswith("seeds.")))
# Settings that cannot change a result: a checkpoint may be resumed with others. Data is
# compared by its fingerprint.
WITHOUT_EFFECT = frozenset(name for name, (_, s) in SETTINGS.items() if not s.effect)


def reads(part: Any) -> set[str]:
    """The settings that a part of a table reads and others of it may not."""
    return {*part.reads}.union(*map(components.declared, part.sections))


def _readers() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {name: {} for name in SETTINGS}
    for by, table in (TABLES | LISTS).items():
        for chosen, part in table.items():
            for name in reads(part) & {*SETTINGS}:
                found[name].setdefault(by, []).append(chosen)
    for name, (_, known) in SETTINGS.items():
        if known.used_by:
            by, values = known.used_by
            found[name][f"{name.rpartition('.')[0]}.{by}"] = [*values]
    return {name: readers for name, readers in found.items() if readers}


# Setting of a component → the settings that decide whether it is read, and by which
# of their values.
READERS = _readers()


def chosen_parts(config: Config) -> dict[str, Any]:
    """The chosen part of each table, by the setting that chooses it."""
    parts = {by: table[get(config, by)] for by, table in TABLES.items()}
    return parts | {by: part_of(get(config, by)) for by in LISTS}


def unread(config: Config, own: Mapping[str, Any] = {}) -> dict[str, str]:  # noqa: B006
    """Settings that nothing chosen reads → the setting that decides so.

    Args:
      config: all settings.
      own: parts of the user's own, by the setting that would choose them.
    """
    mine = {by: reads(part) for by, part in (chosen_parts(config) | {**own}).items()}
    return {
        name: by
        for name, readers in READERS.items()
        for by, values in readers.items()
        if (name not in mine[by] if by in mine else not _uses(config, by, values))
    }


def _uses(config: Config, by: str, values: list[str]) -> bool:
    """Whether a setting has one of the values; none: any but its default."""
    value = get(config, by)
    return value in values if values else value != get(Config(), by)


def read(values: dict[str, Any]) -> dict[str, Any]:
    """Settings by flat name, without those that only other components read."""
    ignored = unread(replace(Config(), values))
    return {name: value for name, value in values.items() if name not in ignored}


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
    new = {section_of(own): own for own in several}
    if not new:
        return config
    kind = _extended(type(config), {name: type(own) for name, own in new.items()})
    return kind(**vars(copy.deepcopy(config)), **copy.deepcopy(new))


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as one dict, ``{"data.name": "mnist"}``."""
    return traverse_util.flatten_dict(settings, sep=".")
