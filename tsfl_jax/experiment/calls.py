"""One call of lanes: chunks, a file to go on from, and the file of each finished lane.

A lane's file is named by a digest of its settings. While a call runs, its state and
history are kept under the digest of all its lanes: the same lanes in one call go on
there. Each file is whole or not there.
"""

import contextlib
import hashlib
import pathlib
import time
import zipfile
import zlib
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import numpy as np

from tsfl_jax.engine import scan
from tsfl_jax.experiment.program import Arrays, Chunk, Compiled
from tsfl_jax.report import files
from tsfl_jax.types import UserError

Notice = Callable[[str], None]
# (intervals so far, history of these [L, t, …]) -> lanes, by their place in the call,
# that need not go on.
Drop = Callable[[int, scan.History], Collection[int]]

OF_LANE = ("tau", "virtual_time", "seconds")  # beside the engine's history
CLIENT = "client"  # who delivers, in lanes whose clients do not start together
_NAME = "lane"  # the digest again: a file's name is not proof of its content
_STATE, _HISTORY = "state/", "history/"  # before the names in a call's file
_EVERY = 30.0  # seconds of work between two writings of a call's file
_SHARE = 20  # and at least this many times what the last one took
_BROKEN = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


class Part(NamedTuple):
    """What a call has done so far."""

    state: scan.State  # after the last finished interval
    history: list[scan.History]  # of finished chunks, on the host, [L, R, …]
    finished: int  # intervals
    seconds: float  # of all its chunks


def finished_lanes(
    folder: pathlib.Path,
    names: list[str],
    notice: Notice,
    metrics: Collection[str] = (),
) -> dict[str, dict]:
    """Lanes that are whole on the disk, as {digest: arrays}; others are left out.

    Args:
      folder: of these files.
      names: digests of the lanes.
      notice: gets a line for each lane that is left out.
      metrics: names of the user's own, and of what else was asked for.
    """
    always = {*scan.History._fields} - {*scan.OPTIONAL}
    wanted = always | {*OF_LANE, *metrics}
    found = {}
    for name in names:
        with (
            contextlib.suppress(*_BROKEN),
            open(folder / f"{name}.npz", "rb") as file,
            np.load(file) as arrays,
        ):
            lane = {key: arrays[key] for key in arrays.files}
            if str(lane.pop(_NAME)) == name and wanted == set(lane) - {CLIENT}:
                found[name] = lane
        if name not in found and (folder / f"{name}.npz").exists():
            notice(
                f"{folder / name}.npz is damaged or of an earlier version; that lane "
                "runs again"
            )
    return found


def write_lane(folder: pathlib.Path, name: str, history: dict[str, np.ndarray]) -> None:
    """Write the file of a finished lane."""
    arrays = history | {_NAME: np.array(name)}
    files.write_arrays(folder / f"{name}.npz", arrays, compress=True)


def path_of(
    folder: pathlib.Path, names: list[str], count: int, extra: str
) -> pathlib.Path:
    """The file of a running call.

    Args:
      folder: of these files.
      names: digests of its lanes.
      count: lanes with the idle ones.
      extra: what else the bits depend on.
    """
    text = f"{names}{count}{extra}"
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.npz"


def write_part(path: pathlib.Path, part: Part) -> None:
    """Write the file of a running call."""
    state = jax.tree.leaves(jax.device_get(part.state))
    history = _joined(part.history)._asdict()
    about = {"finished": np.int64(part.finished), "seconds": np.float64(part.seconds)}
    files.write_arrays(
        path,
        {f"{_STATE}{number}": np.asarray(leaf) for number, leaf in enumerate(state)}
        | {f"{_HISTORY}{name}": a for name, a in history.items() if a is not None}
        | about
        | {_NAME: np.array(path.stem)},
    )


def read_part(path: pathlib.Path, start: scan.State, notice: Notice) -> Part | None:
    """What a call had done; None without its file, or with a damaged one.

    Args:
      path: of the file.
      start: a state of the same shapes.
      notice: called with one line for a damaged file.
    """
    if not path.exists():
        return None
    with contextlib.suppress(*_BROKEN, UserError):
        found = files.read_arrays(path)
        leaves, form = jax.tree.flatten(start)
        state = [found[f"{_STATE}{number}"] for number in range(len(leaves))]
        same = [
            a.shape == b.shape and a.dtype == b.dtype
            for a, b in zip(state, leaves, strict=True)
        ]
        history = scan.History(
            **{
                name: found[f"{_HISTORY}{name}"]
                for name in scan.History._fields
                if name not in scan.OPTIONAL or f"{_HISTORY}{name}" in found
            }
        )
        finished = int(found["finished"])
        lengths = {a.shape[1] for a in jax.tree.leaves(history)}
        if str(found[_NAME]) == path.stem and all(same) and lengths == {finished}:
            seconds = float(found["seconds"])
            return Part(form.unflatten(state), [history], finished, seconds)
    notice(f"{path} is damaged or of an earlier version; its lanes start again")
    return None


def _joined(history: list[scan.History]) -> scan.History:
    return jax.tree.map(lambda *a: np.concatenate(a, axis=1), *history)


def run_call(
    compiled: Compiled,
    arrays: Arrays,
    path: pathlib.Path | None,
    show: Callable[[Chunk], None],
    stop: Callable[[], bool],
    notice: Notice,
    drop: Drop | None = None,
) -> tuple[scan.History, float]:
    """Run lanes to the end, from the file of an earlier process if there is one.

    Args:
      compiled: their program.
      arrays: theirs.
      path: file of the call; None keeps nothing.
      show: called after each chunk; of the first one after a resumption the history is
        the whole one so far.
      stop: called after each chunk but the last; True writes the file and raises.
      notice: called with one line for a damaged file.
      drop: called after each chunk but the last; the lanes that it names do nothing
        from then on. Lanes do not depend on each other, so that no other one changes.

    Returns:
      History ``[L, T, …]`` and seconds of the chunks.

    Raises:
      KeyboardInterrupt: `stop` was true.
    """
    part = None if path is None else read_part(path, arrays.start, notice)
    part = part or Part(arrays.start, [], 0, 0.0)
    total, length = compiled.program.intervals, compiled.program.chunk
    if part.finished:
        show(Chunk(0, part.finished, part.state, part.history[0], part.seconds))
        for earlier in range(length, part.finished + 1, length):
            _drop(drop, arrays, part.history, earlier)
    writing = _Writing(time.perf_counter(), 0.0)
    for chunk in compiled.chunks(arrays, part.state, part.finished):
        part = Part(
            chunk.state,
            [*part.history, chunk.history],
            chunk.last,
            part.seconds + chunk.seconds,
        )
        show(chunk)
        if chunk.last < total:
            _drop(drop, arrays, part.history, part.finished)
        stopping = chunk.last < total and stop()
        if path is not None and chunk.last < total:
            writing = _written(path, part, writing, stopping)
        if stopping:
            raise KeyboardInterrupt
    return _joined(part.history), part.seconds


def _drop(
    drop: Drop | None, arrays: Arrays, history: list[scan.History], finished: int
) -> None:
    """Take all further work from the lanes that need not go on."""
    if drop is None:
        return
    so_far = jax.tree.map(lambda a: a[:, :finished], _joined(history))
    places = list(drop(finished, so_far))
    # On the host: the calls of the next chunks read them.
    arrays.inputs.tau[places, finished:] = 0
    if arrays.inputs.reported is not None:
        arrays.inputs.reported[places, finished:] = 0


class _Writing(NamedTuple):
    """The last writing of a call's file."""

    ended: float
    seconds: float


def _written(path: pathlib.Path, part: Part, last: _Writing, now: bool) -> _Writing:
    """Write the file of a call if it is time to."""
    begun = time.perf_counter()
    if not now and begun - last.ended < max(_EVERY, _SHARE * last.seconds):
        return last
    write_part(path, part)
    ended = time.perf_counter()
    return _Writing(ended, ended - begun)
