"""CSV files with a header, read row by row; errors name the file and the line."""

import csv
import math
import os
import re
from collections.abc import Iterator, Sequence

from tsfl_jax.types import UserError, nearest

Row = tuple[str, dict[str, str]]  # "FILE, line 3", cell by column


def read_rows(
    path: str, required: Sequence[str], optional: Sequence[str] = (), *, flag: str
) -> Iterator[Row]:
    """Yield the cells, by column, of every row that is not blank.

    Args:
      path: CSV file, UTF-8 with or without a byte-order mark; ~ is the home folder.
      required: columns the header must name, in any order and in any case.
      optional: columns it may name.
      flag: the setting that gave the path, named where it cannot be read.

    Yields:
      Location of the row, for messages, and its cells without surrounding blanks.

    Raises:
      UserError: no such file, not UTF-8, unknown, missing or repeated columns, rows
        of another length than the header, no rows at all.
    """
    path = os.path.expanduser(path)
    wanted = ",".join(required) + "".join(f"[,{name}]" for name in optional)
    header, rows = None, 0
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for cells in reader:
                cells = [cell.strip() for cell in cells]
                where = f"{path}, line {reader.line_num}"
                if not any(cells):
                    continue
                if header is None:
                    header = [cell.lower() for cell in cells]
                    if wrong := _wrong_columns(header, required, optional):
                        raise UserError(
                            f"{where}: {wrong[0]}; expected the header {wanted}"
                        )
                elif len(cells) != len(header):
                    raise UserError(
                        f"{where}: {len(cells)} cells; expected {len(header)} "
                        f"({','.join(header)})"
                    )
                else:
                    rows += 1
                    yield where, dict(zip(header, cells, strict=True))
    except OSError as error:
        raise UserError(f"{flag}={path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV file of UTF-8 text ({error})") from error
    if header is None:
        raise UserError(f"{path}: empty; expected the header {wanted}")
    if not rows:
        raise UserError(f"{path}: no rows below the header")


def whole_number(row: Row, column: str, low: int, high: int) -> int:
    """Read a cell as a whole number from low to high, both included.

    Raises:
      UserError: anything else in the cell.
    """
    where, cells = row
    text = cells[column]
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text) or not low <= int(text) <= high:
        raise UserError(
            f"{where}: {column} is {text!r}; expected a whole number from {low} to "
            f"{high}"
        )
    return int(text)


def seconds(
    row: Row, column: str, *, positive: bool = False, endless: bool = False
) -> float:
    """Read a cell as seconds ≥ 0, or > 0 if `positive`; inf only if `endless`.

    Raises:
      UserError: anything else in the cell.
    """
    where, cells = row
    text = cells[column]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    wrong = math.isnan(value) or value < 0 or (positive and value == 0)
    if wrong or (math.isinf(value) and not endless):
        raise UserError(
            f"{where}: {column} is {text!r}; expected seconds "
            f"{'>' if positive else '>='} 0{' or inf' if endless else ''}"
        )
    return value


def _wrong_columns(
    header: list[str], required: Sequence[str], optional: Sequence[str]
) -> list[str]:
    known = (*required, *optional)
    unknown = [name for name in header if name not in known]
    wrong = [f"unknown column {name!r}{nearest(name, known)}" for name in unknown]
    wrong += [f"column {n!r} twice" for i, n in enumerate(header) if n in header[:i]]
    missing = ", ".join(name for name in required if name not in header)
    return wrong + ([f"no column {missing}"] if missing else [])
