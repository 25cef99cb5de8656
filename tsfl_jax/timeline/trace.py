"""Tasks of the clients, and the trace of those that count in a global update.

While a framework is simulated all times are ticks, see `ticks`; `make_simulation`
turns them into seconds. NOT done here: the frameworks' rules; see `synchronous` and
`asynchronous`.
"""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.fleet import ExactFleet, finish, work_of
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.types import UserError


class Trace(NamedTuple):
    """R global updates from at most K deliveries each.

    Empty slots are at the end of a row: client −1, other integers 0, floats NaN.
    """

    time: Float[np.ndarray, " R"]  # seconds of the update, float64, non-decreasing
    client: Int[np.ndarray, "R K"]  # int32, the client that delivers
    version: Int[np.ndarray, "R K"]  # int32 in 0..r, updates that its base model had
    iterations: Int[np.ndarray, "R K"]  # int32, local iterations done
    task: Int[np.ndarray, "R K"]  # int32, number of the client's task, by downloads
    start: Float[np.ndarray, "R K"]  # float64, when its download began
    arrival: Float[np.ndarray, "R K"]  # float64, when its model arrived at the server
    group: Int[np.ndarray, " R"]  # int32, FedAT's tier of the update, else 0


COUNTED, LOST, GIVEN_UP, OPEN = "counted", "lost", "given up", "open"


class Task(NamedTuple):
    """Download, local training and upload of a client. Sorts by arrival, then client.

    Its times, seconds in a `Simulation`, and its draws of the fleet: iteration h takes
    draw ``first + h``.
    """

    arrival: Ticks  # when the model reaches the server; inf: never
    client: int
    number: int  # k, counts the client's downloads
    version: int  # global updates that the downloaded model has
    iterations: int
    start: Ticks  # when the download begins
    lost: bool  # at `arrival` the server learns that nothing comes
    stop: Ticks  # ≤ arrival: the client does nothing for it afterwards
    first: int  # draw of its first iteration, before wrapping
    spent: Ticks = 0  # of that iteration, done in an earlier interval (T-SFL)
    fills: bool = False  # an unfinished iteration fills the time to the upload (T-SFL)
    fate: str = OPEN  # COUNTED in an update, LOST, GIVEN_UP; OPEN: none by the end
    until: Ticks = 0  # then its client waits no longer; 0: for the next update


class Update(NamedTuple):
    """One row of a trace before it is padded."""

    time: Ticks
    tasks: list[Task]
    group: int = 0


class Simulation(NamedTuple):
    """What a framework did up to its last global update."""

    trace: Trace  # of the tasks that count
    tasks: list[Task]  # all that began before the last update, by client, in time


def begin(
    fleet: ExactFleet,
    client: int,
    number: int,
    *,
    version: int,
    now: Ticks,
    iterations: int,
) -> Task:
    """Begin a task of a client: download, training and upload, only while online.

    Args:
      fleet: its times.
      client: in [0, N).
      number: k ≥ 0; it takes the client's iterations [k·H, (k+1)·H).
      version: updates the downloaded model has.
      now: ticks; the download begins at the client's first online moment from then.
      iterations: H ≥ 1, the same in all tasks of this client.

    Returns:
      The `Task`.
    """
    k, times = number % fleet.draws, fleet.of(client)
    start = finish(fleet, client, now, 0)
    work = work_of(fleet, client, number * iterations, iterations)
    work += times.download.item(k) + times.upload.item(k)
    arrival = finish(fleet, client, start, work)
    lost, first = times.lost.item(k), number * iterations
    return Task(
        arrival, client, number, version, iterations, start, lost, arrival, first
    )


def make_simulation(
    updates: Sequence[Update], begun: Sequence[Task], width: int, horizon: Ticks
) -> Simulation:
    """Make the trace of the updates, and the fate of every task, in seconds.

    Args:
      updates: R of them, in time, with the tasks that count.
      begun: all tasks, also those that count, in any order.
      width: K; 0: the most deliveries of an update.
      horizon: for the error message.

    Raises:
      UserError: no updates.
    """
    if not updates:
        first = ticks.seconds(min((task.arrival for task in begun), default=math.inf))
        raise UserError(
            f"--config.num_intervals times --config.schedule.interval_seconds is "
            f"{ticks.seconds(horizon):g} s: no global update happens in that time; the "
            f"first task ends at {first:g} s; choose more or longer intervals, and "
            "less --config.schedule.dropout if deliveries are lost"
        )
    width = width or max(len(update.tasks) for update in updates)
    times = [update.time for update in updates]
    last = times[-1]
    counted = {(t.client, t.number): u.time for u in updates for t in u.tasks}
    tasks = {(t.client, t.number): t for t in begun if t.start < last}
    for name, task in tasks.items():
        fate = OPEN
        if name in counted:
            fate = COUNTED
        elif task.stop < task.arrival:
            fate = GIVEN_UP
        elif task.lost and task.arrival <= last:
            fate = LOST
        next_update = times[bisect.bisect_left(times[:-1], task.stop)]
        until = counted.get(name) or task.until or next_update
        task = task._replace(until=last if fate == OPEN else until, fate=fate)
        tasks[name] = in_seconds(task)
    return Simulation(trace_of(updates, width), [tasks[name] for name in sorted(tasks)])


def in_seconds(task: Task) -> Task:
    """A task whose times are in seconds."""
    names = "arrival", "start", "stop", "spent", "until"
    return task._replace(**{n: ticks.seconds(getattr(task, n)) for n in names})


def trace_of(updates: Sequence[Update], width: int) -> Trace:
    """The updates' tasks as rows of one width."""

    def column(name: str, empty: int | float, dtype: type) -> np.ndarray:
        out = np.full((len(updates), width), empty, dtype)
        unit = ticks.SECOND if dtype is np.float64 else 1
        for r, update in enumerate(updates):
            cells = [getattr(task, name) / unit for task in update.tasks]
            out[r, : len(cells)] = cells
        return out

    return Trace(
        time=np.array([ticks.seconds(u.time) for u in updates]),
        client=column("client", -1, np.int32),
        version=column("version", 0, np.int32),
        iterations=column("iterations", 0, np.int32),
        task=column("number", 0, np.int32),
        start=column("start", math.nan, np.float64),
        arrival=column("arrival", math.nan, np.float64),
        group=np.array([u.group for u in updates], np.int32),
    )


def add_round(
    updates: list[Update], ended: Sequence[Task], now: Ticks, group: int = 0
) -> None:
    """Append the update of a round that ends now, unless all its tasks were lost."""
    arrived = sorted((t for t in ended if not t.lost), key=lambda task: task.client)
    if arrived:
        updates.append(Update(now, arrived, group))
