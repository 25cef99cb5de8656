"""A sweep by several processes, on one machine or many, in one shared folder.

Shards hold one lock each, and the folder's only while they open it and write its
tables; a sweep in one process holds the folder's.
"""

import contextlib
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tsfl_jax.config import Config
from tsfl_jax.report import files, progress
from tsfl_jax.run import lanes, sweeps
from tsfl_jax.types import UserError

PATIENCE = 300.0  # seconds that a shard waits while another one writes the tables


def parse(text: str) -> tuple[int, int]:
    """The index and the count of ``--shard=1/4``; UserError for anything else."""
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    index, count = map(int, numbers.groups()) if numbers else (0, 0)
    if not index < count:
        raise UserError(
            f"--shard={text}: expected i/n with 0 <= i < n, such as 0/4 for the first "
            "of four"
        )
    return index, count


def divide(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Divide the runs of a sweep into shards.

    Laid out group by group, the R runs are cut at k·R/n, k = 1 … n−1. A cut moves to a
    boundary between two groups that is at most R/(4n) away, so that few groups are
    compiled in two shards, and a shard has half to one and a half of the mean.

    Args:
      groups: runs of each compiled program, from `lanes.group`.
      count: n ≥ 1.

    Returns:
      The runs of each shard, ascending; some are empty if n > R.
    """
    order = list(itertools.chain(*groups))
    boundaries = [0, *itertools.accumulate(map(len, groups))]
    cuts = [0]
    for k in range(1, count):
        cut = k * len(order) / count
        nearest = min(boundaries, key=lambda end, cut=cut: abs(end - cut))
        near = 4 * count * abs(nearest - cut) <= len(order)
        cuts.append(nearest if near else round(cut))
    parts = itertools.pairwise([*cuts, len(order)])
    return [sorted(order[first:end]) for first, end in parts]


@contextlib.contextmanager
def hold(folder: pathlib.Path, index: int, count: int) -> Iterator[None]:
    """Hold shard `index` of `count`; refused while the folder is divided otherwise."""
    with contextlib.ExitStack() as locks:
        with files.lock(folder, patience=PATIENCE):
            sweeps.check_no_shard(folder, but=f"-of-{count}")
            locks.enter_context(files.lock(folder, f".shard-{index}-of-{count}"))
        yield


def run(
    config: Config, swept: sweeps.Swept, shard: tuple[int, int], **options: Any
) -> sweeps.SweepResult | None:
    """Run or resume one shard of a sweep; the last one to end writes the tables.

    Args:
      config: as in `doors.sweep`.
      swept: the whole sweep, the same in all processes.
      shard: index from 0, and count; see `divide`.
      **options: of `sweeps.make`; workdir is a folder that all processes see, on a file
        system with locks.

    Returns:
      The result of the whole sweep if this call wrote its tables, else None.

    Raises:
      UserError: what `doors.sweep` refuses, or a shard that another process has.
    """
    sweep = sweeps.make(config, swept, **options)
    (index, count), folder = shard, sweep.folder
    assert folder
    runs = divide(lanes.group(sweep.runs), count)[index]
    with hold(folder, index, count):
        progress.log(sweep.stream, f"shard {index}/{count}: {len(runs)} runs")
        if runs:
            sweeps.run_all(sweep.only(runs))
        with files.lock(folder, patience=PATIENCE):
            missing = sweeps.number_missing(folder, sweep.digests)
            if not missing and not _has_tables(sweep, folder):
                return sweeps.collect(sweep)
    unfinished = f"{missing} of {len(sweep.runs)} runs are left to other shards"
    progress.log(sweep.stream, unfinished if missing else "the tables are there")
    return None


def _has_tables(sweep: sweeps.Sweep, folder: pathlib.Path) -> bool:
    """Whether the tables in the folder are those of this sweep."""
    written = files.read_json(folder / "sweep.json") or {}
    settings = files.plain(sweep.settings())
    return {name: written.get(name) for name in settings} == settings


def collect(
    config: Config,
    swept: sweeps.Swept,
    *,
    workdir: str | pathlib.Path,
    **options: Any,
) -> sweeps.SweepResult | None:
    """Write the tables of the runs that have finished; train nothing.

    Args:
      config: as in `doors.sweep`.
      swept: the whole sweep.
      workdir: its folder.
      **options: of `sweeps.make`.

    Returns:
      The result of the sweep, None while runs are missing.

    Raises:
      UserError: none of the runs is in the folder.
    """
    folder = files.folder_of(workdir)
    if not (folder / "lanes").is_dir():
        raise UserError(f"--collect: {workdir} is not the folder of a sweep")
    sweep = sweeps.make(config, swept, workdir=workdir, **options)
    with files.lock(folder, patience=PATIENCE):
        return sweeps.collect(sweep)
