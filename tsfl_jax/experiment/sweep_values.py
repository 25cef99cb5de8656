"""What the text of a sweep stands for: ``0:10``, ``log(1e-3,1e-1,5)``, ``'a','b'``.

Nothing here knows which settings there are; `grid` does.
"""

import ast
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tsfl_jax import host_memory
from tsfl_jax.types import UserError

LANE_BYTES = 10_000  # of one lane's `Config`, roughly
_DIGITS = 8  # of a computed value: 0.3, not 0.30000000000000004
_SPACED = re.compile(r"(lin|log)\((.*)\)", re.S)
_QUOTES = "\"'"
_KINDS = {int: "a whole number", float: "a number", str: "a text"}


def check_lanes(number: int, shown: str) -> None:
    """Raise UserError unless the settings of that many lanes fit into memory."""
    host_memory.require(shown, number * LANE_BYTES, f"the settings of {number:,} lanes")


def split(text: str) -> list[str]:
    """Cut a text at its commas, not within parentheses or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        else:
            depth += (letter == "(") - (letter == ")")
    return [part.strip() for part in parts]


def value(text: str, kind: type, shown: str) -> Any:
    """One value of a setting from its text.

    Args:
      text: such as ``0.1``, ``'name'`` or ``(1,4)``.
      kind: type of the setting.
      shown: what the user wrote, for messages.

    Raises:
      UserError: not of that type.
    """
    if len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{shown}: {text!r} is neither True nor False")
        return text.lower() == "true"
    if kind is tuple:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found = None
        if not isinstance(found, tuple):
            raise UserError(
                f"{shown}: {text!r} is not a tuple; expected for example (1,4), or "
                "several: (1,4),(2,2)"
            )
        return found
    try:
        return kind(text)
    except ValueError as error:
        raise UserError(f"{shown}: {text!r} is not {_KINDS[kind]}") from error


def _rounded(number: float, kind: type) -> Any:
    return round(number) if kind is int else float(f"{number:.{_DIGITS}g}")


def _ends(name: str, texts: list[str], shown: str) -> tuple[float, float]:
    """The two ends of ``lin`` or ``log``."""
    first, last = (value(text, float, shown) for text in texts)
    if not math.isfinite(first) or not math.isfinite(last) or first == last:
        raise UserError(f"{shown}: {name} needs two different finite numbers")
    if name == "log" and min(first, last) <= 0:
        raise UserError(f"{shown}: log needs numbers > 0; lin takes any")
    return first, last


def _spaced(name: str, texts: list[str], kind: type, shown: str) -> list:
    """``lin(first,last,count)`` or ``log(first,last,count)``, with both ends."""
    if len(texts) != 3:
        raise UserError(f"{shown}: expected {name}(first,last,count)")
    first, last = _ends(name, texts[:2], shown)
    count = value(texts[2], int, shown)
    if count < 2:
        raise UserError(f"{shown}: {name} needs a count of at least 2")
    check_lanes(count, shown)
    space = np.geomspace if name == "log" else np.linspace
    return [_rounded(v, kind) for v in space(first, last, count).tolist()]


def _range(texts: list[str], kind: type, shown: str) -> list:
    """``first:end`` (whole numbers) or ``first:end:step``, without the end."""
    parts = [value(part, kind, shown) for part in texts]
    needed = "first:end or first:end:step" if kind is int else "first:end:step"
    least = 2 if kind is int else 3
    if not least <= len(parts) <= 3 or 0 in parts[2:] or not all(map(_finite, parts)):
        raise UserError(f"{shown}: expected {needed}")
    first, end, step = parts if len(parts) == 3 else (*parts, 1)
    if kind is int:
        number = max(0, -((first - end) // step))
    else:  # 0.1:0.3:0.1 ends before 0.3, whatever rounding makes of it
        number = max(0, math.ceil(round((end - first) / step, 6)))
    check_lanes(number, shown)
    return [_rounded(first + k * step, kind) for k in range(number)]


def _finite(number: float) -> bool:
    return math.isfinite(number)


def values(text: str, kind: type, shown: str) -> list:
    """All values that a text stands for.

    Args:
      text: values, ranges ``0:10``, ``0:10:2``, ``0.1:0.5:0.1`` without the end, and
        ``lin(0,1,5)``, ``log(1e-3,1e-1,5)`` with both ends, separated by commas;
        strings with commas in quotes, tuples in parentheses.
      kind: type of the setting.
      shown: what the user wrote, for messages.

    Raises:
      UserError: not of that type, or more than memory holds.
    """
    found = []
    for part in split(text):
        spaced = _SPACED.fullmatch(part) if kind in (int, float) else None
        if spaced:
            found += _spaced(spaced[1], split(spaced[2]), kind, shown)
        elif kind in (int, float) and ":" in part:
            found += _range([p.strip() for p in part.split(":")], kind, shown)
        else:
            found.append(value(part, kind, shown))
    return found


def distribution(
    text: str, kind: type, shown: str
) -> Callable[[np.random.Generator], Any]:
    """A function that draws a value: ``lin(a,b)``, ``log(a,b)``, or one of `values`.

    Args:
      text: ``lin(0,1)`` uniform, ``log(1e-3,1e-1)`` uniform in the logarithm (whole
        numbers are rounded); anything else: one of the values, equally likely.
      kind: type of the setting.
      shown: what the user wrote, for messages.
    """
    spaced = _SPACED.fullmatch(text.strip()) if kind in (int, float) else None
    texts = split(spaced[2]) if spaced else []
    if spaced is None or len(texts) == 3:
        return one_of(values(text, kind, shown))
    if len(texts) != 2:
        raise UserError(f"{shown}: expected {spaced[1]}(first,last)")
    first, last = _ends(spaced[1], texts, shown)
    if spaced[1] == "lin":
        return lambda rng: _rounded(rng.uniform(first, last), kind)
    low, high = math.log(first), math.log(last)
    return lambda rng: _rounded(math.exp(rng.uniform(low, high)), kind)


def one_of(choices: list) -> Callable[[np.random.Generator], Any]:
    """A function that draws one of some values, equally likely."""
    return lambda rng: choices[int(rng.integers(len(choices)))]
