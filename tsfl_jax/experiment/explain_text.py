"""What an experiment will cost as text, for the terminal."""

import math
import textwrap
from typing import Any

import numpy as np

from tsfl_jax.experiment.explain import Explanation
from tsfl_jax.report.timeline import losses

_COLUMNS = 99
# Settings of each framework that shape its timeline.
_OWN = {
    "tsfl": ("schedule.interval_seconds", "timeline.carry"),
    "fedbuff": ("timeline.local_iterations", "timeline.buffer"),
    "fedat": ("timeline.local_iterations", "timeline.tiers"),
    "fedcs": ("timeline.local_iterations", "timeline.deadline"),
    "safa": ("timeline.local_iterations", "timeline.fraction", "timeline.lag"),
}


def size(count: float) -> str:
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
    names = _OWN.get(settings["timeline.framework"], ("timeline.local_iterations",))
    return ", ".join(f"{n.split('.')[1]}={settings[n]}" for n in names)


def _steps(known: Explanation) -> dict[str, str]:
    """Executed mini-batch steps and their padding, by mapping."""
    table = {}
    for name, executed in known.steps.executed.items():
        waste = 100 * (1 - known.steps.useful / executed) if executed else 0.0
        lanes = known.lanes[name]
        side = "one after another" if lanes == 1 else f"{lanes} side by side"
        table[f"  {name}"] = (
            f"{executed:,} steps executed ({side}), {waste:.1f} % of them padding"
            + (" ← used" if name == known.labels["mapping"] else "")
        )
    return table


def text(known: Explanation, compiled: dict[str, int] | None = None) -> str:
    """An explanation as text, in lines of at most 99 characters.

    Args:
      known: from `explain.explain`.
      compiled: bytes by the compiler, from `experiment.compiled_memory`; None: not
        asked.

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
        told = [f"{k} {100 * v:.1f} %" for k, v in line.shares.items() if v]
        table["clients' time"] = ", ".join(told)
        lost = len(losses(line, math.inf))
        if lost:
            table["lost"] = f"{lost:,} of {len(line.tasks):,} tasks lost or given up"
        if s["timeline.framework"] == "fedcs":
            table[" "] = "lost and late work of fedcs is in no trace: shown as waiting"
    table["training"] = f"{work.samples:,} samples in {steps.useful:,} mini-batch steps"
    table |= _steps(known)
    table["devices"] = (
        f"{known.devices}, work of the busiest {steps.balance[mapping]:.3g} × the "
        f"mean; {known.updates_per_call} updates per compiled call"
    )
    total = sum(known.memory.values())
    table["memory"] = f"≥ {size(total)} on a device, without activations; "
    largest = sorted(known.memory.items(), key=lambda item: -item[1])
    rows = [f"{name} {size(number)}" for name, number in largest]
    table["memory"] += ", ".join(rows)
    if compiled is not None:
        told = ", ".join(f"{name} {size(b)}" for name, b in compiled.items())
        table["  compiled"] = told
    lines = [
        textwrap.fill(f"{name:<15}{words}", _COLUMNS, subsequent_indent=" " * 15)
        for name, words in table.items()
    ]
    return "\n".join(lines)
