"""Watts that a client draws while it computes, transfers and idles, by group."""

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.timeline import distributions
from tsfl_jax.types import UserError, parts_of


def watts(
    text: str, num_clients: int, ids: Int[np.ndarray, "U"]
) -> Float[np.ndarray, "U 3"]:
    """Watts of computing, transferring and idling of some clients.

    Args:
      text: `timeline.power`, "5,1.5,0.2; 10,2,0.5" of two equal groups of clients.
      num_clients: N; client i of G groups is in group ⌊iG/N⌋.
      ids: in [0, N).

    Raises:
      UserError: other than three numbers of a group, or more groups than clients.
    """
    groups = parts_of(text, ";")
    distributions.check_groups("timeline.power", len(groups), num_clients)
    rows = []
    for group in groups:
        try:
            row = np.array([float(number) for number in group.split(",")])
        except ValueError:
            row = np.zeros(0)
        if row.shape != (3,) or not ((row >= 0) & np.isfinite(row)).all():
            raise UserError(
                f"--config.timeline.power={text}: {group.strip()!r}: expected watts "
                'of compute, transfer and idle, like "5,1.5,0.2" (finite and >= 0)'
            )
        rows.append(row)
    return np.stack(rows)[ids.astype(np.int64) * len(rows) // num_clients]
