"""Arguments that the commands of several studies share, and their ranges."""

import argparse
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tsfl_jax import command
from tsfl_jax.run import grid
from tsfl_jax.types import UserError


def ranged(
    kind: type[int] | type[float], fits: Callable[[float], bool], expected: str
) -> Callable[[str], float]:
    """The type of an argument of argparse that is a number for which `fits` is true."""

    def number(text: str) -> float:
        if not fits(kind(text)):
            raise argparse.ArgumentTypeError(f"{text}: must be {expected}")
        return kind(text)

    number.__name__ = kind.__name__  # for argparse's own message
    return number


def at_least(least: int) -> Callable[[str], float]:
    """The type of an argument that is a whole number from `least` on."""
    return ranged(int, lambda number: number >= least, f"at least {least}")


def folder(text: str) -> str:
    """The type of an argument that is a folder."""
    path = os.path.expanduser(text)
    if not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return path


POSITIVE = ranged(float, lambda number: 0 < number < math.inf, "above 0")
SHARE = ranged(float, lambda number: 0 < number < 1, "in (0, 1), like 0.9")


def make_parser(
    name: str, doc: str | None, seeds: int | None = 5
) -> argparse.ArgumentParser:
    """The parser of ``python -m studies.NAME``, with ``--seeds`` and ``--out``.

    Args:
      name: of the study.
      doc: its module docstring, whose first line is shown.
      seeds: the default number of runs; None: no ``--seeds``.
    """
    parser = command.make_parser(name, doc)
    parser.prog = f"python -m studies.{name}"
    if seeds is not None:
        text = "runs of each setting (default: %(default)s)"
        parser.add_argument("--seeds", type=at_least(1), default=seeds, help=text)
    text = "folder of tables and runs (default: %(default)s)"
    out = pathlib.Path("runs", name)
    parser.add_argument("--out", type=pathlib.Path, default=out, help=text)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--data_dir`` and ``--set``, for studies of any config."""
    text = "prepared TFDS data (default: $TFDS_DATA_DIR or ~/tensorflow_datasets)"
    parser.add_argument("--data_dir", type=folder, metavar="FOLDER", help=text)
    text = "change a setting of all runs: --set lr=0.01; repeatable"
    parser.add_argument(
        "--set", action="append", default=[], metavar="SETTING=VALUE", help=text
    )


def parse(parser: argparse.ArgumentParser, texts: list[str]) -> argparse.Namespace:
    """The parsed arguments; wrong ones end the process with exit code 2.

    Args:
      parser: from `make_parser`.
      texts: the command line.

    Returns:
      The arguments by name; ``set`` and ``data_dir`` as dicts of settings.
    """
    flags = parser.parse_args(texts)
    if "set" not in flags:
        return flags
    path = flags.data_dir
    flags.data_dir = {"data.dir": path, "data.download": False} if path else {}
    try:
        flags.set = grid.parse_settings(flags.set)
    except UserError as error:
        parser.error(str(error))
    return flags


def start(name: str, main: Callable[[list[str]], None]) -> None:
    """Run a study with the arguments of this process; wrong input is one line."""
    command.run(f"python -m studies.{name}", main, sys.argv[1:])


def device_text(used: int = 0) -> str:
    """Number and kind of the devices, "1 × cpu"; starts JAX.

    Args:
      used: how many of them a study uses; 0: all.
    """
    return f"{used or jax.device_count()} × {jax.devices()[0].device_kind}"


def settings_text(changes: Mapping[str, Any]) -> list[str]:
    """Settings of ``--set`` for the head of a table; not where the data are."""
    return [f"{n}={v}" for n, v in changes.items() if not n.startswith("data.")]


def seeds_text(seeds: int) -> str:
    """How many runs of each setting, for a title: "1 seed", "5 seeds"."""
    return f"{seeds} seed{'s' * (seeds != 1)}"


def joined(*parts: Any) -> str:
    """The parts that are not empty, separated by commas."""
    return ", ".join(str(part) for part in parts if part)
