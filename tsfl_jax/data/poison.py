"""Samples of attackers: wrong labels, or a pattern that stands for a class.

    label_flip:  label c becomes C − 1 − c
    backdoor:    a share of an attacker's images has a bright square in the last corner
                 and the label `target`

Every sample gets a poisoned copy behind all samples, and attackers hold copies in place
of samples. So it does not matter which clients share samples, and runs with other
attackers share the data; the samples take twice the memory.

Label flips: Fang, Cao, Jia, Gong, "Local Model Poisoning Attacks to Byzantine-Robust
Federated Learning", USENIX Security 2020. Backdoor: Gu, Dolan-Gavitt, Garg, "BadNets:
Identifying Vulnerabilities in the Machine Learning Model Supply Chain", 2017; with
clients: Bagdasaryan et al., "How to Backdoor Federated Learning", AISTATS 2020.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Num, Shaped

from tsfl_jax.data.inputs import require
from tsfl_jax.timeline.attackers import DATA, AttackConfig
from tsfl_jax.types import Array, Dataset, OnChanged, Partition


def stamped(x: Shaped[Any, "M H W C"], side: int, value: Any, numpy: Any = np) -> Any:
    """Images with a square of `value` in the last corner."""
    H, W = x.shape[1:3]
    in_square = (np.arange(H) >= H - side)[:, None] & (np.arange(W) >= W - side)
    return numpy.where(in_square[None, :, :, None], numpy.asarray(value, x.dtype), x)


def poisoned(
    dataset: Dataset,
    partition: Partition,
    is_attacker: Bool[np.ndarray, " U"],
    settings: AttackConfig,
    bright: Any,
) -> tuple[Dataset, Partition]:
    """The data set with poisoned copies, and who holds which.

    Args:
      dataset: as honest clients have it.
      partition: rows of U clients.
      is_attacker: of each of these.
      settings: `kind`, and of a backdoor `target`, `pattern` and `poisoned`.
      bright: value of the pattern's pixels.

    Returns:
      Both as they are without such an attack. Of a backdoor every prefix of a row has
      its share of copies.

    Raises:
      UserError: samples that cannot be poisoned.
    """
    if settings.kind not in DATA or not settings.share:
        return dataset, partition
    _check(dataset, settings)
    x, y, share = dataset.x_train, dataset.y_train, 1.0
    copies, labels = x, dataset.num_classes - 1 - y
    if settings.kind == "backdoor":
        copies, share = stamped(x, settings.pattern, bright), settings.poisoned
        labels = np.full_like(y, settings.target)
    place = np.arange(partition.indices.shape[1])
    is_copy = np.floor((place + 1) * share) > np.floor(place * share)
    moved = (is_attacker[:, None] & is_copy) * np.int32(len(y))
    dataset = dataset._replace(
        x_train=np.concatenate([x, copies]), y_train=np.concatenate([y, labels])
    )
    return dataset, partition._replace(indices=partition.indices + moved)


def success_of(
    dataset: Dataset, settings: AttackConfig
) -> tuple[tuple[str, OnChanged], ...]:
    """The score of a backdoor: test images of other classes, taken for `target`.

    Args:
      dataset: as it was loaded.
      settings: of the attack.

    Returns:
      The metric "attack_success" of a model; () without a backdoor.
    """
    if settings.kind != "backdoor" or not settings.share:
        return ()
    _check(dataset, settings)
    numbers = settings.pattern, settings.target, dataset.x_train.max().item()
    return (("attack_success", _success(*numbers)),)


@functools.lru_cache(maxsize=64)  # one function for all runs of a program
def _success(side: int, target: int, value: float) -> OnChanged:
    def change(x: Shaped[Array, "B H W C"]) -> Array:
        return stamped(x, side, value, jnp)

    def taken(outputs: Num[Array, "B O"], y: Num[Array, "B"]) -> tuple[Array, Array]:
        is_other = y != target
        return is_other & (outputs.argmax(axis=-1) == target), is_other

    return OnChanged(change, taken)


def _check(dataset: Dataset, settings: AttackConfig) -> None:
    x, is_backdoor = dataset.x_train, settings.kind == "backdoor"
    has_classes = dataset.num_classes > 1 and dataset.target is None
    flag = f"--config.attack.kind={settings.kind}: {dataset.name} has samples "
    flag += f"{x.dtype}{list(x.shape[1:])} and {dataset.num_classes} classes; expected "
    require(has_classes, f"{flag}class numbers; choose another attack")
    require(
        not is_backdoor
        or (
            x.ndim == 4
            and settings.pattern <= min(x.shape[1:3])
            and settings.target < dataset.num_classes
        ),
        f"{flag}images [H, W, C] not smaller than --config.attack.pattern="
        f"{settings.pattern}, and more classes than --config.attack.target="
        f"{settings.target}",
    )
