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
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import host_memory, interrupts
from tsfl_jax.config import Config, settings_of
from tsfl_jax.data import client_test
from tsfl_jax.engine import scan
from tsfl_jax.experiment import checkpoint, grid, lanes, memory, summary, sweep_folder
from tsfl_jax.experiment.backend import start_jax
from tsfl_jax.experiment.custom_hooks import Own
from tsfl_jax.experiment.identity import (
    bytes_moved,
    custom_values,
    depends_on_devices,
    identity_of,
    values_of,
)
from tsfl_jax.experiment.network import delivers
from tsfl_jax.experiment.prepare import Prepared, adopted, drawn_bytes, prepare_all
from tsfl_jax.experiment.program import Arrays, Chunk, Compiled
from tsfl_jax.experiment.runner import train
from tsfl_jax.experiment.sweep_folder import CLIENT, NAME
from tsfl_jax.report import bands, files, progress, sweep_files, table
from tsfl_jax.types import UserError
from tsfl_jax.validate import validate

_RUNNING = "running"  # folder of the checkpoints of running calls

Watch = Callable[[Mapping[int, Mapping[str, np.ndarray]]], None]


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
        about = ", ".join(dict.fromkeys(str(row["data"]) for row in self.rows))
        return bands.of_sweep(self.swept, self.rows, self._runs(), about)

    def _runs(self) -> Any:
        return table.of_sweep(self.swept, self.rows, self.history, self.series)


def _digest(prepared: Prepared) -> str:
    identity = files.plain(identity_of(prepared))
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _row(lane: int, every: "Sweep", history: dict) -> dict:
    """One line of results.csv."""
    prepared = every.several[lane]
    settings = values_of(prepared) | custom_values(prepared)
    scores = summary.scores_of(history)
    there = delivers(history["tau"], history["rho"])[: scores["diverged_at"]]
    return (
        {"run": lane}
        | {name: settings[name] for name in every.swept}
        | scores
        | {
            "seconds": float(history["seconds"]),
            "notes": "; ".join((*prepared.notes, *summary.history_notes(history))),
            "data": prepared.dataset.name,
            "num_devices": every.mesh.size,
            "bytes_moved": bytes_moved(prepared, there),
            "samples_trained": int(history["samples"].astype(np.int64).sum()),
        }
        | {f"{k}_sha": v for k, v in prepared.fingerprints.items()}
        | {k: v for k, v in settings.items() if k not in every.swept}
    )


def _cut(history: dict) -> dict:
    """A diverged run ended there: NaN and 0 afterwards."""
    diverged = history["diverged"]
    end = int(min([*(np.flatnonzero(diverged)[:1] + 1), len(diverged)]))
    if end == len(diverged):
        return history
    after = np.arange(len(diverged)) >= end
    return {
        name: np.where(
            after.reshape(after.shape + (1,) * (a.ndim - 1)),
            np.nan if np.issubdtype(a.dtype, np.floating) else 0,
            a,
        ).astype(a.dtype)
        if a.ndim and name not in ("tau", "virtual_time", "diverged", CLIENT)
        else a
        for name, a in history.items()
    }


def sweep(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    *,
    workdir: str | pathlib.Path | None = None,
    runs_per_call: int = 0,
    stop: Callable[[], bool] = interrupts.was_asked,
    watch: Watch = lambda done: None,
    verbose: bool = False,
    ray: bool | str = False,
    **own: Any,
) -> SweepResult:
    """Run or resume a sweep: one run per point, several in one compiled program.

    Args:
      config: all settings that are not swept.
      swept: setting → its values, such as ``{"seed": range(5), "lr": [0.01, 0.1]}``,
        for their product; or a list of points, ``[{"lr": 0.01}, {"lr": 0.1}]``,
        where what a point lacks keeps the config's value.
      workdir: folder for tables, figures and finished runs; the same call with the
        same folder resumes. None keeps everything in memory.
      runs_per_call: runs of one compiled call; 0 chooses by the device.
      stop: called after each chunk of intervals; True raises KeyboardInterrupt.
      watch: called after each call with the histories of finished runs, by number.
      verbose: print progress on stderr.
      ray: True, or the address of a Ray cluster: workers of its machines take shards
        of the runs; `workdir` is a folder that all see, `watch` is not called.
      **own: `model`, `dataset`, `optimizer`, `aggregator`, … as in `simulate`.

    Returns:
      `SweepResult`: a row per run, and histories with a leading axis of runs.

    Raises:
      UserError: a setting or value that cannot work, in one line.
    """
    stream = sys.stderr if verbose else None
    options = {"runs_per_call": runs_per_call, "stream": stream, "stop": stop} | own
    if ray is False:
        return run(config, swept, workdir=workdir, watch=watch, **options)
    from tsfl_jax.experiment import ray_workers  # which is made of this module

    address = "" if ray is True else ray
    return ray_workers.run(config, swept, address, workdir=workdir, **options)


def run(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    *,
    workdir: str | pathlib.Path | None = None,
    runs_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = interrupts.was_asked,
    watch: Watch = lambda done: None,
    **own: Any,
) -> SweepResult:
    """Run or resume a sweep, see `sweep`; progress goes to `stream`; None: nowhere."""
    options = {"runs_per_call": runs_per_call, "stream": stream, "stop": stop}
    with contextlib.ExitStack() as held:
        options |= {"watch": watch, "held": held}
        every = make(config, swept, own, workdir=workdir, **options)
        return _result(every, *run_all(every))


def make(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    own: Mapping[str, Any],
    *,
    workdir: str | pathlib.Path | None,
    runs_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = interrupts.was_asked,
    watch: Watch = lambda done: None,
    held: contextlib.ExitStack | None = None,
) -> "Sweep":
    """Check and draw all before training; `held` gets the folder's lock, if given."""
    validate(config)
    config, parts = adopted(config, Own(**own))
    points = grid.points(swept, settings_of(type(config)))
    if own.get("aggregator") is not None and "algorithm" in grid.names_of(points):
        raise UserError(
            "--sweep algorithm: would be ignored with aggregator=, the rule of all "
            "runs; leave one of them out"
        )
    configs = [grid.changed(config, values) for values in points]
    folder = None if workdir is None else files.folder_of(workdir)
    # Before anything else uses JAX.
    mesh = start_jax(config)
    if not isinstance(runs_per_call, Integral) or runs_per_call < 0:
        raise UserError(f"runs_per_call={runs_per_call!r}: expected an integer >= 0")
    if jax.process_count() > 1:
        raise UserError("a sweep runs in one process; give every process a --shard")
    names = grid.names_of(points)
    host_memory.require(
        f"sweep {', '.join(names)}",
        sum(map(drawn_bytes, configs)),
        f"schedules and splits of {len(configs):,} runs",
    )
    several = prepare_all(configs, parts)
    if folder is not None:
        is_new = not (folder / "lanes").exists()  # and is not made if refused
        for members in lanes.group(several)[0] if is_new else ():
            memory.check(several[members[0]], mesh.size)
        sweep_folder.opened(folder, held)
    every = config, points, names, several, [_digest(p) for p in several]
    return Sweep(*every, runs_per_call, mesh, folder, stream, stop, watch)


class Sweep(NamedTuple):
    """What all calls of a sweep share."""

    config: Config  # what is not swept
    points: list[dict[str, Any]]
    swept: list[str]  # names of the swept settings
    several: list[Prepared]
    names: list[str]  # digest of each run
    runs_per_call: int  # 0 chooses
    mesh: Mesh
    folder: pathlib.Path | None
    stream: IO[str] | None
    stop: Callable[[], bool]
    watch: Watch
    whole: bool = True  # else a shard, which leaves the tables to the last one

    def only(self, runs: Sequence[int]) -> "Sweep":
        """The part with these runs."""
        parts = (self.points, self.several, self.names)
        points, several, names = ([part[i] for i in runs] for part in parts)
        return self._replace(points=points, several=several, names=names, whole=False)

    def metrics(self, run: int = 0) -> tuple[str, ...]:
        """Names of further metrics, of the user or of the network."""
        return tuple(self.several[run].own.metrics)


def _finished(every: Sweep) -> dict[int, dict[str, np.ndarray]]:
    """Histories of the runs that are in the folder, by number."""
    if every.folder is None:
        return {}
    first, warn = every.several[0], progress.warn_to(every.stream)
    wanted = every.metrics() + (scan.REGRET if first.config.measure_regret else ())
    wanted += client_test.SERIES if first.tested is not None else ()
    found = sweep_folder.finished_lanes(every.folder, every.names, warn, wanted)
    return {i: _cut(found[n]) for i, n in enumerate(every.names) if n in found}


def _write_partly(every: Sweep, rows: Mapping[int, dict]) -> None:
    """The tables of the runs that have finished so far."""
    assert every.folder is not None
    about = f"{_about(every.several)}, {len(rows)} of {len(every.several)} runs so far"
    sweep_files.write(every.folder, every.swept, [rows[i] for i in sorted(rows)], about)


def collect(every: Sweep) -> SweepResult | None:
    """Write the tables of the runs in the locked folder; None while some are missing.

    Raises:
      UserError: none of them is there.
    """
    done = _finished(every)
    if not done:
        raise UserError(
            f"{every.folder} has none of these {len(every.several)} runs; do --config "
            "and --sweep say what the shards were told?"
        )
    rows = {i: _row(i, every, history) for i, history in done.items()}
    if len(rows) == len(every.several):
        return _result(every, list(rows.values()), list(done.values()))
    _write_partly(every, rows)
    missing = f"{len(every.several) - len(rows)} of {len(every.several)} runs"
    progress.log(every.stream, f"{missing} are missing")
    return None


def run_all(every: Sweep) -> tuple[list[dict], list[dict[str, np.ndarray]]]:
    """Rows and histories of all runs, from the folder or trained and kept there."""
    several, stream = every.several, every.stream
    for note in _merged([p.notes for p in several]):
        progress.log(stream, f"note: {note}")
    done = _finished(every)
    rows = {i: _row(i, every, history) for i, history in done.items()}
    groups, causes = lanes.group(several, finished=rows)
    for cause in causes:
        progress.log(stream, f"{len(groups)} programs, because of {cause}")
    if done:
        progress.log(stream, f"{len(rows)} runs were finished already")
        every.watch(dict(done))
    lengths = [len(p.steps) for p in several]
    total, first = sum(lengths), sum(lengths[index] for index in rows)
    with progress.bar(stream, total, first) as advance:
        show = _shown(every, rows, advance)
        for members in groups:
            for indices, histories in _run_group(every, members, show, done):
                for index, history in zip(indices, histories, strict=True):
                    done[index] = _cut(history)
                    rows[index] = _row(index, every, done[index])
                every.watch(dict(sorted(done.items())))
                growing = every.folder is not None and every.whole
                if growing and len(rows) < len(several):
                    _write_partly(every, rows)
                if len(rows) < len(several) and every.stop():
                    raise KeyboardInterrupt
    in_order = range(len(several))
    return [rows[i] for i in in_order], [done[i] for i in in_order]


def _merged(notes: Sequence[Sequence[str]]) -> list[str]:
    """The notes of all runs; of those that differ in numbers only, the first one."""
    alike: dict[str, list[str]] = {}
    for note in itertools.chain(*notes):
        alike.setdefault(re.sub(r"\d[\d., ]*", "#", note), []).append(note)
    return [
        found[0]
        if len(set(found)) == 1
        else f"{found[0]} (with other numbers in {len(found) - 1} of {len(notes)} runs)"
        for found in alike.values()
    ]


def _shown(
    every: Sweep, rows: Mapping[int, dict], advance: progress.Advance
) -> Callable[[list[int], Chunk], None]:
    """A function of a call's runs and a chunk of theirs, which advances the bar."""
    best = max((row["best_test_accuracy"] for row in rows.values()), default=0.0)

    def show(indices: list[int], chunk: Chunk) -> None:
        nonlocal best
        history, count = chunk.history, len(indices)  # without the idle lanes
        accuracy = np.where(history.diverged, np.nan, history.test_accuracy)[:count]
        best = float(np.nanmax([*accuracy.flat, best, 0.0]))
        words = f"best accuracy {100 * best:.1f} %" if best else "no accuracy"
        samples = int(np.sum(history.samples[:count], dtype=np.int64))
        advance(count * (chunk.last - chunk.first), samples, chunk.seconds, words)

    return show


def _run_group(
    every: Sweep,
    members: list[int],
    show: Callable[[list[int], Chunk], None],
    done: Collection[int],
) -> Iterator[tuple[list[int], list[dict[str, np.ndarray]]]]:
    """Finish the runs of one program that are not done, a call at a time."""
    several = every.several
    memory.check(several[members[0]], every.mesh.size)
    group = lanes.make_group([several[i] for i in members], every.mesh)
    count = min(every.runs_per_call or lanes.lanes_of_call(group), len(members))
    todo = [i for i in members if i not in done]
    begun = _path_of(every, group, todo[:count], count)
    if begun is None or not begun.exists():  # else it goes on with its idle lanes
        count = min(count, len(todo))
    compiled = None
    for first in range(0, len(todo), count):
        indices = todo[first : first + count]
        arrays = lanes.make_lanes(group, [several[i] for i in indices], count)
        compiled = compiled or group.program.compile(arrays, stream=every.stream)
        path = _path_of(every, group, indices, count)
        yield indices, _run_call(every, compiled, arrays, indices, path, show)
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)


def _run_call(
    every: Sweep,
    compiled: Compiled,
    arrays: Arrays,
    indices: list[int],
    path: pathlib.Path | None,
    show: Callable[[list[int], Chunk], None],
) -> list[dict[str, np.ndarray]]:
    """Histories of runs, from the checkpoint of an earlier process if there is one."""
    total, chunk = compiled.program.intervals, compiled.call.out_info[1]
    done = checkpoint.nothing(arrays.start, chunk, total, 1)
    # Unfinished calls are saved under a hash of their runs.
    identity = {"call": path.name if path else ""}
    if path is not None:
        notice = progress.warn_to(every.stream)
        found = checkpoint.restore_latest(path, done, identity, notice)
        done = found[1] if found else done

    def save(done: checkpoint.Progress) -> None:
        assert path is not None
        checkpoint.save(path, int(done.finished), done, identity)

    if done.finished:
        known, last = done.known(1), int(done.finished)
        show(indices, Chunk(0, last, done.state, known, float(done.seconds)))
    written = checkpoint.Written(checkpoint.now(), 0.1)  # the first after 5 s
    done = train(
        compiled,
        arrays,
        done,
        lambda chunk, _: show(indices, chunk),
        every.stop,
        save if path else None,
        written,
        axis=1,
    )
    found = []
    for lane, index in enumerate(indices):
        prepared = every.several[index]
        own = jax.tree.map(lambda a, lane=lane: a[lane], done.history)
        times = summary.done_of(prepared, own)
        one = summary.named_of(prepared, own) | {
            "tau": times.tau,
            "virtual_time": prepared.workload.seconds,
            "seconds": np.float64(done.seconds / len(indices)),
        }
        if not times.in_order:
            one[CLIENT] = times.client
        if every.folder is not None:
            name = every.names[index]
            lane = one | {NAME: np.array(name)}
            kept = sweep_folder.path_of(every.folder, name)
            files.write_arrays(kept, lane, compress=True)
        found.append(one)
    return found


def _path_of(
    every: Sweep, group: lanes.Group, indices: list[int], count: int
) -> pathlib.Path | None:
    """The folder of a running call's checkpoints; None: nothing is kept."""
    first = every.several[indices[0]]
    if every.folder is None or not first.config.checkpoint:
        return None
    files.prepare_workdir(every.folder / _RUNNING)
    devices = every.mesh.size if depends_on_devices(first) else ""
    names = [every.names[i] for i in indices]
    # In their order the states of several rules are kept side by side.
    rules = list(dict.fromkeys(p.config.algorithm for p in group.members))
    text = f"{names}{count}{devices}{rules}"
    return every.folder / _RUNNING / hashlib.sha256(text.encode()).hexdigest()[:20]


def _about(several: list[Prepared]) -> str:
    return "; ".join({f"{p.dataset.name}, {p.network.name}": 0 for p in several})


def _result(
    every: Sweep, rows: list[dict], histories: list[dict[str, np.ndarray]]
) -> SweepResult:
    """Rows and histories of all runs; written to the folder."""
    swept, folder = every.swept, every.folder
    fields = [
        n for n in histories[0] if n != "seconds" and all(n in h for h in histories)
    ]
    same = {f: len({h[f].shape for h in histories}) == 1 for f in fields}
    whole = {f: np.stack([h[f] for h in histories]) for f in fields if same[f]}
    series = [
        {n: a for n, a in one.items() if a.shape == one["virtual_time"].shape}
        for one in histories
    ]
    result = SweepResult(rows, whole, swept, series)
    if folder is not None:
        # What is left is of calls that another division into calls replaced.
        shutil.rmtree(folder / _RUNNING, ignore_errors=True)
        about = _about(every.several)
        sweep_files.write(folder, swept, rows, about, result._runs())
        settings = {"config": dataclasses.asdict(every.config), "points": every.points}
        files.write_json(folder / "sweep.json", settings | summary.where_run())
    return result
