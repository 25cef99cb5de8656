"""One call of lanes: chunks, checkpoints to go on from, and the finished lanes' files.

A lane's file is named by a digest of its settings. The checkpoints of an unfinished
call are in a folder named by a digest of all its lanes: the call resumes if the same
lanes are requested together.
"""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Collection

import jax
import numpy as np

from tsfl_jax.engine import scan
from tsfl_jax.experiment import checkpoint, saves
from tsfl_jax.experiment.program import Arrays, Chunk, Compiled
from tsfl_jax.report import files
from tsfl_jax.types import UserError

Notice = Callable[[str], None]

OF_LANE = ("tau", "virtual_time", "seconds")  # beside the engine's history
CLIENT = "client"  # who delivers, in lanes whose clients do not start together
_NAME = "lane"  # the digest again: a file's name is not proof of its content


def finished_lanes(
    folder: pathlib.Path,
    names: list[str],
    notice: Notice,
    metrics: Collection[str] = (),
) -> dict[str, dict]:
    """Lanes that are whole on the disk, as {digest: arrays}; others get a notice.

    `metrics` are names of the user's own, and of what else was asked for.
    """
    always = {*scan.History._fields} - {*scan.OPTIONAL}
    wanted = always | {*OF_LANE, *metrics}
    found = {}
    for name in names:
        path = folder / f"{name}.npz"
        if not path.exists():
            continue
        with contextlib.suppress(UserError):
            lane = files.read_arrays(path)
            if str(lane.pop(_NAME, "")) == name and wanted == set(lane) - {CLIENT}:
                found[name] = lane
        if name not in found:
            notice(f"{path} is damaged or of an earlier version; that lane runs again")
    return found


def write_lane(folder: pathlib.Path, name: str, history: dict[str, np.ndarray]) -> None:
    """Write the file of a finished lane."""
    arrays = history | {_NAME: np.array(name)}
    files.write_arrays(folder / f"{name}.npz", arrays, compress=True)


def run_call(
    compiled: Compiled,
    arrays: Arrays,
    path: pathlib.Path | None,
    show: Callable[[Chunk], None],
    stop: Callable[[], bool],
    notice: Notice,
) -> tuple[scan.History, float]:
    """Run lanes to the end, from the checkpoint of an earlier process if there is one.

    Args:
      compiled: their program.
      arrays: theirs.
      path: folder of the call's checkpoints; None keeps nothing.
      show: called after each chunk, and first with all that a checkpoint has.
      stop: as in `saves.train`.
      notice: called with one line for a damaged checkpoint.

    Returns:
      History ``[L, T, …]`` and seconds of the chunks.
    """
    total = compiled.program.intervals
    done, finished = saves.nothing(arrays.start, compiled.call.out_info[1], total, 1), 0
    identity = {"call": path.name if path else ""}  # a digest of all that matters
    save = None
    if path is not None:
        save = functools.partial(checkpoint.save, path, identity=identity)
        found = checkpoint.restore_latest(path, done, identity, notice)
        finished, done = found or (finished, done)
    if finished:
        history = jax.tree.map(lambda a: a[:, :finished], done.history)
        show(Chunk(0, finished, done.state, history, float(done.seconds)))
    written = checkpoint.Written(time.perf_counter(), 0.1)  # the first after 5 s
    given = compiled, arrays, done, finished, lambda chunk, *_: show(chunk), stop
    _, done = saves.train(*given, save, written, axis=1)
    return done.history, float(done.seconds)
