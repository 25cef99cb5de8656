"""Read finished runs, sweeps and tables of studies from their files, for `page`.

A run that has not finished, or has a damaged file, is left out, and a sentence says so.
"""

import pathlib
import re
from typing import Any, NamedTuple

import pandas as pd

from tsfl_jax.config import SEEDS, SETTINGS, flat
from tsfl_jax.report import files, repeat
from tsfl_jax.types import UserError

_SAME = ("versions", "device", "backend", "processor")  # of all runs of a sweep
Parts = tuple[list["Run"], list[str], str]  # runs, what is missing, the command


class Run(NamedTuple):
    """A finished run, alone or of a sweep."""

    name: str  # without the seed
    place: str  # where its files are
    settings: dict[str, Any]  # flat, plain values
    facts: dict[str, Any]  # results and provenance, as in summary.json
    curves: pd.DataFrame  # a row per interval, columns as in metrics.jsonl


class Table(NamedTuple):
    """A table that a study wrote."""

    name: str
    about: str  # the text above it
    rows: pd.DataFrame  # of strings


class Source(NamedTuple):
    """What one of the given folders holds."""

    folder: pathlib.Path
    runs: list[Run]
    missing: list[str]  # sentences
    commands: list[str]  # that repeat the runs and sweeps
    tables: list[Table]
    images: list[pathlib.Path]


def read_source(path: str | pathlib.Path) -> Source:
    """Read the runs, sweeps and tables in a folder and below it.

    Raises:
      UserError: there is no such folder, or nothing in it has finished.
    """
    folder = files.folder_of(path)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise UserError(f"{folder}: {what}; expected the folder of a run or sweep")
    marks = ("config.json", "metrics.jsonl", "results.jsonl", "lanes")
    found = (p for name in marks for p in folder.rglob(name))
    # A study may have a sweep that is named lanes.
    inside = sorted({p.parent for p in found if not (p / "lanes").is_dir()})
    runs, missing, commands = [], [], []
    for one in inside:
        name = re.sub(r"^(runs|cells)/", "", one.relative_to(folder).as_posix())
        sweep = not (one / "metrics.jsonl").exists()
        sweep = sweep and not (one / "config.json").exists()
        try:
            parts = _read_sweep(one, name) if sweep else _read_run(one, name)
        except UserError as error:
            missing.append(f"{error}; left out")
            continue
        runs, missing = [*runs, *parts[0]], [*missing, *parts[1]]
        commands.append(parts[2] or f"# {one}: see its settings below")
    tables = list(filter(None, map(_read_table, sorted(folder.glob("*.csv")))))
    if not runs and not tables:
        why = missing[0] if missing else "holds no run, sweep, comparison or study"
        raise UserError(f"{folder}: {why}")
    drawn_here = {"curves.png"} if folder in inside else set()
    images = [p for p in sorted(folder.glob("*.png")) if p.name not in drawn_here]
    return Source(folder, runs, missing, commands, tables, images)


def _read_run(folder: pathlib.Path, name: str) -> Parts:
    """A single run; UserError where a file is missing or damaged."""
    config, summary = (
        files.read_json(folder / f"{part}.json") for part in ("config", "summary")
    )
    if summary is None:
        raise UserError(
            f"{folder} has not finished: its summary.json is missing or damaged"
        )
    if config is None:
        raise UserError(f"{folder / 'config.json'} is missing or damaged")
    curves = pd.DataFrame(files.read_metrics(folder / "metrics.jsonl")).astype(float)
    name = folder.resolve().name if name == "." else name
    name = re.sub(r"[-_]seed\d+(-\d{8}-\d{4}(-\d+)?)?$", "", name)
    settings = flat(config)
    run = Run(name, str(folder), settings, _facts(summary), curves)
    return [run], [], repeat.run_command(settings)


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for an infinite loss, but an accuracy beside it."""
    tested = facts.get("final_test_accuracy") is not None
    endless = tested and facts.get("final_test_loss") is None
    return facts | {"final_test_loss": float("inf")} if endless else facts


def _read_sweep(folder: pathlib.Path, name: str) -> Parts:
    """The finished runs of a sweep, named after their swept values."""
    try:
        text = (folder / "results.jsonl").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: none of the sweep's runs has finished") from error
    rows = [row for row in map(files.parse_json, text.splitlines()) if row]
    about, missing = files.read_json(folder / "sweep.json") or {}, []
    if len(rows) < len(text.splitlines()):
        missing.append(f"{folder / 'results.jsonl'}: damaged lines are left out")
    if not about:
        missing.append(f"{folder}: the sweep has not finished; {len(rows)} runs have")
    try:
        history = dict(list(pd.read_csv(folder / "history.csv").groupby("run")))
    except (OSError, ValueError, KeyError):
        history = {}
        missing.append(f"{folder / 'history.csv'} is missing or damaged: no curves")
    names = [n for n in SETTINGS if n not in SEEDS]
    swept = [n for n in names if len({str(row.get(n)) for row in rows}) > 1]
    runs = []
    for row in rows:
        number = row.get("run")
        curves = history.get(number, pd.DataFrame())
        curves = curves.head(row.get("diverged_at") or len(curves))
        values = ", ".join(f"{n}={repeat.text_of(row.get(n))}" for n in swept)
        prefix = "" if name == "." else name
        label = ": ".join(filter(None, (prefix, values))) or folder.resolve().name
        facts = {n: v for n, v in row.items() if n not in SETTINGS}
        facts |= {n: about[n] for n in _SAME if n in about}
        facts |= {n: row.get(n) for n in ("algorithm", "data")}
        settings = {n: v for n, v in row.items() if n in SETTINGS}
        place = f"{folder}, run {number}"
        runs.append(Run(label, place, settings, _facts(facts), curves))
    points = about.get("points", [])
    return runs, missing, repeat.sweep_command(flat(about.get("config", {})), points)


def _read_table(path: pathlib.Path) -> Table | None:
    """A table that `files.write_table` wrote; None for other files."""
    beside = path.with_suffix(".md")
    if not beside.is_file():
        return None
    about = beside.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    return Table(path.stem, about, rows)
