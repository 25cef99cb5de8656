"""The one loop of calls, for single runs and for the calls of a sweep.

Restore, run chunks of intervals, save when that is due, show, stop. A single run is a
call of one run. Who writes which files is said in `runner` and `sweeps`.
"""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from tsfl_jax.engine import scan
from tsfl_jax.report import progress as bars
from tsfl_jax.run import checkpoint
from tsfl_jax.run.program import Arrays, Chunk, Compiled, Program


class Progress(NamedTuple):
    """Where L runs stand: all that a checkpoint holds."""

    state: scan.State  # [L, ...]
    history: scan.History  # [L, T, ...], filled up to the finished intervals
    seconds: np.float64  # time spent in compiled calls so far
    finished: np.int64  # intervals

    def of_run(self, run: int = 0) -> scan.History:
        """The history ``[finished, ...]`` of one of the runs."""
        return jax.tree.map(lambda a: a[run, : self.finished], self.history)

    def as_chunk(self) -> Chunk:
        """All finished intervals as one chunk."""
        history = jax.tree.map(lambda a: a[:, : self.finished], self.history)
        finished, seconds = int(self.finished), float(self.seconds)
        return Chunk(0, finished, self.state, history, seconds)

    def filled(self, history: scan.History, first: int = 0) -> scan.History:
        """The history, changed in place: with another one from interval `first` on."""
        pairs = map(jax.tree.leaves, (self.history, history))
        for whole, part in zip(*pairs, strict=True):
            whole[:, first : first + part.shape[1]] = part
        return self.history

    def added(self, chunk: Chunk) -> "Progress":
        """Add a chunk; the history in place."""
        history = self.filled(chunk.history, chunk.first)
        seconds = self.seconds + chunk.seconds
        return Progress(chunk.state, history, seconds, np.int64(chunk.last))


def at_start(program: Program, arrays: Arrays) -> Progress:
    """The progress before the first interval, on the host; nothing is compiled."""
    arguments = program.arguments(arrays, arrays.start, 0)
    history = jax.tree.map(
        lambda a: np.zeros((a.shape[0], program.intervals, *a.shape[2:]), a.dtype),
        jax.eval_shape(program.run, *arguments)[1],
    )
    return Progress(jax.device_get(arrays.start), history, np.float64(0), np.int64(0))


class Store(NamedTuple):
    """Where the checkpoints of a call are, and what they must agree on."""

    folder: pathlib.Path
    identity: dict

    def restored(
        self,
        progress: Progress,
        warn: Callable[[str], None],
        adapt: checkpoint.Adapt | None = None,
    ) -> Progress:
        """The newest saved progress, also of a smaller T; without one, `progress`."""
        saved = checkpoint.restore_latest(
            self.folder, progress, self.identity, warn, adapt
        )
        if not saved:
            return progress
        return saved[1]._replace(history=progress.filled(saved[1].history))

    def save(self, progress: Progress) -> None:
        """Save the progress, whose state is on the host."""
        checkpoint.save(self.folder, int(progress.finished), progress, self.identity)


def train(
    compiled: Compiled,
    arrays: Arrays,
    progress: Progress,
    *,
    show: Callable[[Chunk, Progress], bool | None],
    stop: Callable[[], bool],
    save: Callable[[Progress], None] | None,
    last_save: checkpoint.LastSave = checkpoint.LastSave(),  # noqa: B008, a constant
) -> Progress:
    """Run the remaining chunks of a call.

    Args:
      compiled: the program.
      arrays: what it runs on.
      progress: so far.
      show: called after each chunk; True ends the call there.
      stop: called after each chunk but the last; True saves and raises.
      save: called where it is due, not at the end; None: nothing is kept.
      last_save: when the last save was.

    Returns:
      The progress, its state on the devices.

    Raises:
      KeyboardInterrupt: `stop` was true.
    """
    arrays = arrays._replace(start=progress.state)
    for chunk in compiled.chunks(arrays, int(progress.finished)):
        # Nothing more happens to a single run that has lost its model.
        diverged = chunk.history.diverged
        is_lost = len(diverged) == 1 and bool(diverged[0, -1])
        if is_lost:
            length = int(np.argmax(diverged[0])) + 1
            history = jax.tree.map(lambda a, n=length: a[:, :n], chunk.history)
            chunk = chunk._replace(last=chunk.first + length, history=history)
        progress = progress.added(chunk)
        is_last = is_lost or chunk.last == compiled.program.intervals
        is_stopped = not is_last and stop()
        now = checkpoint.now()
        if save and not is_last and (is_stopped or last_save.due(now)):
            save(progress._replace(state=jax.device_get(chunk.state)))
            last_save = checkpoint.LastSave(checkpoint.now(), checkpoint.now() - now)
        if show(chunk, progress) or is_last:
            break
        if is_stopped:
            raise KeyboardInterrupt
    return progress


def advance(bar: bars.Advance, chunk: Chunk, num_runs: int, results: str) -> None:
    """Advance a bar by a chunk of the first runs of a call; the others are idle."""
    samples = int(np.sum(chunk.history.samples[:num_runs], dtype=np.int64))
    bar(num_runs * (chunk.last - chunk.first), samples, chunk.seconds, results)
