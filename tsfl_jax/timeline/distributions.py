"""Numbers from distributions written as text, one for each group of clients.

The grammar of a group; whole numbers are floored:

- ``normal(mean,std)``: std ≥ 0;
- ``uniform(low,high)``: whole numbers, both ends included; real ones in [low, high);
- ``lognormal(mean,sigma)``: mean > 0 of the distribution itself, sigma ≥ 0 the
  standard deviation of the logarithm, so its median is mean · exp(−sigma²/2);
- ``constant(k)``.
"""

import contextlib
import functools
import math
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Shaped

from tsfl_jax.types import INT32_MAX, UserError, nearest

_COUNTS = {"normal": 2, "uniform": 2, "lognormal": 2, "constant": 1}  # of numbers
_GRAMMAR = (
    "normal(mean,std) with std >= 0, uniform(low,high) with low <= high, whole numbers "
    "for τ and sizes, lognormal(mean,sigma) with mean > 0 and sigma >= 0, or "
    f"constant(k); numbers are finite and at most {INT32_MAX}"
)
_DEVIATIONS = 3.0  # beyond so many standard deviations `limits` cuts off


def limits(texts: Sequence[str], *, flag: str) -> Float[np.ndarray, " G"]:
    """The largest number to keep of each distribution, so that draws are bounded.

    The largest of many draws of a normal or lognormal distribution grows with their
    number without end.

    Args:
      texts: G distributions.
      flag: setting that error messages name.

    Returns:
      ``[G]`` float64: mean + 3 std of a normal distribution, mean · exp(3σ − σ²/2) of
      a lognormal one, inf of bounded ones.

    Raises:
      UserError: a text outside the grammar.
    """
    largest = []
    for name, numbers in (_parse(text, flag) for text in texts):
        limit = math.inf
        if name == "normal":
            limit = numbers[0] + _DEVIATIONS * numbers[1]
        elif name == "lognormal":
            exponent = _DEVIATIONS * numbers[1] - numbers[1] ** 2 / 2
            limit = numbers[0] * math.exp(min(exponent, 700.0))
        largest.append(limit)
    return np.array(largest)


def draw(
    texts: Sequence[str],
    group: Int[np.ndarray, " N"],
    rng: np.random.Generator,
    *,
    flag: str,
    least: int | None = None,
    rows: tuple[int, ...] = (),
) -> Shaped[np.ndarray, "*rows N"]:
    """Draw a number for each client, or for each client and interval.

    Args:
      texts: G distributions.
      group: ``[N]`` int in [0, G), distribution of each client.
      rng: each group has its own stream of it.
      flag: setting that error messages name.
      least: of whole numbers, of which smaller ones become this; None: of real ones.
      rows: (T,) of T intervals; the first ones do not depend on T.

    Returns:
      float64; of whole numbers int64, floored, from `least` to 2³¹ − 1.

    Raises: as `limits`.
    """
    out = np.empty((*rows, len(group)))
    for g, stream in enumerate(rng.spawn(len(texts))):
        name, numbers = _parse(texts[g], flag, least is not None)
        (members,) = np.nonzero(group == g)
        shape = (*rows, len(members))
        first, last = numbers[0], numbers[-1]
        if name == "normal":
            drawn = stream.normal(first, last, shape)
        elif name == "lognormal":
            drawn = stream.lognormal(math.log(first) - last**2 / 2, last, shape)
        elif name == "constant":
            drawn = first
        elif least is not None:
            drawn = stream.integers(int(first), int(last), shape, endpoint=True)
        else:
            drawn = stream.uniform(first, last, shape)
        out[..., members] = drawn
    return _floored(out, least)


def quantiles(
    texts: Sequence[str],
    group: Int[np.ndarray, "*shape"],
    uniform: Float[np.ndarray, "*shape"],
    *,
    flag: str,
    least: int | None = None,
) -> Shaped[np.ndarray, "*shape"]:
    """Numbers as of `draw`, each by inversion of its distribution.

    Args:
      texts, flag, least: as in `draw`.
      group: int in [0, G), distribution of each number.
      uniform: in (0, 1), likewise.

    Returns, Raises: as `draw`.
    """
    from scipy import special

    whole, out = least is not None, np.empty(uniform.shape)
    for g, text in enumerate(texts):
        name, numbers = _parse(text, flag, whole=whole)
        members = np.broadcast_to(group == g, out.shape)
        u, first, last = uniform[members], numbers[0], numbers[-1]
        if name == "normal":
            drawn = first + last * special.ndtri(u)
        elif name == "lognormal":
            drawn = np.exp(math.log(first) - last**2 / 2 + last * special.ndtri(u))
        elif name == "constant":
            drawn = first
        elif whole:
            drawn = first + np.minimum(np.floor(u * (last - first + 1)), last - first)
        else:
            drawn = first + u * (last - first)
        out[members] = drawn
    return _floored(out, least)


def _floored(
    numbers: Float[np.ndarray, "*shape"], least: int | None
) -> Shaped[np.ndarray, "*shape"]:
    if least is None:
        return numbers
    return np.clip(np.floor(numbers), least, INT32_MAX).astype(np.int64)


@functools.lru_cache(maxsize=256)
def _parse(text: str, flag: str, whole: bool = True) -> tuple[str, list[float]]:
    """The name and the numbers of a distribution."""
    name = re.sub(r"\W.*", "", text.strip(), flags=re.DOTALL).lower()
    match = re.fullmatch(r"\s*\w+\s*\(([^()]*)\)\s*", text)
    with contextlib.suppress(ValueError):
        numbers = [float(number) for number in match[1].split(",")] if match else []
        # A NaN is in no range.
        in_range = all(abs(number) <= INT32_MAX for number in numbers)
        if in_range and len(numbers) == _COUNTS.get(name):
            first, last = numbers[0], numbers[-1]
            is_valid = {
                "normal": last >= 0,
                "uniform": first <= last and not (whole and (first % 1 or last % 1)),
                "lognormal": first > 0 and last >= 0,
                "constant": True,
            }
            if is_valid[name]:
                return name, numbers
    hint = "" if name in _COUNTS else nearest(name, _COUNTS)
    raise UserError(f"{flag}: {text!r}: expected {_GRAMMAR}{hint}")


def check_groups(setting: str, groups: int, num_clients: int) -> None:
    """Refuse more groups than clients: some would be empty."""
    if groups > num_clients:
        raise UserError(
            f"--config.{setting} has {groups} entries for "
            f"--config.num_clients={num_clients}; expected at most one per client"
        )
