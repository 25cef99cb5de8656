"""Virtual time in ticks, whole nanoseconds, so that sums are exact and ties are ties.

Settings, files and traces are in seconds: `of` and `seconds` are the border.
"""

import math

import numpy as np
from jaxtyping import Float, Shaped

SECOND = 10**9
Ticks = int | float  # a whole number, or math.inf: never


def of_array(seconds: Float[np.ndarray, "*N J"]) -> Shaped[np.ndarray, "*N J"]:
    """The ticks nearest to finite seconds ≥ 0, of which 15 digits count.

    Args:
      seconds: ``[…, J]``. Float64 has 15 digits, so that 10⁷ + 0.1 s is exact, too.

    Returns:
      ``[…, J]`` int64, or Python's integers where J of them could exceed 63 bits.
    """
    most = float(seconds.max(initial=0.0))
    digits = np.array(9)  # after the point
    if most >= 1e6:
        digits = np.minimum(14 - np.floor(np.log10(np.maximum(seconds, 1.0))), 9)
    kind = np.int64 if most * seconds.shape[-1] < 9e9 else object
    whole = np.rint(seconds * 10.0**digits).astype(np.int64).astype(kind)
    return whole * 10 ** (9 - digits).astype(np.int64).astype(kind)


def of(seconds: float) -> Ticks:
    """The ticks nearest to seconds ≥ 0, see `of_array`; inf stays."""
    if seconds < 1e6:
        return round(float(seconds) * SECOND)
    return math.inf if seconds == math.inf else of_array(np.array([seconds])).item()


def seconds(ticks: Ticks) -> float:
    """The float64 nearest to ticks in seconds, such as 0.3 for three times 0.1 s."""
    return ticks / SECOND


def multiples(count: int, period: float) -> Float[np.ndarray, " count"]:
    """Seconds of 1, 2, …, `count` times a period in seconds: 3 times 0.1 s is 0.3."""
    length = of(period)
    return np.array([seconds(n * length) for n in range(1, count + 1)])
