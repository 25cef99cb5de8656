"""``tsfl report runs/X …``: one self-contained HTML file of finished runs.

For folders of runs, sweeps, comparisons and studies. Everything is read from their
files; what is missing there is listed in the page.
"""

import io
import math
import pathlib
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from tsfl_jax import command
from tsfl_jax.config import SEEDS
from tsfl_jax.report import bands, collect, files, paper, table
from tsfl_jax.report.collect import Run
from tsfl_jax.report.statistics import (
    DIVERGED,
    OVER_SEEDS,
    in_time,
    left_out,
    spread_of_times,
    time_to,
)
from tsfl_jax.report.table import Column
from tsfl_jax.types import UserError

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")
_POINTS = 200  # of a line
_ABOUT = ("data", "model", "algorithm")
_PROVENANCE = "fingerprints versions processor device backend num_devices mapping"
_FIGURES = (  # columns of the curves, and names of the axes
    ("interval", "test_accuracy", bands.INTERVAL, bands.ACCURACY),
    ("virtual_time", "test_accuracy", bands.SECONDS, bands.ACCURACY),
    ("interval", "client_accuracy_mean", bands.INTERVAL, "mean over clients in %"),
    ("interval", "client_accuracy_worst", bands.INTERVAL, "worst decile in %"),
    ("interval", "test_loss", bands.INTERVAL, "test loss"),
    ("interval", "train_loss", bands.INTERVAL, "training loss"),
)


def groups_of(runs: Sequence[Run]) -> list[str]:
    """The group of each run: the same for runs that differ in their seeds only."""
    kept = [{n: v for n, v in run.settings.items() if n not in SEEDS} for run in runs]
    keys = pd.DataFrame({"name": [run.name for run in runs], "settings": kept})
    settings = keys["settings"].astype(str).groupby(keys["name"])
    number = settings.transform(lambda own: pd.factorize(own)[0])
    named = zip(keys["name"], number, strict=True)
    return [f"{name} ({i + 1})" if i else name for name, i in named]


def best_target(runs: Sequence[Run]) -> float | None:
    """The highest multiple of 5 % that half of the runs reach; None: there is none."""
    best = [run.facts.get("best_test_accuracy") for run in runs]
    known = [value for value in best if value is not None]
    steps = math.floor(float(np.median(known)) / 0.05 + 1e-9) if known else 0
    return round(0.05 * steps, 2) or None


def frame_of(runs: Sequence[Run], target: float | None) -> pd.DataFrame:
    """The labelled table of runs: a row for each, the quantities of `table.COLUMNS`.

    Args:
      runs: in any order.
      target: test accuracy in (0, 1] for the time to it; None: no such column.
    """
    rows = []
    for run in runs:
        curves = run.curves
        row: dict[str, Any] = dict(diverged_at=None, seed=run.settings.get("seed"))
        row |= {n: v for n, v in run.facts.items() if n in (*table.COLUMNS, *row)}
        row["intervals"] = curves["interval"].max() if len(curves) else math.nan
        if {"virtual_time", "test_accuracy"} <= set(curves):
            row["virtual_time"] = curves["virtual_time"].max()
            tested = curves[["virtual_time", "test_accuracy"]].dropna().to_numpy()
            if target is not None and len(tested):
                row["to_target"] = time_to(target, *tested.T)
        rows.append(row)
    return pd.DataFrame(rows)


def tables_of(
    runs: Sequence[Run], target: float | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table of groups, and that of single runs, as text."""
    frame, names = frame_of(runs, target), groups_of(runs)
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(name, []).append(place)
    more = {}
    if target is not None:
        more["to_target"] = Column(f"s to {100 * target:g} %", cell=spread_of_times)
    single = {str(place): [place] for place in range(len(runs))}
    first = table.summary(frame, groups, more)
    every = table.summary(frame, single, more).drop(columns=["group", "runs"])
    every.insert(0, "run", names)
    every.insert(1, "seed", frame["seed"].astype(str))
    return first, every.assign(files=[run.place for run in runs])


def _distinct(values: pd.Series) -> str:
    """The values of a column, each once."""
    texts = list(dict.fromkeys(map(str, values)))
    more = [f"and {len(texts) - 6} more"] if len(texts) > 6 else []
    return ", ".join(texts[:6] + more)


def notes_of(runs: Sequence[Run]) -> list[str]:
    """Notes of the runs, and which diverged, each once."""
    found = []
    for run in runs:
        notes = run.facts.get("notes") or []
        found += notes.split("; ") if isinstance(notes, str) else notes
        if left_out(run.facts):
            found.append(f"{DIVERGED} in interval {run.facts['diverged_at']}")
    counts = {note: found.count(note) for note in found}
    return [f"{note} ({n} runs)" if n > 1 else note for note, n in counts.items()]


def curves_svg(runs: Sequence[Run], x: str, y: str, labels: tuple[str, str]) -> str:
    """Means of the groups with 95 % confidence bands, as SVG; "" without values.

    Args:
      runs: those that diverged are plotted if there are no others.
      x: column of the curves, ``interval`` or ``virtual_time``.
      y: column of the curves.
      labels: of the axes, as `bands` has them.
    """
    import matplotlib

    labelled = list(zip(groups_of(runs), runs, strict=True))
    good = [pair for pair in labelled if not left_out(pair[1].facts)] or labelled
    lines: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for label, run in good:
        if {x, y} <= set(run.curves) and len(seen := run.curves[[x, y]].dropna()):
            lines.setdefault(label, []).append(tuple(seen.to_numpy(float).T))
    if not lines:
        return ""
    curves = {}
    for label, pairs in lines.items():
        frame = in_time(pairs, forward=x == "virtual_time")
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


def _runs_of(sources: Sequence[collect.Source]) -> list[Run]:
    """The runs of all folders, named after these if there are several."""
    runs = []
    for source in sources:
        own = "" if len(sources) == 1 else f"{source.folder.resolve().name}: "
        runs += [run._replace(name=own + run.name) for run in source.runs]
    return runs


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
    sources = [collect.read_source(path) for path in paths]
    runs = _runs_of(sources)
    facts = pd.DataFrame([run.facts for run in runs])
    values: dict[str, Any] = {
        "title": ", ".join(source.folder.resolve().name for source in sources),
        "what": [_distinct(pd.Series(facts[n])) for n in _ABOUT if n in facts],
        "sources": sources,
        "notes": notes_of(runs),
        "html": _html,
    }
    if runs:
        groups, every = tables_of(runs, best_target(runs) if target is None else target)
        settings = pd.DataFrame([files.plain(run.settings) for run in runs]).map(repr)
        differing = settings.loc[:, settings.nunique() > 1]
        known = [{n: run.facts.get(n) for n in _PROVENANCE.split()} for run in runs]
        values |= {
            "over_seeds": OVER_SEEDS,
            "results": groups,
            "runs": every,
            "differing": differing.groupby(groups_of(runs), sort=False).agg(_distinct),
            "settings": settings.apply(_distinct).to_frame("value"),
            "provenance": pd.json_normalize(known).apply(_distinct).to_frame("value"),
            "figures": [
                (Markup(curves_svg(runs, x, y, (across, up))), f"{up} over {across}")
                for x, y, across, up in _FIGURES
            ],
        }
    images = [image for source in sources for image in source.images]
    values["images"] = [(str(p), b64encode(data).decode()) for p, data in images]
    environment = jinja2.Environment(autoescape=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    # Names of folders may hold bytes that are no text.
    return template.render(values).encode("utf-8", "replace").decode()


def _write_table(folders: list[str], score: str, base: str) -> None:
    """Write the table for a paper, and print it."""
    sources = [collect.read_source(path) for path in folders]
    runs = _runs_of(sources)
    if not runs:
        raise UserError(f"{folders[0]}: holds tables, but no runs to make one of")
    print(paper.write(runs, groups_of(runs), sources[0].folder, score, base))


def main(texts: list[str]) -> None:
    """Write the report of the given folders and print its path."""
    parser = command.make_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", help="of runs, sweeps, comparisons, …")
    parser.add_argument("--out", help="file (default: report.html in the first folder)")
    parser.add_argument(
        "--target", type=float, help="test accuracy in (0, 1] for the time to it"
    )
    about = "instead: table.csv, table.md and table.tex in the first folder"
    parser.add_argument("--table", action="store_true", help=about)
    about = "of --table: the group that others are compared with, or a part of its name"
    parser.add_argument("--base", default="", metavar="GROUP", help=about)
    about = "of --table (default: final_test_accuracy)"
    parser.add_argument("--score", metavar="NAME", default="", help=about)
    given = parser.parse_args(texts)
    if given.table:
        _write_table(given.folders, given.score or "final_test_accuracy", given.base)
        return
    if given.base or given.score:
        raise UserError("--base and --score belong to --table")
    if given.target is not None and not 0 < given.target <= 1:
        raise UserError(
            f"--target={given.target}: expected an accuracy in (0, 1], like 0.9"
        )
    default = pathlib.Path(given.folders[0]) / "report.html"
    out = files.folder_of(given.out or default, "--out")
    text = make_page(given.folders, given.target)
    files.prepare_workdir(out.parent, "--out")
    files.write_text(out, text)
    print(out)
