"""Read finished runs, sweeps and tables of studies from their files, for `page`.

A run that has not finished, or has a damaged file, is left out, and a sentence says so.
"""

import contextlib
import io
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd

from tsfl_jax.config import SEEDS, SETTINGS, flat
from tsfl_jax.report import files, repeat, table
from tsfl_jax.types import UserError

_SAME = ("versions", "device", "backend", "processor")  # of all runs of a sweep
_MOST = 2**26  # bytes of a figure or a table that is embedded
_NUMBERS = {"run", *table.SCORES, *table.COLUMNS}  # results that are a number or null
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
    images: list[tuple[pathlib.Path, bytes]]


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
    runs, missing, commands, tables, images = [], [], [], [], []
    for one in inside:
        name = re.sub(r"^(runs|cells)/", "", one.relative_to(folder).as_posix())
        sweep = not (one / "metrics.jsonl").exists()
        sweep = sweep and not (one / "config.json").exists()
        with _noted(missing):
            parts = _read_sweep(one, name) if sweep else _read_run(one, name)
            runs += parts[0]
            missing += parts[1]
            python = repeat.from_python(parts[0][0].settings) if parts[0] else ""
            command = "" if python else parts[2]
            commands.append(command or f"# {one}: {python or 'see its settings below'}")
    for path in sorted(
        p for p in folder.glob("*.csv") if p.with_suffix(".md").exists()
    ):
        with _noted(missing):
            tables.append(_read_table(path))
    if not runs and not tables:
        why = missing[0] if missing else "holds no run, sweep, comparison or study"
        raise UserError(f"{folder}: {why}")
    drawn_here = {"curves.png"} if folder in inside else set()
    for path in sorted(p for p in folder.glob("*.png") if p.name not in drawn_here):
        with _noted(missing):
            images.append((path, files.read_bytes(path, _MOST)))
    return Source(folder, runs, missing, commands, tables, images)


@contextlib.contextmanager
def _noted(missing: list[str]) -> Iterator[None]:
    """Leave out what cannot be read; `missing` gets a sentence on it."""
    try:
        yield
    except UserError as error:
        missing.append(f"{error}; left out")


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
    settings = flat(config) | {n: summary[n] for n in summary if _is_custom(n)}
    if "custom aggregator" in settings:
        settings["algorithm"] = summary.get("algorithm")
    facts = _facts(summary, folder / "summary.json")
    run = Run(name, str(folder), settings, facts, curves)
    return [run], [], repeat.run_command(settings)


def _is_custom(name: str) -> bool:
    """A setting of a custom component, or the digest of a custom part."""
    return name not in SETTINGS and ("." in name or name.startswith("custom "))


def _facts(facts: dict[str, Any], source: pathlib.Path | str) -> dict[str, Any]:
    """Results of checked types: UserError names the source of others.

    JSON has no number for an infinite loss, but an accuracy beside it.
    """
    for name in _NUMBERS & {*facts}:
        kind = type(facts[name])
        if kind not in (int, float, type(None)):
            what = f"{name} is a {kind.__name__}; expected a number or null"
            raise UserError(f"{source}: {what}")
    notes = facts.get("notes") or []
    if not isinstance(notes, str | list) or not all(isinstance(n, str) for n in notes):
        raise UserError(f"{source}: notes: expected a list of texts")
    tested = facts.get("final_test_accuracy") is not None
    endless = tested and facts.get("final_test_loss") is None
    return facts | {"final_test_loss": float("inf")} if endless else facts


def _read_sweep(folder: pathlib.Path, name: str) -> Parts:
    """The finished runs of a sweep, named after their swept values."""
    try:
        lines = files.read_bytes(folder / "results.jsonl").splitlines()
    except UserError as error:
        raise UserError(f"{folder}: none of the sweep's runs has finished") from error
    rows = [row for row in map(files.parse_json, lines) if row and "run" in row]
    about, missing = files.read_json(folder / "sweep.json") or {}, []
    if len(rows) < len(lines):
        missing.append(f"{folder / 'results.jsonl'}: damaged lines are left out")
    if not about:
        missing.append(f"{folder}: the sweep has not finished; {len(rows)} runs have")
    try:
        frame = pd.read_csv(io.BytesIO(files.read_bytes(folder / "history.csv")))
        names = [n for n in frame if n in SETTINGS or _is_custom(str(n))]
        history = dict(list(frame.drop(columns=names).astype(float).groupby("run")))
    except (UserError, ValueError, KeyError):
        history = {}
        missing.append(f"{folder / 'history.csv'} is missing or damaged: no curves")
    custom = dict.fromkeys(n for row in rows for n in row if _is_custom(n))
    names = [n for n in (*SETTINGS, *custom) if n not in SEEDS]
    swept = [n for n in names if len({str(row.get(n)) for row in rows}) > 1]
    runs = []
    for row in rows:
        place = f"{folder}, run {row['run']}"
        with _noted(missing):
            facts = _facts(row, place)
            curves = history.get(row["run"], pd.DataFrame())
            curves = curves.head(int(row.get("diverged_at") or len(curves)))
            values = ", ".join(f"{n}={repeat.text_of(row.get(n))}" for n in swept)
            prefix = "" if name == "." else name
            label = ": ".join(filter(None, (prefix, values))) or folder.resolve().name
            settings = {n: facts[n] for n in facts if n in SETTINGS or _is_custom(n)}
            facts = {n: v for n, v in facts.items() if n not in settings}
            facts |= {n: about[n] for n in _SAME if n in about}
            facts |= {n: row.get(n) for n in ("algorithm", "data")}
            runs.append(Run(label, place, settings, facts, curves))
    config, points = about.get("config"), about.get("points")
    if not isinstance(config, dict) or not isinstance(points, list):
        return runs, missing, ""
    points = [point for point in points if isinstance(point, dict)]
    return runs, missing, repeat.sweep_command(flat(config), points)


def _read_table(path: pathlib.Path) -> Table:
    """A table that `files.write_table` wrote; UserError where it is damaged."""
    beside = path.with_suffix(".md")
    about, content = (files.read_bytes(p, _MOST) for p in (beside, path))
    try:
        rows = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)
    except ValueError as error:
        raise UserError(f"{path}: no table of comma-separated values") from error
    return Table(path.stem, about.decode(errors="replace").split("\n\n")[0], rows)
