"""The figures of a page: curves of the groups, their clients, images of studies."""

import base64

import numpy as np

from tsfl_jax.report import vector
from tsfl_jax.report.collect import Run
from tsfl_jax.report.elements import markup, tag
from tsfl_jax.report.groups import Report, seen_values

_MOST_CLIENTS = 6  # figures of clients


def _curves(
    report: Report, column: str, scale: float, *, time: bool
) -> list[vector.Curves]:
    """Curves of the groups that have them, over the interval or virtual time."""
    found = []
    for group in report.groups:
        lines = []
        for run in group.runs:
            seen, values = seen_values(run, column)
            x = run.series.get("virtual_time" if time else "interval", np.zeros(0))
            if len(seen) and len(x) and np.isfinite(x[seen]).all():
                lines.append((x[seen], scale * values))
        if lines:
            found.append(vector.Curves(group.name, group.look, lines))
    return found


def irregular(run: Run) -> bool:
    """Whether virtual time says more than the number of the interval."""
    seconds = run.series.get("virtual_time", np.zeros(0))
    steps = np.diff(seconds, prepend=0.0)
    return bool(len(steps) and not np.allclose(steps, steps[0]))


def _figure(svg: str, caption: str, legend: str = "") -> str:
    return f"<figure>{svg}{legend}{markup(tag('figcaption', caption))}</figure>"


def _legend(curves: list[vector.Curves]) -> str:
    """The lines of a figure with their names; "" for one line."""
    names = [markup(tag("span", group.label)) for group in curves]
    looks = [vector.swatch(group.look) for group in curves]
    lines = [f"<li>{a}{b}</li>" for a, b in zip(looks, names, strict=True)]
    return f'<ul class="legend">{"".join(lines)}</ul>' if len(lines) > 1 else ""


def _shown(curves: list[vector.Curves]) -> tuple[list[vector.Curves], str]:
    """The curves that fit into a figure, and what is left out in words."""
    if len(curves) <= vector.MOST_LINES:
        return curves, ""
    text = f" The first {vector.MOST_LINES} of {len(curves)} are shown."
    return curves[: vector.MOST_LINES], text


def curve_figures(report: Report) -> list[str]:
    """Accuracy and losses over the intervals, or over virtual time.

    Virtual time is used where the updates of a run are not equally far apart, or runs
    have intervals of different lengths; accuracy is then shown over both.
    """
    runs = [run for group in report.groups for run in group.runs]
    lengths = {
        round(float(run.series["virtual_time"][0]), 9)
        for run in runs
        if len(run.series.get("virtual_time", ()))
    }
    time = any(map(irregular, runs)) or len(lengths) > 1
    several = any(len(group.runs) > 1 for group in report.groups)
    wanted = [("test_accuracy", time)]
    wanted += [("test_accuracy", False)] * time
    wanted += [("test_loss", time), ("train_loss", time), ("regret", time)]
    titles = {"test_accuracy": "test accuracy in %", "test_loss": "test loss"}
    titles["train_loss"] = "training loss"
    titles["regret"] = "regret of the weights in validation loss"
    found = []
    for column, over_time in wanted:
        percent = column == "test_accuracy"
        scale = 100.0 if percent else 1.0
        every = _curves(report, column, scale, time=over_time)
        curves, left = _shown(every)
        if not curves:
            continue
        prefix = f"{column.replace('_', '-')}{'-time' * over_time}"
        svg = vector.curves_svg(
            curves, prefix, titles[column], time=over_time, percent=percent
        )
        title = titles[column].removesuffix(" in %").capitalize()
        where = "virtual time" if over_time else "the intervals (global updates)"
        note = _spread_note(len(curves)) if several else ""
        text = f"{title} over {where}.{note}{left}"
        found.append(_figure(svg, text, _legend(curves)))
    return found


def _spread_note(lines: int) -> str:
    """What the lines and bands of a figure are."""
    if lines > vector.MOST_BANDS:
        return " Lines are means over the seeds; the table has their spread."
    return " Lines are means over the seeds, bands their 95 % confidence interval."


def client_figures(report: Report) -> list[str]:
    """Weights and work of the clients, for the first run of each group."""
    found = []
    having = [
        (group.name, run)
        for group in report.groups
        for run in [next((r for r in group.runs if r.rho is not None), None)]
        if run is not None and run.rho is not None and run.rho.size
    ]
    for number, (name, run) in enumerate(having[:_MOST_CLIENTS]):
        assert run.tau is not None and run.rho is not None
        seconds = run.series["virtual_time"] if irregular(run) else None
        if seconds is not None and len(seconds) != len(run.rho):
            seconds = None  # the run goes on, and its files are of two moments
        seed = run.settings.get("seed")
        title = name + (f", seed {seed}" if seed is not None else "")
        label = f"Weights and local iterations of the clients: {title}"
        svg = vector.clients_svg(run.tau, run.rho, seconds, f"clients{number}", label)
        text = f"{title}: mean weight ρ of each client, and its delivered local "
        text += "iterations τ; blank is zero. Right: the share of updates."
        found.append(_figure(svg, text))
    if len(having) > _MOST_CLIENTS:
        text = f"The first {_MOST_CLIENTS} of {len(having)} are shown."
        found.append(markup(tag("p", text, class_="note")))
    return found


def images(report: Report) -> list[str]:
    """Figures that a study wrote, as they are."""
    found = []
    for source in report.sources:
        for path in source.images:
            data = base64.b64encode(path.read_bytes()).decode()
            image = markup(
                tag("img", src=f"data:image/png;base64,{data}", alt=path.stem)
            )
            found.append(_figure(image, f"{path.name}, as the study wrote it."))
    return found
