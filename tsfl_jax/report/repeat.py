"""The command line that repeats a run or a sweep, from its stored settings."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tsfl_jax import config_files
from tsfl_jax.config import SETTINGS, flat
from tsfl_jax.report import files

_BASE = "digits_case3"  # what a command line without --config starts from


def text_of(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list | tuple):
        return f"({','.join(map(str, value))}{',' * (len(value) == 1)})"
    return str(value)


def run_command(settings: Mapping[str, Any], command: str = "run") -> str:
    """``tsfl run`` with these flat settings; "" with a custom part, from Python."""
    if any(name.startswith("custom ") for name in settings):
        return ""
    base = files.plain(flat(dataclasses.asdict(config_files.load(_BASE))))
    changes = [
        f"--config.{name}={text_of(value)}"
        for name, value in files.plain(dict(settings)).items()
        if name in base and base[name] != value
    ]
    return shlex.join(["tsfl", command, f"--config={_BASE}", *changes])


def sweep_command(
    settings: Mapping[str, Any], points: Sequence[Mapping[str, Any]]
) -> str:
    """``tsfl sweep``; "" where the points are no product of values.

    Args:
      settings: flat, of what is not swept.
      points: the swept settings of each run, in order.
    """
    texts = [{name: text_of(v) for name, v in point.items()} for point in points]
    names = texts[0] if texts else {}
    axes = {n: list(dict.fromkeys(point.get(n, "") for point in texts)) for n in names}
    product = [
        dict(zip(axes, values, strict=True))
        for values in itertools.product(*axes.values())
    ]
    # A value with a quote, or with a comma outside of parentheses, would be cut in two.
    cut = re.compile(r"""['"]|,(?![^()]*\))""")
    is_product = product == texts and axes.keys() <= SETTINGS.keys()
    if not settings or not is_product or any(map(cut.search, sum(axes.values(), []))):
        return ""
    swept = [f"--sweep={name}={','.join(values)}" for name, values in axes.items()]
    command = run_command(settings, "sweep")
    return command and f"{command} {shlex.join(swept)}"
