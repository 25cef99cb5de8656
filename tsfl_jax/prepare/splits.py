"""Which samples are for validation and which each client holds, by the settings."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.config import Config, seeds_of
from tsfl_jax.data import partition, whole_splits
from tsfl_jax.data.partition import PartitionConfig
from tsfl_jax.data.whole_splits import Lists
from tsfl_jax.timeline import copula
from tsfl_jax.types import Dataset, Partition, UserError


class FixedSamples(NamedTuple):
    """What is known of the samples before anything of the clients is drawn."""

    held_out: Int[np.ndarray, "V"] = np.zeros(0, np.int64)  # for validation
    lists: Lists | None = None  # each client's samples; None: they are to be drawn
    scores: copula.Scores = {}  # of `copula`

    @property
    def num_samples(self) -> Int[np.ndarray, "N"] | None:
        """Number of samples of each client, where they are not drawn."""
        return None if self.lists is None else np.array([*map(len, self.lists)])


def hold_out(dataset: Dataset, number: int, seed: int) -> Int[np.ndarray, "V"]:
    """Draw so many validation samples; `seed` is that of splits."""
    if not number:
        return np.zeros(0, np.int64)
    generator = rng.generator(seed, "validation")
    return partition.hold_out(dataset.y_train, number, generator)


def fix_samples(config: Config, custom: Any, dataset: Dataset) -> FixedSamples:
    """Hold samples out, and make the splits that do not depend on the workload.

    Args:
      config: all settings.
      custom: lists of indices per client; None: as the settings say.
      dataset: with the training samples.

    Raises:
      UserError: a split that these samples do not have.
    """
    settings, seeds, fixed = config.partition, seeds_of(config), {}
    N, y = config.num_clients, dataset.y_train
    held_out = hold_out(dataset, config.data.validation, seeds.split)
    if custom is None and settings.kind in whole_splits.KINDS:
        generator = rng.generator(seeds.split, "whole split")
        lists = whole_splits.lists(y, N, settings, generator)
    else:
        lists = whole_splits.client_lists(custom, settings.kind, dataset, N)
    if lists:
        lists = whole_splits.without(lists, held_out)
    if not config.timeline.copula:
        return FixedSamples(held_out, lists)
    if lists:
        C = dataset.num_classes
        table = np.stack([np.bincount(y[rows], minlength=C) for rows in lists])
        rare = copula.rarity(table.astype(float), np.bincount(y, minlength=C))
        fixed = {"size": np.array([*map(len, lists)]), "rarity": rare}
    scores = copula.scores(config.timeline.copula, N, seeds.fleet, fixed)
    return FixedSamples(held_out, lists, scores)


def draw_split(
    settings: PartitionConfig,
    dataset: Dataset,
    fixed: FixedSamples,
    capacity: Int[np.ndarray, "N"],
    seed: int,
    drawn: Int[np.ndarray, "U"] | None = None,
) -> Partition:
    """The samples of each client, drawn or given.

    Args:
      settings: how they are drawn.
      dataset: with the training samples.
      fixed: from `fix_samples`.
      capacity: the most samples that each client ever has.
      seed: of the split.
      drawn: clients that get theirs, which do not depend on the others; None: all.

    Raises:
      UserError: there are too few samples, or a split that cannot have the scores.
    """
    held_out, lists = fixed.held_out, fixed.lists
    if lists:
        if drawn is None:
            generator = rng.generator(seed, "partition")
            return whole_splits.as_partition(lists, generator)
        return whole_splits.as_partition([lists[i] for i in drawn], None)
    rarity = fixed.scores.get("rarity")
    if rarity is not None and settings.kind not in ("dirichlet", "shards"):
        raise UserError(
            f"--config.partition.kind={settings.kind}: rarity of labels, in "
            "--config.timeline.copula, needs dirichlet, shards or a given split"
        )
    rows = np.arange(len(dataset.y_train))
    free = np.setdiff1d(rows, held_out, assume_unique=True)
    try:
        labels = dataset.y_train[free]
        split = _drawn_split(settings, labels, capacity, seed, rarity, drawn)
    except UserError as error:
        if not len(held_out):
            raise
        taken = f"--config.data.validation={len(held_out)} leaves {len(free)} samples"
        raise UserError(f"{taken}: {error}") from error
    return split._replace(indices=free[split.indices].astype(np.int32))


def _drawn_split(
    settings: PartitionConfig,
    labels: Int[np.ndarray, "M"],
    capacity: Int[np.ndarray, "N"],
    seed: int,
    rarity: Float[np.ndarray, "N"] | None,
    drawn: Int[np.ndarray, "U"] | None,
) -> Partition:
    """A drawn split; only where clients share samples at random the others are free."""
    total = int(capacity.sum(dtype=np.int64))
    is_shared = settings.replacement and total > len(labels) >= capacity.max()
    if drawn is not None and is_shared and settings.kind == "iid":
        rows = partition.views(drawn, capacity[drawn], len(labels), seed)
        note = (
            f"the clients hold {total:,} samples and there are {len(labels):,}: each "
            "holds a piece of them in random order, as "
            "--config.partition.replacement=True allows"
        )
        return Partition(rows, capacity[drawn], (note,))
    generator = rng.generator(seed, "partition")
    split = partition.make_partition(labels, capacity, settings, generator, rarity)
    if drawn is None:
        return split
    width = capacity[drawn].max()
    return Partition(split.indices[drawn, :width], capacity[drawn], split.notes)


def small_clients(batch_size: int, capacity: Int[np.ndarray, "N"]) -> tuple[str, ...]:
    """A note on clients that never hold a whole mini-batch."""
    few = capacity < batch_size
    if not few.any():
        return ()
    return (
        f"{few.sum()} of {few.size} clients never hold batch_size = {batch_size} "
        f"samples (the smallest {capacity.min()}): they train on one short mini-batch "
        "of all that they hold",
    )
