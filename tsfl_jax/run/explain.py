"""Explain a run before training: its work, timeline and memory.

Only its time needs a compiled program. `report.gantt` shows the timeline.
"""

import textwrap
import time
from typing import IO, Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from tsfl_jax.config import Config
from tsfl_jax.prepare import backend
from tsfl_jax.prepare.prepare import Prepared, accepted, prepare_validated
from tsfl_jax.prepare.workload import Workload
from tsfl_jax.report import progress
from tsfl_jax.report.gantt import Timeline, figure_of, gantt, window
from tsfl_jax.run import lanes, memory
from tsfl_jax.run.costs import costs_of
from tsfl_jax.run.identity import labels_of, values_of
from tsfl_jax.run.program import chunk_of
from tsfl_jax.timeline import FRAMEWORKS, deliveries, segments
from tsfl_jax.timeline.cohort import CHOOSING
from tsfl_jax.timeline.costs import Costs
from tsfl_jax.timeline.presets import PRESETS
from tsfl_jax.timeline.trace import GIVEN_UP, LOST, Trace
from tsfl_jax.types import Schedule

_COLUMNS, _NAME = 99, 15  # of a terminal, and of the names in it


class Work(NamedTuple):
    """Work of the whole run."""

    deliveries: Int[np.ndarray, "N"]  # of each client, of cohorts those who ever work
    iterations: Int[np.ndarray, "N"]  # local iterations of each of them that count
    samples: int  # trained on
    steps: int  # mini-batch steps of all clients


class Timing(NamedTuple):
    """Seconds that a run takes, extrapolated from the updates that were timed."""

    compiling: float  # and drawing the first model, and initial estimates
    least: float  # of training
    most: float
    updates: int


class Explanation(NamedTuple):
    """All that is known before training; shows itself as ``tsfl explain`` does."""

    prepared: Prepared
    mesh: Mesh
    work: Work
    timeline: Timeline
    memory: dict[str, int]  # bytes on every device, estimated
    costs: Costs  # of each client in the whole run
    timing: Timing | None = None  # None: not measured

    @property
    def schedule(self) -> Schedule:
        """τ and samples of each client in each update."""
        return self.prepared.workload.schedule

    @property
    def trace(self) -> Trace | None:
        """Which client delivers what when; None: no virtual clock."""
        return self.prepared.workload.trace

    def __repr__(self) -> str:
        """The text, with notes, and the chart of ``tsfl explain``."""
        return f"{text(self)}\n\n{self.chart()}"

    def chart(self, end: float = 0.0, width: int = _COLUMNS) -> str:
        """The timeline as text, one line per client.

        Args:
          end: seconds, or intervals without a virtual clock; 0: the first updates.
          width: most characters of a line, ≥ 60.
        """
        return gantt(self.timeline, end or window(self.timeline), width)

    def plot(self) -> Any:
        """The timeline of the first updates as a Matplotlib figure."""
        return figure_of(self.timeline, values_of(self.prepared))


def explain(
    config: Config, *, timed: bool = False, stream: IO[str] | None = None, **custom: Any
) -> Explanation:
    """Explain an experiment without training it.

    Args:
      config: all settings.
      timed: whether to compile it and to time its first calls, for `timing`.
      stream: gets the progress of that.
      **custom: `model`, `dataset`, `optimizer`, `aggregator`, … as in `simulate`.

    Returns:
      `Explanation`, which prints as ``tsfl explain`` does: `schedule` and `trace`
      (which client delivers what when), `work`, `costs` (bytes, seconds and joules of
      each client), `memory`, `timeline`, `timing`; ``chart()`` is the timeline as text,
      ``plot()`` as a figure.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    config, parts = accepted(config, **custom)
    mesh = backend.start_jax(config)
    prepared = prepare_validated(config, parts)
    times = prepared.workload.schedule
    return Explanation(
        prepared=prepared,
        mesh=mesh,
        work=_work_of(prepared),
        timeline=_timeline(prepared.workload),
        memory=memory.estimate(prepared, mesh.size, _width(prepared, mesh)),
        costs=costs_of(prepared, deliveries.claimed(times) > 0, times.client),
        timing=_timing_of(prepared, mesh, stream) if timed else None,
    )


def _timing_of(prepared: Prepared, mesh: Mesh, stream: IO[str] | None) -> Timing:
    """Compile a run, time some calls, extrapolate by updates and by their steps."""
    memory.check(prepared, mesh.size)
    begun = time.perf_counter()
    with progress.ticking(stream, "drawing the first model"):
        program, arrays = lanes.single(prepared, mesh)
    compiled = program.compile(arrays, stream)
    middle = time.perf_counter()
    is_sequential = prepared.mapping == "sequential"  # else the longest client decides
    steps = prepared.steps.sum(1) if is_sequential else prepared.steps.max(1)
    work = np.stack([np.ones(len(steps)), steps + 1])
    seconds, rates, last = 0.0, [], 0
    for chunk in compiled.chunks(arrays):
        seconds, last = seconds + chunk.seconds, chunk.last
        rates.append(chunk.seconds / work[:, chunk.first : last].sum(1))
        if seconds > 10:
            break
    # The first call also loads the program.
    training = seconds + np.array(rates[1:] or rates) * work[:, last:].sum(1)
    return Timing(middle - begun, training.min(), training.max(), last)


def _width(prepared: Prepared, mesh: Mesh) -> int:
    """Models that a device trains side by side."""
    slots = prepared.slots
    block = prepared.config.client_block or slots
    return 1 if prepared.mapping == "sequential" else min(block, -(-slots // mesh.size))


def _work_of(prepared: Prepared) -> Work:
    times, batch_size = prepared.workload.schedule, prepared.config.batch_size
    places = prepared.workload.places
    clients, delivers = len(prepared.partition.capacity), deliveries.claimed(times) > 0
    iterations = np.bincount(places[delivers], times.tau[delivers], clients)  # < 2⁵³
    # A pass has ⌈|D|/B⌉ batches, of which only the last one may be short.
    batches = -(-times.size.astype(np.int64) // batch_size)
    passes, steps = np.divmod(prepared.steps.astype(np.int64), batches)
    return Work(
        deliveries=np.bincount(places[delivers], minlength=clients),
        iterations=iterations.astype(np.int64),
        samples=int((passes * times.size + steps * batch_size).sum()),
        steps=int(prepared.steps.sum(dtype=np.int64)),
    )


def _timeline(workload: Workload) -> Timeline:
    times, fleet, trace, tasks, *_ = workload
    most = int(times.tau.max(initial=1))
    if fleet is None or trace is None or tasks is None:
        client = None if times.in_order else times.client
        ends = np.arange(1.0, len(times.tau) + 1)
        bars = segments.of_schedule(times.tau, client)
        return Timeline(bars, [], ends, {}, most, False)
    bars = list(segments.segments(tasks, fleet, float(trace.time[-1])))
    row, column = np.nonzero(trace.iterations > 0)
    clients, groups = trace.client[row, column].tolist(), trace.group[row].tolist()
    tiers = dict(zip(clients, groups, strict=True)) if trace.group.any() else {}
    return Timeline(bars, tasks, trace.time, tiers, most, True)


def _range(values: np.ndarray) -> str:
    low, mean, high = values.min(), values.mean(), values.max()
    middle = f"{mean:,.4g}" if mean < 1000 else f"{mean:,.0f}"
    return f"min {low:,}, mean {middle}, max {high:,}"


def _costs_text(costs: Costs) -> str:
    """Bytes and joules of all clients, and of a client."""
    down, up, joules = costs.bytes_down / 1e6, costs.bytes_up / 1e6, costs.joules
    words = f"{down.sum():,.4g} MB down, {up.sum():,.4g} MB up; per client in MB: "
    words += _range((down + up).round(3))
    if not np.isnan(joules).any():
        words += f"; {joules.sum() / 1e3:,.4g} kJ, per client in J: "
        words += _range(joules.round(1))
    return words


def _clients_text(plan: Explanation) -> str:
    """How many clients there are, of cohorts also how many at a time and ever."""
    config, ever = plan.prepared.config, len(plan.work.deliveries)
    if not config.cohort.size:
        return f"{config.num_clients:,} clients"
    words = f"{config.cohort.size:,} of {config.num_clients:,} clients at a time"
    if config.cohort.sampler in CHOOSING:
        words += f", chosen of {plan.schedule.tau.shape[1]:,} candidates"
    return f"{words}, {ever:,} ever"


def _time_text(timing: Timing, updates: int) -> str:
    """How long a run takes, and how well that is known."""
    parts = timing.compiling + (timing.least + timing.most) / 2, *timing[:3]
    texts = [f"{s:.1f} s" if s < 100 else f"{s / 60:.1f} min" for s in parts]
    words = "about {}: {} to compile, {} to {} to train; ".format(*texts)
    words += f"{timing.updates:,} of {updates:,} updates were timed"
    words += ", the others scaled by number and by steps" * (timing.updates < updates)
    return f"{words}; files come on top"


def text(plan: Explanation) -> str:
    """Format an explanation as text, in lines of at most 99 characters."""
    s, work, line = values_of(plan.prepared), plan.work, plan.timeline
    labels, times = labels_of(plan.prepared), plan.schedule
    table = {"run": f"schedule {s['schedule.kind']}"}
    if line.seconds:
        framework = s["timeline.framework"]
        names = FRAMEWORKS[framework].settings
        values = ", ".join(f"{n.split('.')[1]}={s[n]}" for n in names if n in s)
        table = {"run": f"framework {framework} ({values})"}
        if filled := [f"{n}={s[n]}" for n in PRESETS[s["timeline.fleet"]].make]:
            table["fleet"] = f"{s['timeline.fleet']} ({', '.join(filled)})"
    updates, seconds = len(times.tau), times.seconds[-1]
    lag, tau = deliveries.staleness(times), times.tau[times.tau > 0]
    table |= {
        "algorithm": f"{labels['algorithm']} on {labels['data']}, "
        f"{_clients_text(plan)}",
        "data": repr(plan.prepared.dataset),
        "network": f"{labels['model']}, {plan.prepared.network.size:,} parameters, "
        f"batches of {s['batch_size']}",
        "updates": f"{updates:,} in {seconds:,.6g} virtual seconds, one in "
        f"{seconds / updates:.4g} s",
        "deliveries": f"per client: {_range(work.deliveries)}",
        "iterations": f"τ per delivery: mean {tau.mean():.3g}, at most {line.most}; "
        f"per client in all: {_range(work.iterations)}",
        "costs": _costs_text(plan.costs),
    }
    if lag.any():
        table["staleness"] = f"mean {lag.mean():.3g}, max {lag.max()} updates"
    if line.seconds:
        shares = segments.shares(line.bars).items()
        words = (f"{kind} {100 * share:.1f} %" for kind, share in shares if share)
        table["clients' time"] = ", ".join(words)
        if lost := sum(task.fate in (LOST, GIVEN_UP) for task in line.tasks):
            table["lost"] = f"{lost:,} of {len(line.tasks):,} tasks lost or given up"
    if privacy := plan.prepared.privacy:
        pair = f"ε = {privacy.epsilon[-1]:.4g}, δ = {privacy.delta:g}"
        table["privacy"] = f"{pair}; z = {privacy.multiplier:.4g}; {privacy.method}"
    width, platform = _width(plan.prepared, plan.mesh), plan.mesh.devices.flat[0]
    side = "one after another" if width == 1 else f"{width} side by side"
    total, size_text = sum(plan.memory.values()), memory.size_text
    largest = sorted(plan.memory.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size_text(count)}" for name, count in largest)
    table |= {
        "training": f"{work.samples:,} samples in {work.steps:,} mini-batch steps",
        "devices": f"{plan.mesh.size} × {platform.platform.upper()}, clients {side}, "
        f"{chunk_of(plan.prepared)} updates per compiled call",
        "memory": f"≥ {size_text(total)} on a device, without activations; {parts}",
    }
    if plan.timing:
        table["time"] = _time_text(plan.timing, updates)
    rows = [*table.items(), *(("note", note) for note in plan.prepared.notes)]
    return "\n".join(
        textwrap.fill(f"{n:<{_NAME}}{words}", _COLUMNS, subsequent_indent=" " * _NAME)
        for n, words in rows
    )
