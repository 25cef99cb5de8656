"""Stop lanes of a sweep that cannot win any more: what a race is, and its files.

A stopped lane gets no work from then on; what the others compute does not change. Its
file has the name of the race in its own, so that a sweep without that race, or with
another rule, runs the lane whole.
"""

import hashlib
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from tsfl_jax.engine import scan
from tsfl_jax.experiment import calls

STOPPED = "stopped"  # in a lane's history: intervals that it was trained for; −1: all
Curves = Mapping[int, Float[np.ndarray, "_"]]


class Race(NamedTuple):
    """An early-stopping policy for the lanes of a sweep."""

    name: str  # says all that a decision depends on
    # (lanes that run, intervals t so far, test accuracies [≥ t] of these and of all
    # lanes that have finished or stopped) -> lanes that cannot win.
    losers: Callable[[Sequence[int], int, Curves], Collection[int]]


def file_name(race: Race, digest: str) -> str:
    """The name of a stopped lane's file."""
    return f"{digest}-{hashlib.sha256(race.name.encode()).hexdigest()[:8]}"


def finished(
    race: Race | None,
    folder: pathlib.Path,
    names: list[str],
    notice: calls.Notice,
    metrics: Collection[str],
) -> dict[str, dict]:
    """Lanes that are whole on the disk or were stopped by this race, by digest."""
    done = calls.finished_lanes(folder, names, notice, metrics)
    if race is None:
        return done
    done = {name: lane | {STOPPED: np.int64(-1)} for name, lane in done.items()}
    left = {file_name(race, name): name for name in names if name not in done}
    stopped = calls.finished_lanes(folder, list(left), notice, {*metrics, STOPPED})
    return done | {left[file]: lane for file, lane in stopped.items()}


def write_lane(
    race: Race | None, folder: pathlib.Path, name: str, history: dict[str, np.ndarray]
) -> None:
    """Write the file of a lane, finished or stopped."""
    history = dict(history)
    if int(history.get(STOPPED, -1)) < 0:
        history.pop(STOPPED, None)
        calls.write_lane(folder, name, history)
    elif race is not None:
        calls.write_lane(folder, file_name(race, name), history)


def end_of(diverged: Bool[np.ndarray, "T"], stopped: int) -> int:
    """Intervals that a lane took part in: until it lost every model or was stopped.

    Args:
      diverged: whether it had lost every model by then.
      stopped: intervals that it was trained for; −1: all.
    """
    lost = np.flatnonzero(diverged)
    ends = [*(lost[:1] + 1), *([stopped] if stopped >= 0 else []), len(diverged)]
    return int(min(ends))


def curve_of(
    accuracy: Float[np.ndarray, "T"], diverged: Bool[np.ndarray, "T"], stopped: int
) -> Float[np.ndarray, "T"]:
    """Test accuracies that count in a race.

    NaN from the interval in which the lane lost every model, whose accuracy is that of
    the last good one, and after it was stopped.

    Args:
      accuracy, diverged: of the lane.
      stopped: intervals that it was trained for; −1: all.
    """
    curve = np.where(diverged, np.nan, np.asarray(accuracy, float))
    curve[stopped if stopped >= 0 else len(curve) :] = np.nan
    return curve


class Running(NamedTuple):
    """The lanes of one call; `stopped` grows in place."""

    race: Race
    lanes: list[int]
    others: Curves  # of lanes that have finished
    stopped: dict[int, int]  # lane -> intervals that it was trained for

    def drop(self, interval: int, history: scan.History) -> list[int]:
        """Places of the lanes to stop after this interval; see `calls.Drop`."""
        running = [lane for lane in self.lanes if lane not in self.stopped]
        curves = dict(self.others)
        for place, lane in enumerate(self.lanes):
            curves[lane] = curve_of(
                np.asarray(history.test_accuracy[place]),
                np.asarray(history.diverged[place]),
                self.stopped.get(lane, -1),
            )
        for lane in self.race.losers(running, interval, curves):
            self.stopped[lane] = interval
        return [place for place, lane in enumerate(self.lanes) if lane in self.stopped]
