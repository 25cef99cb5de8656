"""Explain a run before training: its work, timeline and memory.

Nothing is compiled here. `report.gantt` shows the timeline.
"""

import math
import textwrap
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from tsfl_jax.config import Config
from tsfl_jax.prepare import backend
from tsfl_jax.prepare.prepare import (
    Prepared,
    accepted,
    prepare_validated,
)
from tsfl_jax.prepare.workload import Workload
from tsfl_jax.report.gantt import Timeline, figure_of, gantt, losses, window
from tsfl_jax.run import memory
from tsfl_jax.run.call_length import chunk_of
from tsfl_jax.run.identity import labels_of, values_of
from tsfl_jax.timeline import FRAMEWORKS, deliveries, segments
from tsfl_jax.timeline.cohort import CHOOSING
from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import Schedule

_COLUMNS, _NAME = 99, 15  # of a terminal, and of the names in it


class Work(NamedTuple):
    """Work of the whole run."""

    deliveries: Int[np.ndarray, "N"]  # of each client, of cohorts those who ever work
    iterations: Int[np.ndarray, "N"]  # local iterations of each of them that count
    mean_tau: float  # of a delivery; NaN: none
    degree: float  # δ of an update's local iterations, the mean of all updates
    mean_staleness: float  # global updates since the model a delivery started from
    max_staleness: int
    samples: int  # trained on
    steps: int  # mini-batch steps of all clients


class Explanation(NamedTuple):
    """All that is known before training; shows itself as ``tsfl explain`` does."""

    settings: dict[str, Any]  # by name, {"data.name": "mnist"}
    labels: dict[str, Any]
    updates: int
    seconds: float  # virtual, until the last update
    parameters: int
    data: str  # the data set in one line, with what a network sees
    work: Work
    timeline: Timeline
    memory: dict[str, int]  # bytes on every device, estimated
    devices: str
    width: int  # models trained side by side on a device
    updates_per_call: int
    schedule: Schedule  # τ and samples of each client in each update
    trace: Trace | None  # which client delivers what when; None: no virtual clock
    notes: tuple[str, ...] = ()  # what a user should know before the run

    def __repr__(self) -> str:
        """Notes, the text and the chart of ``tsfl explain``."""
        notes = "".join(f"note: {note}\n" for note in self.notes)
        return f"{notes}{text(self)}\n\n{self.chart()}"

    def chart(self, end: float = 0.0, width: int = _COLUMNS) -> str:
        """The timeline as text, one line per client.

        Args:
          end: seconds, or intervals without a virtual clock; 0: the first updates.
          width: most characters of a line, ≥ 60.
        """
        return gantt(self.timeline, end or window(self.timeline), width)

    def plot(self) -> Any:
        """The timeline of the first updates as a Matplotlib figure."""
        return figure_of(self.timeline, self.settings)


def explain(config: Config, **custom: Any) -> Explanation:
    """Explain an experiment without training or compiling it.

    Args:
      config: all settings.
      **custom: `model`, `dataset`, `optimizer`, `aggregator`, … as in `simulate`.

    Returns:
      `Explanation`, which prints as ``tsfl explain`` does: `schedule` and `trace`
      (which client delivers what when), `work`, `memory`, `timeline`; ``chart()`` is
      the timeline as text, ``plot()`` as a figure.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    config, parts = accepted(config, **custom)
    mesh = backend.start_jax(config)
    return of_prepared(prepare_validated(config, parts), mesh)


def of_prepared(prepared: Prepared, mesh: Mesh) -> Explanation:
    """Explain a prepared experiment on the devices of a mesh."""
    settings, times = values_of(prepared), prepared.workload.schedule
    width = _width(prepared, mesh)
    return Explanation(
        settings=settings,
        labels=labels_of(prepared),
        updates=len(prepared.steps),
        seconds=float(prepared.workload.schedule.seconds[-1]),
        parameters=prepared.network.size,
        data=repr(prepared.dataset),
        work=_work_of(prepared),
        timeline=_timeline(prepared.workload),
        memory=memory.estimate(prepared, mesh.size, width),
        devices=f"{mesh.size} × {mesh.devices.flat[0].platform.upper()}",
        width=width,
        updates_per_call=chunk_of(prepared),
        schedule=times,
        trace=prepared.workload.trace,
        notes=prepared.notes,
    )


def _width(prepared: Prepared, mesh: Mesh) -> int:
    """Models that a device trains side by side."""
    slots = prepared.slots
    block = prepared.config.client_block or slots
    return 1 if prepared.mapping == "sequential" else min(block, -(-slots // mesh.size))


def _work_of(prepared: Prepared) -> Work:
    times, settings = prepared.workload.schedule, values_of(prepared)
    works, lag = times.tau > 0, deliveries.staleness(times)
    places = prepared.workload.places
    clients, delivers = len(prepared.partition.capacity), deliveries.claimed(times) > 0
    iterations = np.bincount(places[delivers], times.tau[delivers], clients)  # < 2⁵³
    # Under a framework, clients that do not deliver are still at work.
    counts = works if times.snapshots else np.ones_like(works)
    degrees = [t[c].var() for t, c in zip(times.tau, counts, strict=True) if c.any()]
    # A pass has ⌈|D|/B⌉ batches, of which only the last one may be short.
    batches = -(-times.size.astype(np.int64) // settings["batch_size"])
    passes, steps = np.divmod(prepared.steps.astype(np.int64), batches)
    return Work(
        deliveries=np.bincount(places[delivers], minlength=clients),
        iterations=iterations.astype(np.int64),
        mean_tau=float(times.tau[works].mean()) if works.any() else float("nan"),
        degree=float(np.mean(degrees)) if degrees else 0.0,
        mean_staleness=float(lag.mean()) if lag.size else 0.0,
        max_staleness=int(lag.max(initial=0)),
        samples=int((passes * times.size + steps * settings["batch_size"]).sum()),
        steps=int(prepared.steps.sum(dtype=np.int64)),
    )


def _timeline(workload: Workload) -> Timeline:
    times, fleet, trace, tasks, *_ = workload
    most = int(times.tau.max(initial=1))
    if fleet is None or trace is None or tasks is None:
        parts = segments.of_schedule(
            times.tau, None if times.in_order else times.client
        )
        ends = np.arange(1.0, len(times.tau) + 1)
        return Timeline(parts, [], ends, {}, most, False, segments.shares(parts))
    parts = list(segments.segments(tasks, fleet, float(trace.time[-1])))
    row, column = np.nonzero(trace.iterations > 0)
    clients, groups = trace.client[row, column].tolist(), trace.group[row].tolist()
    tiers = dict(zip(clients, groups, strict=True)) if trace.group.any() else {}
    shares = segments.shares(parts)
    return Timeline(parts, tasks, trace.time, tiers, most, True, shares)


def _range(values: np.ndarray) -> str:
    low, mean, high = values.min(), values.mean(), values.max()
    middle = f"{mean:,.4g}" if mean < 1000 else f"{mean:,.0f}"
    return f"min {low:,}, mean {middle}, max {high:,}"


def _memory_text(rows: dict[str, int]) -> str:
    """Bytes by purpose, the largest first."""
    ordered = sorted(rows.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {memory.size_text(count)}" for name, count in ordered)


def _clients_text(plan: Explanation) -> str:
    """How many clients there are, of cohorts also how many at a time and ever."""
    s, ever = plan.settings, len(plan.work.deliveries)
    clients = s["num_clients"]
    if not s["cohort.size"]:
        return f"{clients:,} clients"
    words = f"{s['cohort.size']:,} of {clients:,} clients at a time"
    if s["cohort.sampler"] in CHOOSING:
        words += f", chosen of {plan.schedule.tau.shape[1]:,} candidates"
    return f"{words}, {ever:,} ever"


def text(plan: Explanation, compiled: dict[str, int] | None = None) -> str:
    """Format an explanation as text, in lines of at most 99 characters.

    Args:
      plan: from `explain`.
      compiled: bytes as the compiler reports them, `program.Compiled.memory`; None:
        not compiled.
    """
    s, work, line = plan.settings, plan.work, plan.timeline
    table = {"run": f"schedule {s['schedule.kind']}"}
    if line.seconds:
        framework = s["timeline.framework"]
        names = FRAMEWORKS[framework].settings
        values = ", ".join(f"{n.split('.')[1]}={s[n]}" for n in names if n in s)
        table = {"run": f"framework {framework} ({values})"}
    table |= {
        "algorithm": f"{plan.labels['algorithm']} on {plan.labels['data']}, "
        f"{_clients_text(plan)}",
        "data": plan.data,
        "network": f"{plan.labels['model']}, {plan.parameters:,} parameters, "
        f"batches of {s['batch_size']}",
        "updates": f"{plan.updates:,} in {plan.seconds:,.6g} virtual seconds, one in "
        f"{plan.seconds / plan.updates:.4g} s",
        "deliveries": f"per client: {_range(work.deliveries)}",
        "iterations": f"τ per delivery: mean {work.mean_tau:.3g}, at most {line.most};"
        f" δ {work.degree:.3g}",
        "": f"per client in all: {_range(work.iterations)}",
        "staleness": f"mean {work.mean_staleness:.3g}, "
        f"max {work.max_staleness} updates",
    }
    if line.seconds:
        shares = [f"{k} {100 * v:.1f} %" for k, v in line.shares.items() if v]
        table["clients' time"] = ", ".join(shares)
        if lost := len(losses(line, math.inf)):
            table["lost"] = f"{lost:,} of {len(line.tasks):,} tasks lost or given up"
    side = "one after another" if plan.width == 1 else f"{plan.width} side by side"
    total = memory.size_text(sum(plan.memory.values()))
    table |= {
        "training": f"{work.samples:,} samples in {work.steps:,} mini-batch steps",
        "devices": f"{plan.devices}, clients {side}, {plan.updates_per_call} updates "
        "per compiled call",
        "memory": f"≥ {total} on a device, without activations; "
        f"{_memory_text(plan.memory)}",
    }
    if compiled is not None:
        table["  compiled"] = _memory_text(compiled)
    return "\n".join(
        textwrap.fill(f"{n:<{_NAME}}{words}", _COLUMNS, subsequent_indent=" " * _NAME)
        for n, words in table.items()
    )
