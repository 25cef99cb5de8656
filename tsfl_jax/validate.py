"""Checks of a `Config` before anything slow starts; every error is one line.

What one setting may be is declared with it and checked by `check`. Components check
what goes together, see `experiment.rule_settings`, and values that depend on the data
are checked where it is read.
"""

import dataclasses
import difflib
import numbers
from typing import Any

from tsfl_jax import components, host_memory
from tsfl_jax import config as c
from tsfl_jax.types import UserError, nearest

_DRAWS = 1024  # of a client's seconds, at least; see `fleet.draw_fleet`
# NumPy's numbers will do, and an int for a float; a tuple holds whole numbers.
_ACCEPTED = {int: numbers.Integral, float: numbers.Real}


def suggestion(name: object) -> str:
    """ "; did you mean 'x' (what it is)?", or nothing where no setting is close."""
    close = difflib.get_close_matches(str(name), c.SETTINGS, n=1)
    words = str(name).rpartition(".")[2].replace("_", " ")
    # learning_rate is not like lr, but what lr is: the first whose help has the words.
    if " " in words:
        close = [n for n, (_, s) in c.SETTINGS.items() if words in s.help][:1] or close
    hints = [f"; did you mean {n!r} ({c.SETTINGS[n][1].help})?" for n in close]
    return "".join(hints)


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
