"""Read runs, sweeps and tables of studies from their files, for `page`.

A run with a damaged file is left out, one that has not finished has curves only, and a
sentence says so.
"""

import contextlib
import io
import math
import pathlib
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tsfl_jax.config import SEEDS, SETTINGS, flat
from tsfl_jax.report import files, statistics, table
from tsfl_jax.types import UserError, user_code

_SAME = ("versions", "device", "backend", "processor", "command")  # of a sweep
_NUMBERS = {"run", *table.SCORES, *table.COLUMNS}  # results that are a number or null
_FILES = ("config.json", "metrics.jsonl", "results.jsonl", "lanes")  # of runs, sweeps


class Run(NamedTuple):
    """A run, alone or a finished one of a sweep."""

    name: str  # without the seed
    place: str  # where its files are
    settings: dict[str, Any]  # flat, plain values
    facts: dict[str, Any]  # results and provenance, as in summary.json
    curves: pd.DataFrame  # a row per interval, columns as in metrics.jsonl
    is_finished: bool = True


class Table(NamedTuple):
    """A table that a study wrote."""

    name: str
    head: str  # the text above it
    rows: pd.DataFrame  # of strings


class Source(NamedTuple):
    """What one folder and those below it hold."""

    folder: pathlib.Path
    runs: list[Run]
    missing: list[str]  # sentences
    tables: list[Table]
    images: list[tuple[pathlib.Path, str]]  # in base64


def read_source(path: str | pathlib.Path) -> Source:
    """Read the runs, sweeps and tables in a folder and below it.

    Images are those of the folder, and of the only run below it.

    Raises:
      UserError: there is no such folder, or no run and no table in it can be read.
    """
    folder = files.folder_of(path)
    source = Source(folder, [], [], [], [])
    paths = (p for name in _FILES for p in folder.rglob(name))
    # A study may have a sweep that is named lanes.
    inside = sorted({p.parent for p in paths if not (p / "lanes").is_dir()})
    for place in inside:
        name = re.sub(r"^(runs|cells)/", "", place.relative_to(folder).as_posix())
        is_run = any((place / n).exists() for n in ("metrics.jsonl", "config.json"))
        with _noted(source.missing):
            (_read_run if is_run else _read_sweep)(place, name, source)
    for text in sorted(folder.glob("*.md")):
        if text.with_suffix(".csv").exists():
            with _noted(source.missing):
                source.tables.append(_read_table(text))
    if not source.runs and not source.tables:
        reason = "no run, sweep, comparison or study there"
        raise UserError((*source.missing, f"{folder}: {reason}")[0])
    folders = dict.fromkeys([folder, *inside * (len(inside) == 1)])
    for png in (png for place in folders for png in sorted(place.glob("*.png"))):
        if png.name != "curves.png" or png.parent not in inside:  # the page has its own
            with _noted(source.missing):
                content = b64encode(files.read_bytes(png)).decode()
                source.images.append((png, content))
    return source


@contextlib.contextmanager
def _noted(missing: list[str]) -> Iterator[None]:
    """Leave out what cannot be read; `missing` gets a sentence on it."""
    try:
        yield
    except UserError as error:
        missing.append(f"{error}; left out")


def _read_run(folder: pathlib.Path, name: str, source: Source) -> None:
    """A single run; UserError where a file that it begins with is damaged."""
    config, summary = (
        files.read_json(folder / f"{part}.json") for part in ("config", "summary")
    )
    if config is None:
        raise UserError(f"{folder}: its config.json is missing or damaged")
    curves = pd.DataFrame(files.read_metrics(folder / "metrics.jsonl")).astype(float)
    name = folder.resolve().name if name == "." else name
    name = re.sub(r"[-_]seed\d+(-\d{8}-\d{4}(-\d+)?)?$", "", name)
    settings, is_finished = flat(config), summary is not None
    facts = _results(summary or {}, folder / "summary.json")
    settings |= {n: fact for n, fact in facts.items() if _is_custom(n)}
    if "custom aggregator" in settings:
        settings["algorithm"] = facts.get("algorithm")
    if not is_finished:
        reason = "its summary.json is missing or damaged; only its curves are shown"
        source.missing.append(f"{folder} has not finished: {reason}")
        name = f"{name}, seed {settings.get('seed')}, unfinished"
    source.runs.append(Run(name, str(folder), settings, facts, curves, is_finished))


def _is_custom(name: str) -> bool:
    """A setting of a custom component, or the digest of a custom part."""
    return name not in SETTINGS and ("." in name or name.startswith("custom "))


def _results(row: dict[str, Any], place: pathlib.Path | str) -> dict[str, Any]:
    """A run's results as numbers; UserError names the place of something else."""
    with user_code(f"{place}: damaged", "expected results as a run writes them"):
        names = [n for n in _NUMBERS & {*row} if row[n] is not None]
        results = row | {n: float(row[n]) for n in names}
        notes = row.get("notes") or []
        results["notes"] = notes.split("; ") if isinstance(notes, str) else [*notes]
    # JSON has no number for an infinite loss, but an accuracy beside it.
    if row.get("final_test_accuracy") is not None and "final_test_loss" not in names:
        results["final_test_loss"] = math.inf
    return results


def _read_sweep(folder: pathlib.Path, name: str, source: Source) -> None:
    """The finished runs of a sweep, named after their swept values."""
    lines = files.read_bytes(folder / "results.jsonl").splitlines()
    rows = [row for row in map(files.parse_json, lines) if row and "run" in row]
    sweep = files.read_json(folder / "sweep.json") or {}
    missing = source.missing
    if len(rows) < len(lines):
        missing.append(f"{folder / 'results.jsonl'}: damaged lines are left out")
    if not sweep:
        missing.append(f"{folder}: the sweep has not finished; finished: {len(rows)}")
    names = dict.fromkeys(n for row in rows for n in row if _is_custom(n))
    settings = [*SETTINGS, *names]
    curves: dict[Any, pd.DataFrame] = {}
    path = folder / "history.csv"
    if sweep:
        with _noted(missing), user_code(f"{path}: damaged", "no curves"):
            frame = pd.read_csv(io.BytesIO(files.read_bytes(path)))
            frame = frame.drop(columns=settings, errors="ignore").astype(float)
            curves = dict(list(frame.groupby("run")))
    swept = [n for n in settings if len({str(row.get(n)) for row in rows}) > 1]
    for row in rows:
        place = f"{folder}, run {row['run']}"
        with _noted(missing):
            facts = _results(row, place) | {n: sweep[n] for n in _SAME if n in sweep}
            history = curves.get(row["run"], pd.DataFrame())
            history = history if len(history) else _lane_curves(folder, row)
            history = history.head(int(facts.get("diverged_at") or len(history)))
            values = ", ".join(f"{n}={row.get(n)}" for n in swept if n not in SEEDS)
            label = ": ".join(filter(None, (name.removeprefix("."), values)))
            label = label or folder.resolve().name
            chosen = {n: row[n] for n in settings if n in row}
            source.runs.append(Run(label, place, chosen, facts, history))


def _lane_curves(folder: pathlib.Path, row: dict[str, Any]) -> pd.DataFrame:
    """The curves of a run of an unfinished sweep; empty where its file is damaged."""
    with contextlib.suppress(Exception):
        path = folder / "lanes" / pathlib.PurePath(str(row.get("file"))).name
        arrays = np.load(io.BytesIO(files.read_bytes(path)), allow_pickle=False)
        curves = pd.DataFrame({n: a for n, a in arrays.items() if a.ndim == 1})
        curves.insert(0, "interval", 1 + curves.index)
        return curves.astype(float)
    return pd.DataFrame()


def results_of(run: Run, target: float | None = None) -> dict[str, Any]:
    """Numbers of a run by name: of the whole run, then its curves' last values.

    And "intervals", "diverged_at" (None: never), and `table.TARGET`: virtual seconds
    until `target`, a test accuracy in (0, 1], was first reached.
    """
    curves = run.curves
    numbers: dict[str, Any] = {"diverged_at": None}
    numbers |= {n: v for n, v in run.facts.items() if n in _NUMBERS and v is not None}
    numbers |= dict(curves.ffill().iloc[-1]) if len(curves) else {}
    numbers["intervals"] = numbers.pop("interval", math.nan)
    if target is not None and {"virtual_time", "test_accuracy"} <= set(curves):
        tested = curves[["virtual_time", "test_accuracy"]].dropna().to_numpy()
        if len(tested):
            numbers[table.TARGET] = statistics.time_to(target, *tested.T)
    return numbers


def _read_table(path: pathlib.Path) -> Table:
    """The text of a table that `files.write_table` wrote; UserError if damaged."""
    head, _, text = files.read_bytes(path).decode(errors="replace").partition("\n\n")
    with user_code(f"{path}: damaged", "expected a table in Markdown"):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
        names, _, *rows = [
            [c.strip().replace(r"\|", "|") for c in row] for row in cells
        ]
        return Table(path.stem, head, pd.DataFrame(rows, columns=names))
