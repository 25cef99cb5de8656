"""Explain before training what an experiment will cost and how its work is assigned.

Memory is estimated from shapes, and checked before a run. `report.timeline` shows the
timeline. Nothing is compiled here.
"""

import math
import textwrap
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from tsfl_jax import host_memory, rng
from tsfl_jax.engine import devices, optimizers, scan
from tsfl_jax.experiment.identity import labels_of, settings_of
from tsfl_jax.experiment.own_hooks import input_dtype
from tsfl_jax.experiment.prepare import Prepared, chunk_of, counts_of
from tsfl_jax.experiment.program import Arrays, Compiled
from tsfl_jax.experiment.workload import Workload
from tsfl_jax.report import progress
from tsfl_jax.report.timeline import Timeline, figure_of, gantt, losses, window
from tsfl_jax.theory import bounds
from tsfl_jax.timeline import FRAMEWORKS, replay, segments
from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import Schedule

_COLUMNS = 99  # of a terminal


class Work(NamedTuple):
    """Work of the whole run."""

    deliveries: Int[np.ndarray, "N"]  # of each client in the whole run
    iterations: Int[np.ndarray, "N"]  # local iterations of each client that count
    mean_tau: float  # of a delivery; NaN: none
    degree: float  # δ of an update's local iterations, the mean of all updates
    mean_staleness: float  # global updates since the model a delivery started from
    max_staleness: int
    samples: int  # trained on in the whole run


class Steps(NamedTuple):
    """Mini-batch steps of the whole run: useful ones, and what the devices execute."""

    useful: int
    executed: dict[str, int]  # by mapping
    balance: dict[str, float]  # by mapping: busiest device / mean of the devices ≥ 1


class Explanation(NamedTuple):
    """All that is known before training; shows itself as ``tsfl explain`` does."""

    settings: dict[str, Any]  # by name, {"data.name": "mnist"}
    labels: dict[str, Any]
    updates: int
    seconds: float  # virtual, until the last update
    parameters: int
    work: Work
    steps: Steps
    timeline: Timeline
    memory: dict[str, int]  # bytes on every device, estimated
    devices: str
    width: dict[str, int]  # by mapping: models trained side by side on a device
    updates_per_call: int
    schedule: Schedule  # τ and samples of each client in each update
    trace: Trace | None  # which client delivers what when; None: no virtual clock
    wall_time: str = ""  # from `measured_time`; "": not measured
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


def work_of(prepared: Prepared) -> Work:
    """Deliveries, τ, staleness and samples of the whole run."""
    times = prepared.workload.schedule
    there, works = replay.claimed(times) > 0, times.tau > 0
    clients = len(prepared.partition.capacity)
    settings = settings_of(prepared)
    lag = replay.staleness(times)
    # A pass has ⌈|D|/B⌉ batches, of which only the last one may be short.
    batches = -(-times.size.astype(np.int64) // settings["batch_size"])
    passes, rest = np.divmod(prepared.steps.astype(np.int64), batches)
    samples = passes * times.size + rest * settings["batch_size"]
    return Work(
        deliveries=replay.dense(there.astype(int), times, clients).sum(0),
        iterations=replay.dense(times.tau, times, clients).sum(0, dtype=np.int64),
        mean_tau=float(times.tau[works].mean()) if works.any() else float("nan"),
        degree=_degree(times),
        mean_staleness=float(lag.mean()) if lag.size else 0.0,
        max_staleness=int(lag.max(initial=0)),
        samples=int(samples.sum()),
    )


def _degree(times: Schedule) -> float:
    if times.delivery is None:
        return float(np.mean(np.asarray(bounds.heterogeneity_degree(times.tau))))
    # Of the clients that deliver: the others are still at work.
    each = [
        float(bounds.heterogeneity_degree(tau[tau > 0]))
        for tau in times.tau
        if any(tau)
    ]
    return float(np.mean(each)) if each else 0.0


def steps_of(
    work: Int[np.ndarray, "R K"],
    assigned: Int[np.ndarray, "R DP"],
    num_devices: int,
    block: int,
) -> Steps:
    """Useful and executed mini-batch steps, under both mappings.

    Args:
      work: ``[R, K]`` mini-batch steps of each delivery in K slots.
      assigned: ``[R, D·P]`` which slot is trained where, see `devices.deal`; K: none.
      num_devices: D.
      block: most clients side by side under "vmap".

    Returns:
      `Steps`. "sequential" executes the useful ones. Under "vmap" all clients of a
      block run the steps of the longest one; where a device has one block only, those
      of the longest client of the whole run, and blocks are filled up.
    """
    updates = len(work)
    padded = np.pad(work.astype(np.int64), ((0, 0), (0, 1)))  # no slot has no work
    mine = np.take_along_axis(padded, assigned, 1).reshape(updates, num_devices, -1)
    block = min(block, mine.shape[2])
    blocks = -(-mine.shape[2] // block)
    filled = np.pad(mine, ((0, 0), (0, 0), (0, blocks * block - mine.shape[2])))
    limit = filled.reshape(updates, num_devices, blocks, block).max(-1)
    if blocks == 1:
        limit = np.full_like(limit, work.max(initial=0))
    executed = {"sequential": mine.sum(2), "vmap": block * limit.sum(2)}  # [R, D]
    return Steps(
        useful=int(work.sum(dtype=np.int64)),
        executed={name: int(steps.sum()) for name, steps in executed.items()},
        # In each update all devices wait for the busiest.
        balance={
            name: float(steps.max(1).sum() / max(steps.mean(1).sum(), 1))
            for name, steps in executed.items()
        },
    )


def _timeline(workload: Workload) -> Timeline:
    times, fleet, trace, tasks, _ = workload
    most = int(times.tau.max(initial=1))
    if fleet is None or trace is None or tasks is None:
        found = segments.of_schedule(times.tau)
        ends = np.arange(1.0, len(times.tau) + 1)
        return Timeline(found, [], ends, {}, most, False, segments.shares(found))
    found = list(segments.segments(tasks, fleet, float(trace.time[-1])))
    shares = segments.shares(found)
    return Timeline(found, tasks, trace.time, _tiers(trace), most, True, shares)


def _tiers(trace: Trace) -> dict[int, int]:
    if not trace.group.any():
        return {}
    row, column = np.nonzero(trace.iterations > 0)
    who, tier = trace.client[row, column].tolist(), trace.group[row].tolist()
    return dict(zip(who, tier, strict=True))


def explain(prepared: Prepared, mesh: Mesh) -> Explanation:
    """Explain an experiment as far as it is known without training and compiling.

    Args:
      prepared: the experiment.
      mesh: the devices it would use.

    Returns:
      `Explanation`.
    """
    settings, updates = settings_of(prepared), len(prepared.steps)
    clients, per_call = settings["num_clients"], chunk_of(prepared)
    block = min(settings["client_chunk"] or clients, clients)
    # A last call that is filled up executes the padding, too.
    steps = np.pad(prepared.steps, ((0, -updates % per_call), (0, 0)))
    in_turn = prepared.mapping == "sequential"
    assigned = devices.deal(steps, mesh.size, grouped=in_turn)
    width = {"sequential": 1, "vmap": min(block, assigned.shape[1] // mesh.size)}
    kind = mesh.devices.flat[0].platform.upper()
    trained = prepared.network.params["params"]
    return Explanation(
        settings=settings,
        labels=labels_of(prepared),
        updates=updates,
        seconds=float(prepared.workload.seconds[-1]),
        parameters=sum(a.size for a in jax.tree.leaves(trained)),
        work=work_of(prepared),
        steps=steps_of(steps, assigned, mesh.size, block),
        timeline=_timeline(prepared.workload),
        memory=estimate_memory(prepared, mesh.size, width[prepared.mapping]),
        devices=f"{mesh.size} × {kind}",
        width=width,
        updates_per_call=per_call,
        schedule=prepared.workload.schedule,
        trace=prepared.workload.trace,
        notes=prepared.notes,
    )


def _bytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _state_of(prepared: Prepared) -> scan.State:
    """Shapes of the state; nothing is computed."""
    model, rule = prepared.network.model, prepared.rule
    counts, snapshots = counts_of(prepared), prepared.workload.schedule.snapshots
    shape = (1, *prepared.dataset.x_train.shape[1:])
    x = jax.ShapeDtypeStruct(shape, input_dtype(prepared.dataset))
    return jax.eval_shape(
        lambda x: scan.init_state(model, rule, rng.key(0), x, counts, snapshots), x
    )


def stacks_models(prepared: Prepared) -> bool:
    """Whether the updates of all clients are kept until all have finished."""
    return prepared.rule.stacks or prepared.config.measure_regret


def estimate_memory(prepared: Prepared, num_devices: int, width: int) -> dict[str, int]:
    """Estimate bytes on every device by purpose, from shapes; without activations.

    Args:
      prepared: the experiment.
      num_devices: that share the test set and the clients.
      width: models that a device trains side by side.
    """
    dataset, state = prepared.dataset, _state_of(prepared)
    model, trained = _bytes(state.params), _bytes(state.params["params"])
    optimizer = jax.eval_shape(
        prepared.optimizer(prepared.hparams).init, state.params["params"]
    )
    slots = prepared.steps.shape[1]
    rows = {
        "training samples": dataset.x_train.nbytes + dataset.y_train.nbytes,
        "index table": prepared.partition.indices.nbytes,
        "test samples": (dataset.x_test.nbytes + dataset.y_test.nbytes) // num_devices,
        "global model": model,
        "earlier models": _bytes((state.snapshots, state.sent)),
        "server state": _bytes(state.server),
        "clients in training": width * (model + trained + _bytes(optimizer)),
        "stacked models": 0,
    }
    if not stacks_models(prepared):
        rows["sum of updates"] = 4 * model  # `exact_sums.Sum` has four arrays
    else:  # models of the device's own clients, and updates of all clients
        rows["stacked models"] = (-(-slots // num_devices) + slots) * model
    # Not in place: the state is there before and after a call.
    rows["state after a call"] = _bytes(state)
    return {name: size for name, size in rows.items() if size}


def check_memory(prepared: Prepared, num_devices: int) -> None:
    """Check an optimizer and that a run can fit, before anything is on a device.

    Args:
      prepared: the experiment.
      num_devices: that share the clients. CPU devices share the host's memory; of other
        devices only the part on the host is checked.

    Raises:
      UserError: the optimizer does not work, or there is less memory than needed.
    """
    config, network = prepared.config, prepared.network
    optimizers.check(prepared.optimizer, prepared.hparams, network.params["params"])
    rows = estimate_memory(prepared, num_devices, 1)
    if jax.default_backend() == "cpu":
        needed = num_devices * sum(rows.values())
    else:
        names = ("training samples", "index table", "test samples")
        needed = sum(rows[n] for n in names) + 2 * rows["state after a call"]
    most = max(rows, key=rows.__getitem__)
    setting = {
        "training samples": f"data.name={config.data.name}",
        "test samples": f"data.name={config.data.name}",
        "index table": f"num_clients={config.num_clients}",
        "stacked models": f"num_clients={config.num_clients}",
    }.get(most, f"model.name={network.name}")
    if setting.startswith("model.") and network.name in (
        *("mlp", "mnist_cnn", "mnist_dropout_cnn"),
    ):
        setting = f"model.hidden={config.model.hidden}"
    host_memory.require(
        f"--config.{setting}", needed, f"training (the largest part: {most})"
    )


def size_text(count: int | float) -> str:
    """Format a number of bytes: 1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _range(values: np.ndarray) -> str:
    """Lowest, mean and highest value."""
    low, mean, high = values.min(), values.mean(), values.max()
    middle = f"{mean:,.4g}" if mean < 1000 else f"{mean:,.0f}"
    return f"min {low:,}, mean {middle}, max {high:,}"


def _parameters(settings: dict[str, Any]) -> str:
    """The settings that shape the framework's timeline."""
    framework = FRAMEWORKS.get(settings["timeline.framework"])
    names = () if framework is None else framework.settings
    return ", ".join(f"{n.split('.')[1]}={settings[n]}" for n in names)


def _steps(known: Explanation) -> dict[str, str]:
    """Executed mini-batch steps and their padding, by mapping."""
    table = {}
    for name, executed in known.steps.executed.items():
        waste = 100 * (1 - known.steps.useful / executed) if executed else 0.0
        width = known.width[name]
        side = "one after another" if width == 1 else f"{width} side by side"
        table[f"  {name}"] = (
            f"{executed:,} steps executed ({side}), {waste:.1f} % of them padding"
            + (" ← used" if name == known.labels["mapping"] else "")
        )
    return table


def measured_time(prepared: Prepared, compiled: Compiled, arrays: Arrays) -> str:
    """Run one call, and say how long the run will take by its mini-batch steps."""
    chunk = next(iter(compiled.chunks(arrays)))
    steps = prepared.steps.sum(axis=1, dtype=np.int64) + 1  # evaluation counts, too
    share = float(steps.sum() / steps[chunk.first : chunk.last].sum())
    training = progress.clock(chunk.seconds * share)
    return (
        f"compiling {compiled.seconds:.1f} s; training about {training}, by the first "
        f"{chunk.last} intervals, which were run"
    )


def text(known: Explanation, compiled: dict[str, int] | None = None) -> str:
    """Format an explanation as text, in lines of at most 99 characters.

    Args:
      known: from `explain`.
      compiled: bytes as the compiler reports them, `program.Compiled.memory`; None:
        not compiled.

    Returns:
      Lines without the last newline.
    """
    s, work, steps, line = known.settings, known.work, known.steps, known.timeline
    timed = line.seconds
    mapping = known.labels["mapping"]
    head = f"framework {s['timeline.framework']} ({_parameters(s)})"
    table = {
        "run": head if timed else f"schedule {s['schedule.kind']}",
        "algorithm": f"{known.labels['algorithm']} on {known.labels['data']}, "
        f"{s['num_clients']:,} clients",
        "network": f"{known.labels['model']}, {known.parameters:,} parameters, "
        f"batches of {s['batch_size']}",
        "updates": f"{known.updates:,} in {known.seconds:,.6g} virtual seconds, one in "
        f"{known.seconds / known.updates:.4g} s",
        "deliveries": f"per client: {_range(work.deliveries)}",
        "iterations": f"τ per delivery: mean {work.mean_tau:.3g}, at most {line.most};"
        f" δ {work.degree:.3g}",
        "": f"per client in all: {_range(work.iterations)}",
        "staleness": f"mean {work.mean_staleness:.3g}, "
        f"max {work.max_staleness} updates",
    }
    if timed:
        shares = [f"{k} {100 * v:.1f} %" for k, v in line.shares.items() if v]
        table["clients' time"] = ", ".join(shares)
        lost = len(losses(line, math.inf))
        if lost:
            table["lost"] = f"{lost:,} of {len(line.tasks):,} tasks lost or given up"
    table["training"] = f"{work.samples:,} samples in {steps.useful:,} mini-batch steps"
    table |= _steps(known)
    table["devices"] = (
        f"{known.devices}, work of the busiest {steps.balance[mapping]:.3g} × the "
        f"mean; {known.updates_per_call} updates per compiled call"
    )
    total = sum(known.memory.values())
    table["memory"] = f"≥ {size_text(total)} on a device, without activations; "
    largest = sorted(known.memory.items(), key=lambda item: -item[1])
    rows = [f"{name} {size_text(number)}" for name, number in largest]
    table["memory"] += ", ".join(rows)
    if compiled is not None:
        parts = [f"{name} {size_text(b)}" for name, b in compiled.items()]
        table["  compiled"] = ", ".join(parts)
    if known.wall_time:
        table["wall time"] = known.wall_time
    lines = [
        textwrap.fill(f"{name:<15}{words}", _COLUMNS, subsequent_indent=" " * 15)
        for name, words in table.items()
    ]
    return "\n".join(lines)
