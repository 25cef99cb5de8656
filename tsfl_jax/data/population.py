"""Clients that each see a piece of one table of samples: there may be millions.

A client is a place in the table and a number of samples. Rows of indices are made for
the clients that are asked for, and the others cost nothing.
"""

import numpy as np
from jaxtyping import Int

from tsfl_jax import host_memory, rng


def views(
    ids: Int[np.ndarray, "U"], size: Int[np.ndarray, "U"], samples: int, seed: int
) -> Int[np.ndarray, "U D"]:
    """The samples of some clients, as rows of `types.Partition`.

    The table has all samples in random order, so that pieces are IID. A client's piece
    starts at a place that depends on (seed, id) alone, uniform over the table; after
    the table's last place comes its first. Clients share samples.

    Args:
      ids: ≥ 0, in any order, also repeated.
      size: samples that each holds, in [1, M].
      samples: M ≥ 1.
      seed: in [0, 2**32).

    Returns:
      int32 indices of samples: all that a client holds, and from its first one again
      up to D, the most that one of these holds.

    Raises:
      UserError: the rows do not fit into memory.
    """
    width = int(size.max(initial=1))
    host_memory.require(
        f"{len(ids):,} clients of up to {width:,} samples",
        12 * len(ids) * width,
        "the index table",
    )
    order = rng.generator(seed, "table order").permutation(samples).astype(np.int32)
    # The upper 32 bits times M: within M/2³² of uniform.
    bits = rng.hashed(seed, "views", ids) >> np.uint64(32)
    start = (bits * np.uint64(samples) >> np.uint64(32)).astype(np.int64)
    place = np.arange(width) % size.astype(np.int64)[:, None] + start[:, None]
    return order[place % samples]
