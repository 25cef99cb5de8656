"""``python -m studies.compare frameworks``: frameworks on one virtual clock.

Each config file is one way to organize the same clients. All run with the same seeds,
so that they have the same data, speeds and delays: a paired comparison. Configs with
other data, another partition or other clients are refused. A finished run is reused, an
interrupted one resumes.
"""

import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from studies import arguments
from studies.verdicts import curves_of
from tsfl_jax import config_files, data
from tsfl_jax.config import READERS, Config, flat, get
from tsfl_jax.engine import devices
from tsfl_jax.prepare import prepare
from tsfl_jax.report import bands, files, progress, style
from tsfl_jax.report.statistics import (
    OVER_SEEDS,
    in_time,
    spread,
    spread_of_known,
    time_to,
)
from tsfl_jax.run import costs, grid, runner
from tsfl_jax.timeline import deliveries, ticks
from tsfl_jax.timeline.timeline_settings import FleetConfig
from tsfl_jax.types import Dataset, UserError

# Settings of the data and the clients, which all configs must share.
_PARTS = ("data.", "partition.", "quadratic.", "seeds.")
_SCHEDULE = "data_size size_groups iteration dropout free_riders free_riding"
_SHARED = {"num_clients"}
_SHARED |= {f"schedule.{name}" for name in _SCHEDULE.split()}
_SHARED |= {f"timeline.{field.name}" for field in dataclasses.fields(FleetConfig)}
# The same data may be in several folders; the samples themselves are compared.
_FOLDERS = {"data.dir", "data.download", "data.file"}


# What all clients spend: a unit and its scale.
COSTS = {"bytes": ("MB", 1e-6), "energy_joules": ("kJ", 1e-3)}


class Entry(NamedTuple):
    """One way to organize the clients."""

    label: str
    config: Config


class FrameworkResult(NamedTuple):
    """Results of one entry, over its seeds."""

    label: str
    algorithm: str
    # (virtual seconds [E], test accuracy in [0, 1] [E]), one pair per seed
    curves: list[tuple[np.ndarray, np.ndarray]]
    updates: float  # of the global model, mean over the seeds
    iterations: float  # delivered local iterations, mean over the seeds
    staleness: float  # mean over deliveries and seeds, in updates
    seconds: float  # wall time of training and testing, all seeds
    data: str = ""  # name of the data set
    lost: int = 0  # runs that diverged, scored at chance level
    # What all clients have spent by then, [E] by name, one per seed; see `COSTS`.
    spent: list[dict[str, np.ndarray]] | None = None


def _shared_values(entry: Entry) -> dict[str, Any]:
    """What all entries must have in common, by name."""
    settings = flat(dataclasses.asdict(entry.config))
    if settings["timeline.framework"] == "none":
        raise UserError(
            f"{entry.label}: --config.timeline.framework=none has no virtual seconds; "
            "choose a framework"
        )
    seconds = settings["num_intervals"] * settings["schedule.interval_seconds"]
    # In ticks 70 × 0.9 s are 63 s, but for a last bit.
    length = "num_intervals × schedule.interval_seconds"
    return {length: ticks.of(seconds) / ticks.SECOND} | {
        name: value
        for name, value in settings.items()
        if name not in _FOLDERS and (name in _SHARED or name.startswith(_PARTS))
    }


def check_same_clients(entries: list[Entry]) -> None:
    """Raise UserError unless all have the same data, clients and virtual seconds."""
    first, expected = entries[0], _shared_values(entries[0])
    for entry in entries:
        values = _shared_values(entry)
        for name in expected:
            if values[name] != expected[name]:
                raise UserError(
                    f"{entry.label} and {first.label} do not have the same data, "
                    f"clients and virtual seconds: {name} is {values[name]} and "
                    f"{expected[name]}; a comparison needs the same in all configs"
                )


def _load_same(
    entries: list[Entry], seed: int, loaded: dict[str, tuple[Dataset, str]]
) -> Dataset:
    """The data set of all entries under a seed; `loaded` keeps what was read."""
    datasets = []
    for entry in entries:
        config = grid.changed(entry.config, {"seed": seed})
        key = prepare.data_key(config)
        if key not in loaded:
            dataset = prepare.load_dataset(config)
            fields = dataset._replace(source="")[1:]
            loaded[key] = dataset, data.fingerprint(*map(np.asarray, fields))
        datasets.append(loaded[key])
        if datasets[-1][1] != datasets[0][1]:
            raise UserError(
                f"{entry.label} and {entries[0].label} do not have the same data: "
                "their --config.data.dir or --config.data.file hold other samples"
            )
    return datasets[0][0]


def _run_one(
    config: Config, dataset: Dataset, workdir: pathlib.Path
) -> tuple[runner.Result, dict]:
    """One run, new, resumed or reused; and a summary of its timeline."""
    exp = runner.build(config, dataset=dataset)
    # Of the schedule and not of the trace: free riders do not do what they report.
    times = exp.prepared.workload.schedule
    stale = deliveries.staleness(times)
    facts = {
        "updates": len(times.tau),
        "iterations": int(times.tau.sum(dtype=np.int64)),
        "mean_staleness": float(stale.mean()) if stale.size else math.nan,
    }
    result = runner.run(exp, workdir)
    seconds = result.history["virtual_time"]
    costs_until = costs.on_timeline(exp.prepared)
    totals = [costs_until(second).totals for second in seconds]
    spent = {n: np.array([total[n] for total in totals]) for n in totals[-1]}
    spent["bytes"] = spent.pop("bytes_down") + spent.pop("bytes_up")
    return result, facts | {"spent": spent}


def run_frameworks(
    entries: list[Entry], seeds: int, out: pathlib.Path, stream: IO[str] | None = None
) -> list[FrameworkResult]:
    """Run or reuse everything; one result per entry.

    Raises:
      UserError: the entries differ in data or clients, or data cannot be read.
    """
    check_same_clients(entries)
    loaded: dict[str, tuple[Dataset, str]] = {}
    datasets = [_load_same(entries, seed, loaded) for seed in range(seeds)]
    frameworks, stream = [], stream or sys.stderr
    for number, (label, config) in enumerate(entries):
        results = []
        for seed, dataset in enumerate(datasets):
            begun = time.perf_counter()
            changed = grid.changed(config, {"seed": seed})
            folder = out / "runs" / f"{label}-seed{seed}"
            results.append(_run_one(changed, dataset, folder))
            passed = f"{time.perf_counter() - begun:.0f} s"
            count = f"run {number * seeds + seed + 1} of {len(entries) * seeds}"
            progress.log(stream, f"{label}, seed {seed}: {passed}, {count}")
        frameworks.append(_over_seeds(label, results, datasets[0].num_classes))
    return frameworks


def _over_seeds(
    label: str, results: list[tuple[runner.Result, dict]], classes: int
) -> FrameworkResult:
    """Accuracy in virtual time, and means over the seeds."""
    curves, spent = [], []
    for result, facts in results:
        accuracy = curves_of(result.history, classes)
        measured = ~np.isnan(accuracy)
        if not measured.any():
            raise UserError(
                f"{label}: no test accuracy was measured, and that is what is compared"
            )
        seconds = result.history["virtual_time"]
        curves.append((seconds[measured], accuracy[measured]))
        spent.append({n: a[measured] for n, a in facts.get("spent", {}).items()})

    def mean(name: str) -> float:
        return float(np.mean([facts[name] for _, facts in results]))

    return FrameworkResult(
        label=label,
        algorithm=results[0][0].summary["algorithm"],
        curves=curves,
        updates=mean("updates"),
        iterations=mean("iterations"),
        staleness=mean("mean_staleness"),
        seconds=sum(result.summary["train_seconds"] for result, _ in results),
        data=results[0][0].summary["data"],
        lost=sum(result.summary["diverged_at"] is not None for result, _ in results),
        spent=spent,
    )


def times_of(result: FrameworkResult, target: float) -> Float[np.ndarray, "S"]:
    """Virtual seconds to the target accuracy, inf: never."""
    return np.array([time_to(target, *curve) for curve in result.curves])


def curves_over(result: FrameworkResult, name: str) -> list[tuple[Any, Any]]:
    """Accuracy over what was spent, of each seed, in the unit of `COSTS`."""
    pairs = zip(result.spent or [], result.curves, strict=False)
    scale = COSTS[name][1]
    return [(scale * s[name], accuracy) for s, (_, accuracy) in pairs if name in s]


def spent_to(result: FrameworkResult, target: float, name: str) -> np.ndarray:
    """What all clients have spent to the target accuracy, inf: never."""
    curves = curves_over(result, name)
    return np.array([time_to(target, *curve) for curve in curves])


def best_accuracy(result: FrameworkResult) -> str:
    """The highest test accuracy in %, mean over the seeds."""
    return spread([100 * accuracy.max() for _, accuracy in result.curves])


def comparison_rows(
    results: list[FrameworkResult], target: float
) -> list[dict[str, str]]:
    """The table as text; speed-up against the first result, paired by seed."""
    first, rows = times_of(results[0], target), []
    for result in results:
        times = times_of(result, target)
        both = np.isfinite(times) & np.isfinite(first)
        rows.append(
            {
                "framework": style.name_of(result.label),
                "rule": style.name_of(result.algorithm),
                "updates": f"{result.updates:.0f}",
                "local iterations": f"{result.iterations:.0f}",
                "mean staleness": f"{result.staleness:.1f}",
                "best accuracy, %": best_accuracy(result),
                f"s to {100 * target:g} %": spread_of_known(times, is_time=True),
                "speed-up": spread(first / times) if both.all() else "–",
                "wall time, s": f"{result.seconds:.0f}",
            }
            | costs_to(result, target)
        )
    return rows


def costs_to(result: FrameworkResult, target: float) -> dict[str, str]:
    """What was spent until the target, a column for each of `COSTS` that is known."""
    return {
        f"{unit} to {100 * target:g} %": spread_of_known(amounts, ".4g", True)
        for name, (unit, _) in COSTS.items()
        if len(amounts := spent_to(result, target, name))
    }


def lost_text(results: list[FrameworkResult]) -> str:
    """A sentence on the runs that diverged, "" if none did."""
    lost = ", ".join(f"{r.lost} of {r.label}" for r in results if r.lost)
    return f" Diverged, scored at chance level: {lost}." if lost else ""


def write_comparison(
    folder: pathlib.Path, results: list[FrameworkResult], target: float, title: str
) -> list[pathlib.Path]:
    """Write compare.md, .csv and the figures; returns their paths.

    compare.png has accuracy over seconds, compare_bytes.png and
    compare_energy_joules.png over these, pareto.png both to the target.
    """
    text = f"{title}; {OVER_SEEDS}; speed-up is the time to the target "
    text += f"against the first line, paired by seed.{lost_text(results)}"
    rows = comparison_rows(results, target)
    paths = files.write_table(folder, "compare", rows, text)
    seconds = f"s to {100 * target:g} %"
    curves = {}
    for result, row in zip(results, rows, strict=True):
        name = f"{row['framework']}, {seconds}: {row[seconds]}"
        curves[name] = in_time(result.curves)
    figure = bands.bands(curves, title, x=bands.SECONDS, target=target)
    paths += style.save_both(figure, folder / "compare")
    names = [n for n in COSTS if all(curves_over(r, n) for r in results)]
    for name in names:
        curves = {r.label: in_time(curves_over(r, name)) for r in results}
        figure = bands.bands(curves, title, x=f"{COSTS[name][0]} of all", target=target)
        paths += style.save_both(figure, folder / f"compare_{name}")
    if names:
        figure = pareto_figure(results, names, target, title)
        paths += style.save_both(figure, folder / "pareto")
    return paths


def front_of(points: Float[np.ndarray, "n 2"]) -> list[int]:
    """The points that no other is at most as large in both and smaller in one."""
    return [
        i
        for i, point in enumerate(points)
        if np.isfinite(point).all()
        and not ((points <= point).all(axis=1) & (points < point).any(axis=1)).any()
    ]


@style.styled
def pareto_figure(
    results: list[FrameworkResult], names: list[str], target: float, title: str
) -> Any:
    """Seconds to the target over what is spent to it; a line joins the Pareto front.

    Means over the seeds; a framework of which a seed never gets there has no point.
    """
    figure, axes = style.figure_of(3.4, ncols=len(names), squeeze=False)
    seconds = [times_of(result, target).mean() for result in results]
    handles: dict[str, Any] = {}
    for name, panel in zip(names, axes[0], strict=True):
        amounts = [spent_to(result, target, name).mean() for result in results]
        points = np.stack([amounts, seconds], 1)
        front = sorted(front_of(points), key=lambda i: points[i, 0])
        panel.plot(*points[front].T, color="#999999", linewidth=0.8, zorder=0)
        for i, result in enumerate(results):
            if np.isfinite(points[i]).all():
                look = style.style_at(i) | {"linestyle": "none"}
                (handle,) = panel.plot(*points[i], **look)
                handles[style.name_of(result.label)] = handle
        panel.set_xlabel(f"{COSTS[name][0]} of all to {100 * target:g} %")
        panel.set_ylabel(f"virtual seconds to {100 * target:g} %")
    style.legend_below(figure, [*handles.values()], [*handles])
    figure.suptitle(style.title(title))
    return figure


def _settings_of(
    framework: str, changes: dict[str, Any], frameworks: list[str]
) -> dict[str, Any]:
    """The changes without settings that only other frameworks of the entries read."""
    by = "timeline.framework"
    readers = {n: {*values[by]} for n, values in READERS.items() if by in values}
    return {
        name: value
        for name, value in changes.items()
        if framework in readers.get(name, {framework})
        or not readers[name] & {*frameworks}
    }


def paths(names: Sequence[str]) -> list[pathlib.Path]:
    """The files of experiments, by name, path or folder: "frameworks:digits".

    Raises:
      UserError: one of them is neither a file nor a known name.
    """
    files: list[pathlib.Path] = []
    for name in names:
        folder, argument = config_files.split(name)
        folder = folder.rstrip("/").removeprefix("configs/")
        inside = [n for n in config_files.descriptions() if n.startswith(f"{folder}/")]
        chosen = [f"{n}:{argument}" if argument else n for n in inside] or [name]
        files += [pathlib.Path(config_files.find(n)) for n in chosen]
    return files


def main(texts: list[str]) -> None:
    """Run all, write table and figure."""
    parser = arguments.make_parser("compare", __doc__, 3)
    arguments.add_settings(parser)
    text = "files, names as in tsfl configs, or all of a folder: frameworks, or "
    text += "without a download frameworks:digits"
    parser.add_argument("configs", nargs="+", help=text)
    text = "test accuracy to reach (default: %(default)s)"
    parser.add_argument("--target", type=arguments.SHARE, default=0.9, help=text)
    flags = arguments.parse(parser, texts)
    entry_files = paths(flags.configs)
    configs = [config_files.load(path) for path in entry_files]
    changes = flags.data_dir | flags.set
    frameworks = [get(config, "timeline.framework") for config in configs]
    entries = [
        Entry(path.stem, grid.changed(config, _settings_of(name, changes, frameworks)))
        for path, config, name in zip(entry_files, configs, frameworks, strict=True)
    ]
    out = files.check_workdir(flags.out, "--out")
    devices.start(0)
    results = run_frameworks(entries, flags.seeds, out)
    title = arguments.joined(
        results[0].data,
        *arguments.settings_text(flags.set),
        arguments.seeds_text(flags.seeds),
        arguments.device_text(),
    )
    for path in write_comparison(out, results, flags.target, title):
        print(path)


if __name__ == "__main__":
    arguments.start("compare", main)
