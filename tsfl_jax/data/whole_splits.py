"""Splits of all training samples, where sizes follow: drawn, or lists that are given.

The drawn ones, by class or by quantity, are of Li et al., "Federated Learning on
Non-IID Data Silos: An Experimental Study" (2022, NIID-Bench), as in its code; Flower's
DirichletPartitioner is the first.
The Dirichlet split of `partition` is Hsu et al.'s, by client and with given sizes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from tsfl_jax import host_memory
from tsfl_jax.components import Part, component, setting
from tsfl_jax.data.inputs import require
from tsfl_jax.types import Dataset, Partition, UserError, user_code

_ATTEMPTS = 100  # draws for the least size
Lists = list[Int[np.ndarray, "_"]]


@component("partition")
class WholeConfig:
    """Of splits of all samples."""

    least_size: int = setting(
        10, "class_dirichlet, quantity: samples of the smallest client", low=1
    )


def lists(
    labels: Shaped[np.ndarray, "M"],
    num_clients: int,
    settings: Any,
    rng: np.random.Generator,
) -> Lists:
    """Divide all samples among N clients; each sample has one client.

    - class_dirichlet: of each class client i gets the share p_i, p ~ Dir(α 1_N), and
      none of a class once it has M/N samples.
    - quantity: client i gets the share p_i of all, IID, p ~ Dir(α 1_N).

    Drawn again, at most 100 times, while a client has fewer than `least_size`.

    Args:
      labels: classes of the training samples.
      num_clients: N.
      settings: `kind`, a key of `KINDS`; `alpha`, `least_size`.
      rng: random number generator.

    Returns:
      Sorted indices of each client's samples.

    Raises:
      UserError: no draw gives each client that many.
    """
    least, M = settings.least_size, len(labels)
    best = 0
    for _ in range(_ATTEMPTS if num_clients * least <= M else 0):
        owner = KINDS[settings.kind].make(labels, num_clients, settings.alpha, rng)
        size = np.bincount(owner, minlength=num_clients)
        if size.min() >= least:
            order = np.argsort(owner, kind="stable")
            return np.split(order, np.cumsum(size)[:-1])
        best = max(best, int(size.min()))
    raise UserError(
        f"--config.partition.least_size={least}: {M} samples of {num_clients} clients "
        f"with alpha={settings.alpha:g} leave the smallest with {best} or fewer in "
        f"{_ATTEMPTS} draws; use a smaller least_size, a larger alpha or fewer clients"
    )


def _by_class(
    labels: Shaped[np.ndarray, "M"], N: int, alpha: float, rng: np.random.Generator
) -> Int[np.ndarray, "M"]:
    """The client of each sample, class after class."""
    owner, size = np.empty(len(labels), np.int64), np.zeros(N)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        is_open = size < len(labels) / N
        owner[members] = _random_owners(len(members), N, alpha, is_open, rng)
        size += np.bincount(owner[members], minlength=N)
    return owner


def _by_quantity(
    labels: Shaped[np.ndarray, "M"], N: int, alpha: float, rng: np.random.Generator
) -> Int[np.ndarray, "M"]:
    """The client of each sample, whatever its class."""
    return rng.permutation(_random_owners(len(labels), N, alpha, np.ones(N, bool), rng))


def _random_owners(
    count: int, N: int, alpha: float, is_open: np.ndarray, rng: np.random.Generator
) -> Int[np.ndarray, "count"]:
    """The clients of so many samples in a row, in shares of Dir(α) of the open ones."""
    share: Float[np.ndarray, N] = np.where(is_open, rng.dirichlet(np.full(N, alpha)), 0)
    if not share.sum() > 0:  # underflow: its limit, one client
        share = np.eye(N)[rng.choice(np.flatnonzero(is_open))]
    cuts = np.floor(np.cumsum(share / share.sum()) * count + 1e-9).astype(np.int64)
    cuts[-1] = count
    return np.repeat(np.arange(N), np.diff(cuts, prepend=0))


# By `PartitionConfig.kind`: functions of labels, N, α and a generator, to the client of
# each sample.
KINDS = {
    "class_dirichlet": Part(_by_class, ("partition.alpha",), (WholeConfig,)),
    "quantity": Part(_by_quantity, ("partition.alpha",), (WholeConfig,)),
}


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
        are_indices = rows.ndim == 1 and rows.size and rows.dtype.kind in "iu"
        require(
            are_indices
            and 0 <= rows.min() <= rows.max() < num_samples
            and len(np.unique(rows)) == len(rows),
            f"partition: client {i} has {' '.join(str(rows).split())[:60]}; {expected}",
        )
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
