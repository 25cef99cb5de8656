"""Splits that are not drawn: lists of samples, or the clients of the data set."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from tsfl_jax import host_memory
from tsfl_jax.types import Dataset, Partition, UserError

Lists = list[Int[np.ndarray, "_"]]


def lists_of(given: Any, kind: str, dataset: Dataset, num_clients: int) -> Lists | None:
    """The samples of each client, or None if they are to be drawn.

    Args:
      given: N lists of indices into the training samples; None: none.
      kind: the setting partition.kind; "client": as the data set says.
      dataset: with `client` for that kind.
      num_clients: N.

    Raises:
      UserError: what is no list of samples per client.
    """
    if given is not None:
        found = _checked(given, len(dataset.y_train))
        what = f"partition= has lists for {len(found)} clients"
    elif kind == "client":
        if dataset.client is None:
            raise UserError(
                f"--config.partition.kind=client: {dataset.name} does not say which "
                "client a sample belongs to; give client= to tsfl_jax.make_dataset, or "
                "an array client in the .npz file"
            )
        order = np.argsort(dataset.client, kind="stable")
        ends = np.cumsum(np.bincount(dataset.client))[:-1]
        found = np.split(order, ends)
        what = f"{dataset.name} has samples of {len(found)} clients"
    else:
        return None
    if len(found) != num_clients:
        raise UserError(f"--config.num_clients={num_clients}: {what}; set it to that")
    return found


def _checked(given: Any, samples: int) -> Lists:
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise UserError(
            f"partition={type(given).__name__}: expected a list of indices per client"
        )
    found = [np.asarray(one) for one in given]
    for i, rows in enumerate(found):
        if rows.ndim != 1 or not rows.size or rows.dtype.kind not in "iu":
            raise UserError(
                f"partition: client {i} has {rows.dtype}{list(rows.shape)}; expected "
                "one index or more, whole numbers"
            )
        if rows.min() < 0 or rows.max() >= samples:
            wrong = rows[(rows < 0) | (rows >= samples)][0]
            raise UserError(
                f"partition: client {i} has index {wrong}; expected 0..{samples - 1}"
            )
        if len(np.unique(rows)) < len(rows):
            raise UserError(f"partition: client {i} has a sample twice")
    return found


def as_partition(
    lists: Sequence[Int[np.ndarray, "_"]], generator: np.random.Generator | None
) -> Partition:
    """The index table of lists; rows in random order, as those that are drawn.

    Without a generator they stay in order, which matters to no client that uses all.
    """
    capacity = np.array([len(rows) for rows in lists], np.int32)
    most = int(capacity.max())
    host_memory.require(
        f"a client with {most:,} samples", 4 * most * len(lists), "the index table"
    )
    if generator is not None:
        lists = [generator.permutation(rows) for rows in lists]
    table = [np.resize(rows, most) for rows in lists]
    note = (
        f"each client holds all of its samples, {capacity.min():,} to {most:,} of them"
    )
    return Partition(np.stack(table).astype(np.int32), capacity, (note,))
