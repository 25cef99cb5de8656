"""What a network learns where a class number does not say it: real numbers.

Their dtype decides, not their values: integers are classes, floats are not. Floats
``[M, K]`` whose rows are shares are soft labels: the largest one is the class of a
sample, for splits and for the accuracy. All other floats are targets of a regression,
for which a data set has one class. Both reach loss and metrics as they are.
"""

import numpy as np
from jaxtyping import Bool, Float, Int, Num, Shaped

from tsfl_jax.types import Dataset, UserError

_TOLERANCE = 0.005  # of a share, which may be rounded to two digits


def require(
    name: str,
    key: str,
    values: Shaped[np.ndarray, "M ..."],
    good: Bool[np.ndarray, "M ..."],
    expected: str,
) -> None:
    """Raise `UserError` that names the first value of an array that is not good."""
    if not good.all():
        where = tuple(np.argwhere(~good)[0].tolist())
        what = f"{name}: {key} holds {values[where]} at row {where[0]}"
        raise UserError(f"{what}; expected {expected}")


def are_targets(y: Shaped[np.ndarray, "..."]) -> bool:
    """Whether labels are targets: floats ``[M]`` or ``[M, O]``."""
    return y.dtype.kind == "f" and 1 <= y.ndim <= 2 and y.size > 0


def read(
    name: str,
    pair: dict[str, Shaped[np.ndarray, "..."]],
    counts: tuple[int, int],
) -> tuple[list[Float[np.ndarray, "M *O"]], list[Int[np.ndarray, "M"]], int]:
    """Targets of training and test samples, their classes, and the number of classes.

    Args:
      name: of the data set.
      pair: y_train and y_test. Integers of test samples become soft labels or, in a
        regression, targets.
      counts: samples of each.

    Raises:
      UserError: not finite, or shapes that do not agree.
    """
    found = []
    train = pair["y_train"]
    width = train.shape[1:]
    for (key, y), count in zip(pair.items(), counts, strict=True):
        whole = y.ndim == 1 and y.dtype.kind in "iu" and len(width) == 1
        if whole and y.size and y.min() >= 0 and y.max() < width[0]:
            y = np.eye(width[0])[y]
        if y.shape != (count, *width) or y.dtype.kind not in "iuf":
            raise UserError(
                f"{name}: {key} is {y.dtype} of shape {y.shape}; expected "
                f"{[count, *width]} targets, a row for each sample"
            )
        with np.errstate(over="ignore"):
            y = y.astype(np.float32)
        require(name, key, pair[key], np.isfinite(y), "finite float32 numbers")
        found.append(y)
    if all(map(_shares, found)):
        classes = [y.argmax(axis=1).astype(np.int32) for y in found]
        return found, classes, found[0].shape[1]
    return found, [np.zeros(len(y), np.int32) for y in found], 1


def _shares(y: Float[np.ndarray, "M *O"]) -> bool:
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
