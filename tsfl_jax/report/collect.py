"""What the folders of runs, sweeps, comparisons and studies hold, as plain values.

Reads files only. What is missing or damaged is listed in words, so that a report can
say so. NOT done here: how it looks, see `page` and `vector`.
"""

import collections
import csv
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tsfl_jax.config import SEEDS, SETTINGS, flat
from tsfl_jax.report import files
from tsfl_jax.timeline import replay
from tsfl_jax.types import UserError

RUN, SWEEP, COMPARISON, STUDY, FOLDER = (
    "run",
    "sweep",
    "comparison",
    "study",
    "folder of runs",
)
# Folders inside of runs and sweeps, in which no run is looked for.
_PARTS = {"checkpoints", "lanes", "running", "tensorboard"}
_DEPTH = 4  # folders below the given one in which runs are looked for
_SCORES = ("best_test_accuracy", "final_test_accuracy", "final_test_loss")


class Run(NamedTuple):
    """A run, or a lane of a sweep."""

    name: str  # without the seed
    place: str  # where it lies
    settings: dict[str, Any]  # flat
    facts: dict[str, Any]  # results and provenance, as in summary.json
    series: dict[str, np.ndarray]  # columns of metrics.jsonl, float64 [T]
    tau: np.ndarray | None = None  # float64 [T, N]
    rho: np.ndarray | None = None  # float64 [T, N]
    # int [T, N], where a client may deliver several times in one update, as under
    # FedBuff; None: a client with τ or ρ > 0 delivers once.
    deliveries: np.ndarray | None = None


class Table(NamedTuple):
    """A table that a study wrote."""

    name: str
    head: str  # what stands above it
    rows: list[dict[str, str]]


class Source(NamedTuple):
    """What lies in one of the given folders."""

    folder: pathlib.Path
    kind: str
    runs: list[Run]
    missing: list[str]  # sentences
    config: dict[str, Any]  # of a sweep: the settings that are not swept, flat
    points: list[dict[str, Any]]  # of a sweep: the swept settings of each lane
    tables: list[Table]
    images: list[pathlib.Path]


def read_source(path: str | pathlib.Path) -> Source:
    """Read what lies in a folder.

    Raises:
      UserError: there is no such folder, or it holds no run, sweep or study.
    """
    folder = files.folder_of(path)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise UserError(f"{folder}: {what}; expected the folder of a run or sweep")
    if _is_run(folder):
        run, missing = _read_run(folder, folder.resolve().name)
        return Source(folder, RUN, [run], missing, {}, [], [], [])
    if _is_sweep(folder):
        return _read_sweep(folder, "")
    return _read_study(folder)


def _is_run(folder: pathlib.Path) -> bool:
    return any((folder / n).is_file() for n in ("metrics.jsonl", "config.json"))


def _is_sweep(folder: pathlib.Path) -> bool:
    named = any((folder / n).is_file() for n in ("results.jsonl", "sweep.json"))
    lanes = folder / "lanes"  # of files; a study may have a sweep of that name
    return named or (lanes.is_dir() and not _is_sweep(lanes))


def _read_run(folder: pathlib.Path, name: str) -> tuple[Run, list[str]]:
    """A run, and what is missing."""
    missing = []
    known = {n: files.read_json(folder / f"{n}.json") for n in ("config", "summary")}
    for part, found in known.items():
        if found is None:
            state = "damaged" if (folder / f"{part}.json").exists() else "not there"
            means = {
                "config": "the settings are not known",
                "summary": "the run has not finished",
            }
            missing.append(f"{folder / part}.json is {state}: {means[part]}.")
    settings, summary = flat(known["config"] or {}), known["summary"] or {}
    series: dict[str, np.ndarray] = {}
    try:
        series = columns(files.read_metrics(folder / "metrics.jsonl"))
    except UserError as error:
        missing.append(f"{error}: no curves of this run.")
    scores = _scores(series) if series else {}
    # Of an infinite loss neither file has a number; the one before is not the last.
    if summary.get("final_test_loss", 0) is None:
        scores["final_test_loss"] = math.nan
    facts = summary | scores
    for score, value in scores.items():
        if score in summary and summary[score] != files.plain(value):
            missing.append(
                f"{folder / 'summary.json'} says {score} = {summary[score]}, but "
                f"metrics.jsonl gives {value}, which is shown."
            )
    tau = rho = deliveries = None
    try:
        arrays = files.read_arrays(folder / "clients.npz")
        tau, rho = _clients(arrays)
        # Not in folders of earlier versions.
        counts = arrays.get("deliveries", np.zeros(0))
        if counts.shape == tau.shape and counts.dtype.kind == "i":
            deliveries = counts
    except UserError:
        missing.append(f"{folder / 'clients.npz'} is not there or damaged: no weights.")
    name = re.sub(r"[-_]seed\d+(-\d{8}-\d{4}(-\d+)?)?$", "", name)
    whole = Run(name, str(folder), settings, facts, series, tau, rho, deliveries)
    return whole, missing


def columns(rows: list[dict]) -> dict[str, np.ndarray]:
    """Rows of metrics.jsonl as columns ``[T]``; NaN where a value is missing."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {n: np.array([row.get(n) for row in rows], float) for n in names}


def _scores(series: dict[str, np.ndarray]) -> dict[str, Any]:
    """Best and last accuracy and last loss; NaN where nothing was measured."""
    found = {}
    for name in ("test_accuracy", "test_loss"):
        values = series.get(name, np.zeros(0))
        seen = values[~np.isnan(values)]
        found[f"final_{name}"] = float(seen[-1]) if len(seen) else math.nan
        found[f"best_{name}"] = float(seen.max()) if len(seen) else math.nan
    # A file of metrics has no infinite loss, but the accuracy of that interval.
    tested = np.flatnonzero(np.isfinite(series.get("test_accuracy", np.zeros(0))))
    loss = series.get("test_loss", np.zeros(0))
    if len(tested) and len(loss) and not np.isfinite(loss[tested[-1]]):
        found["final_test_loss"] = math.inf
    return {name: found[name] for name in _SCORES}


def _clients(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """τ and ρ, [T, N]; UserError where they do not fit each other."""
    tau, rho = (arrays.get(name, np.zeros(0)) for name in ("tau", "rho"))
    if tau.ndim != 2 or rho.shape != tau.shape:
        raise UserError("expected tau and rho of one shape [T, N]")
    return tau.astype(float), np.nan_to_num(rho.astype(float))


def _by_client(
    lane: dict[str, np.ndarray], number: Any
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """τ, ρ and deliveries of a lane's file, ``[T, N]`` each; None: not known.

    Args:
      lane: arrays of the file; {}: there is none.
      number: N; None: not known.
    """
    if not {"tau", "rho"} <= set(lane):
        return None, None, None
    tau, rho = _clients(lane)
    client = lane.get("client")
    if client is None:  # without slots; or of an earlier version, which never has it
        slots = number not in (None, tau.shape[1])
        return (None, None, None) if slots else (tau, rho, None)
    there = (tau > 0) | (rho > 0)
    if client.shape != tau.shape or not isinstance(number, int):
        return None, None, None
    if not ((client[there] >= 0) & (client[there] < number)).all():
        return None, None, None
    tau, rho, deliveries = (
        replay.by_client(values, client, there, number)
        for values in (tau, rho, there.astype(int))
    )
    return tau, rho, deliveries


def _read_sweep(folder: pathlib.Path, prefix: str) -> Source:
    """A sweep; names of its lanes are the swept values, with a prefix."""
    missing = []
    about = files.read_json(folder / "sweep.json") or {}
    if not about:
        missing.append(
            f"{folder / 'sweep.json'} is not there or damaged: the sweep has not "
            "finished, or how many lanes it has is not known."
        )
    rows = _read_rows(folder / "results.jsonl", missing)
    points = [p for p in about.get("lanes", []) if isinstance(p, dict)]
    if len(rows) < len(points):
        missing.append(f"{folder}: {len(rows)} of {len(points)} lanes have finished.")
    given = set().union(*points)
    swept = [name for name in _varied(rows) if not given or name in given]
    series, arrays = _long_history(folder / "history.csv"), _lanes(folder / "lanes")
    runs, without = [], 0
    for index, row in enumerate(rows):
        found = arrays.get(_key(row), {})
        line = series.get(str(row.get("lane", index)), _curves(found))
        line = {n: a[: _last_interval(row)] for n, a in line.items()}
        without += not found
        weights = _by_client(found, row.get("num_clients"))
        values = [f"{n}={_shown(row.get(n))}" for n in swept if n not in SEEDS]
        name = ": ".join(filter(None, [prefix, ", ".join(values)]))
        settings = {n: v for n, v in row.items() if n in SETTINGS}
        facts = {n: v for n, v in row.items() if n not in SETTINGS}
        facts |= {"algorithm": row.get("algorithm"), "data": row.get("data")}
        facts |= {
            n: about[n]
            for n in ("versions", "device", "backend", "processor")
            if n in about
        }
        facts["fingerprints"] = {
            n.removesuffix("_sha"): v for n, v in facts.items() if n.endswith("_sha")
        }
        where = f"{folder}, lane {row.get('lane', index)}"
        name = name or folder.resolve().name
        runs.append(Run(name, where, settings, facts, line, *weights))
    if without:
        missing.append(
            f"{folder / 'lanes'}: the files of {without} of {len(rows)} lanes are not "
            "there or cannot be assigned: no weights of those."
        )
    config = flat(about.get("config") or {})
    return Source(folder, SWEEP, runs, missing, config, points, [], [])


def _last_interval(row: dict[str, Any]) -> int | None:
    """Where a lane ended that diverged or that a race stopped; None: it did not."""
    ends = [row.get(name) for name in ("diverged_at", "stopped_at")]
    return min((end for end in ends if isinstance(end, int)), default=None)


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """Settings with several values."""
    names = dict.fromkeys(n for row in rows for n in row if n in SETTINGS)
    return [n for n in names if len({str(row.get(n)) for row in rows}) > 1]


def _shown(value: Any) -> str:
    return f"({','.join(map(str, value))})" if isinstance(value, list) else str(value)


def _read_rows(path: pathlib.Path, missing: list[str]) -> list[dict[str, Any]]:
    """The objects of a file of lines; adds to `missing` what cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        missing.append(f"{path} is not there or damaged: no results of the lanes.")
        return []
    rows = [files.parse_json(line) for line in lines]
    if None in rows:
        missing.append(f"{path}: {rows.count(None)} lines are damaged and left out.")
    return [row for row in rows if row is not None]


def _long_history(path: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """Columns of history.csv by lane; {} where there is no such file."""
    found: dict[str, list[dict]] = collections.defaultdict(list)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found[row["lane"]].append({n: _number(v) for n, v in row.items() if n})
    except (OSError, KeyError, ValueError, csv.Error):
        return {}
    return {lane: columns(rows) for lane, rows in found.items()}


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _key(facts: dict[str, Any]) -> tuple:
    """What says which file is of which lane: all that a lane has measured."""
    return tuple(facts.get(n) for n in (*_SCORES, "samples_trained"))


def _lanes(folder: pathlib.Path) -> dict[tuple, dict[str, np.ndarray]]:
    """Arrays of the files of lanes, by their results, until they diverged or stopped.

    The files are named by digests that results.jsonl does not have. Two with the same
    results and other arrays are left out.
    """
    found: dict[tuple, dict[str, np.ndarray]] = {}
    twice = set()
    for path in sorted(folder.glob("*.npz")):
        try:
            arrays = files.read_arrays(path)
            lost = np.flatnonzero(arrays["diverged"])
            end = lost[0] + 1 if len(lost) else len(arrays["diverged"])
            stop = int(arrays.get("stopped", -1))  # there where a race stopped it
            end = min(end, stop) if stop >= 0 else end
            lane = {n: a[:end] for n, a in arrays.items() if a.ndim}
            facts = _scores(lane) | {"samples_trained": int(lane["samples"].sum())}
            _clients(lane)
        except (UserError, KeyError, IndexError, TypeError, ValueError):
            continue  # counted by the caller
        key = _key(files.plain(facts))
        if key in found and not np.array_equal(found[key]["rho"], lane["rho"]):
            twice.add(key)
        found[key] = lane
    return {key: lane for key, lane in found.items() if key not in twice}


def _curves(lane: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns as of metrics.jsonl, from a lane's file."""
    if not lane:
        return {}
    intervals = np.arange(1, len(lane["diverged"]) + 1, dtype=float)
    own = {n: a.astype(float) for n, a in lane.items() if a.ndim == 1}
    return {"interval": intervals} | own


def _read_study(folder: pathlib.Path) -> Source:
    """A folder of a comparison, of a study, or of several runs and sweeps."""
    runs, missing = [], []
    for inner in _inside(folder, _DEPTH, missing):
        name = str(inner.relative_to(folder)).removeprefix("runs/")
        name = name.removeprefix("cells/")
        if _is_run(inner):
            run, lacking = _read_run(inner, name)
            runs.append(run)
        else:
            sweep = _read_sweep(inner, name)
            runs, lacking = runs + sweep.runs, sweep.missing
        missing += lacking
    tables = list(_tables(folder))
    images = [p for p in sorted(folder.glob("*.png")) if p.with_suffix(".pdf").exists()]
    if not runs and not tables:
        raise UserError(
            f"{folder}: holds no run, sweep, comparison or study; expected a folder "
            "that tsfl run, sweep, compare or reproduce has written"
        )
    kind = STUDY if tables or images else FOLDER
    kind = COMPARISON if (folder / "compare.csv").is_file() else kind
    return Source(folder, kind, runs, missing, {}, [], tables, images)


def _inside(
    folder: pathlib.Path, depth: int, missing: list[str]
) -> Iterator[pathlib.Path]:
    """Folders of runs and sweeps below a folder; adds those that cannot be read."""
    for inner in sorted(p for p in folder.iterdir() if p.is_dir()):
        if inner.name in _PARTS or inner.name.startswith("."):
            continue
        try:
            found = _is_run(inner) or _is_sweep(inner)
        except OSError:
            missing.append(f"{inner} cannot be read and is left out.")
            continue
        if found:
            yield inner
        elif depth > 1:
            yield from _inside(inner, depth - 1, missing)


def _tables(folder: pathlib.Path) -> Iterator[Table]:
    """The tables that `files.write_table` wrote."""
    for path in sorted(folder.glob("*.csv")):
        beside = path.with_suffix(".md")
        if not beside.is_file():
            continue
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            rows = [
                {str(n): str(v) for n, v in r.items()} for r in csv.DictReader(file)
            ]
        text = beside.read_text(encoding="utf-8", errors="replace")
        yield Table(path.stem, text.split("\n\n")[0], rows)
