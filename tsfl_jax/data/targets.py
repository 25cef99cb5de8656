"""What a network learns where a class number does not say it: real numbers.

Their dtype decides, not their values: integers are classes, floats are not. Floats
``[M, K]`` whose rows are shares are soft labels: the largest one is the class of a
sample, for splits and for the accuracy. All other floats are targets of a regression,
for which a data set has one class. Both reach loss and metrics as they are.
"""

import numpy as np
from jaxtyping import Float, Int, Num, Shaped

from tsfl_jax.data.inputs import require, require_values
from tsfl_jax.types import Dataset

_TOLERANCE = 0.005  # of a share, which may be rounded to two digits


def read(
    name: str, y_train: Shaped[np.ndarray, "M ..."], y_test: Shaped[np.ndarray, "Q ..."]
) -> tuple[list[Float[np.ndarray, "M *O"]], list[Int[np.ndarray, "M"]], int]:
    """Targets of training and test samples, their classes, and the number of classes.

    Args:
      name: of the data set.
      y_train: floats ``[M]`` or ``[M, O]``.
      y_test: likewise; integers become soft labels or, in a regression, targets.

    Raises:
      UserError: not finite, or shapes that do not agree.
    """
    targets, width = [], y_train.shape[1:]
    for key, raw in (("y_train", y_train), ("y_test", y_test)):
        y = raw
        is_class = y.ndim == 1 and y.dtype.kind in "iu" and len(width) == 1
        if is_class and y.size and y.min() >= 0 and y.max() < width[0]:
            y = np.eye(width[0])[y]
        require(
            y.shape[1:] == width and y.dtype.kind in "iuf",
            f"{name}: {key} is {y.dtype} of shape {y.shape}; expected "
            f"{[len(y), *width]} targets, a row for each sample",
        )
        with np.errstate(over="ignore"):
            y = y.astype(np.float32)
        require_values(f"{name}: {key}", raw, np.isfinite(y), "finite float32 numbers")
        targets.append(y)
    if all(map(_are_shares, targets)):
        labels = [y.argmax(axis=1).astype(np.int32) for y in targets]
        return targets, labels, targets[0].shape[1]
    return targets, [np.zeros(len(y), np.int32) for y in targets], 1


def _are_shares(y: Float[np.ndarray, "M *O"]) -> bool:
    """Whether each row has shares of two or more classes."""
    if y.ndim != 2 or y.shape[1] < 2 or y.min() < 0 or y.max() > 1.001:
        return False
    off = np.abs(y.sum(axis=1) - 1).max()
    return bool(off < min(_TOLERANCE * y.shape[1], 0.5) + 1e-6)


def of(dataset: Dataset) -> tuple[Num[np.ndarray, "M *O"], Num[np.ndarray, "Q *O"]]:
    """What loss and metrics get of training and test samples: targets or labels."""
    if dataset.target is None or dataset.test_target is None:
        return dataset.y_train, dataset.y_test
    return dataset.target, dataset.test_target


def regresses(dataset: Dataset) -> bool:
    """Whether the targets are those of a regression."""
    return dataset.target is not None and dataset.num_classes == 1


def outputs(dataset: Dataset) -> int:
    """Outputs of a network for the data set: classes, or numbers to predict."""
    if dataset.target is None or dataset.target.ndim == 1:
        return dataset.num_classes
    return dataset.target.shape[1]
