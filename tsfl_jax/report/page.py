"""``tsfl report runs/X …``: one self-contained HTML file of runs.

For folders of runs, sweeps, comparisons and studies. Everything is read from their
files; what is missing there is listed in the page.
"""

import collections
import io
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from tsfl_jax import command
from tsfl_jax.config import SEEDS
from tsfl_jax.report import bands, collect, files, paper, statistics, table
from tsfl_jax.report.collect import Run
from tsfl_jax.types import UserError

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")
_POINTS = 200  # of a line
_PROVENANCE = "fingerprints versions processor device backend num_devices mapping"
_FIGURES = (  # columns of the curves, and names of the axes
    ("interval", "test_accuracy", bands.INTERVAL, bands.ACCURACY),
    ("virtual_time", "test_accuracy", bands.SECONDS, bands.ACCURACY),
    ("interval", "client_accuracy_mean", bands.INTERVAL, "mean over clients in %"),
    ("interval", "client_accuracy_worst", bands.INTERVAL, "worst decile in %"),
    ("interval", "test_loss", bands.INTERVAL, "test loss"),
    ("virtual_time", "test_loss", bands.SECONDS, "test loss"),
    ("interval", "train_loss", bands.INTERVAL, "training loss"),
    ("interval", "spent_epsilon", bands.INTERVAL, "ε so far"),
)
_CAPTIONS = {
    "participation.png": "how often each client counts, with what weight and work",
    "timeline.png": "timeline of the first updates",
}


def read_groups(
    paths: Sequence[str | pathlib.Path],
) -> tuple[list[collect.Source], list[Run]]:
    """Read some folders, and name their runs after the groups that a table shows.

    Runs of one group differ in their seeds only. With several folders the group begins
    with the folder; groups of one name that differ in other settings are numbered.

    Raises:
      UserError: a folder that holds nothing that has finished.
    """
    sources = [collect.read_source(path) for path in paths]
    runs: list[Run] = []
    numbers: dict[str, dict[str, int]] = {}  # of the groups of a name, by settings
    for source in sources:
        folder = f"{source.folder.resolve().name}: " if len(sources) > 1 else ""
        for run in source.runs:
            name = f"{folder}{run.name}"
            text = str({n: v for n, v in run.settings.items() if n not in SEEDS})
            groups = numbers.setdefault(name, {})
            number = groups.setdefault(text, len(groups) + 1)
            runs.append(run._replace(name=f"{name} ({number})" * (number > 1) or name))
    return sources, runs


def _best_target(runs: Sequence[Run]) -> float | None:
    """The highest multiple of 5 % that half of the runs reach; None: there is none."""
    best = pd.Series([run.facts.get("best_test_accuracy") for run in runs], dtype=float)
    steps = int(np.nan_to_num(best.median() / 0.05 + 1e-9))
    return round(0.05 * steps, 2) or None


def _results_of(runs: Sequence[Run], target: float | None) -> dict[str, Any]:
    """Of finished runs: tables of groups and of single runs, and whence they come."""
    target = _best_target(runs) if target is None else target
    frame = pd.DataFrame([collect.results_of(run, target) for run in runs])
    names = pd.Series([run.name for run in runs])
    groups = {n: np.flatnonzero(names == n).tolist() for n in names.unique()}
    columns = table.COLUMNS | {table.TARGET: table.column_of(table.TARGET, target)}
    single = table.summary(frame, {str(i): [i] for i in frame.index}, columns)
    single = single.assign(group=names, runs=[run.settings.get("seed") for run in runs])
    single = single.rename(columns={"group": "run", "runs": "seed"})
    origins = [{n: run.facts.get(n) for n in _PROVENANCE.split()} for run in runs]
    python = "# {}: of a Python program"
    commands = [r.facts.get("command") or python.format(r.place) for r in runs]
    return {
        "over_seeds": statistics.OVER_SEEDS,
        "target": target,
        "results": table.summary(frame, groups, columns),
        "runs": single.assign(files=[run.place for run in runs]),
        "commands": dict.fromkeys(commands),
        "provenance": pd.json_normalize(origins).apply(_distinct).to_frame("value"),
    }


def _curves_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Of all runs: settings and curves."""
    is_timed, names = _is_timed(runs), [run.name for run in runs]
    settings = pd.DataFrame([files.plain(run.settings) for run in runs]).map(repr)
    differing = settings.loc[:, settings.nunique() > 1]
    return {
        "differing": differing.groupby(names, sort=False).agg(_distinct),
        "settings": settings.apply(_distinct).to_frame("value"),
        "figures": [
            (Markup(_curves_svg(runs, x, y, (across, up))), f"{up} over {across}")
            for x, y, across, up in _FIGURES
            if is_timed or x == "interval"
        ],
    }


def _distinct(values: pd.Series) -> str:
    """The values of a column, each once."""
    texts = list(dict.fromkeys(map(str, values)))
    return ", ".join(texts[:6] + [f"and {len(texts) - 6} more"] * (len(texts) > 6))


def _notes_of(runs: Sequence[Run]) -> list[str]:
    """Notes of the runs, and which diverged, each once."""
    notes = [str(note) for run in runs for note in run.facts["notes"]]
    lost = [run.facts for run in runs if statistics.has_diverged(run.facts)]
    notes += [f"diverged in interval {facts['diverged_at']:g}" for facts in lost]
    counts = collections.Counter(notes)
    return [f"{note} ({n} runs)" if n > 1 else note for note, n in counts.items()]


def _is_timed(runs: Sequence[Run]) -> bool:
    """Whether the virtual time is not in proportion to the interval in all curves."""
    columns = ["virtual_time", "interval"]
    curves = pd.concat([run.curves for run in runs]).reindex(columns=columns)
    lengths = (curves["virtual_time"] / curves["interval"]).dropna()
    return len(lengths) > 0 and bool(np.ptp(lengths) > 1e-6 * lengths.max())


def _curves_svg(runs: Sequence[Run], x: str, y: str, labels: tuple[str, str]) -> str:
    """Column y of the groups' curves over column x, as SVG; "" without values."""
    import matplotlib

    lines: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    # Runs that diverged are plotted if there are no others.
    for run in [run for run in runs if not statistics.has_diverged(run.facts)] or runs:
        if {x, y} <= set(run.curves) and len(seen := run.curves[[x, y]].dropna()):
            lines.setdefault(run.name, []).append(tuple(seen.to_numpy(float).T))
    if not lines:
        return ""
    curves = {}
    for label, pairs in lines.items():
        frame = statistics.in_time(pairs, forward=x == "virtual_time")
        places = np.linspace(0, len(frame) - 1, _POINTS).astype(int)
        curves[label] = frame.iloc[np.unique(places)]
    figure = bands.bands(curves, "", x=labels[0], y=labels[1])
    buffer = io.StringIO()
    # The salt distinguishes the ids of the figures; the same files give the same page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": x + y}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _html(frame: pd.DataFrame, **options: Any) -> Markup:
    """A table as HTML, its text escaped; "" without columns."""
    with pd.option_context("display.max_colwidth", None):
        text = frame.to_html(border=0, na_rep="–", **options)
    return Markup(text if frame.shape[1] else "")


def make_page(paths: Sequence[str | pathlib.Path], target: float | None = None) -> str:
    """The report of some folders as HTML.

    Args:
      paths: folders of runs, sweeps, comparisons, studies, or of several of them.
      target: test accuracy in (0, 1] for the time to it; None chooses.

    Returns:
      The whole page, which needs no other file.

    Raises:
      UserError: a folder that holds nothing that has finished.
    """
    sources, runs = read_groups(paths)
    values: dict[str, Any] = {
        "title": ", ".join(source.folder.resolve().name for source in sources),
        "sources": sources,
        "notes": _notes_of(runs),
        "captions": _CAPTIONS,
        "html": _html,
    }
    values |= _curves_of(runs) if runs else {}
    finished = [run for run in runs if run.is_finished]
    values |= _results_of(finished, target) if finished else {}
    environment = jinja2.Environment(autoescape=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    # Names of folders may hold bytes that are no text.
    return template.render(values).encode("utf-8", "replace").decode()


def main(texts: list[str]) -> None:
    """Write the report of the given folders and print its path."""
    parser = command.make_parser("report", __doc__)
    add = parser.add_argument
    add("folders", nargs="+", help="of runs, sweeps, comparisons, …")
    add("--out", help="file (default: report.html in the first folder)")
    add("--target", type=float, help="test accuracy in (0, 1] for the time to it")
    text = "instead: table.csv, table.md and table.tex in the first folder"
    add("--table", action="store_true", help=text)
    text = "of --table: the group that others are compared with, or a part of its name"
    add("--base", default="", metavar="GROUP", help=text)
    text = "of --table: a result, time_to_target, or a metric for its last value "
    text += "(default: %(default)s)"
    add("--score", metavar="NAME", default="final_test_accuracy", help=text)
    options = parser.parse_args(texts)
    if options.target is not None and not 0 < options.target <= 1:
        raise UserError(
            f"--target={options.target}: expected an accuracy in (0, 1], like 0.9"
        )
    if options.table:
        sources, runs = read_groups(options.folders)
        runs = [run for run in runs if run.is_finished]
        for line in (line for source in sources for line in source.missing):
            print(line, file=sys.stderr)
        choices = options.score, options.base, options.target or _best_target(runs)
        print(paper.write(runs, sources[0].folder, *choices))
        return
    default = pathlib.Path(options.folders[0]) / "report.html"
    out = files.folder_of(options.out or default, "--out")
    page = make_page(options.folders, options.target)
    files.prepare_workdir(out.parent, "--out")
    files.write_text(out, page)
    print(out)
