"""Run or resume a sweep: groups of runs, one program each; one file per run.

Each finished run is one file named by a digest of its settings, so that a killed sweep
resumes, and a larger one reuses what a smaller one has run.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import IO, Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from tsfl_jax import command, host_memory
from tsfl_jax.config import Config
from tsfl_jax.engine import scan, structures
from tsfl_jax.prepare.backend import start_jax
from tsfl_jax.prepare.prepare import NAMED, Prepared, adopted, drawn_bytes, prepare_all
from tsfl_jax.report import bands, files, progress, table
from tsfl_jax.run import calls, checkpoint, grid, identity, lanes, memory
from tsfl_jax.run import summary as summaries
from tsfl_jax.run.program import Chunk
from tsfl_jax.types import UserError

_RUNNING = "running"  # folder of the checkpoints of running calls
_ALWAYS = ("tau", "virtual_time", "seconds")  # beside the engine's history
_NAME = "lane"  # the digest again: a file's name is not proof of its content

Swept = Mapping[str, Sequence] | Sequence[Mapping]
History = dict[str, np.ndarray]  # of a run, by name
Watch = Callable[[Mapping[int, History]], None]


class SweepResult(NamedTuple):
    """What a sweep leaves behind, runs in order of the product of its axes."""

    rows: list[dict]  # per run: swept values, results, fingerprints, all settings
    # [L, T] or [L, T, N], NaN after a divergence. What differs in shape between the
    # runs (T, N were swept) is left out: it is in the runs' files. Where clients do
    # not start together N are cohort members, and "client" says which client each is.
    history: dict[str, np.ndarray]
    swept: Sequence[str] = ()  # names of the swept settings
    series: Sequence[dict[str, np.ndarray]] = ()  # per run: arrays [T]

    def __repr__(self) -> str:
        """Two lines: what it is, what one can do with it."""
        methods = ".rows .history .to_xarray() .to_pandas() .plot()"
        runs = f"{len(self.rows):,} runs over {', '.join(self.swept)}"
        return f"SweepResult: {runs}\n  {methods}"

    def _repr_html_(self) -> str:
        """The groups of runs as a table, for notebooks."""
        groups = bands.groups_table(self.swept, self.rows)
        return groups.to_html(index=False, max_rows=50, show_dimensions=True)

    def to_xarray(self) -> Any:
        """Histories and results as an `xarray.Dataset`; see `report.table`."""
        return table.unstacked(self._runs(), self.swept)

    def to_pandas(self) -> Any:
        """A data frame with one line per run and interval."""
        return table.to_pandas(self._runs())

    def plot(self) -> Any:
        """A Matplotlib figure of accuracy against the interval, a line per group."""
        title = ", ".join(dict.fromkeys(str(row["data"]) for row in self.rows))
        return bands.of_sweep(self.swept, self.rows, self._runs(), title)

    def _runs(self) -> Any:
        return table.of_sweep(self.swept, self.rows, self.history, self.series)


class Sweep(NamedTuple):
    """What all calls of a sweep share."""

    config: Config  # what is not swept
    points: list[dict[str, Any]]
    swept: list[str]  # names of the swept settings
    runs: list[Prepared]
    digests: list[str]  # of each run, which name its file
    mesh: Mesh
    folder: pathlib.Path | None
    runs_per_call: int  # 0 chooses
    stream: IO[str] | None
    stop: Callable[[], bool]
    watch: Watch
    is_whole: bool = True  # else a shard, which leaves the tables to the last one

    def only(self, runs: Sequence[int]) -> "Sweep":
        """The part with these runs."""
        return self._replace(
            points=[self.points[i] for i in runs],
            runs=[self.runs[i] for i in runs],
            digests=[self.digests[i] for i in runs],
            is_whole=False,
        )

    def settings(self) -> dict[str, Any]:
        """What sweep.json says of it."""
        return {"config": dataclasses.asdict(self.config), "points": self.points}

    @property
    def title(self) -> str:
        """Data sets and networks."""
        names = {f"{p.dataset.name}, {p.network.name}": 0 for p in self.runs}
        return "; ".join(names)


def run(config: Config, swept: Swept, **options: Any) -> SweepResult:
    """Run or resume a sweep, see `doors.sweep`; `options` are those of `make`."""
    with contextlib.ExitStack() as locks:
        sweep = make(config, swept, locks, **options)
        return _result(sweep, run_all(sweep))


def make(
    config: Config,
    swept: Swept,
    locks: contextlib.ExitStack | None = None,
    *,
    workdir: str | pathlib.Path | None = None,
    runs_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = command.was_stopped,
    watch: Watch = lambda histories: None,
    **custom: Any,
) -> Sweep:
    """Check and draw all before training.

    Args:
      config: as in `doors.sweep`, and so is all that is not named here.
      locks: gets the folder's lock; None: it is not locked.
      stream: gets the progress; None: no one.
      **custom: fields of `custom_hooks.Custom`.
    """
    config, parts = adopted(config, **custom)
    points = grid.points(swept)
    names = grid.names_of(points)
    for argument, by in NAMED.items():
        if custom.get(argument) is not None and by in names:
            raise UserError(
                f"--sweep {by}: would be ignored with {argument}=, which is that of "
                "all runs; leave one of them out"
            )
    configs = [grid.changed(config, values) for values in points]
    folder = None if workdir is None else files.folder_of(workdir)
    mesh = start_jax(config)  # before anything else uses JAX
    if not isinstance(runs_per_call, Integral) or runs_per_call < 0:
        raise UserError(f"runs_per_call={runs_per_call!r}: expected an integer >= 0")
    host_memory.require(
        f"sweep {', '.join(names)}",
        sum(map(drawn_bytes, configs)),
        f"schedules and splits of {len(configs):,} runs",
    )
    with progress.ticking(stream, f"preparing {len(configs):,} runs"):
        runs = prepare_all(configs, parts)
    if folder:
        is_new = not (folder / "lanes").exists()  # and is not made if refused
        for members in lanes.group(runs) if is_new else ():
            memory.check(lanes.largest([runs[i] for i in members]), mesh.size)
        open_folder(folder, locks)
    identities = (files.plain(identity.identity_of(prepared)) for prepared in runs)
    digests = [_digest(json.dumps(one, sort_keys=True)) for one in identities]
    hooks: dict[str, Any] = {"stream": stream, "stop": stop, "watch": watch}
    return Sweep(
        config=config,
        points=points,
        swept=names,
        runs=runs,
        digests=digests,
        mesh=mesh,
        folder=folder,
        runs_per_call=runs_per_call,
        **hooks,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def open_folder(
    workdir: str | pathlib.Path, locks: contextlib.ExitStack | None
) -> pathlib.Path:
    """The folder, made if missing, with lanes/; its lock is in `locks` if given."""
    folder = files.prepare_workdir(workdir)
    if locks:
        locks.enter_context(files.lock(folder))
        check_no_shard(folder)
    if any((folder / n).exists() for n in ("config.json", "metrics.jsonl")):
        raise UserError(f"{folder} holds a single run; choose another --workdir")
    files.prepare_workdir(folder / "lanes")
    return folder


def check_no_shard(folder: pathlib.Path, but: str = ".") -> None:
    """Refuse a folder where a shard is at work whose lock does not end so."""
    for path in folder.glob(".shard-*"):
        if not path.name.endswith(but):
            with files.lock(folder, path.name):
                pass


def path_of(folder: pathlib.Path, digest: str) -> pathlib.Path:
    """The file of the finished run of that digest."""
    return folder / "lanes" / f"{digest}.npz"


def _load(sweep: Sweep, run: int) -> History:
    """The arrays of a run that is whole on the disk; {}, with a warning: it is not."""
    digest = sweep.digests[run]
    if not sweep.folder or not (path := path_of(sweep.folder, digest)).exists():
        return {}
    always = {*structures.History._fields} - {*structures.OPTIONAL} | {*_ALWAYS}
    with contextlib.suppress(UserError):
        arrays = files.read_arrays(path)
        fields = {*arrays} - {_NAME, "client"}
        expected = always | {*summaries.measured(sweep.runs[run])}
        if str(arrays.pop(_NAME, "")) == digest and fields == expected:
            return arrays
    text = f"{path} is damaged or of an earlier version; that one runs again"
    progress.warn_to(sweep.stream)(text)
    return {}


class Finished(NamedTuple):
    """A run that has finished."""

    history: History
    row: dict[str, Any]  # of results.csv


def _finished(sweep: Sweep, run: int, history: History) -> Finished:
    """A finished run, with its line of results.csv."""
    prepared = sweep.runs[run]
    settings = identity.values_of(prepared) | identity.custom_values(prepared)
    results = summaries.results_of(prepared, history)
    row = (
        {"run": run}
        | {name: settings[name] for name in sweep.swept}
        | results
        | {
            "train_seconds": float(history["seconds"]),
            "notes": "; ".join(results["notes"]),
            "data": prepared.dataset.name,
            "num_devices": sweep.mesh.size,
        }
        | {f"{k}_sha": v for k, v in prepared.fingerprints.items()}
        | {k: v for k, v in settings.items() if k not in sweep.swept}
    )
    if sweep.folder:
        row["file"] = str(path_of(pathlib.Path(), sweep.digests[run]))
    return Finished(history, row)


def _load_finished(sweep: Sweep) -> dict[int, Finished]:
    """The runs that are in the folder, by number."""
    histories = {run: _load(sweep, run) for run in range(len(sweep.runs))}
    return {run: _finished(sweep, run, h) for run, h in histories.items() if h}


def _write_partly(sweep: Sweep, finished: Mapping[int, Finished]) -> None:
    """The tables of the runs that have finished so far, if there is a folder."""
    if sweep.folder:
        title = f"{sweep.title}, {len(finished)} of {len(sweep.runs)} runs so far"
        rows = [finished[i].row for i in sorted(finished)]
        bands.write_sweep(sweep.folder, sweep.swept, rows, title)


def _result(sweep: Sweep, finished: Mapping[int, Finished]) -> SweepResult:
    """Rows and histories of all runs; written to the folder."""
    rows = [finished[i].row for i in sorted(finished)]
    histories = [finished[i].history for i in sorted(finished)]
    shapes = {n: {np.shape(h.get(n, ())) for h in histories} for n in histories[0]}
    names = [n for n in shapes if n != "seconds" and len(shapes[n]) == 1]
    stacked = {n: np.stack([h[n] for h in histories]) for n in names}
    series = [{n: a for n, a in h.items() if a.ndim == 1} for h in histories]
    result = SweepResult(rows, stacked, sweep.swept, series)
    if sweep.folder:
        # What is left is of calls that another division into calls replaced.
        shutil.rmtree(sweep.folder / _RUNNING, ignore_errors=True)
        bands.write_sweep(sweep.folder, sweep.swept, rows, sweep.title, result._runs())
        settings = sweep.settings() | summaries.where_run()
        files.write_json(sweep.folder / "sweep.json", settings)
    return result


def collect(sweep: Sweep) -> SweepResult | None:
    """Write the tables of the runs in the locked folder; None while some are missing.

    Raises:
      UserError: none of them is there.
    """
    finished, total = _load_finished(sweep), len(sweep.runs)
    if not finished:
        raise UserError(
            f"{sweep.folder} has none of these {total} runs; do --config "
            "and --sweep say what the shards were told?"
        )
    if len(finished) == total:
        return _result(sweep, finished)
    _write_partly(sweep, finished)
    progress.log(sweep.stream, f"{total - len(finished)} of {total} runs are missing")
    return None


def run_all(sweep: Sweep) -> dict[int, Finished]:
    """All runs, from the folder or trained and kept there."""
    runs, stream = sweep.runs, sweep.stream
    notes: dict[str, str] = {}  # of those that differ in numbers only, the first one
    for note in itertools.chain(*(p.notes for p in runs)):
        notes.setdefault(re.sub(r"\d[\d., ]*", "#", note), f"note: {note}")
    for note in notes.values():
        progress.log(stream, note)
    finished = _load_finished(sweep)
    # The finished ones of a group belong to it all the same, so that an interrupted
    # call goes on in its program.
    groups = [members for members in lanes.group(runs) if {*members} - {*finished}]
    if len(groups) > 1:
        causes = lanes.causes_of(groups, runs)
        progress.log(stream, f"{len(groups)} programs, one for each {causes}")
    if finished:
        progress.log(stream, f"{len(finished)} runs were finished already")
        sweep.watch({i: run.history for i, run in finished.items()})
    lengths = [len(p.steps) for p in runs]
    first = sum(lengths[i] for i in finished)
    compiles: list[float] = []  # seconds of each program so far

    def later() -> float:
        return (len(groups) - len(compiles)) * float(np.mean(compiles or 0.0))

    bar = progress.bar(stream, sum(lengths), first, later)
    for number, members in enumerate(groups, 1):
        place = f", {number} of {len(groups)} programs" * (len(groups) > 1)
        for finished_call in _run_group(sweep, members, bar, finished, compiles, place):
            finished |= finished_call
            sweep.watch({i: finished[i].history for i in sorted(finished)})
            if len(finished) < len(runs):
                if sweep.is_whole:
                    _write_partly(sweep, finished)
                if sweep.stop():
                    raise KeyboardInterrupt
    return finished


def _run_group(
    sweep: Sweep,
    members: list[int],
    bar: progress.Advance,
    finished: Collection[int],
    compiles: list[float],
    place: str,
) -> Iterator[dict[int, Finished]]:
    """The unfinished runs of one program, a call at a time."""
    stream, entered = sweep.stream, time.perf_counter()
    prepared_runs = [sweep.runs[i] for i in members]
    memory.check(lanes.largest(prepared_runs), sweep.mesh.size)
    group = lanes.make_group(prepared_runs, sweep.mesh)
    count = min(sweep.runs_per_call or lanes.runs_per_call(group, stream), len(members))
    unfinished = [i for i in members if i not in finished]
    begun = _store(sweep, group, unfinished[:count], count)
    if not (begun and begun.folder.exists()):  # else it goes on with its idle runs
        count = min(count, len(unfinished))
        folder = sweep.folder if sweep.is_whole and not finished else None
        if folder and any(folder.glob("[lr]*/*")):  # of lanes/ and running/
            progress.log(stream, f"{folder} has other settings: all begins again")
    compiled = None
    for first in range(0, len(unfinished), count):
        indices = unfinished[first : first + count]

        def show(chunk: Chunk, _: Any = None, num_runs: int = len(indices)) -> None:
            accuracy = np.ravel(chunk.history.test_accuracy[:num_runs])
            best = 100 * float(np.nanmax([*accuracy, 0.0]))
            words = f"best accuracy {best:.1f} %" if best else "no accuracy"
            calls.advance(bar, chunk, num_runs, words)

        with progress.ticking(stream, "drawing first models"):
            arrays = lanes.make_arrays(group, [sweep.runs[i] for i in indices], count)
        if not compiled:
            program = group.program._replace(title=group.program.title + place)
            compiled = program.compile(arrays, stream)
            compiles.append(time.perf_counter() - entered)
        standing = calls.at_start(compiled.program, arrays)
        store = _store(sweep, group, indices, count)
        if store:
            standing = store.restored(standing, progress.warn_to(stream))
        if standing.finished:
            show(standing.as_chunk())
        end = calls.train(
            compiled,
            arrays,
            standing,
            show=show,
            stop=sweep.stop,
            save=store.save if store else None,
            last_save=checkpoint.LastSave(checkpoint.now(), 0.1),  # the first after 5 s
        )
        seconds = float(end.seconds / len(indices))
        yield {
            run: _kept(sweep, run, end.of_run(lane), seconds)
            for lane, run in enumerate(indices)
        }
        if store:
            shutil.rmtree(store.folder, ignore_errors=True)


def _kept(sweep: Sweep, run: int, fields: scan.History, seconds: float) -> Finished:
    """A run that has finished, whose history is written into its file."""
    history = _cut(summaries.named_of(sweep.runs[run], fields))
    history["seconds"] = np.asarray(seconds)
    if sweep.folder:
        digest = sweep.digests[run]
        named = history | {_NAME: np.array(digest)}
        files.write_arrays(path_of(sweep.folder, digest), named, compress=True)
    return _finished(sweep, run, history)


def _cut(history: History) -> History:
    """A diverged run ended there: NaN and 0 afterwards, and still diverged."""
    is_diverged = np.logical_or.accumulate(history["diverged"])
    is_after = np.append(False, is_diverged[:-1])
    cut = {"diverged": is_diverged}
    for name in history.keys() - {"tau", "virtual_time", "client", "diverged"}:
        values = history[name]
        missing = np.nan if np.issubdtype(values.dtype, np.floating) else 0
        cut[name] = values.copy()
        cut[name][is_after] = missing
    return history | cut


def _store(
    sweep: Sweep, group: lanes.Group, indices: list[int], count: int
) -> calls.Store | None:
    """Where a running call is kept, named by a digest of its runs; None: it is not."""
    runs = [sweep.runs[i] for i in indices]
    if not sweep.folder or not any(p.config.checkpoint for p in runs):
        return None
    files.prepare_workdir(sweep.folder / _RUNNING)
    devices = sweep.mesh.size if any(map(identity.depends_on_devices, runs)) else ""
    digests = [sweep.digests[i] for i in indices]
    # In their order the states of several rules are kept side by side.
    rules = list(dict.fromkeys(p.config.algorithm for p in group.members))
    name = _digest(f"{digests}{count}{devices}{rules}")
    return calls.Store(sweep.folder / _RUNNING / name, {"call": name})
