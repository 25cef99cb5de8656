"""``python -m studies.adversary``: the fleet on which one rule beats another by most.

The eight numbers of a fleet (see `fleets`) are searched by CMA-ES (Hansen, "The CMA
Evolution Strategy: A Tutorial", arXiv:1604.00772), with the fleets of a generation as
points of one sweep. A difference that a search has found is too large, as the best of
many is: it is measured again on seeds that the search has not seen, once with new
clients of the same numbers and once with the fleet of a CSV file that is kept.
"""

import argparse
import dataclasses
import hashlib
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from studies import arena, arguments, fleets, study
from studies.fleets import BOUNDS, FleetNumbers
from studies.study import Changes
from studies.verdicts import curves_of
from tsfl_jax.config import Config, get, replace
from tsfl_jax.engine import devices
from tsfl_jax.prepare import prepare
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS, p_text, paired_p, spread
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.run import grid, sweeps
from tsfl_jax.types import Dataset, UserError

# Seeds of the search, of the choice between its last mean and its best, of the result.
SEARCH, CHOICE, FRESH = range(3), range(100, 105), range(200, 210)
START = 0.5  # of each number, as a share of its range
STEP = 0.3  # σ of the first generation
Way = tuple[str, str]  # the rule that is to win, the rule that is to lose


class Found(NamedTuple):
    """A candidate of a search."""

    numbers: FleetNumbers
    gap: float  # mean difference over the seeds, in points


def numbers_at(place: Float[np.ndarray, "8"]) -> FleetNumbers:
    """The numbers at a place in the unit cube; the period on a logarithmic scale."""
    found = {}
    for share, (name, (low, high)) in zip(place, BOUNDS.items(), strict=True):
        if name == "period":
            found[name] = float(low * (high / low) ** share)
        else:
            found[name] = float(low + share * (high - low))
    # As the table shows them, so that the table gives the same fleet.
    return FleetNumbers(
        **{name: float(f"{value:.3g}") for name, value in found.items()}
    )


def gaps(
    config: Config,
    dataset: Dataset,
    way: Way,
    points: Sequence[Changes],
    workdir: pathlib.Path | None = None,
) -> tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]]:
    """Differences of the two rules in points, of last and of best accuracies."""
    lanes = [{"algorithm": rule, **point} for point in points for rule in way]
    stream = sys.stderr if workdir else None
    options = {"dataset": dataset, "workdir": workdir, "stream": stream}
    history = sweeps.run(config, lanes, **options).history
    curves = curves_of(history, dataset.num_classes)
    last = 100 * np.array([arena.recent(curve) for curve in curves])
    best = 100 * np.nanmax(curves, axis=1)
    return last[::2] - last[1::2], best[::2] - best[1::2]


def points_of(
    config: Config,
    dataset: Dataset,
    numbers: FleetNumbers,
    seeds: Sequence[int],
    folder: pathlib.Path,
) -> list[dict[str, Any]]:
    """The settings of these numbers' fleets, one for each seed; writes their files."""
    found = []
    for seed in seeds:
        made = fleets.make_fleet(replace(config, {"seed": seed}), numbers, dataset)
        path = fleets.write_fleet(folder / f"{seed}.csv", made)
        found.append(fleets.settings_of(path) | {"seed": seed})
    return found


Evaluate = Callable[[Sequence[FleetNumbers]], Float[np.ndarray, "F"]]


def search(
    evaluate: Evaluate, generations: int, population: int, log: pathlib.Path
) -> list[Found]:
    """The numbers with the largest gap: the search's last mean and its best.

    Args:
      evaluate: numbers of fleets -> their gaps.
      generations, population: numbers of them, and of fleets in each.
      log: file of all that was evaluated; the search goes on from there.

    Raises:
      UserError: the file has other fleets than this search asks for.
    """
    try:
        import cmaes
    except ImportError as error:
        raise UserError(
            "studies.adversary needs CMA-ES: pip install 'tsfl_jax[search]'"
        ) from error
    dimensions = len(BOUNDS)
    optimizer = cmaes.CMA(
        mean=np.full(dimensions, START),
        sigma=STEP,
        bounds=np.tile([0.0, 1.0], (dimensions, 1)),
        population_size=population,
        seed=0,
    )
    known = files.read_metrics(log) if log.exists() else []
    best = Found(numbers_at(optimizer.mean), -np.inf)
    for generation in range(generations):
        places = [optimizer.ask() for _ in range(population)]
        several = [numbers_at(place) for place in places]
        old = known[generation * population : (generation + 1) * population]
        if len(old) == population:
            if [{n: row[n] for n in BOUNDS} for row in old] != [
                one._asdict() for one in several
            ]:
                raise UserError(
                    f"{log}: generation {generation} has other fleets than this "
                    "search; delete the file or choose another --out"
                )
            found = np.array([row["gap"] for row in old])
        else:
            found = np.asarray(evaluate(several))
            rows = [
                {"interval": generation} | n._asdict() | {"gap": float(gap)}
                for n, gap in zip(several, found, strict=True)
            ]
            known = [*known[: generation * population], *rows]
            files.write_metrics(log, known)
        optimizer.tell(list(zip(places, (-found).tolist(), strict=True)))
        top = int(found.argmax())
        if found[top] > best.gap:
            best = Found(several[top], float(found[top]))
        line = f"generation {generation + 1} of {generations}: best {best.gap:+.2f}"
        print(f"{line}, mean {found.mean():+.2f} points", file=sys.stderr)
    return [Found(numbers_at(optimizer.mean), float("nan")), best]


class Confirmed(NamedTuple):
    """A fleet that was found, on seeds that the search has not seen."""

    way: Way
    numbers: FleetNumbers
    searched: float  # the largest gap in the search, in points
    clients: Float[np.ndarray, "S"]  # new clients of these numbers
    file: Float[np.ndarray, "S"]  # the clients of the file, other models and batches
    best: Float[np.ndarray, "S"]  # likewise, of best accuracies, as summary.md has them


def confirm(
    config: Config, dataset: Dataset, way: Way, found: Found, out: pathlib.Path
) -> Confirmed:
    """Measure a fleet again on fresh seeds; writes the CSV file of the first one."""
    name = "-over-".join(way)
    folder = files.prepare_workdir(out / f"{name}-fleets", "--out")
    points = points_of(config, dataset, found.numbers, FRESH, folder)
    clients, _ = gaps(config, dataset, way, points, out / f"{name}-clients")
    kept = out / f"{name}.csv"
    shutil.copyfile(folder / f"{FRESH[0]}.csv", kept)
    fixed = fleets.settings_of(kept) | {"seeds.split": FRESH[0]}
    points = [fixed | {"seed": seed} for seed in FRESH]
    last, best = gaps(config, dataset, way, points, out / f"{name}-file")
    return Confirmed(way, found.numbers, found.gap, clients, last, best)


def run_way(
    config: Config,
    dataset: Dataset,
    way: Way,
    given: argparse.Namespace,
) -> Confirmed:
    """Search and confirm one way."""
    name = "-over-".join(way)
    # Another search has another file: what decides its results is in the name.
    asked = (dataclasses.asdict(config), given.population, tuple(SEARCH), arena.LAST)
    digest = hashlib.sha256(repr(asked).encode()).hexdigest()[:8]
    folder = files.prepare_workdir(given.out / f"{name}-search", "--out")

    def evaluate(
        several: Sequence[FleetNumbers], seeds: Sequence[int] = SEARCH
    ) -> Float[np.ndarray, "F"]:
        points = []
        for number, numbers in enumerate(several):
            one = files.prepare_workdir(folder / str(number))
            points += points_of(config, dataset, numbers, seeds, one)
        last, _ = gaps(config, dataset, way, points)
        return np.array([part.mean() for part in np.split(last, len(several))])

    log = given.out / f"{name}-{digest}.jsonl"
    found = search(evaluate, given.generations, given.population, log)
    again = evaluate([one.numbers for one in found], CHOICE)
    chosen = found[int(again.argmax())]._replace(gap=found[1].gap)
    return confirm(config, dataset, way, chosen, given.out)


def rows_of(several: Sequence[Confirmed]) -> list[dict[str, str]]:
    """The table: numbers of each fleet, and differences."""
    rows = []
    for one in several:
        win, lose = map(style.name_of, one.way)
        rows.append(
            {"difference": f"{win} − {lose}"}
            | {name: f"{value:g}" for name, value in one.numbers._asdict().items()}
            | {
                "in the search": f"{one.searched:+.2f}",
                "new clients": spread(one.clients, "+.2f"),
                "p": p_text(paired_p(one.clients)),
                "the file": spread(one.file, "+.2f"),
                "the file, best": spread(one.best, "+.2f"),
            }
        )
    return rows


def parse(texts: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = arguments.make_parser("adversary", __doc__, None)
    arguments.add_settings(parser)
    about = "the two rules (default: dms fedavg); searched both ways"
    options = {"default": ["dms", "fedavg"], "choices": tuple(AGGREGATORS)}
    parser.add_argument("--rules", nargs=2, metavar="RULE", help=about, **options)
    about = "search only where the first rule beats the second"
    parser.add_argument("--one_way", action="store_true", help=about)
    about = "generations of the search (default: %(default)s)"
    parser.add_argument(
        "--generations", type=arguments.at_least(1), default=20, help=about
    )
    about = "fleets of a generation (default: %(default)s)"
    parser.add_argument(
        "--population", type=arguments.at_least(4), default=10, help=about
    )
    given = arguments.parse(parser, texts)
    if given.rules[0] == given.rules[1]:
        parser.error(f"--rules {' '.join(given.rules)}: expected two different rules")
    for rule in given.rules:
        if AGGREGATORS[rule].stacks:
            parser.error(f"--rules {rule}: it shares no program with another rule")
    return given


def main(texts: list[str]) -> None:
    """Search both ways and write the table."""
    given = parse(texts)
    devices.start(0)
    given.out = files.prepare_workdir(given.out, "--out")
    taken = ("schedule.kind", "schedule.trace")
    study.check_free(given.set, taken, "adversary")
    changes = arena.DATA["digits"] | given.data_dir | given.set
    config = grid.changed(Config(), changes)
    dataset = prepare.load_dataset(config)
    first, second = given.rules
    about = f"{dataset.name}, {get(config, 'partition.kind')} split; differences in"
    about += f" points of accuracy, mean of the last {arena.LAST} intervals,"
    device = arguments.device_text(get(config, "devices"))
    searched = f"{given.generations} generations of {given.population} fleets on"
    searched += f" {len(SEARCH)} seeds, result on {len(FRESH)} others"
    about += f" {OVER_SEEDS}, paired; "
    about += arguments.joined(
        searched, *arguments.settings_text(given.set), f"device: {device}."
    )
    several: list[Confirmed] = []
    ways = ((first, second), (second, first))
    for way in ways[:1] if given.one_way else ways:
        several.append(run_way(config, dataset, way, given))
        paths = files.write_table(given.out, "adversary", rows_of(several), about)
    for path in paths:
        print(path)


if __name__ == "__main__":
    arguments.start("adversary", main)
