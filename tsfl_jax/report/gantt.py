"""The timeline of an experiment as text and as a figure."""

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tsfl_jax.report import style
from tsfl_jax.timeline import segments
from tsfl_jax.timeline.trace import GIVEN_UP, LOST, Task

if TYPE_CHECKING:
    import matplotlib.figure

_COLUMNS = 99  # of the text, with the clients' names
_ROWS = 20  # clients of the text
_BARS = 40  # bars that a reader can distinguish on a page
_LINES = 12  # updates that may be plotted across the bars


class _Look(NamedTuple):
    """How an activity is shown in text and in the figure."""

    ink: str  # character, or two that alternate
    label: str
    face: str
    hatch: str = ""
    edge: str = "#222222"
    half: float = 0.38  # of the bar's height

    def bar(self) -> style.Style:
        look = {"facecolor": self.face, "hatch": self.hatch, "edgecolor": self.edge}
        return look | {"linewidth": 0.4}


# The colors of Okabe and Ito; in grey, hatches and lightness distinguish them.
LOOKS = {
    segments.DOWNLOAD: _Look("<", "download", "#56B4E9", "////"),
    segments.ITERATION: _Look("█▓", "local iteration", "#0072B2", "", "#FFFFFF"),
    segments.UNFINISHED: _Look("░", "unfinished iteration", "#FFFFFF", "xxxx"),
    segments.UPLOAD: _Look(">", "upload", "#E69F00"),
    segments.WAITING: _Look("·", "waiting", "#E6E6E6", "", "#999999", 0.14),
    segments.IDLE: _Look("-", "idle", "#FFFFFF", "", "#CCCCCC", 0.04),
    segments.OFFLINE: _Look(" ", "offline", "#FFFFFF", "....", "#999999", 0.14),
}


class Timeline(NamedTuple):
    """Activities and updates; in seconds, or in intervals without a virtual clock."""

    bars: list[segments.Segment]
    tasks: list[Task]
    updates: np.ndarray  # [R], when the global updates are
    tier: dict[int, int]  # of each client that delivers, with tiers only
    most: int  # H, most iterations of a delivery
    seconds: bool  # else the unit is an interval


def window(timeline: Timeline) -> float:
    """The end of the time that a chart shows: the first few updates.

    At least four updates, and one and a half times the first task of 90 % of the
    clients.
    """
    end = float(timeline.updates[: 4 if timeline.seconds else 8][-1])
    arrivals: dict[int, float] = {}
    for task in timeline.tasks:
        if task.arrival < math.inf:
            arrivals.setdefault(task.client, task.arrival)
    if arrivals:
        # The slowest clients would leave too little width for the others.
        end = max(end, 1.5 * float(np.quantile(list(arrivals.values()), 0.9)))
    return min(end, float(timeline.updates[-1]))


class _Chart(NamedTuple):
    """What a chart shows of a timeline, in text as in the figure; rows are clients."""

    names: list[str]  # of the rows, by tier
    bars: list[tuple[int, segments.Segment]]  # row and activity, by start
    labels: dict[str, str]  # of the kinds of activity that occur
    losses: list[tuple[int, float]]  # row and seconds of those lost or given up
    updates: np.ndarray


def chart_of(line: Timeline, end: float, most: int) -> _Chart:
    """All clients, or `most` of them at even distances, until `end`."""
    ids = np.array(sorted({bar.client for bar in line.bars}))
    places = np.linspace(0, len(ids) - 1, min(most, len(ids))).round().astype(int)
    last = max(line.tier.values(), default=0) + 1
    clients = sorted(ids[places].tolist(), key=lambda i: (line.tier.get(i, last), i))
    tiers = {i: f", tier {line.tier.get(i, '–')}" if line.tier else "" for i in clients}
    row = {client: k for k, client in enumerate(clients)}
    bars = [(row[s.client], s) for s in line.bars if s.client in row and s.start < end]
    tasks = [t for t in line.tasks if t.fate in (LOST, GIVEN_UP) and t.stop <= end]
    kinds = {s.kind for _, s in bars}
    labels = {kind: look.label for kind, look in LOOKS.items() if kind in kinds}
    if segments.WAITING in kinds and not line.seconds:
        labels[segments.WAITING] = f"rest of H = {line.most}"
    return _Chart(
        [f"{i}{tiers[i]}" for i in clients],
        sorted(bars, key=lambda bar: bar[1].start),
        labels,
        [(row[t.client], t.stop) for t in tasks if t.client in row],
        line.updates[line.updates <= end],
    )


def gantt(timeline: Timeline, end: float, width: int = _COLUMNS) -> str:
    """The timeline from 0 to `end` as text, one line per client.

    Args:
      timeline: of an experiment.
      end: seconds, or intervals where there are no seconds, > 0.
      width: most characters of a line, ≥ 60.

    Returns:
      Lines with the global updates, at most 20 clients, the time, a legend.
    """
    chart = chart_of(timeline, end, _ROWS)
    names = ["updates", *(f"client {name}" for name in chart.names)]
    margin = max(map(len, names)) + 1
    columns = width - margin
    rows = np.full((len(names), columns), " ")

    def column(at: Any) -> Any:  # the characters that end then, or the nearest ones
        places = np.ceil(np.divide(at, end) * columns).astype(int) - 1
        return np.clip(places, 0, columns - 1)

    rows[0, column(chart.updates)] = "|"
    middle = (np.arange(columns) + 0.5) * end / columns
    number = [-1] * len(chart.names)
    for row, (_, kind, start, stop) in chart.bars:
        number[row] += kind == segments.ITERATION
        ink = LOOKS[kind].ink
        rows[1 + row, (middle >= start) & (middle < stop)] = ink[number[row] % len(ink)]
    for row, at in chart.losses:
        rows[1 + row, column(at)] = "x"
    lines = [f"{n:<{margin}}{''.join(row)}" for n, row in zip(names, rows, strict=True)]
    unit = "s" if timeline.seconds else "intervals"
    lines.append(f"{'':<{margin}}0{f'{end:.4g} {unit}':>{columns - 1}}")
    inks = {kind: LOOKS[kind].ink.strip() or "blank:" for kind in chart.labels}
    legend = [f"{inks[kind]} {label}" for kind, label in chart.labels.items()]
    legend += ["x lost or given up"] * bool(chart.losses) + ["| global update"]
    lines.append(textwrap.fill(", ".join(legend), width))
    return "\n".join(line.rstrip() for line in lines)


def plot(axes: Any, chart: _Chart, end: float) -> None:
    """Plot the bars and updates of a chart until `end`."""
    ranges: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for row, (_, kind, start, stop) in chart.bars:
        ranges.setdefault((row, kind), []).append((start, min(stop, end) - start))
    for (row, kind), spans in ranges.items():
        half = LOOKS[kind].half
        axes.broken_barh(spans, (row - half, 2 * half), **LOOKS[kind].bar(), zorder=2)
    few = len(chart.updates) <= _LINES  # more of them in front would hide the bars
    look = {"color": "#000000", "linewidth": 0.9 if few else 0.5, "zorder": 1 + 2 * few}
    rows = -0.7, len(chart.names) - 0.4
    axes.vlines(chart.updates, *rows, **look, label="global update")
    axes.set_ylim(*rows[::-1])


@style.styled
def figure_of(
    line: Timeline, settings: Mapping[str, Any]
) -> "matplotlib.figure.Figure":
    """Plot the first few updates.

    Args:
      line: the timeline of an experiment.
      settings: of the experiment, by name, {"timeline.framework": "afl"}.
    """
    from matplotlib.patches import Patch

    end = window(line)
    chart = chart_of(line, end, _BARS)
    figure, axes = style.figure_of(1.35 + 0.17 * max(len(chart.names), 4))
    axes.grid(visible=False)
    plot(axes, chart, end)
    if chart.losses:
        row, at = zip(*chart.losses, strict=True)
        cross = {"marker": "X", "markersize": 7, "color": "#D55E00"}
        cross |= {"markeredgecolor": "#FFFFFF", "linestyle": "none", "zorder": 4}
        axes.plot(at, row, **cross, label="delivery lost or given up")
    handles = [Patch(**LOOKS[k].bar(), label=v) for k, v in chart.labels.items()]
    handles += axes.get_legend_handles_labels()[0]
    axes.set_xlim(0, end * 1.005)
    axes.set_xlabel("virtual time in seconds" if line.seconds else "interval")
    if not line.seconds:
        number = np.arange(1, round(end) + 1)
        axes.set_xticks(number - 0.5, number)
        axes.tick_params(axis="x", length=0)
    axes.set_yticks(range(len(chart.names)), chart.names, fontsize="small")
    axes.set_ylabel("client")
    labels = [handle.get_label() for handle in handles]
    style.legend_below(figure, handles, labels)
    name, *_ = style.name_of(settings["timeline.framework"]).split(",")
    name = name if line.seconds else f"schedule {settings['schedule.kind']}"
    clients = f"{len(chart.names)} of {settings['num_clients']} clients"
    unit = "updates" if line.seconds else "intervals"
    updates = f"first {len(chart.updates)} of {len(line.updates)} {unit}"
    figure.suptitle(style.escape(f"{name}, {clients}, {updates}"))
    return figure
