"""Clients whose samples look different, or whose labels are wrong.

Feature skew: noise that grows from client to client, Li et al., "Federated Learning on
Non-IID Data Silos: An Experimental Study" (2022, NIID-Bench); rotated images, Ghosh et
al., "An Efficient Framework for Clustered Federated Learning" (2020). Symmetric label
noise: Natarajan et al., "Learning with Noisy Labels" (2013). The test set stays.
"""

from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from tsfl_jax import rng
from tsfl_jax.components import component, setting
from tsfl_jax.data.inputs import require
from tsfl_jax.types import Dataset, Partition


@component("partition")
class SkewConfig:
    """How samples differ from client to client, of every split."""

    noise: float = setting(
        0.0, "σ; client i has noise σ i/(N−1) on what the model sees", low=0
    )
    rotation: float = setting(
        0.0, "degrees; client i has images turned by i/(N−1) of it", low=0, high=360
    )
    label_noise: float = setting(
        0.0, "share of each client's labels that are wrong", low=0, below=1
    )


def skewed(dataset: Dataset, partition: Partition, settings: Any, seed: int) -> Dataset:
    """The data set as its clients have it.

    Client i = 0..N−1 has noise of the standard deviation σ i/(N−1) in units of what the
    model sees, and images rotated by φ i/(N−1). A share p of each client's labels is
    replaced, by each of the other classes alike.

    Args:
      dataset: samples, whose arrays are not changed.
      partition: which client holds which; samples of no client stay.
      settings: `noise` σ ≥ 0, `rotation` φ in degrees, `label_noise` p in [0, 1).
      seed: of the split.

    Returns:
      The data set itself, if nothing is skewed. Values of uint8 are rounded and
      clipped.

    Raises:
      UserError: samples that cannot be skewed, or that several clients hold.
    """
    if not (settings.noise or settings.rotation or settings.label_noise):
        return dataset
    _check(dataset, partition, settings)
    x, y = dataset.x_train, dataset.y_train.copy()
    draws = rng.generator(seed, "skew")
    if settings.noise or settings.rotation:
        x = x.copy()
    N, C = len(partition.indices), dataset.num_classes
    for i, rows in enumerate(_rows(partition)):
        level = i / max(N - 1, 1)
        if angle := settings.rotation * level:  # linear interpolation; outside is 0
            from scipy import ndimage  # slow to import

            images, options = x[rows].astype(np.float32), {"reshape": False, "order": 1}
            x[rows] = _stored(ndimage.rotate(images, angle, (1, 2), **options), x.dtype)
        if settings.noise * level:
            noise = draws.standard_normal(x[rows].shape) * dataset.std
            x[rows] = _stored(x[rows] + settings.noise * level * noise, x.dtype)
        wrong = draws.permutation(rows)[: round(settings.label_noise * len(rows))]
        y[wrong] = (y[wrong] + draws.integers(1, C, len(wrong))) % C
    return dataset._replace(x_train=x, y_train=y)


def _stored(
    x: Shaped[np.ndarray, "n ..."], dtype: np.dtype
) -> Shaped[np.ndarray, "n ..."]:
    return np.clip(np.rint(x), 0, 255).astype(np.uint8) if dtype == np.uint8 else x


def _rows(partition: Partition) -> list[Int[np.ndarray, "_"]]:
    """The samples of each client."""
    pairs = zip(partition.indices, partition.capacity, strict=True)
    return [row[:number] for row, number in pairs]


def _check(dataset: Dataset, partition: Partition, settings: Any) -> None:
    x = dataset.x_train
    has_classes = dataset.num_classes > 1 and dataset.target is None
    require(
        (x.dtype != np.int32 or not settings.noise)
        and (x.ndim == 4 or not settings.rotation)
        and (has_classes or not settings.label_noise),
        f"--config.partition.noise, rotation, label_noise: {dataset.name} has samples "
        f"{x.dtype}{list(x.shape[1:])} and {dataset.num_classes} classes; noise needs "
        "other samples than tokens, rotation images [H, W, C] (of [H, W], "
        "make_dataset(..., add_channel=True) makes them), label_noise class numbers",
    )
    rows = np.concatenate(_rows(partition))
    require(
        not settings.online and len(np.unique(rows)) == len(rows),
        "--config.partition.noise, rotation, label_noise: each sample is changed for "
        "the client that holds it, but several clients hold the same; leave out "
        "partition.replacement, common and online",
    )
