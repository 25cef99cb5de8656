"""Which samples are for validation and which each client holds, by the settings."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from tsfl_jax import rng
from tsfl_jax.data import class_counts, partition, whole_splits
from tsfl_jax.data import client_test as tests
from tsfl_jax.data.client_test import ClientTest, EvaluationConfig
from tsfl_jax.data.partition import PartitionConfig
from tsfl_jax.data.whole_splits import Lists
from tsfl_jax.types import Dataset, Partition, UserError


class FixedSamples(NamedTuple):
    """What is known of the samples before anything of the clients is drawn."""

    held_out: Int[np.ndarray, "V"] | None = None  # for validation; None: there are none
    lists: Lists | None = None  # each client's samples; None: they are to be drawn

    @property
    def num_samples(self) -> Int[np.ndarray, "N"] | None:
        """Number of samples of each client, where they are not drawn."""
        return None if self.lists is None else np.array([*map(len, self.lists)])


def hold_out(dataset: Dataset, number: int, seed: int) -> Int[np.ndarray, "V"] | None:
    """So many validation samples, None if there are none; `seed` is that of splits."""
    if not number:
        return None
    generator = rng.generator(seed, "validation")
    return class_counts.hold_out(dataset.y_train, number, generator)


def fix_samples(
    settings: PartitionConfig,
    custom: Any,
    dataset: Dataset,
    num_clients: int,
    num_validation: int,
    seed: int,
) -> FixedSamples:
    """Hold samples out, and make the splits that do not depend on the workload.

    Args:
      settings: how samples are split.
      custom: lists of indices per client; None: as the settings say.
      dataset: with the training samples.
      num_clients: N.
      num_validation: V, samples that no client holds.
      seed: of the split.

    Raises:
      UserError: a split that these samples do not have.
    """
    held_out = hold_out(dataset, num_validation, seed)
    if custom is None and settings.kind in whole_splits.KINDS:
        generator = rng.generator(seed, "whole split")
        lists = whole_splits.lists(dataset.y_train, num_clients, settings, generator)
    else:
        kind = settings.kind
        lists = whole_splits.client_lists(custom, kind, dataset, num_clients)
    if lists is not None:
        lists = lists if held_out is None else whole_splits.without(lists, held_out)
    return FixedSamples(held_out, lists)


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
      UserError: there are too few samples.
    """
    generator = rng.generator(seed, "partition")
    held_out, lists = fixed.held_out, fixed.lists
    if lists is not None:
        if drawn is None:
            return whole_splits.as_partition(lists, generator)
        return whole_splits.as_partition([lists[i] for i in drawn], None)
    labels = dataset.y_train
    if held_out is None:
        return _drawn_split(settings, labels, capacity, seed, generator, drawn)
    free = np.setdiff1d(np.arange(len(labels)), held_out, assume_unique=True)
    try:
        split = _drawn_split(settings, labels[free], capacity, seed, generator, drawn)
    except UserError as error:
        taken = f"--config.data.validation={len(held_out)} leaves {len(free)} samples"
        raise UserError(f"{taken}: {error}") from error
    return split._replace(indices=free[split.indices].astype(np.int32))


def _drawn_split(
    settings: PartitionConfig,
    labels: Int[np.ndarray, "M"],
    capacity: Int[np.ndarray, "N"],
    seed: int,
    generator: np.random.Generator,
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
    split = partition.make_partition(labels, capacity, settings, generator)
    if drawn is None:
        return split
    width = capacity[drawn].max()
    return Partition(split.indices[drawn, :width], capacity[drawn], split.notes)


def client_test(
    settings: EvaluationConfig,
    dataset: Dataset,
    split: Partition,
    drawn: Int[np.ndarray, "U"],
    owners: Int[np.ndarray, "_"],
    classifies: bool | None,
) -> ClientTest | None:
    """The clients that are scored, by the settings; None: none.

    Args:
      settings: which clients, on what.
      dataset: with the test samples.
      split: the training samples of the clients `drawn`.
      drawn: ids of clients that may work.
      owners: ids of clients that may be scored on test samples of their own.
      classifies: whether the network does.
    """
    if settings.clients == "labels":
        return tests.by_labels(dataset, split, drawn, classifies, settings.number)
    if settings.clients == "own":
        return tests.by_owner(dataset, owners, settings.number)
    return None


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
