"""Checks of a `Config` before anything slow starts; every error is one line.

What one setting may be is declared with it and checked by `check`. Components check
what goes together, see `experiment.rule_settings`, and values that depend on the data
are checked where it is read.
"""

import dataclasses
import difflib
import math
import numbers
from typing import Any

from tsfl_jax import components, host_memory
from tsfl_jax import config as c
from tsfl_jax.types import INT32_MAX, UserError, nearest

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


def _check_memory(config: c.Config) -> None:
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


def validate(config: c.Config) -> None:
    """Check the type and range of each setting, and the memory of what is drawn.

    Raises:
      UserError: one line about the first setting that cannot work.
    """
    if not isinstance(config, c.Config):
        raise UserError(f"expected a tsfl_jax.Config, got {type(config).__name__}")
    _check_types(config)
    settings = c.settings_of(type(config))
    for name in settings:
        components.check(settings, name, c.get(config, name))
    _check_memory(config)
