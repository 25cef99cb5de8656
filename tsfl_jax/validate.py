"""Checks of a `Config` before anything slow starts; every error is one line.

What one setting may be is declared with it and checked by `check`; here are also the
rules between general settings. Components check their own, and values that depend on
the data are checked where it is read.
"""

import dataclasses
import difflib
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from tsfl_jax import components, host_memory
from tsfl_jax import config as c
from tsfl_jax.components import check_name, listed
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.sections import LR_SCHEDULES, SCHEDULES
from tsfl_jax.types import INT32_MAX, UserError, nearest

check = functools.partial(components.check, c.SETTINGS)


_TINY, _HUGE = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32
_DRAWS = 1024  # of a client's seconds, at least; see `fleet.draw_fleet`
# NumPy's numbers will do, and an int for a float; a tuple holds whole numbers.
_ACCEPTED = {int: numbers.Integral, float: numbers.Real}


def suggestion(name: object) -> str:
    """ "; did you mean 'x' (what it is)?", or nothing where no setting is close."""
    found = difflib.get_close_matches(str(name), c.SETTINGS, n=1)
    words = str(name).rpartition(".")[2].replace("_", " ")
    # learning_rate is not like lr, but what lr is: the first whose help has the words.
    if " " in words:
        found = [n for n, (_, s) in c.SETTINGS.items() if words in s.help][:1] or found
    about = [f"; did you mean {n!r} ({c.SETTINGS[n][1].help})?" for n in found]
    return "".join(about)


def _check_types(config: Any, prefix: str = "") -> None:
    """A field has the type of its default; an int will do for a float."""
    fields = [field.name for field in dataclasses.fields(config)]
    for name in vars(config):
        if name not in fields:
            hint = nearest(prefix + name, [prefix + f for f in fields])
            raise UserError(
                f"config.{prefix}{name}: there is no such setting"
                f"{hint or suggestion(prefix + name)}"
            )
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(field.default_factory):
            if not isinstance(value, field.default_factory):
                raise UserError(
                    f"config.{name} must be a {field.default_factory.__name__}, "
                    f"got {value!r}{_meant(name, value)}"
                )
            _check_types(value, name + ".")
            continue
        expected = type(field.default)
        if not _has_type(value, expected):
            kind = expected.__name__
            if expected is tuple:
                kind = "whole numbers like (1,4)"
            raise UserError(
                f"--config.{name}={value!r}: expected {kind}, "
                f"got {type(value).__name__}"
            )
        _check_extremes(f"--config.{name}", value)


def _meant(section: str, value: Any) -> str:
    """The setting that a name in place of a section was meant for: "resnet18"."""
    for name, (_, known) in c.SETTINGS.items():
        near = nearest(value, known.choices) if name.startswith(f"{section}.") else ""
        if near:
            return near.replace("'", f"config.{name} = '", 1)
    return ""


def _has_type(value: Any, expected: type) -> bool:
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    if expected is tuple and isinstance(value, tuple | list):
        return all(_has_type(number, int) for number in value)
    return isinstance(value, _ACCEPTED.get(expected, expected))


def _check_extremes(flag: str, value: Any) -> None:
    """Refuse what 32 bits or a file name cannot hold; seeds have their own range."""
    if isinstance(value, str):
        if "\0" in value:
            raise UserError(f"{flag}={value!r}: holds a zero byte")
    elif isinstance(value, tuple | list):
        for number in value:
            _check_extremes(f"{flag}={tuple(value)}", int(number))
    elif isinstance(value, numbers.Integral):
        if (
            abs(int(value)) > INT32_MAX
            and flag.removeprefix("--config.") not in c.SEEDS
        ):
            raise UserError(f"{flag}={value}: must be <= {INT32_MAX}")
    elif 0 < abs(value) < _TINY or _HUGE < abs(value) < math.inf:
        raise UserError(
            f"{flag}={value}: outside what float32 holds, {_TINY:.2g} to {_HUGE:.2g}"
        )


def _differs(value: object, default: object) -> bool:
    return (tuple(value) if isinstance(value, list) else value) != default


_DEFAULT = c.Config()
# Settings that say how much clients work, which speeds do where there is a framework.
_DECIDE_TAU = tuple(
    f"schedule.{name}" for name in ("tau", "tau_groups", "trace", "upload_above")
)
# Settings that other values of a second setting would ignore: that setting, and the
# values that use the first one.
_USED_BY = {
    "lr_decay": ("lr_schedule", LR_SCHEDULES[1:]),
    "lr_every": ("lr_schedule", ("steps",)),
    "schedule.tau": ("schedule.kind", ("explicit",)),
    "schedule.tau_groups": ("schedule.kind", ("distribution",)),
    "schedule.size_groups": (
        "schedule.kind",
        tuple(kind for kind in SCHEDULES if kind != "trace"),
    ),
    "schedule.trace": ("schedule.kind", ("trace",)),
    "partition.alpha": ("partition.kind", ("dirichlet",)),
    "partition.classes_per_client": ("partition.kind", ("shards",)),
    "data.file": ("data.name", ("npz",)),
    "model.norm": ("model.name", ("vgg11", "resnet18")),
    "timeline.speed": ("timeline.speeds", ("",)),
} | {
    name: ("data.name", ("quadratic",))
    for name in c.SETTINGS
    if name.startswith("quadratic.")
}
_USED_BY |= {
    name: (f"{name.rpartition('.')[0]}.{known.used_by[0]}", known.used_by[1])
    for name, (_, known) in c.SETTINGS.items()
    if known.used_by
}


def check_used(
    config: c.Config, used_by: Mapping[str, tuple[str, Sequence[str]]]
) -> None:
    """Refuse settings that another one makes useless.

    Args:
      config: the settings.
      used_by: setting → another one, and the values of that one that use the first.

    Raises:
      UserError: a setting that is not at its default and would be ignored.
    """
    for name, (other, values) in used_by.items():
        value, default = c.get(config, name), c.get(_DEFAULT, name)
        chosen = c.get(config, other)
        if _differs(value, default) and chosen not in values:
            raise UserError(
                f"--config.{name}={value}: would be ignored with "
                f"--config.{other}={chosen}; it belongs to "
                f"{listed(values) or 'an empty one'}"
            )


def _check_constants(config: c.Config) -> None:
    """Ranges with an exception."""
    if config.partition.common and config.partition.online:
        raise UserError(
            "--config.partition.common=True with --config.partition.online=True: each "
            "client draws its own samples in every interval, so that none are common "
            "to all; leave out one of them"
        )
    if config.partition.common and not config.partition.iid_share:
        raise UserError(
            "--config.partition.common=True: would be ignored with "
            "--config.partition.iid_share=0.0"
        )
    if config.constants.grad_variance == 0:
        raise UserError(
            "--config.constants.grad_variance=0.0: must be finite and not 0; a "
            "negative value has it estimated"
        )
    if config.data.name == "synthetic" and (
        not config.data.shape or min(config.data.shape) < 1
    ):
        raise UserError(
            f"--config.data.shape={config.data.shape}: needs sizes > 0, like (28,28,1)"
        )


def _check_quadratic(config: c.Config) -> None:
    """Quadratic data have a section, a model and a shape of their own."""
    if (config.data.name == "quadratic") != (config.model.name == "quadratic"):
        raise UserError(
            f"--config.model.name={config.model.name} with "
            f"--config.data.name={config.data.name}: quadratic data and the quadratic "
            "model go together"
        )
    if config.data.name != "quadratic":
        return
    largest = config.quadratic.smoothness
    name = "quadratic.convexity"
    check(name, config.quadratic.convexity, largest, "quadratic.smoothness")
    if len(config.data.shape) != 1 or config.data.shape[0] < 1:
        raise UserError(
            f"--config.data.shape={tuple(config.data.shape)}: quadratic data need the "
            "number of dimensions alone, like (8,)"
        )
    if config.data.shape[0] == 1 and (
        config.quadratic.convexity != config.quadratic.smoothness
    ):
        raise UserError(
            f"--config.quadratic.convexity={config.quadratic.convexity}: one dimension "
            "has one eigenvalue; set it to --config.quadratic.smoothness"
        )
    for name, needed in (
        ("normalize", "unit"),
        ("train_size", 0),
        ("test_size", 0),
        ("validation", 0),
    ):
        value = getattr(config.data, name)
        if value != needed:
            raise UserError(
                f"--config.data.{name}={value}: would spoil the known constants of "
                "quadratic data; leave it out"
            )


def _check_timeline(config: c.Config) -> None:
    """What does nothing: work of cases beside speeds, settings of no framework."""
    framework = config.timeline.framework
    riding, riders = config.schedule.free_riding, config.schedule.free_riders
    if riding != _DEFAULT.schedule.free_riding and not riders:
        raise UserError(
            f"--config.schedule.free_riding={riding}: would be ignored with "
            "--config.schedule.free_riders=0; say how many"
        )
    if config.measure_clients and framework not in ("none", "tsfl"):
        raise UserError(
            "--config.measure_clients=true: the theory is about clients in step; "
            f"--config.timeline.framework={framework} is not, use none or tsfl"
        )
    timeline = [name for name in c.SETTINGS if name.startswith("timeline.")]
    for name in timeline if framework == "none" else _DECIDE_TAU:
        value = c.get(config, name)
        if _differs(value, c.get(_DEFAULT, name)):
            raise UserError(
                f"--config.{name}={value}: would be ignored with "
                f"--config.timeline.framework={framework}"
                + (
                    "; choose a framework"
                    if framework == "none"
                    else ", whose speeds decide τ; leave it out"
                )
            )


def _check_memory(config: c.Config) -> None:
    """What is drawn before training must fit; later steps check what they make."""
    intervals, clients = config.num_intervals, config.num_clients
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


def validate(config: c.Config) -> None:
    """Check all settings that can be checked without data and rule.

    Raises:
      UserError: one line about the first setting that cannot work.
    """
    if not isinstance(config, c.Config):
        raise UserError(f"expected a tsfl_jax.Config, got {type(config).__name__}")
    _check_types(config)
    settings = c.settings_of(config)
    for name in settings:
        components.check(settings, name, c.get(config, name))
    check_name("algorithm", config.algorithm, AGGREGATORS)
    _check_constants(config)
    check_used(config, _USED_BY)
    _check_timeline(config)
    _check_quadratic(config)
    _check_memory(config)
