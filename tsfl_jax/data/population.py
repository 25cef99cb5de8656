"""Clients as places in a table of samples, 12 bytes each: there may be millions.

Client i holds the ``size[i]`` samples from place ``start[i]`` of the table on; after
the table's last place comes its first. The index rows of a program are made for the
clients that are asked for, and for no others.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from tsfl_jax import host_memory, rng
from tsfl_jax.types import INT32_MAX, UserError


class Population(NamedTuple):
    """Where the samples of N clients are in a table of M."""

    start: Int[np.ndarray, "N"]  # int64 in [0, M), a client's first place
    size: Int[np.ndarray, "N"]  # int32 in [1, M], samples that it holds
    order: Int[np.ndarray, "M"] | None  # int32, samples by place; None: as they are
    samples: int  # M

    @property
    def bytes(self) -> int:
        """Bytes of the table of clients; one size for all takes those of one."""
        return sum(a.itemsize * (a.size if a.strides[0] else 1) for a in self[:2])

    def rows(
        self, ids: Int[np.ndarray, "U"], width: int | None = None
    ) -> Int[np.ndarray, "U D"]:
        """The samples of some clients, as rows of `types.Partition`.

        Args:
          ids: in [0, N), in any order, also repeated.
          width: D ≥ 1; None: the most that one of these clients holds.

        Returns:
          int32 indices of samples. Row u is that of client ``ids[u]``: all that it
          holds, or the first D of them, and from its first one again up to D.

        Raises:
          UserError: the rows do not fit into memory.
        """
        start, size = self.start[ids], self.size[ids].astype(np.int64)
        width = int(size.max(initial=1)) if width is None else width
        host_memory.require(
            f"{len(ids):,} clients of up to {width:,} samples",
            12 * len(ids) * width,
            "the index table",
        )
        place = np.arange(width) % size[:, None]
        place += start[:, None]
        place %= self.samples
        return (place if self.order is None else self.order[place]).astype(np.int32)


def of_clients(client: Int[np.ndarray, "M"], num_clients: int = 0) -> Population:
    """The population of a data set that names the client of each sample.

    Args:
      client: in [0, N), of each sample, in any order.
      num_clients: N; 0: the largest client + 1.

    Returns:
      A `Population`; a client's samples keep their order.

    Raises:
      UserError: a client without samples.
    """
    size = np.bincount(client, minlength=num_clients).astype(np.int32)
    if len(size) == 0 or size.min() < 1:
        raise UserError(
            f"client {int(size.argmin()) if len(size) else 0} of {len(size)} has no "
            "training samples; expected one or more for each"
        )
    # Sorted already, as files by client are: the samples stay where they are.
    in_order = bool((np.diff(client) >= 0).all())
    order = None if in_order else np.argsort(client, kind="stable").astype(np.int32)
    start = np.cumsum(size, dtype=np.int64) - size
    return Population(start, size, order, len(client))


def views(
    num_clients: int,
    samples: int,
    size: int | Int[np.ndarray, "N"],
    seed: int,
    labels: Shaped[np.ndarray, "M"] | None = None,
) -> Population:
    """N clients that each see a piece of one shared table, N as large as one likes.

    Client i's piece starts at a place that depends on (seed, i) alone, uniform over the
    table. The table is in random order, so that pieces are IID; with `labels` it is
    sorted by them and random within each, so that most clients have one or two classes.

    Args:
      num_clients: N ≥ 1.
      samples: M ≥ 1.
      size: samples of each client, in [1, M].
      seed: in [0, 2**32).
      labels: classes of the samples.

    Returns:
      A `Population`; clients share samples where Σ size > M, and may where it is not.

    Raises:
      UserError: a client with more samples than there are, or with none.
    """
    size = np.broadcast_to(np.asarray(size), (num_clients,))
    wrong = (size < 1) | (size > min(samples, INT32_MAX))
    if wrong.any():
        raise UserError(
            f"client {wrong.argmax()} has {size[wrong.argmax()]} of {samples} samples; "
            f"expected 1..{samples}"
        )
    order = rng.generator(seed, "table order").permutation(samples).astype(np.int32)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    bits = rng.hashed(seed, "views", np.arange(num_clients))
    # The upper 32 bits times M: within M/2³² of uniform.
    start = (bits >> np.uint64(32)) * np.uint64(samples) >> np.uint64(32)
    small = np.asarray(size if size.strides[0] else size[:1], np.int32)
    size = small if len(small) == num_clients else np.broadcast_to(small, num_clients)
    return Population(start.astype(np.int64), size, order, samples)
