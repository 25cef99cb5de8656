"""The points of a sweep: ``seed=0:10`` → values, a file of points, their product."""

import csv
import itertools
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tsfl_jax.components import Settings
from tsfl_jax.config import SETTINGS, Config, replace, value
from tsfl_jax.types import UserError, one_line
from tsfl_jax.validate import suggestion, validate

Points = list[dict[str, Any]]  # {setting: value} of each run
MOST_RUNS = 100_000
_DIGITS = 8  # of a computed value: 0.3, not 0.30000000000000004
_SPACED = re.compile(r"(lin|log)\((.*)\)")


def kind_of(name: str, shown: str, settings: Settings = SETTINGS) -> type:
    """The type of a setting; UserError for an unknown one."""
    if name not in settings:
        raise UserError(f"{shown}: there is no such setting{suggestion(name)}")
    return settings[name][0]


def values(text: str, kind: type, shown: str) -> list:
    """All values that a text stands for.

    Args:
      text: values, ranges ``0:10``, ``0:10:2``, ``0.1:0.5:0.1`` without the end, and
        ``lin(0,1,5)``, ``log(1e-3,1e-1,5)`` with both ends, separated by commas that
        are not within parentheses.
      kind: type of the setting.
      shown: what the user wrote, for messages.
    """
    found = []
    for part in map(str.strip, re.split(r",(?![^(]*\))", text)):
        spaced = _SPACED.fullmatch(part)
        if kind in (int, float) and spaced:
            found += _spaced(spaced[1], spaced[2].split(","), kind, shown)
        elif kind in (int, float) and ":" in part:
            found += _range(part.split(":"), kind, shown)
        else:
            found.append(value(part, kind, shown))
    return found


def _spaced(name: str, texts: list[str], kind: type, shown: str) -> list:
    """``lin(first,last,count)`` or ``log(first,last,count)``, with both ends."""
    numbers = [value(text, float, shown) for text in texts]
    least = 0 if name == "log" else -math.inf
    if (
        len(numbers) != 3
        or not all(least < end < math.inf for end in numbers[:2])
        or numbers[2] not in range(2, MOST_RUNS + 1)
    ):
        raise UserError(
            f"{shown}: expected {name}(first,last,count), a count from 2 to "
            f"{MOST_RUNS:,}{' and ends > 0; lin takes any' * (name == 'log')}"
        )
    space = np.geomspace if name == "log" else np.linspace
    first, last, count = numbers
    return [_rounded(number, kind) for number in space(first, last, int(count))]


def _range(texts: list[str], kind: type, shown: str) -> list:
    """``first:end`` (whole numbers) or ``first:end:step``, without the end."""
    numbers = [value(text, kind, shown) for text in texts]
    numbers += [1] if kind is int and len(numbers) == 2 else []
    if len(numbers) != 3 or not all(map(math.isfinite, numbers)) or not numbers[2]:
        needed = "first:end or first:end:step" if kind is int else "first:end:step"
        raise UserError(f"{shown}: expected {needed}")
    first, end, step = numbers
    # 0.1:0.3:0.1 ends before 0.3, whatever rounding makes of it.
    count = max(0, math.ceil(round((end - first) / step, 6)))
    few = range(min(count, MOST_RUNS + 1))  # more are refused later
    return [_rounded(first + k * step, kind) for k in few]


def _rounded(number: float, kind: type) -> Any:
    return round(number) if kind is int else float(f"{number:.{_DIGITS}g}")


def parse(texts: Iterable[str], flag: str = "--sweep") -> dict[str, list]:
    """Parse swept settings, such as ``["seed=0:10", "lr=log(1e-3,1e-1,5)"]``.

    Args:
      texts: of the command line.
      flag: that they were given to, for messages.
    """
    axes: dict[str, list] = {}
    for text in texts:
        name, equals, given = text.partition("=")
        name, shown = name.strip(), f"{flag}={text}"
        if not equals:
            raise UserError(f"{shown}: expected setting=values, such as seed=0:10")
        if name in axes:
            raise UserError(f"{shown}: {name} is given twice; give all values at once")
        axes[name] = values(given.strip(), kind_of(name, shown), shown)
        check({name: axes[name]}, shown)
    return axes


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parse command-line settings, such as ``["lr=0.01"]``, one value each."""
    found = parse(texts, "--set")
    for name, several in found.items():
        if len(several) > 1 or name in ("algorithm", "seed"):
            raise UserError(f"--set={name}: cannot be set to one value here")
    return {name: several[0] for name, several in found.items()}


def read_points(path: str) -> Points:
    """The points of a sweep file.

    Args:
      path: a list of points in YAML or JSON, ``[{lr: 0.1, seed: 3}, …]``, or a CSV
        file with a column for each setting; an empty cell keeps the config's value.
    """
    import yaml  # JSON is YAML, too

    shown = f"--sweep_file={path}"
    try:
        with pathlib.Path(path).expanduser().open(encoding="utf-8", newline="") as file:
            table = path.endswith(".csv")
            found = list(csv.DictReader(file)) if table else yaml.safe_load(file)
    except (OSError, ValueError, RuntimeError, csv.Error, yaml.YAMLError) as error:
        raise UserError(f"{shown}: cannot be read ({one_line(error)})") from error
    if not (found and isinstance(found, list)) or any(
        type(p) is not dict for p in found
    ):
        raise UserError(f"{shown}: expected a list of points, like [{{lr: 0.1}}]")
    for point in found:
        for name, given in [*point.items()]:
            about = f"{shown}: {name}={given}"
            kind = kind_of(name, about)
            if given in ("", None):
                del point[name]
            elif isinstance(given, str):  # YAML, too, takes 1e-3 for a text
                point[name] = value(given, kind, about)
    return points(found)


def check(
    axes: Mapping[str, Any], shown: str = "", settings: Settings = SETTINGS
) -> dict[str, list]:
    """Convert axes to lists of plain values; UserError for what cannot be swept."""
    found = {}
    for name, given in axes.items():
        about = shown or f"sweep {name}"
        kind = kind_of(name, about, settings)
        if not settings[name][1].swept:
            raise UserError(
                f"{about}: all runs of a sweep share it; set --config.{name}"
            )
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise UserError(f"{about}: expected a list of values, got {given!r}")
        # Neither a generator without end nor range(10**10) is turned into a list.
        several = list(itertools.islice(given, MOST_RUNS + 1))
        if len(several) > MOST_RUNS:
            raise UserError(f"{about}: more than {MOST_RUNS:,} runs")
        # NumPy's and JAX's numbers as plain ones, an int as a float, lists as tuples.
        several = [v.item() if hasattr(v, "item") else v for v in several]
        if kind is float:
            several = [float(v) if type(v) is int else v for v in several]
        if kind is tuple:
            several = [tuple(v) if isinstance(v, list) else v for v in several]
        if not several:
            raise UserError(f"{about}: no values; a range is first:end")
        if len(set(map(str, several))) < len(several):
            raise UserError(f"{about}: a value is given twice in {several}")
        found[name] = several
    return found


def points(
    swept: Mapping[str, Sequence] | Sequence[Mapping], settings: Settings = SETTINGS
) -> Points:
    """Make the sweep points: the product of axes, or the points of a list.

    The points of a list may name different settings, as a setting that only one rule
    reads: one that a point lacks keeps the config's value.

    Returns:
      {setting: value} of every run; of a product, the last axis is the fastest.
    """
    if isinstance(swept, str) or not isinstance(swept, Iterable):
        raise UserError(
            f"sweep: expected {{setting: values}}, or a list of such points, got "
            f"{swept!r}"
        )
    if isinstance(swept, Mapping):
        axes = check(swept, settings=settings)
        if math.prod(map(len, axes.values())) > MOST_RUNS:
            raise UserError(f"sweep {', '.join(axes)}: more than {MOST_RUNS:,} runs")
        product = itertools.product(*axes.values())
        found = [dict(zip(axes, each, strict=True)) for each in product if axes]
    else:
        found = list(swept)
        for point in found:
            if not isinstance(point, Mapping):
                raise UserError(f"sweep: expected settings as a dict, got {point!r}")
        found = [
            {n: v for n, (v,) in check(each, settings=settings).items()}
            for each in ({n: [v] for n, v in p.items()} for p in found)
        ]
    if not found:
        raise UserError("sweep: no points; expected for example {'seed': range(5)}")
    return found


def names_of(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """The settings that some point names, each once."""
    return list(dict.fromkeys(name for point in points for name in point))


def changed(config: Config, values: dict[str, Any]) -> Config:
    """A copy of a config with settings changed, validated."""
    config = replace(config, values)
    try:
        validate(config)
    except UserError as error:
        where = ", ".join(f"{k}={v}" for k, v in values.items())
        raise UserError(f"run {where}: {error}") from error
    return config
