"""Samples of attackers: wrong labels, or a pattern that stands for a class.

    label_flip:  label c becomes C − 1 − c
    backdoor:    a share of images has a bright square in a corner, and label `target`

Every sample gets a poisoned copy behind all samples, and attackers hold copies in place
of samples. So it does not matter which clients share samples, and runs with other
attackers share the data; the samples take twice the memory.

Label flips: Fang, Cao, Jia, Gong, "Local Model Poisoning Attacks to Byzantine-Robust
Federated Learning", USENIX Security 2020. Backdoor: Gu, Dolan-Gavitt, Garg, "BadNets:
Identifying Vulnerabilities in the Machine Learning Model Supply Chain", 2017.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Num, Shaped

from tsfl_jax.data.inputs import require
from tsfl_jax.timeline.attackers import DATA, AttackConfig
from tsfl_jax.types import Array, Dataset, OnChanged, Partition


def _stamped(x: Shaped[Any, "M H W C"], side: int, value: Any, numpy: Any = np) -> Any:
    """Images with a square of `value` in the last corner."""
    H, W = x.shape[1:3]
    in_square = (np.arange(H) >= H - side)[:, None] & (np.arange(W) >= W - side)
    return numpy.where(in_square[None, :, :, None], numpy.asarray(value, x.dtype), x)


def poisoned(
    dataset: Dataset,
    partition: Partition,
    is_attacker: Bool[np.ndarray, "U"],
    settings: AttackConfig,
    bright: Any,
) -> tuple[Dataset, Partition]:
    """The data set with poisoned copies, and who holds which.

    Args:
      dataset: as honest clients have it.
      partition: rows of U clients; each prefix of a row gets its share of copies.
      is_attacker: of each of these.
      settings: of the attack; both are unchanged by another kind.
      bright: value of the pattern's pixels.
    """
    if settings.kind not in DATA or not settings.share:
        return dataset, partition
    x, y, share = dataset.x_train, dataset.y_train, 1.0
    copies, labels = x, dataset.num_classes - 1 - y
    if settings.kind == "backdoor":
        copies, share = _stamped(x, settings.pattern, bright), settings.poisoned
        labels = np.full_like(y, settings.target)
    place = np.arange(partition.indices.shape[1])
    is_copy = np.floor((place + 1) * share) > np.floor(place * share)
    moved = (is_attacker[:, None] & is_copy) * np.int32(len(y))
    x, y = np.concatenate([x, copies]), np.concatenate([y, labels])
    split = partition._replace(indices=partition.indices + moved)
    return dataset._replace(x_train=x, y_train=y), split


def success_of(
    dataset: Dataset, settings: AttackConfig
) -> tuple[tuple[str, OnChanged], ...]:
    """The metric "attack_success": test images of other classes, taken for `target`.

    Args:
      dataset: as it was loaded.
      settings: of the attack; (): no backdoor.

    Raises:
      UserError: samples that cannot be poisoned, in either way.
    """
    if settings.kind not in DATA or not settings.share:
        return ()
    shape, C = dataset.x_train.shape[1:], dataset.num_classes
    fits = C > 1 and dataset.target is None
    if settings.kind == "backdoor":
        fits &= len(shape) == 3 and settings.pattern <= min(shape[:2])
        fits &= settings.target < C
    require(
        fits,
        f"--config.attack.kind={settings.kind}, pattern={settings.pattern}, target="
        f"{settings.target}: {dataset.name} has samples {[*shape]} and {C} classes; "
        "expected class numbers, and of a backdoor images [H, W, C] and a target that "
        "fit",
    )
    if settings.kind == "label_flip":
        return ()
    numbers = settings.pattern, settings.target, dataset.x_train.max().item()
    return (("attack_success", _success(*numbers)),)


@functools.lru_cache(maxsize=64)  # one function for all runs of a program
def _success(side: int, target: int, value: float) -> OnChanged:
    def taken(outputs: Num[Array, "B O"], y: Num[Array, "B"]) -> tuple[Array, Array]:
        return (y != target) & (outputs.argmax(axis=-1) == target), y != target

    return OnChanged(lambda x: _stamped(x, side, value, jnp), taken)
