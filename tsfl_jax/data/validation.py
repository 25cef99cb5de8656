"""Validation samples: held out of the training samples before clients get theirs.

What a server might own beside its test set. Rules with weights from updates and
the regret of rules are measured on them; no client trains on them.
"""

import numpy as np
from jaxtyping import Int, Shaped

from tsfl_jax.data import class_counts
from tsfl_jax.data.inputs import require


def hold_out(
    labels: Shaped[np.ndarray, "M"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, "V"]:
    """Draw validation samples, the same share of each class up to rounding.

    Args:
      labels: classes of the training samples.
      count: V ≥ 0.
      rng: random number generator.

    Returns:
      Indices of V samples, ascending.

    Raises:
      UserError: nothing would be left to train on.
    """
    require(
        count < len(labels),
        f"--config.data.validation={count}: there are only {len(labels)} training "
        "samples, and clients need some; use fewer",
    )
    classes, inverse = np.unique(labels, return_inverse=True)
    stock = np.bincount(inverse, minlength=len(classes))
    real = count * stock[None] / stock.sum()
    class_sizes = class_counts.round_rows(real, np.array([count]))[0]
    drawn = [
        rng.permutation(np.flatnonzero(inverse == c))[:number]
        for c, number in enumerate(class_sizes)
    ]
    return np.sort(np.concatenate(drawn))


def left(samples: int, held_out: Int[np.ndarray, "V"]) -> Int[np.ndarray, "_"]:
    """Indices of the samples that are not held out, ascending."""
    return np.setdiff1d(np.arange(samples), held_out, assume_unique=True)


def without(
    lists: list[Int[np.ndarray, "_"]], held_out: Int[np.ndarray, "V"]
) -> list[Int[np.ndarray, "_"]]:
    """Each client's own samples without those that are held out.

    Raises:
      UserError: a client would have none.
    """
    remaining = [rows[~np.isin(rows, held_out)] for rows in lists]
    for i, rows in enumerate(remaining):
        require(
            len(rows),
            f"--config.data.validation={len(held_out)}: takes all {len(lists[i])} "
            f"samples of client {i}; use fewer, or another --config.seed",
        )
    return remaining
