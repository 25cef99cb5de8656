"""Splits that are not drawn: lists of samples, or the clients of the data set."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from tsfl_jax import host_memory
from tsfl_jax.data.inputs import require, require_values
from tsfl_jax.types import Dataset, Partition, user_code

Lists = list[Int[np.ndarray, "_"]]


def client_lists(
    partition: Any, kind: str, dataset: Dataset, num_clients: int
) -> Lists | None:
    """The samples of each client, or None if they are to be drawn.

    Args:
      partition: N lists of indices into the training samples; None: none.
      kind: the setting partition.kind; "client": as the data set says.
      dataset: with `client` for that kind.
      num_clients: N.

    Raises:
      UserError: what is no list of samples per client.
    """
    if partition is not None:
        lists, source = _checked(partition, len(dataset.y_train)), "partition="
    elif kind == "client":
        client = dataset.client if dataset.client is not None else np.zeros(0, int)
        require(
            client.size,
            f"--config.partition.kind=client: {dataset.name} does not say which client "
            "a sample belongs to; give client= to tsfl_jax.make_dataset, or an array "
            "client in the .npz file",
        )
        order = np.argsort(client, kind="stable")
        lists = np.split(order, np.cumsum(np.bincount(client))[:-1])
        source = dataset.name
    else:
        return None
    require(
        len(lists) == num_clients,
        f"--config.num_clients={num_clients}: {source} has samples of {len(lists)} "
        "clients; set it to that",
    )
    return lists


def _checked(partition: Any, num_samples: int) -> Lists:
    """Lists of a user as arrays of distinct indices."""
    expected = f"expected a list per client, of distinct indices 0..{num_samples - 1}"
    with user_code("partition= is no list", expected):
        lists = [np.asarray(rows) for rows in partition]
    for i, rows in enumerate(lists):
        name = f"partition: client {i}"
        is_list = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu"
        kind = f"{rows.dtype}{list(rows.shape)}"
        require(is_list, f"{name} has {kind}; {expected}, one or more")
        good = (rows >= 0) & (rows < num_samples)
        require_values(name, rows, good, f"0..{num_samples - 1}")
        require(len(np.unique(rows)) == len(rows), f"{name} has a sample twice")
    return lists


def as_partition(
    lists: Sequence[Int[np.ndarray, "_"]], generator: np.random.Generator | None
) -> Partition:
    """The index table of lists; rows in random order, as those that are drawn.

    Without a generator they stay in order, which matters to no client that uses all.
    """
    capacity = np.array([len(rows) for rows in lists], np.int32)
    largest = int(capacity.max())
    owner, size = f"a client with {largest:,} samples", 4 * largest * len(lists)
    host_memory.require(owner, size, "the index table")
    if generator is not None:
        lists = [generator.permutation(rows) for rows in lists]
    table = np.stack([np.resize(rows, largest) for rows in lists]).astype(np.int32)
    sizes = f"{capacity.min():,} to {largest:,}"
    note = f"each client holds all of its samples, {sizes} of them"
    return Partition(table, capacity, (note,))
