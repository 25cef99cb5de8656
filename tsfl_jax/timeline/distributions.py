"""Numbers from distributions written as text, one for each group of clients.

The grammar of a group; `draw` floors each number, `draw_real` leaves it:

- ``normal(mean,std)``: std ≥ 0;
- ``uniform(low,high)``: whole numbers, both ends included; real in [low, high) in
  `draw_real`;
- ``lognormal(mean,sigma)``: mean > 0 of the distribution itself, sigma ≥ 0 the
  standard deviation of the logarithm, so its median is mean · exp(−sigma²/2);
- ``constant(k)``.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from tsfl_jax.types import UserError, nearest

_ARGUMENTS = {
    "normal": ("mean", "std"),
    "uniform": ("low", "high"),
    "lognormal": ("mean", "sigma"),
    "constant": ("k",),
}
_GRAMMAR = ", ".join(f"{name}({','.join(a)})" for name, a in _ARGUMENTS.items())
_LARGEST = 2**31 - 1  # what int32 holds
_DEVIATIONS = 3.0  # beyond so many standard deviations `most` cuts off


def most(texts: Sequence[str], *, flag: str) -> np.ndarray:
    """The largest number that is kept of each distribution, so that draws are bounded.

    The largest of many draws of a normal or lognormal distribution grows with their
    number without end.

    Args:
      texts: G distributions.
      flag: named in error messages.

    Returns:
      [G] float64: mean + 3 std of a normal distribution, mean · exp(3 σ − σ²/2) of a
      lognormal one, inf of those that are bounded already.

    Raises:
      UserError: a text outside the grammar.
    """
    limits = []
    for name, numbers in (_parse(text, flag) for text in texts):
        limit = math.inf
        if name == "normal":
            limit = numbers[0] + _DEVIATIONS * numbers[1]
        elif name == "lognormal":
            exponent = _DEVIATIONS * numbers[1] - numbers[1] ** 2 / 2
            limit = numbers[0] * math.exp(min(exponent, 700.0))
        limits.append(limit)
    return np.array(limits)


def draw(
    texts: Sequence[str],
    group: np.ndarray,
    num_intervals: int,
    rng: np.random.Generator,
    *,
    least: int,
    flag: str,
) -> np.ndarray:
    """Draws a number for each client and interval.

    Args:
      texts: G distributions.
      group: [N] int, which of them a client follows.
      num_intervals: T; the first intervals do not depend on it.
      rng: each group has its own stream of it.
      least: smaller numbers become this.
      flag: named in error messages.

    Returns:
      [T, N] int64.

    Raises:
      UserError: a text outside the grammar.
    """
    parsed = [_parse(text, flag) for text in texts]
    out = np.empty((num_intervals, len(group)), np.int64)
    for g, ((name, numbers), stream) in enumerate(
        zip(parsed, rng.spawn(len(parsed)), strict=True)
    ):
        members = np.flatnonzero(group == g)
        # Rows are drawn one after another, so more rows extend fewer.
        drawn = _sample(name, numbers, (num_intervals, len(members)), stream)
        out[:, members] = np.clip(np.floor(drawn), least, _LARGEST)
    return out


def draw_real(
    texts: Sequence[str], group: np.ndarray, rng: np.random.Generator, *, flag: str
) -> np.ndarray:
    """Draws one real number for each client.

    Args:
      texts: G distributions.
      group: [N] int, which of them a client follows.
      rng: each group has its own stream of it.
      flag: named in error messages.

    Returns:
      [N] float64, neither floored nor clipped.

    Raises:
      UserError: a text outside the grammar.
    """
    parsed = [_parse(text, flag, whole=False) for text in texts]
    out = np.empty(len(group), np.float64)
    for g, ((name, numbers), stream) in enumerate(
        zip(parsed, rng.spawn(len(parsed)), strict=True)
    ):
        members = np.flatnonzero(group == g)
        out[members] = _sample(name, numbers, len(members), stream, whole=False)
    return out


def _sample(name, numbers, shape, rng, whole=True) -> np.ndarray:
    if name == "normal":
        return rng.normal(*numbers, shape)
    if name == "uniform" and not whole:
        return rng.uniform(*numbers, shape)
    if name == "uniform":
        low, high = (int(n) for n in numbers)
        return rng.integers(low, high, shape, endpoint=True)
    if name == "lognormal":
        mean, sigma = numbers
        return rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, shape)
    return np.full(shape, numbers[0])


def _parse(text: str, flag: str, whole: bool = True) -> tuple[str, list[float]]:
    def wrong(why: str) -> UserError:
        return UserError(f"{flag}: {text!r}: {why} (grammar: {_GRAMMAR})")

    match = re.fullmatch(r"\s*(\w*)\s*\(([^()]*)\)\s*", text)
    if not match:
        word = re.match(r"\s*(\w*)", text)[1].lower()
        raise wrong(f"expected NAME(NUMBER,…){nearest(word, _ARGUMENTS)}")
    name = match[1].lower()
    if name not in _ARGUMENTS:
        raise wrong(f"unknown distribution {name!r}{nearest(name, _ARGUMENTS)}")
    arguments = _ARGUMENTS[name]
    parts = match[2].split(",")
    if len(parts) != len(arguments):
        raise wrong(f"{name} takes {len(arguments)} numbers, got {len(parts)}")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise wrong("not a number") from None
    if not all(abs(n) <= _LARGEST for n in numbers):  # also answers NaN
        raise wrong(f"numbers must be finite and at most {_LARGEST}")
    if name in ("normal", "lognormal") and numbers[1] < 0:
        raise wrong(f"{arguments[1]} must be >= 0")
    if name == "lognormal" and numbers[0] <= 0:
        raise wrong("the mean must be > 0")
    if name == "uniform" and numbers[0] > numbers[1]:
        raise wrong("low must not exceed high")
    if name == "uniform" and whole and any(n != int(n) for n in numbers):
        raise wrong("low and high must be whole numbers")
    return name, numbers
