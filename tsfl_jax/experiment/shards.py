"""A sweep by several processes, on one machine or many, in one shared folder."""

import contextlib
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from tsfl_jax.config import Config
from tsfl_jax.experiment import lanes, sweep_folder, sweeps
from tsfl_jax.report import files, progress
from tsfl_jax.types import UserError

Swept = Mapping[str, Sequence] | Sequence[Mapping]


def parse(text: str) -> tuple[int, int]:
    """The index and the count of ``--shard=1/4``; UserError for anything else."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    index, count = map(int, found.groups()) if found else (0, 0)
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


def run(
    config: Config,
    swept: Swept,
    shard: tuple[int, int],
    *,
    workdir: str | pathlib.Path,
    runs_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **own: Any,
) -> sweeps.SweepResult | None:
    """Run or resume one shard of a sweep; the last one to end writes the tables.

    Args:
      config: as in `sweeps.sweep`, and so are swept, runs_per_call, stop and own.
      swept: the whole sweep, the same in all processes.
      shard: index from 0, and count; see `divide`.
      workdir: folder that all processes see, on a file system with locks.
      stream: gets the progress.

    Returns:
      The result of the whole sweep if this call wrote its tables, else None.

    Raises:
      UserError: what `sweeps.sweep` refuses, a shard that another process has, or a
        folder of another sweep.
    """
    options = {"runs_per_call": runs_per_call, "stream": stream, "stop": stop}
    every = sweeps.make(config, swept, own, workdir=workdir, **options)
    index, count = shard
    mine = divide(lanes.group(every.several)[0], count)[index]
    folder = every.folder
    assert folder is not None
    with sweep_folder.shard(folder, every.names, index, count):
        progress.log(stream, f"shard {index}/{count}: {len(mine)} runs")
        if mine:
            sweeps.run_all(every.only(mine))
        with files.lock(folder, patience=sweep_folder.PATIENCE):
            there = [sweep_folder.path_of(folder, n).exists() for n in every.names]
            if all(there) and not _collected(every):
                return sweeps.collect(every)
    left = f"{there.count(False)} of {len(there)} runs are left to other shards"
    progress.log(stream, "the tables are there" if all(there) else left)
    return None


def _collected(every: sweeps.Sweep) -> bool:
    """Whether the tables in the folder are those of this sweep."""
    assert every.folder is not None
    known = files.read_json(every.folder / "sweep.json") or {}
    own = {"config": dataclasses.asdict(every.config), "points": every.points}
    return {name: known.get(name) for name in own} == files.plain(own)


def collect(
    config: Config,
    swept: Swept,
    *,
    workdir: str | pathlib.Path,
    stream: IO[str] | None = None,
    **own: Any,
) -> sweeps.SweepResult | None:
    """Write the tables of the runs that have finished; train nothing.

    Args:
      config: as in `sweeps.sweep`, and so are swept and own.
      swept: the whole sweep.
      workdir: its folder.
      stream: gets the notes.

    Returns:
      The result of the sweep, None while runs are missing.

    Raises:
      UserError: none of the runs is in the folder.
    """
    with contextlib.ExitStack() as held:
        if not (files.folder_of(workdir) / "lanes").is_dir():
            raise UserError(f"--collect: {workdir} is not the folder of a sweep")
        every = sweeps.make(config, swept, own, workdir=workdir, stream=stream)
        assert every.folder is not None
        held.enter_context(files.lock(every.folder, patience=sweep_folder.PATIENCE))
        return sweeps.collect(every)
