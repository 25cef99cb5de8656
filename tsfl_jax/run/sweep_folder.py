"""The folder of a sweep: who writes there, and which of its runs have finished.

A sweep in one process holds the folder's lock. Shards hold one lock each, and the
folder's only while they open it and write its tables. `shards.json` says how the sweep
was divided.
"""

import contextlib
import pathlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tsfl_jax.engine import structures
from tsfl_jax.report import files
from tsfl_jax.types import UserError

_ALWAYS = ("tau", "virtual_time", "seconds")  # beside the engine's history
NAME = "lane"  # the digest again: a file's name is not proof of its content
PATIENCE = 300.0  # seconds that a shard waits while another one writes the tables
DIVISION = "shards.json"


def opened(
    workdir: str | pathlib.Path, locks: contextlib.ExitStack | None
) -> pathlib.Path:
    """The folder, made if missing, with lanes/; its lock is in `locks` if given."""
    folder = files.prepare_workdir(workdir)
    if locks:
        locks.enter_context(files.lock(folder))
        _check_no_shard(folder)
    if any((folder / n).exists() for n in ("config.json", "metrics.jsonl")):
        raise UserError(f"{folder} holds a single run; choose another --workdir")
    files.prepare_workdir(folder / "lanes")
    return folder


def path_of(folder: pathlib.Path, digest: str) -> pathlib.Path:
    """The file of the finished run of that digest."""
    return folder / "lanes" / f"{digest}.npz"


def number_missing(folder: pathlib.Path, digests: Sequence[str]) -> int:
    """Those of some runs that have not finished."""
    return sum(not path_of(folder, digest).exists() for digest in digests)


def _check_no_shard(folder: pathlib.Path) -> None:
    for path in folder.glob(".shard-*"):
        with files.lock(folder, path.name):
            pass


@contextlib.contextmanager
def shard(
    folder: pathlib.Path, digests: Sequence[str], index: int, count: int
) -> Iterator[None]:
    """Hold shard `index` of `count` of a sweep.

    The folder may have been divided otherwise, or hold a part of this sweep, if nobody
    works there.

    Args:
      folder: from `opened`.
      digests: of each run of the sweep.
      index: from 0.
      count: of shards.

    Raises:
      UserError: another process has this shard, or the folder is of another sweep.
    """
    division = {"shards": count, "runs": list(digests)}
    with contextlib.ExitStack() as locks:
        with files.lock(folder, patience=PATIENCE):
            before = files.read_json(folder / DIVISION, {"runs": list})
            if before and before != division:
                _check_no_shard(folder)
                if not {*map(str, before.get("runs", ()))} <= {*digests}:
                    raise UserError(
                        f"{folder} holds the shards of another sweep; choose another "
                        f"--workdir, or delete its {DIVISION}"
                    )
            locks.enter_context(files.lock(folder, f".shard-{index}-of-{count}"))
            files.write_json(folder / DIVISION, division)
        yield


def finished_run(
    folder: pathlib.Path,
    digest: str,
    warn: Callable[[str], None],
    extra_fields: Collection[str] = (),
) -> dict[str, Any] | None:
    """The arrays of a run that is whole on the disk; None, with a warning: it is not.

    `extra_fields` are names of metrics, and of what else the run measures.
    """
    path = path_of(folder, digest)
    if not path.exists():
        return None
    always = {*structures.History._fields} - {*structures.OPTIONAL} | {*_ALWAYS}
    with contextlib.suppress(UserError):
        arrays = files.read_arrays(path)
        fields = {*arrays} - {NAME, "client"}
        if str(arrays.pop(NAME, "")) == digest and fields == always | {*extra_fields}:
            return arrays
    warn(f"{path} is damaged or of an earlier version; that one runs again")
    return None
