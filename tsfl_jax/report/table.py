"""Results as one labelled table, an `xarray.Dataset`: every array names its axes.

A run has the dimensions ``interval`` and ``client``, or ``slot`` of a cohort or of an
update's deliveries. A sweep has those of its swept settings before them, or ``run``
where its points are no product. Units are attributes.
"""

import itertools
import math
import numbers
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tsfl_jax.config import SEEDS
from tsfl_jax.report.statistics import spread_of_known

if TYPE_CHECKING:
    import pandas
    import xarray

Row = Mapping[str, Any]  # one run: swept settings and results by name

_OF_UNIT = {
    "s": "virtual_time train_seconds",
    "1": "test_accuracy rho client_accuracy_mean client_accuracy_worst "
    "client_accuracy_std client_accuracy_gini client_loss_gini best_test_accuracy "
    "final_test_accuracy",
    "nat": "test_loss train_loss weight_entropy validation_loss regret gap "
    "client_loss_mean client_loss_worst client_loss_std final_test_loss",
    "iteration": "threshold tau",
    "client": "num_selected num_discarded",
    "sample": "samples samples_trained",
    "B": "bytes_moved bytes_down bytes_up",
    "J": "energy_joules",
    "interval": "diverged_at",
}
_ATTRIBUTES = {n: {"units": u} for u, names in _OF_UNIT.items() for n in names.split()}
_PLAIN = (str, int, float)  # attributes that a file of xarray can have
_FIRST = ("virtual_time", "test_accuracy", "test_loss", "train_loss")


def of_run(
    history: Mapping[str, np.ndarray], attributes: Mapping[str, Any] | None = None
) -> "xarray.Dataset":
    """The table of one run.

    Args:
      history: arrays ``[T]``, and ``[T, N]`` or ``[T, K]``, by name; with "client"
        ``[T, K]``, whose each slot is, else the second axis is the client.
      attributes: of the table.
    """
    plain = {n: v for n, v in (attributes or {}).items() if isinstance(v, _PLAIN)}
    return _dataset((), history).assign_attrs(plain)


def of_sweep(
    swept: Sequence[str],
    rows: Sequence[Row],
    history: Mapping[str, np.ndarray],
    series: Sequence[Mapping[str, np.ndarray]] = (),
) -> "xarray.Dataset":
    """The table of a sweep with the dimension ``run``; see `unstacked`.

    Args:
      swept: names of the swept settings, which become coordinates.
      rows: results of each run.
      history: arrays ``[L, T, …]`` by name.
      series: of each run, arrays ``[T]``; needed only where T differs. The intervals
        that a run does not have are NaN, or 0 in whole numbers.
    """
    if series and "virtual_time" not in history:
        history = {name: _padded([run[name] for run in series]) for name in series[0]}
    coords = {name: ("run", _labels(row[name] for row in rows)) for name in swept}
    scores = {
        name: np.array([row.get(name) for row in rows], float)
        for name in SCORES
        if any(name in row for row in rows)
    }
    return _dataset(("run",), {**history, **scores}).assign_coords(coords)


def _dataset(
    before: tuple[str, ...], history: Mapping[str, np.ndarray]
) -> "xarray.Dataset":
    """Arrays with their dimensions, units, and the number of the interval from 1."""
    import xarray

    dims = (*before, "interval", "slot" if "client" in history else "client")
    arrays = {name: np.asarray(a) for name, a in history.items()}
    variables: dict[Hashable, Any] = {
        name: (dims[: a.ndim], a, _ATTRIBUTES.get(name, {}))
        for name, a in arrays.items()
        if name in SCORES or len(before) < a.ndim <= len(dims)
    }
    table = xarray.Dataset(variables)
    coords = {str(n): np.arange(size) for n, size in table.sizes.items()}
    coords["interval"] = 1 + coords.get("interval", np.arange(0))
    clients = {"client"} & table.data_vars.keys()
    return table.set_coords(clients).assign_coords(coords)


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays ``[T]`` of different lengths as one ``[L, T]``."""
    kind = arrays[0].dtype
    missing = np.nan if np.issubdtype(kind, np.floating) else 0
    return np.array([*itertools.zip_longest(*arrays, fillvalue=missing)], kind).T


def _labels(values: Iterable[Any]) -> np.ndarray:
    """Values of a setting as a coordinate; lists as text."""
    plain = [v if isinstance(v, str | numbers.Number) else str(v) for v in values]
    mixed = len({isinstance(v, str) for v in plain}) > 1
    return np.array(plain, object if mixed else None)


def unstacked(runs: "xarray.Dataset", swept: Sequence[str]) -> "xarray.Dataset":
    """The table with a dimension for each swept setting, where that is possible.

    Args:
      runs: from `of_sweep`.
      swept: names of the swept settings.

    Returns:
      `runs` itself where the points are not the product of the settings' values.
    """
    values = {name: list(dict.fromkeys(runs[name].values.tolist())) for name in swept}
    points = set(zip(*(runs[name].values.tolist() for name in swept), strict=True))
    size = math.prod(map(len, values.values()))
    if not swept or not len(points) == size == runs.sizes["run"]:
        return runs
    if len(values) == 1:
        return runs.drop_vars("run").swap_dims(run=swept[0])
    product = runs.drop_vars("run").set_index(run=list(swept)).unstack("run")
    first = [name for name in product.dims if name not in values]
    return product.sel(values).transpose(*swept, *first)


def to_pandas(table: "xarray.Dataset") -> "pandas.DataFrame":
    """The long table: a line per run and interval, a column per quantity.

    Quantities of single clients and of whole runs are not in it. A run's intervals end
    where its virtual time does.
    """
    dims = [name for name in ("run", "interval") if name in table.dims]
    names = [n for n, a in table.data_vars.items() if {*a.dims} == {*dims}]
    names.sort(key=lambda n: _FIRST.index(n) if n in _FIRST else len(_FIRST))
    flat = table[names].drop_vars("client", errors="ignore")
    frame: Any = flat.to_dataframe(dim_order=dims).reset_index()
    settings = [n for n, a in table.coords.items() if a.dims == ("run",) and n != "run"]
    frame = frame[[*dims[:-1], *settings, "interval", *names]]
    return frame[frame["virtual_time"].notna()] if "run" in dims else frame


def grouped(swept: Sequence[str], rows: Sequence[Row]) -> dict[str, list[int]]:
    """Runs with the same swept values except for the seed, by label.

    A label is "lr=0.01, algorithm=dms", or "all" if only seeds differ. Of runs with
    the same values and seeds only the first is in a group: they are one run.
    """
    groups: dict[str, list[int]] = {}
    seen: set[str] = set()
    for index, row in enumerate(rows):
        point = repr([row[name] for name in swept])
        if point not in seen:
            seen.add(point)
            pairs = [f"{name}={row[name]}" for name in swept if name not in SEEDS]
            groups.setdefault(", ".join(pairs) or "all", []).append(index)
    return groups


class Column(NamedTuple):
    """How a table of groups shows a quantity of runs."""

    head: str  # with the unit after a comma
    scale: float = 1.0
    form: str = ".4g"
    is_result: bool = True  # of no meaning for a run that diverged
    is_time: bool = False  # to a target, inf: never

    def cell(self, values: np.ndarray) -> str:
        """The mean with its interval; what follows from settings once if it agrees."""
        distinct = np.unique(values[~np.isnan(values)])
        once = not self.is_result and len(distinct) == 1
        return spread_of_known(distinct if once else values, self.form, self.is_time)


# Quantity of a run → its column, in every table of groups of runs.
COLUMNS = {
    "best_test_accuracy": Column("best accuracy, %", 100, ".2f"),
    "final_test_accuracy": Column("final accuracy, %", 100, ".2f"),
    "final_test_loss": Column("final loss"),
    "final_client_accuracy_mean": Column("mean of clients, %", 100, ".2f"),
    "final_client_accuracy_worst": Column("worst decile, %", 100, ".2f"),
    "final_client_accuracy_std": Column("std of clients, %", 100, ".2f"),
    "final_client_accuracy_gini": Column("Gini of clients"),
    "mean_regret": Column("mean regret"),
    "epsilon": Column("epsilon", is_result=False),
    "intervals": Column("intervals", 1, ".5g", is_result=False),
    "virtual_time": Column("virtual time, s", 1, ".5g", is_result=False),
    "bytes_moved": Column("moved, MB", 1e-6, ".5g", is_result=False),
    "bytes_down": Column("down, MB", 1e-6, ".5g", is_result=False),
    "bytes_up": Column("up, MB", 1e-6, ".5g", is_result=False),
    "energy_joules": Column("energy, kJ", 1e-3, ".5g", is_result=False),
    "train_seconds": Column("wall-clock training, s", is_result=False),
}
# Results of a whole run that a sweep's table has.
SCORES = tuple(n for n in COLUMNS if n not in ("intervals", "virtual_time"))
SCORES += ("diverged_at", "mean_gap", "samples_trained", "delta")
TARGET = "time_to_target"  # virtual seconds, inf: never


def column_of(name: str, target: float | None = None) -> Column:
    """How a table shows a score by its name; what `COLUMNS` lacks with its unit.

    Args:
      name: of `SCORES`, a quantity of a history, or `TARGET`.
      target: test accuracy in (0, 1] of the latter.
    """
    if name == TARGET:
        head = f"virtual time to {100 * (target or 0):g} %, s"
        return Column(head, form=".2f", is_time=True)
    words, unit = name.replace("_", " "), _ATTRIBUTES.get(name, {}).get("units")
    if "accuracy" in name and "gini" not in name:
        return COLUMNS.get(name, Column(f"{words}, %", 100, ".2f"))
    is_shown = unit in ("s", "nat", "B", "J")  # else a count, or none
    return COLUMNS.get(name, Column(words + f", {unit}" * is_shown))


def summary(
    runs: "pandas.DataFrame",
    groups: Mapping[str, Sequence[int]],
    columns: Mapping[str, Column] = COLUMNS,
) -> "pandas.DataFrame":
    """A line of text per group: means over its runs with intervals of confidence.

    Args:
      runs: a row per run, with ``diverged_at`` and any of `columns`; a column without
        a value is left out.
      groups: label → places of its rows.
      columns: name of a quantity → its column.

    Returns:
      Columns of strings: group, runs, quantities, and diverged if any run did.
    """
    import pandas

    lost, places = runs["diverged_at"].notna(), [*groups.values()]
    cells = {"group": [*groups], "runs": [str(len(group)) for group in places]}
    for name, column in ((n, c) for n, c in columns.items() if n in runs):
        values = column.scale * runs[name].astype(float)
        values = values.mask(lost) if column.is_result else values
        if values.notna().to_numpy().any():
            cells[column.head] = [column.cell(values.iloc[group]) for group in places]
    if lost.to_numpy().any():
        cells["diverged"] = [str(lost.iloc[group].sum()) for group in places]
    return pandas.DataFrame(cells)
