"""Results in long form: one line per interval, one column per quantity.

The same columns make history.csv and a pandas data frame. Quantities of single clients
are not here: they are arrays ``[T, N]`` of the history.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tsfl_jax.types import UserError

_FIRST = ("virtual_time", "test_accuracy", "test_loss", "train_loss")


def series_of(history: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What is one number per interval, ``[T]``, the most wanted first."""
    length = len(history["virtual_time"])
    names = dict.fromkeys([*_FIRST, *history])
    found = {name: np.asarray(history[name]) for name in names}
    return {name: a for name, a in found.items() if a.shape == (length,)}


def of_run(history: Mapping[str, Any]) -> dict[str, Iterable[Any]]:
    """Columns of one run: the interval, from 1, and what was measured in it."""
    series = series_of(history)
    return {"interval": np.arange(1, len(series["virtual_time"]) + 1), **series}


def of_sweep(
    swept: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    series: Sequence[Mapping[str, np.ndarray]],
) -> dict[str, Iterable[Any]]:
    """Columns of a sweep: the lane, its swept settings, the interval and the rest.

    Args:
      swept: names of the swept settings.
      rows: of each lane, with "lane" and the swept settings.
      series: of each lane, arrays ``[T]``; T may differ.
    """
    lengths = [len(one["virtual_time"]) for one in series]
    settings = {
        name: list(
            itertools.chain.from_iterable(
                [row[name]] * length for row, length in zip(rows, lengths, strict=True)
            )
        )
        for name in ("lane", *swept)
    }
    interval = np.concatenate([np.arange(1, length + 1) for length in lengths])
    measured = {n: np.concatenate([one[n] for one in series]) for n in series[0]}
    return {**settings, "interval": interval, **measured}


def to_pandas(columns: Mapping[str, Iterable[Any]]) -> Any:
    """The columns as a `pandas.DataFrame`.

    Raises:
      UserError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError(
            "to_pandas() needs pandas: pip install 'tsfl_jax[pandas]'"
        ) from error
    return pandas.DataFrame({name: list(column) for name, column in columns.items()})
