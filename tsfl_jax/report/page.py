"""``tsfl report runs/X …``: one self-contained HTML file of finished or running runs.

For folders of runs, sweeps, comparisons and studies. Everything is read from their
files; what is missing there is listed in the page.
"""

import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tsfl_jax import command
from tsfl_jax.config import SEEDS, SETTINGS, Config, get
from tsfl_jax.report import collect, elements, files, repeat, vector
from tsfl_jax.report.collect import Run
from tsfl_jax.report.elements import Cell, markup, tag
from tsfl_jax.report.groups import (
    Group,
    Report,
    best_target,
    grouped,
    lost,
    moved_bytes,
    score,
    seen_values,
    stopped,
)
from tsfl_jax.report.page_figures import client_figures, curve_figures, images
from tsfl_jax.report.statistics import (
    DIVERGED,
    OVER_SEEDS,
    STOPPED,
    left_out,
    spread_of_known,
    spread_of_times,
    time_to,
)
from tsfl_jax.report.style import NAMES
from tsfl_jax.types import UserError

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")
_MOST_ROWS = 2000  # of a table
_MOST_COLUMNS = 8  # groups beside each other in the table of settings


def _readable(count: float) -> str:
    """A number of bytes as text."""
    if not math.isfinite(count):
        return "–"
    units = ["B", "kB", "MB", "GB", "TB"]
    index = min(int(math.log10(max(count, 1)) // 3), len(units) - 1)
    return f"{count / 1000**index:.4g} {units[index]}"


def _mean_cell(values: Sequence[float], form: str) -> Cell:
    """Mean ± spread of what is known; of infinite values, how many there are."""
    known = [value for value in values if not math.isnan(value)]
    mean = float(np.mean(known)) if known else math.nan
    order = "Infinity" if math.isinf(mean) else repr(mean)
    return Cell(spread_of_known(known, form), order if known else "", True)


def _same_cell(values: Sequence[float]) -> Cell:
    """A value that most often is the same in all runs."""
    if len(set(values)) == 1 and math.isfinite(values[0]):
        return Cell(f"{values[0]:.10g}", repr(values[0]), True)
    return _mean_cell(values, ".4g")


def _time_cell(runs: Sequence[Run], target: float | None) -> Cell:
    """Virtual seconds until the target accuracy."""
    times = []
    for run in runs:
        index, accuracy = seen_values(run)
        seconds = run.series.get("virtual_time", np.zeros(0))
        if target is not None and len(accuracy) and len(seconds):
            times.append(time_to(target, seconds[index], accuracy))
    if not times:
        return Cell("–", "", True)
    reached = np.array(times)
    order = "Infinity" if np.isinf(reached).any() else repr(float(reached.mean()))
    return Cell(spread_of_times(reached), order, True)


def _last(run: Run, column: str) -> float:
    values = run.series.get(column, np.zeros(0))
    return float(values[-1]) if len(values) else math.nan


def _result_cells(runs: Sequence[Run], target: float | None) -> list[Cell]:
    """Results of runs: those that diverged or stopped are counted, and in no mean."""
    good = [run for run in runs if not left_out(run.facts)]
    best, final = (
        [100 * score(run, f"{which}_test_accuracy") for run in good]
        for which in ("best", "final")
    )
    loss = [score(run, "final_test_loss") for run in good]
    intervals = [_last(run, "interval") for run in runs]
    seconds = [_last(run, "virtual_time") for run in runs]
    moved = [b for b in map(moved_bytes, runs) if math.isfinite(b)]
    mean = float(np.mean(moved)) if moved else math.nan
    return [
        _mean_cell(final, ".2f"),
        _mean_cell(best, ".2f"),
        _mean_cell(loss, ".4g"),
        _same_cell(intervals),
        _same_cell(seconds),
        _time_cell(good, target),
        Cell(_readable(mean), repr(mean) if moved else "", True),
        Cell(str(sum(map(lost, runs))), None, True),
        Cell(str(sum(map(stopped, runs))), None, True),
    ]


def _heads(target: float | None) -> list[str]:
    reach = "s to target" if target is None else f"s to {100 * target:g} %"
    heads = [
        "final accuracy,\u00a0%",
        "best accuracy,\u00a0%",
        "final loss",
        "intervals",
    ]
    heads += ["virtual time,\u00a0s", reach, "bytes moved"]
    return [*heads, DIVERGED, STOPPED]


def results(report: Report) -> str:
    """The table of groups, and that of all runs where they are not the same."""
    rows = []
    for index, (name, runs, look) in enumerate(report.groups):
        seeds = sorted({str(run.settings.get("seed", "?")) for run in runs}, key=_order)
        listed = f"{len(runs)}" + (f" ({', '.join(seeds)})" if len(seeds) < 6 else "")
        mark = vector.swatch(look) if index < vector.MOST_LINES else ""
        first = [Cell(name, name, before=mark)]
        first.append(Cell(listed, str(len(runs)), True))
        rows.append(first + _result_cells(runs, report.target))
    heads = _heads(report.target)
    parts = [_without_empty(["run", "seeds", *heads], rows[:_MOST_ROWS], "results")]
    parts.append(_cut(len(rows)))
    runs = [(group.name, run) for group in report.groups for run in group.runs]
    if len(runs) > len(report.groups):
        every = [
            [Cell(name), Cell(str(run.settings.get("seed", "?")), None, True)]
            + _result_cells([run], report.target)
            + [Cell(run.place)]
            for name, run in runs[:_MOST_ROWS]
        ]
        inner = _without_empty(["run", "seed", *heads, "place"], every, "runs")
        parts.append(elements.details(f"All {len(runs)} runs", inner, _cut(len(runs))))
    return elements.section("results-part", "Results", *parts, _notes_on(report))


def _without_empty(head: list[str], rows: list[list[Cell]], name: str) -> str:
    """A table without columns that say nothing; the notes below it say which."""
    kept = [
        i
        for i, title in enumerate(head)
        if not (
            title in (DIVERGED, STOPPED) and all(row[i].text == "0" for row in rows)
        )
        and not (title == "bytes moved" and all(row[i].text == "–" for row in rows))
    ]
    cells = [[row[i] for i in kept] for row in rows]
    return elements.table([head[i] for i in kept], cells, name)


def _order(text: str) -> tuple:
    return (not text.isdigit(), int(text) if text.isdigit() else 0, text)


def _cut(count: int) -> str:
    if count <= _MOST_ROWS:
        return ""
    text = f"The first {_MOST_ROWS} of {count} lines; the folders have all of them."
    return markup(tag("p", text, class_="note"))


def _share_seeds(group: Group) -> bool:
    """Whether runs of a group have one of several seeds in common."""
    values = {n: [run.settings.get(n) for run in group.runs] for n in SEEDS}
    several = [found for found in values.values() if len(set(found)) > 1]
    return len(several) > 1 and any(len(set(v)) < len(v) for v in several)


def _notes_on(report: Report) -> str:
    """What the columns mean."""
    text = f"Cells are {OVER_SEEDS}; runs that diverged are in no mean of a result. "
    if report.target is None:
        text += "No test accuracy was measured, so there is no target to reach. "
    elif report.chosen:
        text += f"The target {100 * report.target:g} % is the highest multiple of 5 % "
        text += "that half of the runs reach; --target chooses another one. "
    runs = [run for group in report.groups for run in group.runs]
    if not any(map(lost, runs)):
        text += "No run diverged. "
    if any(map(stopped, runs)):
        text += "Runs that a race stopped before their end are in no mean of a result, "
        text += "either. "
    if any(map(_share_seeds, report.groups)):
        text += "Runs that share a seed are not independent: where several seeds are "
        text += "swept, intervals are too narrow. "
    if any(math.isfinite(moved_bytes(run)) for run in runs):
        text += "Bytes moved are estimated: a float32 model down and up for each "
        text += "delivery that counted, with SCAFFOLD's control variates."
    else:
        text += "Bytes moved are not known: the files do not say how large the model "
        text += "is, or who delivered."
    return markup(tag("p", text, class_="note"))


def _value(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def settings(report: Report) -> str:
    """What differs between the groups, and a list of all settings."""
    names = dict.fromkeys(
        n for group in report.groups for run in group.runs for n in run.settings
    )
    if not names:
        return ""
    values = {
        name: [
            sorted(
                {_value(run.settings.get(name, "?")) for run in group.runs}, key=_order
            )
            for group in report.groups
        ]
        for name in names
    }
    differ = [n for n in names if len({v for own in values[n] for v in own}) > 1]
    parts = []
    if differ and len(report.groups) <= _MOST_COLUMNS:
        rows = [[Cell(n), *(Cell(", ".join(v)) for v in values[n])] for n in differ]
        head = ["setting", *(group.name for group in report.groups)]
        parts.append(elements.table(head, rows, "differing"))
    elif differ:
        every = {n: dict.fromkeys(v for own in values[n] for v in own) for n in differ}
        rows = [[Cell(n), Cell(", ".join(every[n]))] for n in differ]
        parts.append(elements.table(["setting", "values"], rows, "differing"))
    elif sum(len(group.runs) for group in report.groups) > 1:
        parts.append(markup(tag("p", "All runs have the same settings.")))
    default = files.plain({n: get(Config(), n) for n in SETTINGS})
    rows = []
    for name in names:
        every = ", ".join(dict.fromkeys(v for own in values[name] for v in own))
        usual = _value(default.get(name, "–"))
        rows.append([Cell(name), Cell(every), Cell("" if usual == every else usual)])
    head = ["setting", "value", "default, where it differs"]
    table = elements.table(head, rows, "all-settings")
    parts.append(elements.details(f"All {len(names)} settings", table))
    return elements.section("settings", "Settings", *parts)


def _distinct(report: Report, name: str, inner: str = "") -> dict[str, int]:
    """Values of a fact, with the number of runs that have each."""
    found: dict[str, int] = {}
    for group in report.groups:
        for run in group.runs:
            value = run.facts.get(name)
            if inner:
                value = value.get(inner) if isinstance(value, dict) else None
            text = "not recorded" if value in (None, "") else str(value)
            found[text] = found.get(text, 0) + 1
    return found


def _counted(found: dict[str, int]) -> str:
    if len(found) == 1:
        return next(iter(found))
    few = [f"{text} ({n} run{'s' * (n > 1)})" for text, n in list(found.items())[:6]]
    more = f", and {len(found) - 6} more" if len(found) > 6 else ""
    return ", ".join(few) + more


def provenance(report: Report) -> str:
    """Fingerprints, versions, processor and the command lines."""
    facts = [run.facts for group in report.groups for run in group.runs]
    if not facts:
        return ""
    rows = []
    for name, title in (
        ("fingerprints", "fingerprint of the"),
        ("versions", "version"),
    ):
        inner = dict.fromkeys(
            key
            for fact in facts
            if isinstance(fact.get(name), dict)
            for key in fact[name]
        )
        if not inner:
            rows.append([Cell(name), Cell("not recorded")])
        for key in inner:
            title_of = (
                "program (git commit)" if key == "git_commit" else f"{title} {key}"
            )
            rows.append([Cell(title_of), Cell(_counted(_distinct(report, name, key)))])
    for name in ("processor", "device", "backend", "num_devices", "mapping"):
        rows.append([Cell(name), Cell(_counted(_distinct(report, name)))])
    table = elements.table(["what", "value"], rows)
    return elements.section("provenance", "Provenance", table, _commands(report))


def _commands(report: Report) -> str:
    """How to repeat each sweep and run."""
    known, lines = repeat.known_settings(), []
    for source in report.sources:
        if source.kind == collect.SWEEP:
            line = repeat.sweep_command(source.config, source.points, known)
            lines.append(line or f"# {source.folder}: see the points in sweep.json")
            continue
        for run in source.runs:
            line = repeat.run_command(run.settings, known)
            lines.append(line or f"# {run.place}: its settings are not known")
    whole = markup(tag("pre", tag("code", "\n".join(lines[:_MOST_ROWS]))))
    if len(lines) > 3:
        whole = elements.details(f"{len(lines)} command lines", whole)
    text = "To repeat, in a new folder; models, data and rules that were given from "
    text += "Python are not part of a command line."
    own = markup(tag("h3", "Command line"))
    return f"{own}{markup(tag('p', text, class_='note'))}{whole}"


def tables(report: Report) -> str:
    """The tables that studies wrote."""
    parts, number = [], 0
    for source in report.sources:
        for name, head, rows in source.tables:
            if not rows:
                continue
            number += 1
            cells = [[_study_cell(v) for v in row.values()] for row in rows]
            parts.append(
                markup(tag("h3", name)) + markup(tag("p", head, class_="note"))
            )
            parts.append(elements.table(list(rows[0]), cells, f"study-{number}"))
    return elements.section("tables", "Tables of the study", *parts)


def _study_cell(text: str) -> Cell:
    """A cell that is sorted by the number that it begins with."""
    first = text.replace("−", "-").split(" ")[0]
    try:
        float(first)
    except ValueError:
        return Cell(text)
    return Cell(text, first, True)


def _title(report: Report) -> str:
    """What was run, in a line."""
    if len(report.sources) > 1:
        return f"{len(report.sources)} folders: " + ", ".join(
            source.folder.resolve().name for source in report.sources
        )
    source = report.sources[0]
    name = source.folder.resolve().name
    return f"{source.kind.capitalize()}: {name}"


def overview(report: Report) -> str:
    """The head of the page: title, what was run, when, and what is missing."""
    runs = [run for group in report.groups for run in group.runs]
    words = []
    for fact in ("data", "model", "algorithm"):
        known = [text for text in _distinct(report, fact) if text != "not recorded"]
        names = [NAMES.get(text, text) for text in known]
        some = f", and {len(names) - 6} more" if len(names) > 6 else ""
        words.append(", ".join(names[:6]) + some)
    clients = {
        str(r.settings["num_clients"]) for r in runs if "num_clients" in r.settings
    }
    words.append(f"{', '.join(sorted(clients, key=_order))} clients" if clients else "")
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    if len(report.groups) != len(runs):
        count += f" in {len(report.groups)} groups that differ in more than the seed"
    line = "; ".join(filter(None, [*words, count]))
    parts = [markup(tag("h1", _title(report))), markup(tag("p", line))]
    times = [_changed(source.folder) for source in report.sources]
    where = "; ".join(
        f"{source.folder}, last changed {at}"
        for source, at in zip(report.sources, times, strict=True)
    )
    parts.append(markup(tag("p", where, class_="sub")))
    missing = [text for source in report.sources for text in source.missing]
    for title, kind, texts in (
        ("Missing in these folders", "missing", missing),
        ("Notes of the runs", "notes", _notes(runs)),
    ):
        if texts:
            shown = [tag("li", text) for text in texts[:20]]
            if len(texts) > 20:
                shown.append(tag("li", f"and {len(texts) - 20} more"))
            parts.append(
                markup(
                    tag("aside", tag("strong", title), tag("ul", *shown), class_=kind)
                )
            )
    return f"<header>{''.join(parts)}</header>"


def _notes(runs: Sequence[Run]) -> list[str]:
    """Notes, divergences and stops."""
    found: dict[str, int] = {}
    for run in runs:
        notes = run.facts.get("notes") or []
        notes = notes.split("; ") if isinstance(notes, str) else notes
        if lost(run):
            notes = [*notes, f"Diverged in interval {run.facts['diverged_at']}."]
        if stopped(run):
            at = run.facts["stopped_at"]
            notes = [*notes, f"Stopped by a race after {at} intervals."]
        for note in notes if isinstance(notes, list) else []:
            found[str(note)] = found.get(str(note), 0) + 1
    return [f"{t} ({n} runs)" if n > 1 else t for t, n in found.items()]


def _changed(folder: pathlib.Path) -> str:
    """When the newest result file of a folder was written."""
    names = ("summary.json", "results.jsonl", "metrics.jsonl")
    found = [p for p in (folder / n for n in names) if p.is_file()] or [folder]
    newest = max(path.stat().st_mtime for path in found)
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(newest))


def make_page(paths: Sequence[str | pathlib.Path], target: float | None = None) -> str:
    """The report of some folders as HTML.

    Args:
      paths: folders of runs, sweeps, comparisons, studies, or of several of them.
      target: test accuracy in (0, 1] for the time to it; None chooses.

    Returns:
      The whole page, which needs no other file.

    Raises:
      UserError: a folder that holds none of them.
    """
    sources = [collect.read_source(path) for path in paths]
    groups = grouped(sources)
    chosen = target is None
    report = Report(sources, groups, best_target(groups) if chosen else target, chosen)
    figures = [*curve_figures(report), *images(report)]
    clients = client_figures(report)
    parts = {
        "results-part": results(report) if groups else "",
        "tables": tables(report),
        "figures": elements.section("figures", "Figures", elements.grid(figures)),
        "clients": elements.section("clients", "Clients", elements.grid(clients)),
        "settings": settings(report),
        "provenance": provenance(report),
    }
    titles = {"results-part": "Results", "tables": "Tables", "figures": "Figures"}
    titles |= {"clients": "Clients", "settings": "Settings"}
    titles |= {"provenance": "Provenance"}
    links = [tag("a", titles[n], href=f"#{n}") for n, text in parts.items() if text]
    footer = markup(tag("footer", "Made by tsfl report from the files of the folders."))
    body = [overview(report), markup(tag("nav", *links)), *parts.values(), footer]
    template = _TEMPLATE.read_text(encoding="utf-8")
    return elements.fill(template, _title(report), "\n".join(filter(None, body)))


def main(texts: list[str]) -> None:
    """Write the report of the given folders and print its path."""
    parser = command.make_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", help="of runs, sweeps, comparisons, …")
    parser.add_argument("--out", help="file to write (default: FOLDER/report.html)")
    parser.add_argument(
        "--target", type=float, help="test accuracy in (0, 1] for the time to it"
    )
    given = parser.parse_args(texts)
    if given.target is not None and not 0 < given.target <= 1:
        raise UserError(
            f"--target={given.target}: expected an accuracy in (0, 1], like 0.9"
        )
    if not given.out and len(given.folders) > 1:
        raise UserError(
            f"{len(given.folders)} folders: say where to write with --out=FILE.html"
        )
    out = pathlib.Path(given.out or pathlib.Path(given.folders[0]) / "report.html")
    out = out.expanduser()
    if out.is_dir():
        raise UserError(f"--out={out}: is a folder; expected a file, like {out}/x.html")
    text = make_page(given.folders, given.target)
    files.prepare_workdir(out.parent, "--out")
    files.write_text(out, text)
    print(out)
