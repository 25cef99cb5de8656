"""``python -m studies.mcmahan``: rounds that FedAvg needs, beside those of its paper.

MNIST on 100 clients of 600 samples, C = 0.1: ten clients a round make E passes over
their samples in batches of B (∞: all 600). IID, or samples of two digits per client.
Rounds until the highest test accuracy so far reaches the target, interpolated between
rounds as there. The first seed chooses the learning rate η of ``--lrs`` with the fewest
rounds, the others run with it alone. There is a table for each network and split,
written after each row; the same command goes on where it was stopped.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data" (AISTATS 2017), Table 2 (CNN, 99 %) and Table 4 (2NN, 97 %).
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

_SAMPLES = 600  # of a client
_FIXED = {
    "num_clients": 100,
    "cohort.size": 10,
    "algorithm": "fedavg",
    "momentum": 0.0,
    "schedule.kind": "explicit",
    "schedule.data_size": _SAMPLES,
    "partition.classes_per_client": 2,
}
_SPLITS = {"iid": "iid", "non_iid": "shards"}  # → partition.kind


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
    batch: int  # B
    iid: int  # rounds to the target
    non_iid: int

    @property
    def steps(self) -> int:
        """u, steps of a client per round."""
        return self.passes * math.ceil(_SAMPLES / self.batch)

    @property
    def label(self) -> str:
        """E and B as ``--cells`` has them."""
        return f"{self.passes},{'all' if self.batch == _SAMPLES else self.batch}"


class Network(NamedTuple):
    """A network, its target accuracy in [0, 1] and its table in the paper."""

    module: nn.Module
    target: float
    cells: tuple[Cell, ...]


NETWORKS = {
    "2nn": Network(
        TwoNN(),
        0.97,
        (
            Cell(1, _SAMPLES, 1468, 1817),
            Cell(10, _SAMPLES, 156, 1100),
            Cell(1, 50, 144, 1183),
            Cell(20, _SAMPLES, 92, 957),
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
            Cell(1, _SAMPLES, 626, 483),
            Cell(5, _SAMPLES, 179, 1000),
            Cell(1, 50, 65, 600),
            Cell(20, _SAMPLES, 234, 672),
            Cell(1, 10, 34, 350),
            Cell(5, 50, 29, 334),
            Cell(20, 50, 32, 426),
            Cell(5, 10, 20, 229),
            Cell(20, 10, 18, 173),
        ),
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


def config_of(cell: Cell, split: str, given: argparse.Namespace) -> Config:
    """The settings of all runs of a cell."""
    rounds = math.ceil(given.longer * getattr(cell, split))
    changes = {
        "num_intervals": rounds,
        "batch_size": cell.batch,
        "schedule.tau": (cell.passes,),
        "partition.kind": _SPLITS[split],
        "data.name": "idx" if given.idx else "mnist",
    }
    if given.idx:
        changes["data.dir"] = given.idx
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
    config, network = config_of(cell, split, given), NETWORKS[name]
    label = f"{name}_{split}_E{cell.passes}_B{cell.label.split(',')[1]}"
    options: dict[str, Any] = {"dims": ("lr",), "model": network.module}
    options["workdir"] = given.out / "cells" / label
    points = {lr: {"lr": lr} for lr in given.lrs}
    first = study.run(config, points, 1, **options)
    lr = chosen(first.accuracy(), network.target)
    runs = study.run(config, {lr: points[lr]}, given.seeds, **options)
    minutes = first.minutes()
    if given.seeds > 1:
        minutes += sum(row["train_seconds"] for row in runs.result.rows[1:]) / 60
    found = rounds_of(runs.accuracy(), network.target).values.ravel()
    reached, paper = found[np.isfinite(found)], getattr(cell, split)
    shown = spread(reached, ".1f") if reached.size else "–"
    print(f"{label}: η = {lr:g}, {shown} rounds, paper {paper}, {minutes:.1f} min")
    return {
        "E": str(cell.passes),
        "B": cell.label.split(",")[1],
        "u": str(cell.steps),
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
    network = NETWORKS[name]
    head = (
        f"{name}, {split.replace('_', '-')}: rounds until FedAvg reaches "
        f"{100 * network.target:g} % on MNIST, ten of 100 clients a round, "
        f"{arguments.seeds_text(given.seeds)}; the first seed chose η of "
        f"{', '.join(f'{lr:g}' for lr in given.lrs)}."
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
    parser.add_argument("--networks", default=[*NETWORKS], choices=NETWORKS, **many)
    parser.add_argument("--splits", default=[*_SPLITS], choices=_SPLITS, **many)
    about = "rows, as 1,10 (E = 1, B = 10) or 1,all (default: all)"
    parser.add_argument("--cells", nargs="+", metavar="E,B", help=about)
    about = "learning rates to choose from (default: %(default)s)"
    rates = {"nargs": "+", "type": float, "default": [0.05, 0.1, 0.2, 0.5]}
    parser.add_argument("--lrs", metavar="η", help=about, **rates)
    about = "rounds run, in those of the paper (default: %(default)s)"
    parser.add_argument("--longer", type=arguments.POSITIVE, default=1.5, help=about)
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
