"""A measured schedule from a CSV file.

The header names the columns interval, client, tau and, if wanted, size. Counting
starts at 0. A pair (interval, client) without a row means that the client is away.
"""

import numpy as np

from tsfl_jax.timeline import csv_rows
from tsfl_jax.types import UserError

_COLUMNS = ("interval", "client", "tau", "size")
_LARGEST = 2**31 - 1  # what int32 holds


def read_trace(
    path: str, num_intervals: int, num_clients: int, data_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reads τ and sizes.

    Args:
      path: CSV file, UTF-8 with or without a byte-order mark.
      num_intervals: T; intervals in the file are in [0, T).
      num_clients: N; clients in the file are in [0, N).
      data_size: samples of a client where the file gives no size.

    Returns:
      tau: [T, N] int64, 0 where a client is away.
      size: [T, N] int64 ≥ 1. While a client is away it keeps its largest size, so
        that its absence never asks for more data.

    Raises:
      UserError: anything malformed, with file and line.
    """
    flag = "--config.schedule.trace"
    if not path:
        raise UserError(f"--config.schedule.kind=trace needs {flag}")
    shape = (num_intervals, num_clients)
    given: dict[tuple[int, int], str] = {}  # where
    tau, size = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row in csv_rows.read_rows(path, _COLUMNS[:3], _COLUMNS[3:], flag=flag):
        where, cells = row
        t = csv_rows.whole_number(row, "interval", 0, num_intervals - 1)
        i = csv_rows.whole_number(row, "client", 0, num_clients - 1)
        if (t, i) in given:
            first = given[t, i].rsplit(", ", 1)[-1]
            raise UserError(
                f"{where}: interval {t}, client {i} is given twice, first in {first}"
            )
        given[t, i] = where
        tau[t, i] = csv_rows.whole_number(row, "tau", 0, _LARGEST)
        size[t, i] = data_size
        if cells.get("size"):
            size[t, i] = csv_rows.whole_number(row, "size", 1, _LARGEST)
    largest = size.max(axis=0)
    # A client that is away has no size of its own yet.
    return tau, np.where(size > 0, size, np.where(largest > 0, largest, data_size))
