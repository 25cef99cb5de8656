"""What a metric writer is."""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from tsfl_jax.report import files
from tsfl_jax.types import UserError

Record = dict[str, Any]  # of an interval: numbers by name, None where not measured


def _ignored(*given: Any) -> None:
    del given


class Writer(NamedTuple):
    """Three functions that follow a run."""

    # An interval's record; False ends the run after the intervals of this call.
    report: Callable[[Record], bool | None]
    # Settings by flat name; intervals that an earlier process has reported.
    start: Callable[[dict[str, Any], int], None] = _ignored
    # summary.json and the run's figures, paths of .png files.
    end: Callable[[dict[str, Any], list[pathlib.Path]], None] = _ignored


def library(name: str, extra: str) -> Any:
    """A library that only this writer needs.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name} is not installed; pip install 'tsfl_jax[{extra}]'"
        ) from error


def measured(record: Record) -> dict[str, float]:
    """The numbers of a record but the interval, which is the step."""
    return {n: v for n, v in record.items() if v is not None and n != "interval"}


def remembered(path: pathlib.Path, made: Callable[[], str]) -> str:
    """A name that a run keeps in a file, so that a resumed one goes on under it."""
    if not path.exists():
        files.write_text(path, made())
    return files.read_bytes(path).decode()
