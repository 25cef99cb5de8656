"""The command line that repeats a run or a sweep, from its settings."""

import dataclasses
import functools
import itertools
import re
import runpy
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tsfl_jax import config_files
from tsfl_jax.config import SETTINGS, WITHOUT_EFFECT, flat
from tsfl_jax.report import files

Known = dict[str, dict[str, Any]]  # settings of the experiments, by name


@functools.cache
def known_settings() -> Known:
    """The flat settings of each experiment that --config knows by name."""
    found = {}
    for name in config_files.known():
        try:
            config = runpy.run_path(config_files.find(name))["get_config"]()
        except TypeError:
            continue  # its get_config() needs an argument, as papers.py
        found[name] = files.plain(flat(dataclasses.asdict(config)))
    return found


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list | tuple):
        return f"({','.join(map(str, value))}{',' * (len(value) == 1)})"
    return str(value)


def _changes(settings: Mapping[str, Any], known: Known) -> list[str]:
    """--config and the changes, of the experiment that needs the fewest."""
    best: list[str] = []
    own = {n: v for n, v in files.plain(dict(settings)).items() if n in SETTINGS}
    for name, there in known.items():
        kept = set(own) - WITHOUT_EFFECT | {"data.dir", "data.file"}
        changed = [n for n in own if n in kept and there.get(n) != own[n]]
        words = [f"--config.{n}={_text(own[n])}" for n in changed]
        if not best or len(words) + 1 < len(best):
            best = [f"--config={name}", *words]
    return best


def run_command(settings: Mapping[str, Any], known: Known) -> str:
    """``tsfl run`` with these settings; "" without settings."""
    if not settings:
        return ""
    return shlex.join(["tsfl", "run", *_changes(settings, known)])


def sweep_command(
    settings: Mapping[str, Any], points: Sequence[Mapping[str, Any]], known: Known
) -> str:
    """``tsfl sweep``; "" where the points are no product of values.

    Args:
      settings: flat, of what is not swept.
      points: the swept settings of each lane, in order.
      known: from `known_settings`.
    """
    if not settings or not points or any(p.keys() != points[0].keys() for p in points):
        return ""
    axes = {n: list(dict.fromkeys(_text(p[n]) for p in points)) for n in points[0]}
    product = [
        dict(zip(axes, v, strict=True)) for v in itertools.product(*axes.values())
    ]
    if product != [{n: _text(v) for n, v in point.items()} for point in points]:
        return ""
    every = [value for values in axes.values() for value in values]
    if any(re.search(r"""['"]|,(?![^()]*\))""", value) for value in every):
        return ""  # it would be cut in two
    swept = [f"--sweep={n}={','.join(values)}" for n, values in axes.items()]
    return shlex.join(["tsfl", "sweep", *_changes(settings, known), *swept])
