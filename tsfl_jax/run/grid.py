"""The points of a sweep: ``seed=0:10`` → values, a file of points, their product."""

import csv
import itertools
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tsfl_jax.config import (
    SETTINGS,
    Config,
    of_fleet,
    replace,
    suggestion,
    validate,
    value,
)
from tsfl_jax.types import UserError, one_line

Points = list[dict[str, Any]]  # {setting: value} of each run
MOST_RUNS = 100_000
_DIGITS = 8  # of a computed value: 0.3, not 0.30000000000000004
_SPACED = re.compile(r"(lin|log)\((.*)\)")


def kind_of(name: str, argument: str) -> type:
    """The type of a setting; UserError for an unknown one."""
    if name not in SETTINGS:
        raise UserError(f"{argument}: there is no such setting{suggestion(name)}")
    return SETTINGS[name][0]


def values(text: str, kind: type, argument: str) -> list:
    """All values that a text stands for.

    Args:
      text: values, ranges ``0:10``, ``0:10:2``, ``0.1:0.5:0.1`` without the end, and
        ``lin(0,1,5)``, ``log(1e-3,1e-1,5)`` with both ends, separated by commas that
        are not within parentheses.
      kind: type of the setting.
      argument: what the user wrote, for messages.
    """
    numbers = []
    for part in map(str.strip, re.split(r",(?![^(]*\))", text)):
        is_number, spaced = kind in (int, float), _SPACED.fullmatch(part)
        if is_number and spaced:
            space = _spaced(spaced[1], spaced[2].split(","), argument)
            numbers += [_rounded(number, kind) for number in space]
        elif is_number and ":" in part:
            numbers += _range(part.split(":"), kind, argument)
        else:
            numbers.append(value(part, kind, argument))
    return numbers


def _spaced(name: str, texts: list[str], argument: str) -> np.ndarray:
    """``lin(first,last,count)`` or ``log(first,last,count)``, with both ends."""
    numbers = [value(text, float, argument) for text in texts]
    *ends, count = numbers
    least = 0 if name == "log" else -math.inf
    is_finite = all(least < end < math.inf for end in ends)
    if len(ends) != 2 or not is_finite or count not in range(2, MOST_RUNS + 1):
        raise UserError(
            f"{argument}: expected {name}(first,last,count) with a count from 2 to "
            f"{MOST_RUNS:,}, of log with ends > 0"
        )
    space: Any = np.geomspace if name == "log" else np.linspace
    return space(*ends, int(count))


def _range(texts: list[str], kind: type, argument: str) -> list:
    """``first:end`` (whole numbers) or ``first:end:step``, without the end."""
    numbers = [value(text, kind, argument) for text in texts]
    numbers += [1] if kind is int and len(numbers) == 2 else []
    if len(numbers) != 3 or not all(map(math.isfinite, numbers)) or not numbers[2]:
        needed = "first:end or first:end:step" if kind is int else "first:end:step"
        raise UserError(f"{argument}: expected {needed}")
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
        name, equals, listed = map(str.strip, text.partition("="))
        argument = f"{flag}={text}"
        if not equals or name in axes:
            raise UserError(
                f"{argument}: expected setting=values, each setting once, such as "
                "seed=0:10"
            )
        kind = kind_of(name, argument)
        is_whole = flag == "--set" and kind is str
        axes[name] = [listed] if is_whole else values(listed, kind, argument)
        check({name: axes[name]}, argument)
    return axes


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parse command-line settings, such as ``["lr=0.01"]``, one value each.

    A text may have commas: ``timeline.power=5,1.5,0.2``.
    """
    axes = parse(texts, "--set")
    for name, listed in axes.items():
        if len(listed) > 1 or name in ("algorithm", "seed"):
            raise UserError(f"--set={name}: cannot be set to one value here")
    return {name: listed[0] for name, listed in axes.items()}


def read_points(path: str) -> Points:
    """The points of a sweep file.

    Args:
      path: a list of points in YAML or JSON, ``[{lr: 0.1, seed: 3}, …]``, or a CSV
        file with a column for each setting; an empty cell keeps the config's value.
    """
    import yaml  # JSON is YAML, too

    flag = f"--sweep_file={path}"
    try:
        with pathlib.Path(path).expanduser().open(encoding="utf-8", newline="") as file:
            is_table = path.endswith(".csv")
            listed = list(csv.DictReader(file)) if is_table else yaml.safe_load(file)
    except (OSError, ValueError, RuntimeError, csv.Error, yaml.YAMLError) as error:
        raise UserError(f"{flag}: cannot be read ({one_line(error)})") from error
    is_list = isinstance(listed, list) and all(type(p) is dict for p in listed)
    if not listed or not is_list:
        raise UserError(f"{flag}: expected a list of points, like [{{lr: 0.1}}]")
    for point in listed:
        for name, setting in [*point.items()]:
            text = f"{flag}: {name}={setting}"
            kind = kind_of(name, text)
            if setting in ("", None):
                del point[name]
            elif isinstance(setting, str):  # YAML, too, takes 1e-3 for a text
                point[name] = value(setting, kind, text)
    return points(listed)


def check(axes: Mapping[str, Any], flag: str = "") -> dict[str, list]:
    """Convert axes to lists of plain values; UserError for what cannot be swept."""
    checked = {}
    for name, axis in axes.items():
        text = flag or f"sweep {name}"
        kind = kind_of(name, text)
        if not SETTINGS[name][1].swept:
            raise UserError(
                f"{text}: all runs of a sweep share it; set --config.{name}"
            )
        if isinstance(axis, str) or not isinstance(axis, Iterable):
            raise UserError(f"{text}: expected a list of values, got {axis!r}")
        # Neither a generator without end nor range(10**10) is turned into a list.
        listed = [_plain(v, kind) for v in itertools.islice(axis, MOST_RUNS + 1)]
        if not 0 < len(listed) <= MOST_RUNS or len({*map(str, listed)}) < len(listed):
            raise UserError(
                f"{text}: no values, more than {MOST_RUNS:,}, or one twice; a range is "
                "first:end"
            )
        checked[name] = listed
    return checked


def _plain(number: Any, kind: type) -> Any:
    """NumPy's and JAX's numbers as plain ones, an int as a float, a list as a tuple."""
    number = number.item() if hasattr(number, "item") else number
    if kind is float and type(number) is int:
        return float(number)
    return tuple(number) if kind is tuple and isinstance(number, list) else number


def points(swept: Mapping[str, Sequence] | Sequence[Mapping]) -> Points:
    """Make the sweep points: the product of axes, or the points of a list.

    The points of a list may name different settings, as a setting that only one rule
    reads: one that a point lacks keeps the config's value.

    Returns:
      {setting: value} of every run; of a product, the last axis is the fastest.
    """
    if isinstance(swept, Mapping):
        axes = check(swept)
        if math.prod(map(len, axes.values())) > MOST_RUNS:
            raise UserError(f"sweep {', '.join(axes)}: more than {MOST_RUNS:,} runs")
        product = itertools.product(*axes.values())
        listed = [dict(zip(axes, point, strict=True)) for point in product if axes]
    else:
        is_list = isinstance(swept, Iterable) and not isinstance(swept, str)
        listed: list[Any] = [*swept] if is_list else [swept]
        for point in listed:
            if not isinstance(point, Mapping):
                raise UserError(f"sweep: expected settings as a dict, got {point!r}")
        singles = ({n: [v] for n, v in point.items()} for point in listed)
        listed = [{n: v for n, (v,) in axes.items()} for axes in map(check, singles)]
    if not listed:
        raise UserError("sweep: no points; expected for example {'seed': range(5)}")
    return listed


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
    fills = of_fleet(config)
    for name in (n for n in values if n in fills):  # another would be run
        raise UserError(
            f"run {name}={values[name]}: is a default, for which timeline.fleet="
            f"{config.timeline.fleet} puts {fills[name]}; choose another value, or "
            "another fleet"
        )
    return config
