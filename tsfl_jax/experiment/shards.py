"""A sweep by several processes, on one machine or many, in one shared folder."""

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


def run(
    config: Config,
    swept: Swept,
    shard: tuple[int, int],
    *,
    workdir: str | pathlib.Path,
    stream: IO[str] | None = None,
    runs_per_call: int = 0,
    stop: Callable[[], bool] = lambda: False,
    **custom: Any,
) -> sweeps.SweepResult | None:
    """Run or resume one shard of a sweep; the last one to end writes the tables.

    Args:
      config: as in `doors.sweep`, and so are swept, runs_per_call, stop and custom.
      swept: the whole sweep, the same in all processes.
      shard: index from 0, and count; see `divide`.
      workdir: folder that all processes see, on a file system with locks.
      stream: gets the progress.

    Returns:
      The result of the whole sweep if this call wrote its tables, else None.

    Raises:
      UserError: what `doors.sweep` refuses, a shard that another process has, or a
        folder of another sweep.
    """
    sweep = sweeps.make(
        config,
        swept,
        custom,
        workdir=workdir,
        runs_per_call=runs_per_call,
        stream=stream,
        stop=stop,
    )
    index, count = shard
    runs = divide(lanes.group(sweep.runs)[0], count)[index]
    folder = sweep.folder
    assert folder is not None
    with sweep_folder.shard(folder, sweep.digests, index, count):
        progress.log(stream, f"shard {index}/{count}: {len(runs)} runs")
        if runs:
            sweeps.run_all(sweep.only(runs))
        with files.lock(folder, patience=sweep_folder.PATIENCE):
            paths = [sweep_folder.path_of(folder, d) for d in sweep.digests]
            missing = sum(not path.exists() for path in paths)
            if not missing and not _has_tables(sweep):
                return sweeps.collect(sweep)
    unfinished = f"{missing} of {len(paths)} runs are left to other shards"
    progress.log(stream, unfinished if missing else "the tables are there")
    return None


def _has_tables(sweep: sweeps.Sweep) -> bool:
    """Whether the tables in the folder are those of this sweep."""
    assert sweep.folder is not None
    written = files.read_json(sweep.folder / "sweep.json") or {}
    about = {"config": dataclasses.asdict(sweep.config), "points": sweep.points}
    return {name: written.get(name) for name in about} == files.plain(about)


def collect(
    config: Config,
    swept: Swept,
    *,
    workdir: str | pathlib.Path,
    stream: IO[str] | None = None,
    **custom: Any,
) -> sweeps.SweepResult | None:
    """Write the tables of the runs that have finished; train nothing.

    Args:
      config: as in `doors.sweep`, and so are swept and custom.
      swept: the whole sweep.
      workdir: its folder.
      stream: gets the notes.

    Returns:
      The result of the sweep, None while runs are missing.

    Raises:
      UserError: none of the runs is in the folder.
    """
    if not (files.folder_of(workdir) / "lanes").is_dir():
        raise UserError(f"--collect: {workdir} is not the folder of a sweep")
    sweep = sweeps.make(config, swept, custom, workdir=workdir, stream=stream)
    assert sweep.folder is not None
    with files.lock(sweep.folder, patience=sweep_folder.PATIENCE):
        return sweeps.collect(sweep)
