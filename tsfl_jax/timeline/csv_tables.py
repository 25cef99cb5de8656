"""Tables of numbers in CSV files with a header; errors name the file and the line."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tsfl_jax.types import UserError, nearest, user_code


class CsvColumn(NamedTuple):
    """The numbers that the cells of a column may have."""

    low: float = 0
    high: float = np.inf
    whole: bool = False
    optional: bool = False  # an empty cell, or no such column, is NaN

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:g} to {self.high:.10g}"


def read_table(
    path: str, columns: Mapping[str, CsvColumn], *, key: Sequence[str] = (), flag: str
) -> Any:
    """Read the numbers of a file, and check each against its column.

    Args:
      path: CSV file, UTF-8 with or without a byte-order mark; ~ is the home folder.
      columns: those of the header, which has them in any order and in any case.
      key: columns that together are another in each row.
      flag: the setting that gave the path, named where it cannot be read.

    Returns:
      A `pandas.DataFrame` of float64, a row for each line that is not blank, with the
      number of the line as its index.

    Raises:
      UserError: no such file, not a CSV file of UTF-8 text, other columns, a cell that
        is no such number, a key twice.
    """
    import pandas as pd  # slow to import

    required = [name for name, cells in columns.items() if not cells.optional]
    optional = [f"[,{name}]" for name in columns if name not in required]
    header = ",".join(required) + "".join(optional)
    with user_code(f"{flag}={path}: cannot be read", f"expected CSV with {header}"):
        text: Any = pd.read_csv(
            os.path.expanduser(path),
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            index_col=False,
            encoding="utf-8-sig",
        )
    text = text.fillna("").apply(lambda cells: cells.str.strip())
    text.columns = text.columns.str.strip().str.lower()
    text.index += 2  # of the file's lines, from 1, the first is the header
    if not {*required} <= {*text.columns} <= {*columns}:
        unknown = [name for name in text.columns if name not in columns]
        raise UserError(
            f"{path}, line 1: the header is {','.join(text.columns)}; expected "
            f"{header}{nearest(' '.join(unknown), columns)}"
        )
    text = text[(text != "").any(axis=1)].reindex(columns=[*columns], fill_value="")
    table: Any = text.apply(pd.to_numeric, errors="coerce").astype(np.float64)
    for name, cells in columns.items():
        numbers = table[name]
        is_valid = (cells.low <= numbers) & (numbers <= cells.high)
        is_valid &= not cells.whole or numbers % 1 == 0
        is_valid |= cells.optional & (text[name] == "")
        if not is_valid.all():
            line = is_valid.idxmin()
            raise UserError(
                f"{path}, line {line}: {name} is {text[name][line]!r}; expected {cells}"
            )
    if key and (again := table.duplicated([*key])).any():
        line = again.idxmax()
        names = ", ".join(f"{name} {table[name][line]:.0f}" for name in key)
        raise UserError(f"{path}, line {line}: {names} for the second time")
    return table
