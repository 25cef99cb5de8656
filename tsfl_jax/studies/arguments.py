"""Arguments that the commands of several studies share, and their ranges."""

import argparse
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from tsfl_jax import command
from tsfl_jax.experiment import grid
from tsfl_jax.types import UserError


def make_parser(
    name: str, about: str | None, seeds: int | None, out: str
) -> argparse.ArgumentParser:
    """A parser with ``--seeds`` and ``--out``.

    Args:
      name: of the command.
      about: the command's module docstring, whose first line is shown.
      seeds, out: the defaults, a number of runs and a folder; None: no ``--seeds``.
    """
    parser = command.make_parser(name, about)
    if seeds is not None:
        parser.add_argument(
            "--seeds",
            type=int,
            default=seeds,
            help="runs of each setting (default: %(default)s)",
        )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=out,
        help="folder of tables and runs (default: %(default)s)",
    )
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--data_dir`` and ``--set``, for studies of any config."""
    parser.add_argument(
        "--data_dir",
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="prepared TFDS data (default: $TFDS_DATA_DIR or ~/tensorflow_datasets)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="change a setting of all runs: --set lr=0.01; repeatable",
    )


def parse(
    parser: argparse.ArgumentParser, texts: list[str], share: str = ""
) -> argparse.Namespace:
    """The parsed arguments; wrong ones end the process with exit code 2.

    Args:
      parser: from `make_parser`.
      texts: the command line.
      share: an argument that must be in (0, 1), such as a target accuracy.

    Returns:
      The arguments by name; ``set`` and ``data_dir`` as dicts of settings.
    """
    given = parser.parse_args(texts)
    if "seeds" in given and given.seeds < 1:
        parser.error("--seeds must be at least 1")
    if share and not 0 < getattr(given, share) < 1:
        value = getattr(given, share)
        parser.error(f"--{share}={value}: must be in (0, 1), like 0.9")
    try:
        if "set" in given:
            given.set = grid.parse_settings(given.set)
            given.data_dir = _data_settings(getattr(given, "data_dir", ""))
    except UserError as error:
        parser.error(str(error))
    return given


def _data_settings(folder: str) -> dict[str, Any]:
    """Settings of ``--data_dir``: read prepared data there; none for ""."""
    if folder and not os.path.isdir(os.path.expanduser(folder)):
        raise UserError(f"--data_dir={folder}: no such folder")
    return {"data.dir": folder, "data.download": False} if folder else {}


def device_text(used: int = 0) -> str:
    """Number and kind of the devices, "1 × cpu"; starts JAX.

    Args:
      used: how many of them a study uses; 0: all.
    """
    return f"{used or jax.device_count()} × {jax.devices()[0].device_kind}"


def shown(given: Mapping[str, Any]) -> list[str]:
    """Settings of ``--set`` for the head of a table; not where the data are."""
    return [f"{n}={v}" for n, v in given.items() if not n.startswith("data.")]


def seeds_text(seeds: int) -> str:
    """How many runs of each setting, for a title: "1 seed", "5 seeds"."""
    return f"{seeds} seed{'s' * (seeds != 1)}"


def joined(*parts: Any) -> str:
    """The parts that are not empty, separated by commas."""
    return ", ".join(str(part) for part in parts if part)
