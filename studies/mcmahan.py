"""``python -m studies.mcmahan``: rounds that FedAvg needs, beside those of its paper.

MNIST on 100 clients of 600 samples, C = 0.1: ten clients a round make E passes over
their samples in batches of B (∞: all 600). IID, or samples of two digits per client.
Rounds until the highest test accuracy so far reaches the target, interpolated between
rounds as there. The first seed chooses the learning rate η of ``--lrs`` with the fewest
rounds, the others run with it alone. There is a table for each network and split,
written after each row; the same command goes on where it was stopped. The LSTM predicts
the next character of Shakespeare, on 1,134 clients, IID or one role each.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data" (AISTATS 2017), Table 2 (CNN, 99 %; LSTM, 54 %) and Table 4 (2NN, 97 %).
"""

import argparse
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
import xarray
from flax import linen as nn
from jaxtyping import Array, Float

from studies import arguments, study
from studies.study import Row
from studies.verdicts import diverged_note
from tsfl_jax.config import Config
from tsfl_jax.engine import devices
from tsfl_jax.report import files
from tsfl_jax.report.statistics import spread
from tsfl_jax.run import grid
from tsfl_jax.types import UserError

_FIXED = {"algorithm": "fedavg", "momentum": 0.0, "schedule.kind": "explicit"}
_MNIST = {
    "data.name": "mnist",
    "num_clients": 100,
    "cohort.size": 10,
    "partition.classes_per_client": 2,
}
_SHAKESPEARE = study.SHAKESPEARE | {"cohort.size": 113, "model.hidden": 256}
_SPLITS = ("iid", "non_iid")


class TwoNN(nn.Module):
    """Two hidden layers of 200 units: 199,210 parameters."""

    @nn.compact
    def __call__(self, x: Float[Array, "B H W 1"]) -> Float[Array, "B 10"]:
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(200)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    """Two 5×5 convolutions with max pooling, 512 units: 1,663,370 parameters."""

    @nn.compact
    def __call__(self, x: Float[Array, "B H W 1"]) -> Float[Array, "B 10"]:
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (5, 5))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(512)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class Cell(NamedTuple):
    """A row of the paper's tables; the first one is FedSGD."""

    passes: int  # E
    batch: int  # B; 0: all samples of a client
    iid: int  # rounds to the target
    non_iid: int

    @property
    def label(self) -> str:
        """E and B as ``--cells`` has them."""
        return f"{self.passes},{self.batch or 'all'}"


class Network(NamedTuple):
    """A network, its target accuracy in [0, 1] and its table in the paper."""

    module: nn.Module | None  # None: of its settings
    target: float
    cells: tuple[Cell, ...]
    settings: dict[str, Any] = _MNIST
    non_iid: str = "shards"  # partition.kind
    samples: int = 600  # of a client, the mean
    lrs: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)  # to choose from

    def steps(self, cell: Cell) -> int:
        """u, steps of a client with the mean number of samples per round."""
        return cell.passes * math.ceil(self.samples / (cell.batch or self.samples))


NETWORKS = {
    "2nn": Network(
        TwoNN(),
        0.97,
        (
            Cell(1, 0, 1468, 1817),
            Cell(10, 0, 156, 1100),
            Cell(1, 50, 144, 1183),
            Cell(20, 0, 92, 957),
            Cell(1, 10, 92, 831),
            Cell(10, 50, 45, 881),
            Cell(20, 50, 39, 835),
            Cell(10, 10, 34, 497),
            Cell(20, 10, 32, 738),
        ),
    ),
    "cnn": Network(
        CNN(),
        0.99,
        (
            Cell(1, 0, 626, 483),
            Cell(5, 0, 179, 1000),
            Cell(1, 50, 65, 600),
            Cell(20, 0, 234, 672),
            Cell(1, 10, 34, 350),
            Cell(5, 50, 29, 334),
            Cell(20, 50, 32, 426),
            Cell(5, 10, 20, 229),
            Cell(20, 10, 18, 173),
        ),
    ),
    "lstm": Network(
        None,
        0.54,
        (
            Cell(1, 50, 1635, 549),
            Cell(1, 10, 460, 164),
            Cell(5, 50, 401, 152),
            Cell(5, 10, 192, 41),
        ),
        _SHAKESPEARE,
        "client",
        37,  # windows
        (3.0, 8.0),
    ),
}


def rounds_to(accuracy: Float[np.ndarray, " T"], target: float) -> float:
    """Rounds until the highest accuracy so far is `target`; NaN: never.

    Interpolated linearly between the accuracies after two rounds; round 0 has none.
    """
    best = np.maximum.accumulate(accuracy)
    reached = np.flatnonzero(best >= target)
    if not reached.size:
        return math.nan
    after = int(reached[0])
    if not after:
        return 1.0
    low, high = best[after - 1 : after + 1]
    return after + float((target - low) / (high - low))


def rounds_of(accuracy: xarray.DataArray, target: float) -> xarray.DataArray:
    """`rounds_to` of each run, ``[lr, seed]``."""
    return xarray.apply_ufunc(
        rounds_to,
        accuracy,
        input_core_dims=[["interval"]],
        kwargs={"target": target},
        vectorize=True,
    )


def config_of(name: str, cell: Cell, split: str, given: argparse.Namespace) -> Config:
    """The settings of all runs of a cell."""
    network = NETWORKS[name]
    kind = network.non_iid if split == "non_iid" else split
    changes = network.settings | {
        "num_intervals": given.rounds or math.ceil(given.longer * getattr(cell, split)),
        "batch_size": cell.batch or network.samples,
        "schedule.tau": (cell.passes,),
        "partition.kind": kind,
    }
    if kind != "client":
        changes["schedule.data_size"] = network.samples
    if given.idx and network.module is not None:
        changes |= {"data.name": "idx", "data.dir": given.idx}
    return grid.changed(Config(), _FIXED | changes | given.data_dir | given.set)


def chosen(accuracy: xarray.DataArray, target: float) -> float:
    """The η of the fewest rounds; if none reaches the target, of the best accuracy.

    Args:
      accuracy: in [0, 1], ``[lr, seed = 1, interval]``.
      target: in [0, 1].
    """
    later = accuracy.sizes["interval"] + 2 - accuracy.max("interval")
    rounds = rounds_of(accuracy, target).fillna(later)
    return rounds.isel(seed=0).idxmin("lr").item()


def row_of(name: str, cell: Cell, split: str, given: argparse.Namespace) -> Row:
    """Run or resume a row with all η and seeds."""
    config, network = config_of(name, cell, split, given), NETWORKS[name]
    label = f"{name}_{split}_E{cell.passes}_B{cell.label.split(',')[1]}"
    options: dict[str, Any] = {"dims": ("lr",), "model": network.module}
    options["workdir"] = given.out / "cells" / label
    target = given.target or network.target
    points = {lr: {"lr": lr} for lr in given.lrs or network.lrs}
    first = study.run(config, points, 1, **options)
    lr = chosen(first.accuracy(), target)
    runs = study.run(config, {lr: points[lr]}, given.seeds, **options)
    minutes = first.minutes()
    if given.seeds > 1:
        minutes += sum(row["train_seconds"] for row in runs.result.rows[1:]) / 60
    found = rounds_of(runs.accuracy(), target).values.ravel()
    reached, paper = found[np.isfinite(found)], getattr(cell, split)
    shown = spread(reached, ".1f") if reached.size else "–"
    print(f"{label}: η = {lr:g}, {shown} rounds, paper {paper}, {minutes:.1f} min")
    return {
        "E": str(cell.passes),
        "B": cell.label.split(",")[1],
        "u": str(network.steps(cell)),
        "rounds": shown,
        "the paper's": str(paper),
        "ratio": f"{reached.mean() / paper:.2f}" if reached.size else "–",
        "reached": f"{reached.size} of {given.seeds}",
        "rounds run": str(config.num_intervals),
        "best accuracy, %": spread(runs.best().values.ravel()),
        "η": f"{lr:g}",
        "minutes": f"{minutes:.1f}",
        "note": diverged_note(runs.result.history),
    }


def tables(name: str, split: str, given: argparse.Namespace) -> list[pathlib.Path]:
    """Run or resume rows of a network and split; their table, written after each."""
    network, settings = NETWORKS[name], NETWORKS[name].settings | given.set
    changed = arguments.settings_text(given.set)
    head = (
        f"{name}, {split.replace('_', '-')}: rounds until FedAvg reaches "
        f"{100 * (given.target or network.target):g} % on {settings['data.name']}, "
        f"{settings['cohort.size']} of {settings['num_clients']} clients a round, "
        f"{arguments.joined(*changed, arguments.seeds_text(given.seeds))}; the first "
        f"seed chose η of {', '.join(f'{lr:g}' for lr in given.lrs or network.lrs)}."
    )
    rows: list[Row] = []
    made: list[pathlib.Path] = []
    for cell in network.cells:
        if not given.cells or cell.label in given.cells:
            rows.append(row_of(name, cell, split, given))
            made = files.write_table(given.out, f"mcmahan_{name}_{split}", rows, head)
    return made


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line; wrong arguments end the process with exit code 2.

    Raises:
      UserError: a setting that each run sets.
    """
    parser = arguments.make_parser("mcmahan", __doc__, seeds=3)
    arguments.add_settings(parser)
    many: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--networks", default=["2nn", "cnn"], choices=NETWORKS, **many)
    parser.add_argument("--splits", default=_SPLITS, choices=_SPLITS, **many)
    about = "rows, as 1,10 (E = 1, B = 10) or 1,all (default: all)"
    parser.add_argument("--cells", nargs="+", metavar="E,B", help=about)
    about = "learning rates to choose from (default: "
    about += "; ".join(f"{k}: {' '.join(map(str, n.lrs))}" for k, n in NETWORKS.items())
    rates = {"nargs": "+", "type": float, "metavar": "η"}
    parser.add_argument("--lrs", help=f"{about})", **rates)
    about = "rounds run, in those of the paper (default: %(default)s)"
    parser.add_argument("--longer", type=arguments.POSITIVE, default=1.5, help=about)
    about = "rounds run, in place of --longer"
    parser.add_argument("--rounds", type=arguments.at_least(1), help=about)
    about = "accuracy to reach (default: the paper's: 0.99, 0.97, LSTM 0.54)"
    parser.add_argument("--target", type=arguments.SHARE, help=about)
    about = "read MNIST from a folder of IDX files"
    parser.add_argument("--idx", type=arguments.folder, metavar="FOLDER", help=about)
    given = arguments.parse(parser, texts)
    known = {c.label for name in given.networks for c in NETWORKS[name].cells}
    for label in given.cells or ():
        if label not in known:
            parser.error(f"--cells {label}: no such row; known: {sorted(known)}")
    taken = {*_FIXED, "num_intervals", "batch_size", "schedule.tau", "lr"}
    study.check_free(given.set, taken | {"partition.kind"}, "mcmahan")
    return given


def main(texts: list[str]) -> None:
    """Run or resume the rows one after another, and print the paths of the tables.

    Raises:
      UserError: none of the networks has one of the rows.
    """
    given = parse(texts)
    devices.start(0)  # all devices; the first question to JAX would start it with one
    given.out = files.prepare_workdir(given.out, "--out")
    made = [
        path
        for name in given.networks
        for split in given.splits
        for path in tables(name, split, given)
    ]
    if not made:
        raise UserError(f"--cells {' '.join(given.cells)}: no row of these networks")
    for path in made:
        print(path)


if __name__ == "__main__":
    arguments.start("mcmahan", main)
