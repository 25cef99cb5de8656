"""A measured schedule from a CSV file.

The header names the columns interval, client, tau and, if wanted, size. Counting
starts at 0. A pair (interval, client) without a row means that the client is away.
"""

import csv
import os
import re
from collections.abc import Iterator

import numpy as np

from tsfl_jax.types import UserError, nearest

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
    if not path:
        raise UserError("--config.schedule.kind=trace needs --config.schedule.trace")
    path = os.path.expanduser(path)
    shape = (num_intervals, num_clients)
    lines = np.zeros(shape, np.int64)  # where each pair was given; 0 = not
    tau, size = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for line, row in _rows(path):
        where = f"{path}, line {line}"
        t = _number(row, "interval", 0, num_intervals - 1, where)
        i = _number(row, "client", 0, num_clients - 1, where)
        if lines[t, i]:
            raise UserError(
                f"{where}: interval {t}, client {i} is given twice, first in line "
                f"{lines[t, i]}"
            )
        lines[t, i] = line
        tau[t, i] = _number(row, "tau", 0, _LARGEST, where)
        size[t, i] = data_size
        if row.get("size"):
            size[t, i] = _number(row, "size", 1, _LARGEST, where)
    if not lines.any():
        raise UserError(f"{path}: no rows below the header")
    largest = size.max(axis=0)
    return tau, np.where(lines > 0, size, np.where(largest > 0, largest, data_size))


def _rows(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells by column of every row that is not blank."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = None
            for cells in reader:
                cells = [cell.strip() for cell in cells]
                if not any(cells):
                    continue
                if header is None:
                    header = [cell.lower() for cell in cells]
                    _check_header(f"{path}, line {reader.line_num}", header)
                elif len(cells) != len(header):
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells; "
                        f"expected {len(header)} ({','.join(header)})"
                    )
                else:
                    yield reader.line_num, dict(zip(header, cells, strict=True))
            if header is None:
                raise UserError(
                    f"{path}: empty; expected the header interval,client,tau[,size]"
                )
    except OSError as error:
        raise UserError(
            f"--config.schedule.trace={path}: {error.strerror or error}"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV file of UTF-8 text ({error})") from error


def _check_header(where: str, header: list[str]) -> None:
    expected = "expected the header interval,client,tau[,size]"
    for i, name in enumerate(header):
        if name not in _COLUMNS:
            raise UserError(
                f"{where}: unknown column {name!r}{nearest(name, _COLUMNS)}; {expected}"
            )
        if name in header[:i]:
            raise UserError(f"{where}: column {name!r} twice; {expected}")
    missing = [name for name in _COLUMNS[:3] if name not in header]
    if missing:
        raise UserError(f"{where}: no column {', '.join(missing)}; {expected}")


def _number(row, column, low, high, where) -> int:
    text = row[column]
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text) or not low <= int(text) <= high:
        raise UserError(
            f"{where}: {column} is {text!r}; expected a whole number from {low} to "
            f"{high}"
        )
    return int(text)
