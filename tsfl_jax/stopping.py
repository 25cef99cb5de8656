"""When a run ends before its last interval: settings, and the rule."""

import numpy as np
from jaxtyping import Float

from tsfl_jax.components import component, setting


@component("stop")
class StopConfig:
    """The end of a run before T intervals, by its test scores; single runs only."""

    at: float = setting(
        0.0,
        "end after the first test accuracy that is at least this, in [0, 1]; 0: off",
        low=0,
        high=1,
        effect=False,
    )
    patience: int = setting(
        0,
        "end after so many tests without a best accuracy (or loss); 0: off",
        low=0,
        effect=False,
    )


def reached(
    stop: StopConfig, accuracy: Float[np.ndarray, "T"], loss: Float[np.ndarray, "T"]
) -> bool:
    """Whether a run ends, which its history alone decides.

    Args:
      stop: the settings.
      accuracy: in [0, 1], of the finished intervals; NaN: not measured.
      loss: likewise.
    """
    score = accuracy[~np.isnan(accuracy)]
    if stop.at and score.size and score.max() >= stop.at:
        return True
    if not score.size:  # of a regression
        score = -loss[~np.isnan(loss)]
    tests = score.size
    return bool(stop.patience and tests and tests - 1 - score.argmax() >= stop.patience)
