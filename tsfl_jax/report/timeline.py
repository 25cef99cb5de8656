"""The timeline of an experiment as text and as a figure."""

import math
import pathlib
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tsfl_jax.report import style
from tsfl_jax.timeline import segments
from tsfl_jax.timeline.trace import GIVEN_UP, LOST, Task

if TYPE_CHECKING:
    import matplotlib.axes
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

    found: list[segments.Segment]
    tasks: list[Task]
    updates: np.ndarray  # [R], when the global updates are
    tier: dict[int, int]  # of each client that delivers, with tiers only
    most: int  # H, most iterations of a delivery
    seconds: bool  # else the unit is an interval
    shares: dict[str, float]  # of the clients' time until the last update


def updates_until(timeline: Timeline, end: float) -> np.ndarray:
    """Times of the global updates until `end`."""
    return timeline.updates[timeline.updates <= end]


def window(timeline: Timeline) -> float:
    """The end of the time that a chart shows: the first few updates.

    At least four updates, and one and a half times the first task of 90 % of the
    clients.
    """
    last = float(timeline.updates[-1])
    end = float(timeline.updates[: 4 if timeline.seconds else 8][-1])
    first: dict[int, float] = {}
    for task in timeline.tasks:
        if task.arrival < math.inf:
            first.setdefault(task.client, task.arrival)
    if first:
        # The slowest clients would leave too little width for the others.
        end = max(end, 1.5 * float(np.quantile(list(first.values()), 0.9)))
    return min(end, last)


def chosen(timeline: Timeline, most: int) -> list[int]:
    """Clients of a chart, by tier: all, or `most` of them at even distances."""
    clients = np.array(sorted({s.client for s in timeline.found}))
    number = min(most, len(clients))
    places = np.linspace(0, len(clients) - 1, number).round().astype(int)
    last = max(timeline.tier.values(), default=0) + 1
    few = clients[places].tolist()
    return sorted(few, key=lambda i: (timeline.tier.get(i, last), i))


def losses(timeline: Timeline, end: float) -> list[tuple[int, float]]:
    """(client, seconds) of tasks that were lost or given up until `end`."""
    return [
        (task.client, task.stop)
        for task in timeline.tasks
        if task.fate in (LOST, GIVEN_UP) and task.stop <= end
    ]


def gantt(timeline: Timeline, end: float, width: int = _COLUMNS) -> str:
    """The timeline from 0 to `end` as text, one line per client.

    Args:
      timeline: of an experiment.
      end: seconds, or intervals where there are no seconds, > 0.
      width: most characters of a line, ≥ 60.

    Returns:
      Lines with the global updates, at most 20 clients, the time, a legend.
    """
    clients = chosen(timeline, _ROWS)
    names = {i: f"client {i}" for i in clients}
    if timeline.tier:
        names = {i: f"client {i} tier {timeline.tier.get(i, '?')}" for i in clients}
    margin = max(map(len, [*names.values(), "updates"])) + 1
    columns = width - margin
    rows = {name: np.full(columns, " ") for name in ["updates", *names.values()]}

    def column(at: Any) -> Any:  # the characters that end then, or the nearest ones
        found = np.ceil(np.divide(at, end) * columns).astype(int) - 1
        return np.clip(found, 0, columns - 1)

    rows["updates"][column(updates_until(timeline, end))] = "|"
    middle = (np.arange(columns) + 0.5) * end / columns
    number, used = dict.fromkeys(names, -1), set()
    for client, kind, first, last in sorted(timeline.found, key=lambda s: s.start):
        if client in names and first < end:
            used.add(kind)
            ink = LOOKS[kind].ink
            number[client] += kind == segments.ITERATION
            seen = (middle >= first) & (middle < last)
            rows[names[client]][seen] = ink[number[client] % len(ink)]
    for client, at in losses(timeline, end):
        if client in names:
            rows[names[client]][column(at)] = "x"
    lines = [f"{name:<{margin}}{''.join(row)}" for name, row in rows.items()]
    right = f"{end:.4g} {'s' if timeline.seconds else 'intervals'}"
    lines.append(f"{'':<{margin}}0{right:>{columns - 1}}")
    shown = [
        f"{look.ink.strip() or 'blank:'} {_label(kind, timeline)}"
        for kind, look in LOOKS.items()
        if kind in used
    ]
    shown += ["x lost or given up"] if losses(timeline, end) else []
    lines.append(textwrap.fill(", ".join([*shown, "| global update"]), width))
    return "\n".join(line.rstrip() for line in lines)


def _label(kind: str, line: Timeline) -> str:
    if kind == segments.WAITING and not line.seconds:
        return f"rest of H = {line.most}"
    return LOOKS[kind].label


def plot_timeline(
    line: Timeline, settings: Mapping[str, Any], path: str | pathlib.Path
) -> list[pathlib.Path]:
    """Plot the first few updates; writes a PNG and a PDF and returns their paths.

    Args:
      line, settings: as for `figure_of`.
      path: of the figure, without a suffix.
    """
    return style.save_both(figure_of(line, settings), pathlib.Path(path))


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

    end, clients = window(line), chosen(line, _BARS)
    figure, axes = style.figure_of(1.35 + 0.17 * max(len(clients), 4))
    axes.grid(visible=False)
    found = plot_bars(axes, line, clients, end)
    handles = [
        Patch(**look.bar(), label=_label(kind, line))
        for kind, look in LOOKS.items()
        if kind in found
    ]
    plot_updates(axes, updates_until(line, end), len(clients))
    lost = [(at, clients.index(i)) for i, at in losses(line, end) if i in clients]
    if lost:
        cross = {"marker": "X", "markersize": 7, "color": "#D55E00"}
        cross |= {"markeredgecolor": "#FFFFFF", "linestyle": "none", "zorder": 4}
        axes.plot(*zip(*lost, strict=True), **cross, label="delivery lost or given up")
    handles += axes.get_legend_handles_labels()[0]
    _axes(axes, line, clients, end)
    where = {"loc": "outside lower center", "ncols": min(len(handles), 4)}
    figure.legend(handles=handles, **where, handlelength=2, fontsize="small")
    figure.suptitle(_title(line, settings))
    return figure


def plot_bars(
    axes: "matplotlib.axes.Axes", line: Timeline, clients: list[int], end: float
) -> set[str]:
    """Plot the segments; returns the kinds that occur."""
    parts: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for client, kind, first, last in line.found:
        if client in clients and first < end:
            width = min(last, end) - first
            parts.setdefault((clients.index(client), kind), []).append((first, width))
    for (row, kind), ranges in parts.items():
        half = LOOKS[kind].half
        axes.broken_barh(ranges, (row - half, 2 * half), **LOOKS[kind].bar(), zorder=2)
    return {kind for _, kind in parts}


def plot_updates(axes: "matplotlib.axes.Axes", at: np.ndarray, rows: int) -> None:
    """Plot the global updates as vertical lines, in front if there are few."""
    few = len(at) <= _LINES  # more of them in front would hide the bars
    look = {"color": "#000000", "linewidth": 0.9 if few else 0.5, "zorder": 1 + 2 * few}
    axes.vlines(at, -0.7, rows - 0.4, **look, label="global update")


def _axes(
    axes: "matplotlib.axes.Axes", line: Timeline, clients: list[int], end: float
) -> None:
    """Set up the axes of time and clients, and name the tiers."""
    axes.set_xlim(0, end * 1.005)
    axes.set_ylim(len(clients) - 0.4, -0.7)
    axes.set_xlabel("virtual time in seconds" if line.seconds else "interval")
    if not line.seconds:
        number = np.arange(1, round(end) + 1)
        axes.set_xticks(number - 0.5, number)
        axes.tick_params(axis="x", length=0)
    names = [str(i) for i in clients]
    if line.tier:
        names = [f"{i}, tier {line.tier.get(i, '–')}" for i in clients]
    axes.set_yticks(range(len(clients)), names, fontsize="small")
    axes.set_ylabel("client")


def _title(line: Timeline, settings: Mapping[str, Any]) -> str:
    """Framework or schedule, and how much of the experiment the figure shows."""
    name, *_ = style.name_of(settings["timeline.framework"]).split(",")
    if not line.seconds:
        name = f"schedule {settings['schedule.kind']}"
    clients, few = f"{settings['num_clients']} clients", chosen(line, _BARS)
    if len(few) < settings["num_clients"]:
        clients = f"{len(few)} of {clients}"
    words = f"{name}, {clients}, first {len(updates_until(line, window(line)))} of "
    words += f"{len(line.updates)} {'updates' if line.seconds else 'intervals'}"
    return style.escape(words)
