"""The command line that repeats a run or a sweep, from its settings."""

import dataclasses
import functools
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tsfl_jax import config_files
from tsfl_jax.config import SETTINGS, flat
from tsfl_jax.report import files
from tsfl_jax.types import UserError


@functools.cache
def _experiments() -> dict[str, dict[str, Any]]:
    """The flat settings of each experiment that --config knows by name."""
    found = {}
    for name in config_files.descriptions():
        try:
            config = config_files.load(name)
        except UserError:
            continue  # its get_config() needs an argument, as papers.py
        found[name] = files.plain(flat(dataclasses.asdict(config)))
    return found


def text_of(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list | tuple):
        return f"({','.join(map(str, value))}{',' * (len(value) == 1)})"
    return str(value)


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """--config and the changes, of the experiment that needs the fewest."""
    own = files.plain(dict(settings))
    choices = [
        [f"--config={name}"]
        + [
            f"--config.{n}={text_of(v)}"
            for n, v in own.items()
            if n in there and there[n] != v
        ]
        for name, there in _experiments().items()
    ]
    return min(choices, key=len)


def from_python(settings: Mapping[str, Any]) -> str:
    """With which arguments a run was started from Python; "": it was not."""
    custom = [name for name in settings if name.startswith("custom ")]
    names = ", ".join(f"{name.removeprefix('custom ')}=" for name in custom)
    return names and f"started from Python with {names}"


def run_command(settings: Mapping[str, Any]) -> str:
    """``tsfl run`` with these flat settings."""
    return shlex.join(["tsfl", "run", *_flags(settings)])


def sweep_command(
    settings: Mapping[str, Any], points: Sequence[Mapping[str, Any]]
) -> str:
    """``tsfl sweep``; "" where the points are no product of values.

    Args:
      settings: flat, of what is not swept.
      points: the swept settings of each run, in order.
    """
    if not settings or not points or any(p.keys() != points[0].keys() for p in points):
        return ""
    axes = {n: list(dict.fromkeys(text_of(p[n]) for p in points)) for n in points[0]}
    product = list(itertools.product(*axes.values()))
    if not axes.keys() <= SETTINGS.keys():
        return ""  # of a custom component
    if product != [tuple(map(text_of, point.values())) for point in points]:
        return ""
    every = [value for values in axes.values() for value in values]
    if any(re.search(r"""['"]|,(?![^()]*\))""", value) for value in every):
        return ""  # it would be cut in two
    swept = [f"--sweep={n}={','.join(values)}" for n, values in axes.items()]
    return shlex.join(["tsfl", "sweep", *_flags(settings), *swept])
