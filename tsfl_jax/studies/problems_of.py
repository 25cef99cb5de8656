"""Which clients a study of rules runs on: a data set, a case, validation samples."""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tsfl_jax.config import Config, get
from tsfl_jax.engine import devices
from tsfl_jax.experiment import grid
from tsfl_jax.report import files
from tsfl_jax.studies import arguments, settings
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
DATA = ("digits", "mnist", "fashion_mnist")
_VALIDATION = 1000  # samples, of MNIST and Fashion-MNIST
_R = TypeVar("_R")


class Case(NamedTuple):
    """One case of the paper in a study."""

    config: Config
    about: str  # data, case, changed settings, intervals, seeds
    path: pathlib.Path  # of its tables and figures, without a suffix


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add ``--data``, ``--case``, ``--intervals``, ``--idx``, ``--set``."""
    arguments.add_settings(parser)
    parser.add_argument(
        "--data", default="digits", choices=DATA, help="data set (default: %(default)s)"
    )
    parser.add_argument(
        "--case",
        nargs="+",
        default=["1", "3"],
        choices=["1", "2", "3"],
        help="cases of the paper (default: 1 3)",
    )
    about = "intervals of a run (default: as many as the paper; digits 30)"
    parser.add_argument("--intervals", type=int, default=0, help=about)
    parser.add_argument(
        "--idx",
        metavar="FOLDER",
        default="",
        help="read the data set from a folder of IDX files",
    )


def parse(parser: argparse.ArgumentParser, texts: list[str]) -> argparse.Namespace:
    """The parsed arguments; wrong ones end the process with exit code 2."""
    given = arguments.parse(parser, texts)
    if given.intervals < 0:
        parser.error("--intervals must be at least 0")
    given.idx = str(pathlib.Path(given.idx).expanduser()) if given.idx else ""
    if given.idx and not pathlib.Path(given.idx).is_dir():
        parser.error(f"--idx={given.idx}: expected a folder of IDX files")
    if given.idx and given.data == "digits":
        parser.error(f"--idx={given.idx}: --data=digits needs no files")
    devices.start(0)  # all devices; the first question to JAX would start it with one
    return given


def config_of(given: argparse.Namespace, case: str) -> tuple[Config, str]:
    """The settings of a case with validation samples, and how to call them."""
    changes: dict[str, Any] = {"data.download": False} | given.data_dir
    if given.data == "digits":
        config = Config()
        changes |= _DIGITS | {"schedule.kind": f"case{case}"}
    else:
        config = settings.paper(f"{given.data}_case{case}")
        changes["data.validation"] = _VALIDATION
    if given.intervals:
        changes["num_intervals"] = given.intervals
    if given.idx:
        changes |= {"data.name": "idx", "data.dir": given.idx}
    config = grid.changed(config, changes | given.set)
    own = [f"{name}={value}" for name, value in given.set.items()]
    return config, arguments.joined(f"{given.data}, Case {case}", *own)


def run_cases(
    given: argparse.Namespace,
    study: str,
    run: Callable[[Config, pathlib.Path], _R],
    write: Callable[[Case, _R], list[pathlib.Path]],
) -> None:
    """Run or resume a study in each case and print the paths of its files.

    A case that cannot be run is named on stderr and left out.

    Args:
      given: from `parse`.
      study: its name.
      run: (settings, folder of finished lanes) → results.
      write: writes tables and figures; their paths.

    Raises:
      UserError: no case could be run.
    """
    out, made = files.prepare_workdir(given.out, "--out"), []
    for case in given.case:
        config, about = config_of(given, case)
        name = f"{study}_{given.data}_case{case}"
        try:
            results = run(config, out / "cells" / name)
        except UserError as error:
            print(f"{name}: not available: {error}", file=sys.stderr)
            continue
        intervals = f"{get(config, 'num_intervals')} intervals"
        about = arguments.joined(about, intervals, arguments.seeds_text(given.seeds))
        made += write(Case(config, about, out / name), results)
    if not made:
        raise UserError(f"study {study}: nothing could be run; see the lines above")
    for path in made:
        print(path)
