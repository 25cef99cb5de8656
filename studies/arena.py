"""``python -m studies.arena``: which rule wins where, all rules on the same clients.

Every rule is run on every fleet and split, paired by seed: with a seed all rules have
the same initial model, split, fleet and mini-batches. All of it is one sweep, with as
many lanes in a compiled program as there can be; the same command goes on where it was
stopped, and the tables are written anew after each call of lanes.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from studies import arena_report, arguments, fleets, study
from studies.arena_report import Arena, Lane
from studies.fleets import FleetNumbers
from studies.verdicts import curves_of
from tsfl_jax.config import Config, get, replace
from tsfl_jax.engine import devices
from tsfl_jax.prepare import custom_hooks, prepare
from tsfl_jax.report import files, style
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.run import costs, grid, sweeps
from tsfl_jax.types import Dataset, UserError

# All rules that need no settings of their own. Not those that need validation samples
# (oracle, dms_adaptive, fltrust): they would have data that the others lack.
RULES = (
    *("fedavg", "fedprox", "fednova", "scaffold", "fedavgm", "fedadam", "fedyogi"),
    *("dms", "bound_optimal", "learned", "fedasync", "fedbuff", "fedat"),
    *("median", "trimmed_mean", "geometric_median", "krum", "multi_krum"),
    *("flexible", "geometric_mean", "safa", "aso_fed", "secure_buffer"),
    *("feddyn", "fedexp", "qfedavg", "ca2fl", "fadas"),
    "centered_clipping",
)
# On average 2.5 local iterations per client and interval, 3 in Case 3.
FLEETS: dict[str, FleetNumbers | dict[str, Any]] = {
    "equal": FleetNumbers(),
    "Case 1": {"schedule.kind": "case1"},
    "Case 3": {"schedule.kind": "case3"},
    "heavy tail": FleetNumbers(spread=1.0),
    "slow by label": FleetNumbers(spread=0.6, labels=1.0),
    "night": FleetNumbers(pace=5.0, away=0.5, period=10.0),
    # Forty of those that are online are asked in each interval.
    "mobile": {
        "timeline.framework": "tsfl",
        "timeline.fleet": "mobile",
        "cohort.size": 40,
        "cohort.sampler": "online",
        "schedule.iteration": "step",
        "schedule.interval_seconds": 12.0,
    },
}
SPLITS: dict[str, dict[str, Any]] = {
    "IID": {"partition.kind": "iid"},
    "Dirichlet(0.5)": {"partition.kind": "dirichlet", "partition.alpha": 0.5},
    "Dirichlet(0.1)": {"partition.kind": "dirichlet", "partition.alpha": 0.1},
    "2 classes": {"partition.kind": "shards", "partition.classes_per_client": 2},
    "roles": {"partition.kind": "client"},
}
# Clients one after another, so that all fleets share a program.
_COMMON = {"algorithm": "fedavg", "num_clients": 20, "mapping": "sequential"}
DATA: dict[str, dict[str, Any]] = {
    "digits": _COMMON
    | {
        "num_intervals": 30,
        "report_every": 5,
        "devices": 1,  # so small that a second one costs more than it gives
        "lr": 0.03,
        "batch_size": 8,
        "schedule.data_size": 44,
        "model.hidden": 64,
    },
    "mnist": _COMMON
    | {
        "num_intervals": 10,
        "report_every": 2,
        "lr": 0.01,
        "batch_size": 32,
        "data.name": "mnist",
        "data.download": False,
        "data.test_size": 2500,  # all of them would take a fifth of the time
        "schedule.data_size": 256,
        "model.name": "mnist_cnn",
    },
    "shakespeare": _COMMON
    | study.SHAKESPEARE
    | {
        "num_intervals": 30,
        "report_every": 5,
        "lr": 4.0,
        "eval_every": 5,
        "evaluation.clients": "own",
        "model.hidden": 64,
    },
}
# Accuracy, for the columns of time and MB.
TARGET = {"digits": 0.8, "mnist": 0.9, "shakespeare": 0.3}
# What takes part if nothing is chosen.
_IMAGES = {
    "rules": RULES,
    "fleets": [fleet for fleet in FLEETS if fleet != "mobile"],
    "splits": [split for split in SPLITS if split != "roles"],
}
_ROLES = {
    "rules": ("fedavg", "fednova", "scaffold", "feddyn", "fedadam", "dms"),
    "fleets": ["mobile"],
    "splits": ["roles"],
}
CHOSEN = {"digits": _IMAGES, "mnist": _IMAGES, "shakespeare": _ROLES}
TUNING_SEED = 1000  # no result is of this seed
# --tune: fleet and split.
TUNED = dict.fromkeys(DATA, ("Case 1", "Dirichlet(0.5)"))
TUNED |= {"shakespeare": ("mobile", "roles")}
STEPS = (1 / 3, 1.0, 3.0)  # of η: --tune
LAST = 3  # tested intervals that a score is the mean of


class Cell(NamedTuple):
    """A fleet and a split."""

    fleet: str
    split: str


def _class_metric(number: int) -> Callable[[Array, Array], Array]:
    """1 where a sample of this class is recognized; its mean is over all samples."""

    def right(outputs: Array, labels: Array) -> Array:
        found = jax.numpy.argmax(outputs, axis=-1) == labels
        return (found & (labels == number)).astype(np.float32)

    return right


def metrics_of(num_classes: int) -> dict[str, Any]:
    """Metrics that the accuracy of each class is made of."""
    return {f"class_{c}": _class_metric(c) for c in range(num_classes)}


def point_of(
    config: Config, cell: Cell, dataset: Dataset, seed: int, folder: pathlib.Path
) -> dict[str, Any]:
    """The settings of a cell under a seed; writes its trace if it has one."""
    values = SPLITS[cell.split] | {"seed": seed}
    fleet = FLEETS[cell.fleet]
    if isinstance(fleet, dict):
        return values | fleet
    name = f"{cell.fleet} {cell.split if fleet.labels else ''} {seed}"
    path = folder / f"{'-'.join(name.lower().split())}.csv"
    made = fleets.make_fleet(replace(config, values), fleet, dataset)
    return values | fleets.settings_of(fleets.write_fleet(path, made))


def client_shares(
    config: Config, points: Sequence[Mapping[str, Any]], dataset: Dataset
) -> list[Float[np.ndarray, "N C"]]:
    """Shares of the classes in what each client holds, by point."""
    found = []
    for point in points:
        changed = grid.changed(config, dict(point))
        made = prepare.prepare_validated(
            changed, custom_hooks.Custom(dataset=dataset), "-"
        )
        found.append(fleets.shares_of(made.config, dataset, made.partition.capacity))
    return found


def recent(accuracy: Float[np.ndarray, "T"], last: int = LAST) -> float:
    """The mean of the last tested intervals; NaN without any."""
    seen = np.asarray(accuracy, float)[np.isfinite(accuracy)]
    return float(seen[-last:].mean()) if len(seen) else float("nan")


def raced(
    accuracy: Float[np.ndarray, "rules S T"], base: int, margin: float, every: int
) -> Int[np.ndarray, "rules"]:
    """Intervals after which a race would have stopped each rule of a cell; −1: none.

    A rule stops after a chunk, not in the first third of the intervals, if in every
    seed the mean of its last tested accuracies is more than the margin below that of
    the rule with the highest mean over the seeds, of those that still run and have not
    diverged with any seed. The rule that all are compared with is never stopped.

    Args:
      accuracy: in [0, 1]; NaN where not tested, and from where a run diverged.
      base: place of the rule that is never stopped.
      margin: in points of accuracy, > 0.
      every: intervals of a chunk.
    """
    intervals, ended = accuracy.shape[-1], np.full(len(accuracy), -1)
    for t in range(every, intervals, every):
        runs = (ended < 0) & np.isfinite(accuracy[:, :, t - 1]).all(axis=1)
        if 3 * t < intervals or not runs.any():
            continue
        score = np.array([[recent(c[:t]) for c in rule] for rule in accuracy])
        best = score[np.where(runs, score.mean(axis=1), -np.inf).argmax()]
        behind = runs & (100 * (best - score) > margin).all(axis=1)
        ended[behind & (np.arange(len(ended)) != base)] = t
    return ended


def lane_of(
    history: Mapping[str, np.ndarray],
    shares: Float[np.ndarray, "N C"] | None,
    of_class: Float[np.ndarray, "C"],
    sent: Float[np.ndarray, "T"],
    target: float,
    stopped: int = -1,
) -> Lane:
    """What one run is judged by.

    Args:
      history: of the run.
      shares: of the classes in each client's samples; None: of clients that are scored
        on test data of their own.
      of_class: shares of the classes in the test set.
      sent: bytes of a delivery with its download, in each interval.
      target: accuracy in (0, 1).
      stopped: intervals that count; −1: all.
    """
    lost, classes = bool(np.asarray(history["diverged"]).any()), len(of_class)
    accuracy = curves_of(history, classes)
    accuracy[stopped if stopped >= 0 else len(accuracy) :] = np.nan
    known = np.isfinite(accuracy)
    if shares is None:
        worst = np.asarray(history["client_accuracy_worst"], float)[known][-LAST:]
    else:
        right = np.stack([history[f"class_{c}"] for c in range(classes)], axis=-1)
        each = (right[known][-LAST:] / of_class) @ shares.T  # [LAST, N]
        worst = np.sort(each.mean(axis=0))[: max(1, -(-len(shares) // 10))]
    reached = np.flatnonzero(known & (np.nan_to_num(accuracy) >= target))
    tau = np.asarray(history["tau"])
    moved = np.cumsum((tau > 0).sum(axis=1) * sent) / 1e6
    return Lane(
        final=recent(accuracy),
        worst=1 / classes if lost else float(worst.mean()),
        seconds=float(history["virtual_time"][reached[0]]) if len(reached) else np.inf,
        megabytes=float(moved[reached[0]]) if len(reached) else np.inf,
        stopped=stopped,
        wall=float(history["seconds"]),
    )


def tune(
    config: Config, given: argparse.Namespace, dataset: Dataset
) -> dict[str, float]:
    """η of each rule, the best of a grid on a seed of its own; writes tune.md."""
    rules, out = given.rules, given.out
    cell = Cell(*TUNED[given.data])
    base = point_of(config, cell, dataset, TUNING_SEED, out)
    rates = [float(f"{step * get(config, 'lr'):.2g}") for step in STEPS]
    points = {
        (rule, rate): base | {"algorithm": rule, "lr": rate}
        for rule in rules
        for rate in rates
    }
    options = {"dataset": dataset, "first_seed": TUNING_SEED, "dims": ("rule", "rate")}
    options["classes"] = dataset.num_classes
    curves = study.run(config, points, 1, out / "tune", **options).accuracy()
    score = np.array([[recent(c) for c in rule[:, 0]] for rule in curves.values])
    chosen = [rates[i] for i in score.argmax(axis=1)]
    table = [
        {"rule": style.name_of(rule)}
        | {f"η = {r:g}": f"{100 * s:.2f}" for r, s in zip(rates, one, strict=True)}
        | {"chosen": f"{rate:g}"}
        for rule, one, rate in zip(rules, score, chosen, strict=True)
    ]
    about = f"{cell.fleet}, {cell.split}, seed {TUNING_SEED}: mean test accuracy in %"
    files.write_table(out, "tune", table, f"{about} of the last {LAST} intervals.")
    return dict(zip(rules, chosen, strict=True))


class Plan(NamedTuple):
    """What is run, and what is needed to judge it."""

    cells: list[Cell]
    rules: list[str]
    seeds: int
    lanes: dict[tuple[int, str, int], dict[str, Any]]  # (cell, rule, seed) -> settings
    shares: dict[tuple[int, int], Any]  # (cell, seed) -> as of `lane_of`
    of_class: Float[np.ndarray, "C"]
    target: float
    margin: float  # of a race, in points; 0: none
    every: int  # intervals of a chunk


def make_plan(
    config: Config, dataset: Dataset, given: argparse.Namespace, rates: dict[str, float]
) -> Plan:
    """All lanes of the arena; writes the traces of the fleets."""
    cells = [Cell(fleet, split) for fleet in given.fleets for split in given.splits]
    folder = files.prepare_workdir(given.out / "fleets", "--out")
    points = {
        (number, seed): point_of(config, cell, dataset, seed, folder)
        for number, cell in enumerate(cells)
        for seed in range(given.seeds)
    }
    shares: list[Any] = [None] * len(points)
    if config.evaluation.clients == "none":
        shares = client_shares(config, list(points.values()), dataset)
    lanes = {
        (number, rule, seed): points[number, seed]
        | {"algorithm": rule}
        | ({"lr": rates[rule]} if rates else {})
        for number in range(len(cells))
        for rule in given.rules
        for seed in range(given.seeds)
    }
    labels = dataset.y_test
    return Plan(
        cells,
        list(given.rules),
        given.seeds,
        lanes,
        dict(zip(points, shares, strict=True)),
        np.bincount(labels, minlength=dataset.num_classes) / len(labels),
        given.target or TARGET[given.data],
        given.race,
        max(get(config, "report_every"), 1),
    )


def traffic_of(prepared: prepare.Prepared, rule: str) -> Float[np.ndarray, "T"]:
    """Bytes of a delivery with its download under a rule, in each interval."""
    with_rule = prepared._replace(rule=AGGREGATORS[rule])
    return costs.traffic_of(with_rule, prepared.config.num_intervals).sum(axis=0)


def judge(
    plan: Plan,
    done: Mapping[int, Mapping[str, Any]],
    sent: Mapping[str, Float[np.ndarray, "T"]],
) -> Arena:
    """The arena as far as it was run; ``sent`` is of each rule, as in `lane_of`."""
    found, seeds = {}, range(plan.seeds)
    runs = {key: done[i] for i, key in enumerate(plan.lanes) if i in done}
    for number in range(len(plan.cells)):
        there = {
            rule: [runs[number, rule, s] for s in seeds]
            for rule in plan.rules
            if all((number, rule, s) in runs for s in seeds)
        }
        stopped = dict.fromkeys(there, -1)
        if plan.margin and arena_report.BASE in there:
            curves = [[x["test_accuracy"] for x in each] for each in there.values()]
            accuracy = np.array(curves, float)
            base = list(there).index(arena_report.BASE)
            ended = raced(accuracy, base, plan.margin, plan.every).tolist()
            stopped = dict(zip(there, ended, strict=True))
        for rule, several in there.items():
            for seed in seeds:
                options = (plan.of_class, sent[rule], plan.target, stopped[rule])
                made = lane_of(several[seed], plan.shares[number, seed], *options)
                found[number, rule, seed] = made
    names = [(cell.fleet, cell.split) for cell in plan.cells]
    return Arena(names, plan.rules, plan.seeds, plan.target, found)


def run_arena(
    config: Config, given: argparse.Namespace, device: str
) -> list[pathlib.Path]:
    """Run or resume the arena and write its tables and picture."""
    dataset = prepare.load_dataset(config)
    out = given.out
    rates = tune(config, given, dataset) if given.tune else {}
    plan = make_plan(config, dataset, given, rates)
    lanes = list(plan.lanes.values())
    first = prepare.prepare(grid.changed(config, lanes[0]), dataset=dataset)
    sent = {rule: traffic_of(first, rule) for rule in plan.rules}
    about = arguments.joined(
        dataset.name,
        first.network.name,
        f"{get(config, 'num_intervals')} intervals",
        "η of each rule tuned" if rates else f"η = {get(config, 'lr'):g}",
        *arguments.settings_text(given.set),
        f"rules more than {given.race:g} points behind stopped" if given.race else "",
        f"device: {device}",
    )

    def show(done: Mapping[int, Mapping[str, Any]]) -> None:
        whole = len(done) == len(lanes)
        arena_report.write(out, judge(plan, done, sent), about, whole)

    one_program = [r for r in plan.rules if not AGGREGATORS[r].stacks]
    sweeps.run(
        config,
        lanes,
        dataset=dataset,
        metrics=metrics_of(dataset.num_classes)
        if plan.shares[0, 0] is not None
        else {},
        workdir=out / "lanes",
        # Whole cells, which the tables are written of.
        runs_per_call=max(len(one_program), 1) * plan.seeds,
        stream=sys.stderr,
        watch=show,
    )
    return [
        *(out / f"arena{part}.{kind}" for part in ("", "_rules") for kind in _TABLES),
        *(out / f"arena.{kind}" for kind in ("png", "pdf")),
    ]


_TABLES = ("md", "csv")


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = arguments.make_parser("arena", __doc__)
    arguments.add_settings(parser)
    known = {"rules": [*AGGREGATORS], "fleets": [*FLEETS], "splits": [*SPLITS]}
    for name, choices in known.items():
        about = f"only these of {', '.join(choices)}"
        upper = name.upper().removesuffix("S")
        options = {"nargs": "+", "choices": choices, "metavar": upper}
        parser.add_argument(f"--{name}", help=about, **options)
    about = "samples, and the folder in OUT (default: %(default)s)"
    parser.add_argument("--data", choices=tuple(DATA), default="digits", help=about)
    about = "target accuracy of the columns time and MB (default: "
    about += f"{', '.join(f'{name} {value}' for name, value in TARGET.items())})"
    parser.add_argument("--target", type=arguments.SHARE, help=about)
    about = f"η of each rule from a grid of {len(STEPS)}, on a seed of its own"
    parser.add_argument("--tune", action="store_true", help=about)
    about = (
        "judge rules that fall more than so many points behind in all seeds of a cell"
    )
    about += " as if they had been stopped there: they get no verdict"
    parser.add_argument(
        "--race", type=arguments.POSITIVE, default=0.0, metavar="POINTS", help=about
    )
    given = arguments.parse(parser, texts)
    for name, default in CHOSEN[given.data].items():  # each once, in their order
        setattr(given, name, tuple(dict.fromkeys(getattr(given, name) or default)))
    if "fedavg" not in given.rules:
        parser.error("--rules: fedavg must be among them, as all are compared with it")
    return given


def main(texts: list[str]) -> None:
    """Run the arena."""
    given = parse(texts)
    devices.start(0)
    own = {name for split in SPLITS.values() for name in split}
    own |= {"schedule.kind", "schedule.trace"}
    study.check_free(given.set, own, "arena")
    given.out = files.prepare_workdir(given.out / given.data, "--out")
    changes = DATA[given.data] | given.data_dir | given.set
    try:
        config = grid.changed(Config(), changes)
        device = arguments.device_text(get(config, "devices"))
        paths = run_arena(config, given, device)
    except UserError as error:
        raise UserError(f"arena: {error}") from error
    for path in paths:
        print(path)


if __name__ == "__main__":
    arguments.start("arena", main)
