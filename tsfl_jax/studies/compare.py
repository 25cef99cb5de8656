"""``python -m tsfl_jax.compare configs/frameworks/*.py``: accuracy in virtual time.

Each config file is one way to organise the same clients. All are run with the same
seeds, so they see the same data, speeds and delays: a paired comparison. Configs with
other data, another partition or other clients are refused. A run that is there is used
again, a killed one goes on.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

from tsfl_jax import data
from tsfl_jax.config import Config, flat
from tsfl_jax.engine import devices
from tsfl_jax.experiment import assemble, grid, prepare, runner, workload
from tsfl_jax.report import files
from tsfl_jax.studies import compare_files
from tsfl_jax.studies.compare_files import Outcome
from tsfl_jax.timeline import trace
from tsfl_jax.types import Dataset, UserError

# Settings of the data and the clients.
_PARTS = ("data.", "partition.", "quadratic.")
_SCHEDULE = [
    "data_size",
    "size_groups",
    "iteration",
    "dropout",
    "free_riders",
    "free_riding",
]
_TIMELINE = ["speed", "jitter", "download", "upload", "speeds", "availability"]
_SHARED = {
    "num_clients",
    *(f"schedule.{name}" for name in _SCHEDULE),
    *(f"timeline.{name}" for name in _TIMELINE),
}
# The same data may lie in several places; the samples themselves are compared.
_PLACES = {"data.dir", "data.download", "data.file"}


class Entry(NamedTuple):
    """One way to organise the clients."""

    label: str
    config: Config


def _is_shared(name: str) -> bool:
    return (name in _SHARED or name.startswith(_PARTS)) and name not in _PLACES


def check_same_clients(entries: list[Entry]) -> None:
    """Raises UserError unless all have the same data, clients and virtual seconds."""
    first = entries[0]
    there = flat(dataclasses.asdict(first.config))
    for entry in entries:
        here = flat(dataclasses.asdict(entry.config))
        for name in filter(_is_shared, here):
            if here[name] != there[name]:
                raise UserError(
                    f"{entry.label} and {first.label} do not have the same data and "
                    f"clients: {name} is {here[name]} and {there[name]}; a comparison "
                    "needs the same value in all configs"
                )
        if here["timeline.framework"] == "none":
            raise UserError(
                f"{entry.label}: --config.timeline.framework=none has no virtual "
                "seconds; choose a framework"
            )


class _Loaded(NamedTuple):
    dataset: Dataset
    fingerprint: str


def _load_same(entries: list[Entry], seed: int, loaded: dict[str, _Loaded]) -> Dataset:
    """The data set of all entries under a seed; `loaded` keeps what was read.

    Raises:
      UserError: an entry's folder or file holds other data.
    """
    found = []
    for entry in entries:
        config = grid.changed(entry.config, {"seed": seed})
        key = prepare.data_key(config)
        if key not in loaded:
            dataset = prepare.load_dataset(config)
            loaded[key] = _Loaded(dataset, data.fingerprint(*dataset[1:]))
        found.append(loaded[key])
        if found[-1].fingerprint != found[0].fingerprint:
            raise UserError(
                f"{entry.label} and {entries[0].label} do not have the same data: "
                "their --config.data.dir or --config.data.file hold other samples"
            )
    return found[0].dataset


def run_one(
    config: Config, dataset: Dataset, workdir: pathlib.Path, stream
) -> tuple[runner.Result, dict]:
    """One run, new, resumed or used again; and what its timeline is like."""
    clients = workload.fleet_of(config, workload.sizes_of(config))
    facts = trace.summary(
        workload.trace_of(config, clients), grid.setting(config, "num_clients")
    )
    exp = assemble.build(config, dataset=dataset)
    return runner.run(exp, workdir, stream), facts


def run(
    entries: list[Entry], seeds: int, out: pathlib.Path, stream=None
) -> list[Outcome]:
    """Runs or reuses everything; one `Outcome` per entry.

    Raises:
      UserError: the entries differ in data or clients, or data cannot be read.
    """
    check_same_clients(entries)
    loaded: dict[str, _Loaded] = {}
    datasets = [_load_same(entries, seed, loaded) for seed in range(seeds)]
    outcomes = []
    for label, config in entries:
        results = []
        for seed, dataset in enumerate(datasets):
            begun = time.perf_counter()
            changed = grid.changed(config, {"seed": seed})
            folder = out / "runs" / f"{label}-seed{seed}"
            results.append(run_one(changed, dataset, folder, None))
            print(
                f"{label}, seed {seed}: {time.perf_counter() - begun:.0f} s",
                file=stream or sys.stderr,
            )
        outcomes.append(_outcome(label, results))
    return outcomes


def _outcome(label: str, results: list[tuple[runner.Result, dict]]) -> Outcome:
    """Accuracy in virtual time, and means over the seeds."""
    curves = []
    for result, _ in results:
        accuracy = result.history["test_accuracy"]
        measured = ~np.isnan(accuracy)
        if not measured.any():
            raise UserError(
                f"{label}: no test accuracy was measured, and that is what is compared"
            )
        seconds = result.history["virtual_time"]
        curves.append((seconds[measured], accuracy[measured]))
    facts = [facts for _, facts in results]
    return Outcome(
        label=label,
        algorithm=results[0][0].summary["algorithm"],
        curves=curves,
        updates=float(np.mean([f["updates"] for f in facts])),
        iterations=float(np.mean([f["iterations"] for f in facts])),
        staleness=float(np.mean([f["mean_staleness"] for f in facts])),
        seconds=sum(result.summary["train_seconds"] for result, _ in results),
        data=results[0][0].summary["data"],
    )


def main(arguments: list[str]) -> None:
    """Runs all, writes table and figure."""
    parser = argparse.ArgumentParser(
        prog="python -m tsfl_jax.compare", description=__doc__.splitlines()[0]
    )
    parser.add_argument("configs", nargs="+", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default="runs/compare")
    parser.add_argument("--data_dir", default="", help="prepared TFDS data")
    parser.add_argument("--target", type=float, default=0.9, help="test accuracy")
    parser.add_argument("--set", action="append", default=[], help="setting=value")
    given = parser.parse_args(arguments)
    if given.seeds < 1 or not 0 < given.target < 1:
        parser.error("--seeds must be at least 1 and --target within (0, 1)")
    changes = grid.parse_settings(given.set) | grid.data_settings(given.data_dir)
    entries = [
        Entry(path.stem, grid.changed(grid.config_at(path), changes))
        for path in given.configs
    ]
    out = files.prepare_workdir(given.out)
    devices.start(0)
    outcomes = run(entries, given.seeds, out)
    device = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    about = f"{outcomes[0].data}, {given.seeds} seed(s), {device}"
    for path in compare_files.write(out, outcomes, given.target, about):
        print(path)
