"""Run or resume a sweep: groups of runs, one program each; one file per run.

Each finished run is one file named by a digest of its settings, so that a killed sweep
resumes, and a larger one reuses what a smaller one has run.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import host_memory, interrupts
from tsfl_jax.config import Config, settings_of
from tsfl_jax.experiment import (
    calls,
    checkpoint,
    grid,
    lanes,
    memory,
    summary,
    sweep_folder,
)
from tsfl_jax.experiment.backend import start_jax
from tsfl_jax.experiment.custom_hooks import Custom
from tsfl_jax.experiment.identity import (
    custom_values,
    depends_on_devices,
    identity_of,
    values_of,
)
from tsfl_jax.experiment.prepare import Prepared, adopted, drawn_bytes, prepare_all
from tsfl_jax.experiment.program import Arrays, Chunk, Compiled
from tsfl_jax.report import bands, files, progress, sweep_files, table
from tsfl_jax.types import UserError
from tsfl_jax.validate import validate

_RUNNING = "running"  # folder of the checkpoints of running calls

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
        """Three lines: what it is, the best group, what one can do with it."""
        return sweep_files.text(self.swept, self.rows)

    def _repr_html_(self) -> str:
        """The groups of runs as a table, for notebooks."""
        groups = sweep_files.groups_table(self.swept, self.rows)
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
    runs_per_call: int = 0  # 0 chooses
    stream: IO[str] | None = None
    stop: Callable[[], bool] = interrupts.was_asked
    watch: Watch = lambda histories: None
    is_whole: bool = True  # else a shard, which leaves the tables to the last one

    def only(self, runs: Sequence[int]) -> "Sweep":
        """The part with these runs."""
        return self._replace(
            points=[self.points[i] for i in runs],
            runs=[self.runs[i] for i in runs],
            digests=[self.digests[i] for i in runs],
            is_whole=False,
        )

    @property
    def title(self) -> str:
        """Data sets and networks."""
        names = {f"{p.dataset.name}, {p.network.name}": 0 for p in self.runs}
        return "; ".join(names)


def run(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    *,
    workdir: str | pathlib.Path | None = None,
    runs_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = interrupts.was_asked,
    watch: Watch = lambda histories: None,
    **custom: Any,
) -> SweepResult:
    """Run or resume a sweep, see `doors.sweep`; progress goes to `stream`."""
    options = {"runs_per_call": runs_per_call, "stream": stream, "stop": stop}
    options |= {"workdir": workdir, "watch": watch}
    with contextlib.ExitStack() as locks:
        sweep = make(config, swept, custom, locks=locks, **options)
        histories = run_all(sweep)
        return _result(sweep, [histories[i] for i in range(len(sweep.runs))])


def make(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    custom: Mapping[str, Any],
    *,
    workdir: str | pathlib.Path | None,
    locks: contextlib.ExitStack | None = None,
    **options: Any,
) -> Sweep:
    """Check and draw all before training.

    Args:
      config: as in `doors.sweep`, and so are swept and workdir.
      custom: fields of `custom_hooks.Custom`.
      locks: gets the folder's lock; None: it is not locked.
      **options: runs_per_call, stream, stop and watch of `Sweep`.
    """
    validate(config)
    config, parts = adopted(config, Custom(**custom))
    points = grid.points(swept, settings_of(type(config)))
    names = grid.names_of(points)
    if custom.get("aggregator") is not None and "algorithm" in names:
        raise UserError(
            "--sweep algorithm: would be ignored with aggregator=, the rule of all "
            "runs; leave one of them out"
        )
    configs = [grid.changed(config, values) for values in points]
    folder = None if workdir is None else files.folder_of(workdir)
    # Before anything else uses JAX.
    mesh = start_jax(config)
    count = options.get("runs_per_call", 0)
    if not isinstance(count, Integral) or count < 0:
        raise UserError(f"runs_per_call={count!r}: expected an integer >= 0")
    if jax.process_count() > 1:
        raise UserError("a sweep runs in one process; give every process a --shard")
    host_memory.require(
        f"sweep {', '.join(names)}",
        sum(map(drawn_bytes, configs)),
        f"schedules and splits of {len(configs):,} runs",
    )
    runs = prepare_all(configs, parts)
    if folder is not None:
        is_new = not (folder / "lanes").exists()  # and is not made if refused
        for members in lanes.group(runs)[0] if is_new else ():
            memory.check(lanes.largest([runs[i] for i in members]), mesh.size)
        sweep_folder.opened(folder, locks)
    digests = [_digest(p) for p in runs]
    return Sweep(config, points, names, runs, digests, mesh, folder, **options)


def _digest(prepared: Prepared) -> str:
    identity = files.plain(identity_of(prepared))
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _row(run: int, sweep: Sweep, history: History) -> dict[str, Any]:
    """One line of results.csv."""
    prepared = sweep.runs[run]
    settings = values_of(prepared) | custom_values(prepared)
    results = summary.results_of(prepared, history)
    return (
        {"run": run}
        | {name: settings[name] for name in sweep.swept}
        | results
        | {
            "seconds": float(history["seconds"]),
            "notes": "; ".join(results["notes"]),
            "data": prepared.dataset.name,
            "num_devices": sweep.mesh.size,
        }
        | {f"{k}_sha": v for k, v in prepared.fingerprints.items()}
        | {k: v for k, v in settings.items() if k not in sweep.swept}
    )


def _rows(sweep: Sweep, histories: Mapping[int, History]) -> dict[int, dict[str, Any]]:
    """Lines of results.csv of the finished runs, by number."""
    return {i: _row(i, sweep, history) for i, history in histories.items()}


def _finished(sweep: Sweep) -> dict[int, History]:
    """Histories of the runs that are in the folder, by number."""
    if sweep.folder is None:
        return {}
    warn, histories = progress.warn_to(sweep.stream), {}
    for i, (prepared, digest) in enumerate(zip(sweep.runs, sweep.digests, strict=True)):
        history = sweep_folder.finished_run(
            sweep.folder, digest, warn, summary.measured(prepared)
        )
        if history is not None:
            histories[i] = history
    return histories


def _write_partly(sweep: Sweep, rows: Mapping[int, dict[str, Any]]) -> None:
    """The tables of the runs that have finished so far, if there is a folder."""
    if sweep.folder is not None:
        title = f"{sweep.title}, {len(rows)} of {len(sweep.runs)} runs so far"
        in_order = [rows[i] for i in sorted(rows)]
        sweep_files.write(sweep.folder, sweep.swept, in_order, title)


def collect(sweep: Sweep) -> SweepResult | None:
    """Write the tables of the runs in the locked folder; None while some are missing.

    Raises:
      UserError: none of them is there.
    """
    histories, total = _finished(sweep), len(sweep.runs)
    if not histories:
        raise UserError(
            f"{sweep.folder} has none of these {total} runs; do --config "
            "and --sweep say what the shards were told?"
        )
    if len(histories) == total:
        return _result(sweep, list(histories.values()))
    _write_partly(sweep, _rows(sweep, histories))
    missing = f"{total - len(histories)} of {total} runs"
    progress.log(sweep.stream, f"{missing} are missing")
    return None


def run_all(sweep: Sweep) -> dict[int, History]:
    """Histories of all runs, from the folder or trained and kept there."""
    runs, stream = sweep.runs, sweep.stream
    for note in _merged([p.notes for p in runs]):
        progress.log(stream, f"note: {note}")
    histories = _finished(sweep)
    groups, causes = lanes.group(runs, finished=histories)
    for cause in causes:
        progress.log(stream, f"{len(groups)} programs, because of {cause}")
    if histories:
        progress.log(stream, f"{len(histories)} runs were finished already")
        sweep.watch(dict(histories))
    lengths = [len(p.steps) for p in runs]
    first = sum(lengths[i] for i in histories)
    rows = _rows(sweep, histories)
    with progress.bar(stream, sum(lengths), first) as bar:
        show = _shown_on(bar, histories)
        for members in groups:
            for call_histories in _run_group(sweep, members, show, histories):
                histories |= call_histories
                rows |= {i: _row(i, sweep, h) for i, h in call_histories.items()}
                sweep.watch(dict(sorted(histories.items())))
                if len(histories) < len(runs) and sweep.is_whole:
                    _write_partly(sweep, rows)
                if len(histories) < len(runs) and sweep.stop():
                    raise KeyboardInterrupt
    return histories


def _merged(notes: Sequence[Sequence[str]]) -> list[str]:
    """The notes of all runs; of those that differ in numbers only, the first one."""
    alike: dict[str, list[str]] = {}
    for note in itertools.chain(*notes):
        alike.setdefault(re.sub(r"\d[\d., ]*", "#", note), []).append(note)
    return [
        texts[0]
        if len(set(texts)) == 1
        else f"{texts[0]} (with other numbers in {len(texts) - 1} of {len(notes)} runs)"
        for texts in alike.values()
    ]


def _shown_on(
    bar: progress.Advance, histories: Mapping[int, History]
) -> Callable[[int, Chunk], None]:
    """A function of a call's number of runs and a chunk, which advances the bar."""
    scores = [h["test_accuracy"] for h in histories.values()]
    best = max((np.nanmax([*a, 0.0]) for a in scores), default=0.0)

    def show(num_runs: int, chunk: Chunk) -> None:
        nonlocal best
        history = chunk.history  # with that of idle runs after the others
        accuracy = np.where(history.diverged, np.nan, history.test_accuracy)
        best = float(np.nanmax([*accuracy[:num_runs].flat, best, 0.0]))
        words = f"best accuracy {100 * best:.1f} %" if best else "no accuracy"
        calls.advance(bar, chunk, num_runs, words)

    return show


def _run_group(
    sweep: Sweep,
    members: list[int],
    show: Callable[[int, Chunk], None],
    finished: Collection[int],
) -> Iterator[dict[int, History]]:
    """Histories of the unfinished runs of one program, a call at a time."""
    prepared_runs = [sweep.runs[i] for i in members]
    memory.check(lanes.largest(prepared_runs), sweep.mesh.size)
    group = lanes.make_group(prepared_runs, sweep.mesh)
    count = min(sweep.runs_per_call or lanes.runs_per_call(group), len(members))
    unfinished = [i for i in members if i not in finished]
    begun = _call_folder(sweep, group, unfinished[:count], count)
    if begun is None or not begun.exists():  # else it goes on with its idle runs
        count = min(count, len(unfinished))
    compiled = None
    for first in range(0, len(unfinished), count):
        indices = unfinished[first : first + count]
        arrays = lanes.make_arrays(group, [sweep.runs[i] for i in indices], count)
        compiled = compiled or group.program.compile(arrays, stream=sweep.stream)
        folder = _call_folder(sweep, group, indices, count)
        end = _run_call(
            sweep, compiled, arrays, folder, functools.partial(show, len(indices))
        )
        yield {
            run: _kept(sweep, run, end, lane, len(indices))
            for lane, run in enumerate(indices)
        }
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _run_call(
    sweep: Sweep,
    compiled: Compiled,
    arrays: Arrays,
    folder: pathlib.Path | None,
    show: Callable[[Chunk], None],
) -> calls.Progress:
    """Run a call to its end, from the checkpoint of an earlier process if there is one.

    Unfinished calls are saved in a folder whose name is a digest of their runs.
    """
    standing = calls.at_start(compiled.program, arrays)
    identity = {"call": "" if folder is None else folder.name}
    if folder is not None:
        warn = progress.warn_to(sweep.stream)
        saved = checkpoint.restore_latest(folder, standing, identity, warn)
        standing = saved[1] if saved else standing

    def save(standing: calls.Progress) -> None:
        assert folder is not None
        checkpoint.save(folder, int(standing.finished), standing, identity)

    if standing.finished:
        last, seconds = int(standing.finished), float(standing.seconds)
        history = jax.tree.map(lambda a: a[:, :last], standing.history)
        show(Chunk(0, last, standing.state, history, seconds))
    return calls.train(
        compiled,
        arrays,
        standing,
        show=lambda chunk, _: show(chunk),
        stop=sweep.stop,
        save=save if folder else None,
        last_save=checkpoint.LastSave(checkpoint.now(), 0.1),  # the first after 5 s
    )


def _kept(
    sweep: Sweep, run: int, end: calls.Progress, lane: int, num_runs: int
) -> History:
    """The history of a run by name, which is written into its file."""
    fields = jax.tree.map(lambda a: a[lane], end.history)
    history = _cut(summary.named_of(sweep.runs[run], fields))
    history["seconds"] = np.asarray(end.seconds / num_runs)
    if sweep.folder is not None:
        digest = sweep.digests[run]
        path = sweep_folder.path_of(sweep.folder, digest)
        named = history | {sweep_folder.NAME: np.array(digest)}
        files.write_arrays(path, named, compress=True)
    return history


def _cut(history: History) -> History:
    """A diverged run ended there: NaN and 0 afterwards, and still diverged."""
    is_after = np.logical_or.accumulate(history["diverged"])
    is_after = np.append(False, is_after[:-1])
    drawn_before = {"tau", "virtual_time", "client"} & {*history}
    unchanged = {name: history[name] for name in drawn_before}
    cut = {
        name: np.where(
            is_after.reshape(is_after.shape + (1,) * (a.ndim - 1)),
            np.nan if np.issubdtype(a.dtype, np.floating) else 0,
            a,
        ).astype(a.dtype)
        for name, a in history.items()
    }
    return cut | unchanged | {"diverged": history["diverged"] | is_after}


def _call_folder(
    sweep: Sweep, group: lanes.Group, indices: list[int], count: int
) -> pathlib.Path | None:
    """The folder of a running call's checkpoints; None: nothing is kept."""
    runs = [sweep.runs[i] for i in indices]
    if sweep.folder is None or not any(p.config.checkpoint for p in runs):
        return None
    files.prepare_workdir(sweep.folder / _RUNNING)
    devices = sweep.mesh.size if any(map(depends_on_devices, runs)) else ""
    digests = [sweep.digests[i] for i in indices]
    # In their order the states of several rules are kept side by side.
    rules = list(dict.fromkeys(p.config.algorithm for p in group.members))
    text = f"{digests}{count}{devices}{rules}"
    return sweep.folder / _RUNNING / hashlib.sha256(text.encode()).hexdigest()[:20]


def _result(sweep: Sweep, histories: list[History]) -> SweepResult:
    """Rows and histories of all runs; written to the folder."""
    rows = [_row(i, sweep, history) for i, history in enumerate(histories)]
    fields = [
        n for n in histories[0] if n != "seconds" and all(n in h for h in histories)
    ]
    same = [n for n in fields if len({h[n].shape for h in histories}) == 1]
    stacked = {n: np.stack([h[n] for h in histories]) for n in same}
    series = [
        {n: a for n, a in h.items() if a.shape == h["virtual_time"].shape}
        for h in histories
    ]
    result = SweepResult(rows, stacked, sweep.swept, series)
    if sweep.folder is not None:
        # What is left is of calls that another division into calls replaced.
        shutil.rmtree(sweep.folder / _RUNNING, ignore_errors=True)
        sweep_files.write(sweep.folder, sweep.swept, rows, sweep.title, result._runs())
        settings = {"config": dataclasses.asdict(sweep.config), "points": sweep.points}
        files.write_json(sweep.folder / "sweep.json", settings | summary.where_run())
    return result
