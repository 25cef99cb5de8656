"""Run or resume a sweep: groups of lanes, calls of lanes, one file per lane.

Each finished lane is one file named by a digest of its settings, so that a killed sweep
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
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import host_memory
from tsfl_jax.config import Config
from tsfl_jax.config import settings_of as settings_of_config
from tsfl_jax.engine import scan
from tsfl_jax.experiment import (
    calls,
    grid,
    lanes,
    memory,
)
from tsfl_jax.experiment.backend import depends_on_devices, start_jax
from tsfl_jax.experiment.identity import identity_of, settings_of
from tsfl_jax.experiment.network import bytes_per_delivery, delivers
from tsfl_jax.experiment.own_hooks import Own
from tsfl_jax.experiment.prepare import Prepared, adopted, drawn_bytes, prepare_all
from tsfl_jax.experiment.program import Chunk
from tsfl_jax.experiment.runner import history_notes, regret_of, scores_of
from tsfl_jax.report import bands, files, progress, results, sweeps, table
from tsfl_jax.types import UserError
from tsfl_jax.validate import validate

_RUNNING = "running"  # folder of the checkpoints of running calls
ONE_CALL = 4  # lanes that run one after another: a killed call loses their work

Watch = Callable[[Mapping[int, Mapping[str, np.ndarray]]], None]


class SweepResult(NamedTuple):
    """What a sweep leaves behind, lanes in order of the product of its axes."""

    rows: list[dict]  # per lane: swept values, results, fingerprints, all settings
    # [L, T] or [L, T, N], NaN after a divergence. What differs in shape between the
    # lanes (T, N were swept) is left out: it is in the lanes' files. Where clients do
    # not start together N are slots, and "client" says whose they are.
    history: dict[str, np.ndarray]
    swept: Sequence[str] = ()  # names of the swept settings
    series: Sequence[dict[str, np.ndarray]] = ()  # per lane: arrays [T]

    def __repr__(self) -> str:
        """Three lines: what it is, the best lane, what one can do with it."""
        return results.sweep_text(self.swept, self.rows)

    def _repr_html_(self) -> str:
        """The groups of lanes as a table, for notebooks."""
        return results.sweep_html(self.swept, self.rows)

    def to_xarray(self) -> Any:
        """Histories and results as an `xarray.Dataset`; see `report.table`."""
        return table.unstacked(self._runs(), self.swept)

    def to_pandas(self) -> Any:
        """A data frame with one line per lane and interval."""
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


def most_lanes(prepared: Prepared) -> int:
    """Most lanes of a call, as far as it is known without compiling."""
    stats = jax.devices()[0].memory_stats() or {}
    one_by_one = prepared.mapping == "sequential" or "bytes_limit" not in stats
    return ONE_CALL if one_by_one else sys.maxsize


def lanes_of_call(group: lanes.Group) -> int:
    """Choose the number of lanes of one compiled call.

    Sequential lanes: a few. Lanes side by side (vmapped): what fits into 80 % of the
    device's memory, as the compiler reports the memory of one lane.
    """
    members = group.members
    if most_lanes(members[0]) == ONE_CALL:
        return min(ONE_CALL, len(members))
    stats = jax.devices()[0].memory_stats() or {}
    one = lanes.make_lanes(group, members[:1], 1, runs=False)
    memory = group.program.compile(one).memory()
    free = 0.8 * stats["bytes_limit"] - memory["arguments"]
    fits = int(free // max(memory["temporary"], 1))
    return max(1, min(fits, len(members)))


def _row(
    lane: int, prepared: Prepared, swept: list[str], history: dict, num_devices: int
) -> dict:
    """One line of results.csv."""
    settings = settings_of(prepared)
    values = {"lane": lane} | {name: settings[name] for name in swept}
    fingerprints = {f"{k}_sha": v for k, v in prepared.fingerprints.items()}
    scores = scores_of(history)
    end = scores["diverged_at"]
    there = delivers(history["tau"][:end], history["rho"][:end])
    sizes = [a.size for a in jax.tree.leaves(prepared.network.params["params"])]
    delivery = bytes_per_delivery(sum(sizes), prepared.rule)
    return (
        values
        | scores
        | regret_of(history)
        | {
            "seconds": float(history["seconds"]),
            "notes": "; ".join((*prepared.notes, *history_notes(history))),
            "data": prepared.dataset.name,
            "num_devices": num_devices,
            "bytes_moved": delivery * int(there.sum()),
            "samples_trained": int(history["samples"].astype(np.int64).sum()),
        }
        | fingerprints
        | {k: v for k, v in settings.items() if k not in values}
    )


def _cut(history: dict) -> dict:
    """A lane that lost every model ended there: NaN and 0 afterwards."""
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
        if a.ndim and name not in ("tau", "virtual_time", "diverged", calls.CLIENT)
        else a
        for name, a in history.items()
    }


def run(
    config: Config, swept: Mapping[str, Sequence] | Sequence[Mapping], **options: Any
) -> SweepResult:
    """Run or resume a sweep, with `options` as `from_python.sweep` has them.

    Progress goes to the option `stream`; None: nowhere.
    """
    validate(config)
    given = Own(**{n: options.pop(n) for n in Own._fields if n in options})
    config, own = adopted(config, given)
    points = grid.points(swept, settings_of_config(config))
    if given.aggregator is not None and "algorithm" in grid.names_of(points):
        raise UserError(
            "--sweep algorithm: would be ignored with aggregator=, the rule of all "
            "lanes; leave one of them out"
        )
    configs = [grid.changed(config, values) for values in points]
    return run_validated(config, points, configs, **options, **own._asdict())


def run_validated(
    config: Config,
    points: list[dict[str, Any]],
    configs: list[Config],
    *,
    workdir: str | pathlib.Path | None = None,
    lanes_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    watch: Watch = lambda done: None,
    **own: Any,
) -> SweepResult:
    """Run or resume a sweep of validated configs, one per point; see `run`."""
    if workdir is not None:
        files.folder_of(workdir)  # before the work
    # Before anything else uses JAX.
    mesh = start_jax(config)
    if not isinstance(lanes_per_call, Integral) or lanes_per_call < 0:
        raise UserError(
            f"lanes_per_call={lanes_per_call!r}: expected a whole number >= 0 "
            "(0 chooses)"
        )
    if jax.process_count() > 1:
        raise UserError("a sweep runs in one process; give every process its own part")
    host_memory.require(
        f"sweep {', '.join(grid.names_of(points))}",
        sum(map(drawn_bytes, configs)),
        f"schedules and splits of {len(configs):,} lanes",
    )
    with contextlib.ExitStack() as stack:
        folder = None if workdir is None else _opened(workdir, stack)
        several = prepare_all(configs, Own(**own))
        names = [_digest(p) for p in several]
        swept = grid.names_of(points)
        every = _Sweep(points, swept, several, names, mesh, folder, stream, stop, watch)
        return _result(config, every, *_train(every, lanes_per_call))


def _opened(workdir: str | pathlib.Path, stack: contextlib.ExitStack) -> pathlib.Path:
    """The locked folder; its folder lanes/ exists."""
    folder = files.prepare_workdir(workdir)
    stack.enter_context(files.lock(folder))
    if any((folder / n).exists() for n in ("config.json", "metrics.jsonl")):
        raise UserError(f"{folder} holds a single run; choose another --workdir")
    files.prepare_workdir(folder / "lanes")
    return folder


class _Sweep(NamedTuple):
    """What all calls of a sweep share."""

    points: list[dict[str, Any]]
    swept: list[str]  # names of the swept settings
    several: list[Prepared]
    names: list[str]  # digest of each lane
    mesh: Mesh
    folder: pathlib.Path | None
    stream: IO[str] | None
    stop: Callable[[], bool]
    watch: Watch

    def metrics(self) -> tuple[str, ...]:
        """Names of the user's own metrics, the same in all lanes."""
        return tuple(self.several[0].own.metrics or ())

    def row(self, lane: int, history: dict) -> dict:
        """The lane's line of the tables."""
        size = self.mesh.size
        return _row(lane, self.several[lane], self.swept, history, size)


def _train(
    every: _Sweep, lanes_per_call: int
) -> tuple[list[dict], list[dict[str, np.ndarray]]]:
    """Rows and histories of all lanes, from the folder or trained and kept there."""
    several, names, stream = every.several, every.names, every.stream
    for note in _merged([p.notes for p in several]):
        progress.log(stream, f"note: {note}")
    done = {}
    if every.folder is not None:
        warn = progress.warn_to(stream)
        regret = several[0].config.measure_regret
        wanted = every.metrics() + (scan.REGRET if regret else ())
        found = calls.finished_lanes(every.folder / "lanes", names, warn, wanted)
        done = {i: _cut(found[n]) for i, n in enumerate(names) if n in found}
    rows = {i: every.row(i, history) for i, history in done.items()}
    groups, causes = lanes.group(several, finished=rows)
    for cause in causes:
        progress.log(stream, f"{len(groups)} programs, because of {cause}")
    if done:
        progress.log(stream, f"{len(rows)} lanes were finished already")
        every.watch(dict(done))
    lengths = [len(p.steps) for p in several]
    total, first = sum(lengths), sum(lengths[lane] for lane in rows)
    with progress.bar(stream, total, first) as advance:
        show = _shown(every, rows, advance)
        for members in groups:
            for indices, histories in _run_group(
                every, members, lanes_per_call, show, done
            ):
                for index, history in zip(indices, histories, strict=True):
                    done[index] = _cut(history)
                    rows[index] = every.row(index, done[index])
                every.watch(dict(sorted(done.items())))
                if every.folder is not None and len(rows) < len(several):
                    ordered = [rows[i] for i in sorted(rows)]
                    about = f"{len(rows)} of {len(several)} lanes so far"
                    about = f"{_about(several)}, {about}"
                    sweeps.write_partial(every.folder, every.swept, ordered, about)
                if len(rows) < len(several) and every.stop():
                    raise KeyboardInterrupt
    if every.folder is not None:  # of calls that another division into calls replaced
        shutil.rmtree(every.folder / _RUNNING, ignore_errors=True)
    lanes_in_order = range(len(several))
    return [rows[i] for i in lanes_in_order], [done[i] for i in lanes_in_order]


def _merged(notes: Sequence[Sequence[str]]) -> list[str]:
    """The notes of all lanes; of those that differ in numbers only, the first one."""
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
    every: _Sweep, rows: Mapping[int, dict], advance: progress.Advance
) -> Callable[[list[int], Chunk], None]:
    """A function of a call's lanes and a chunk of theirs, which advances the bar."""
    tested = [(row["best_test_accuracy"], lane) for lane, row in rows.items()]
    best = max((pair for pair in tested if pair[0] > 0), default=(0.0, 0))

    def show(indices: list[int], chunk: Chunk) -> None:
        nonlocal best
        history, count = chunk.history, len(indices)  # without the idle lanes
        accuracy = np.where(history.diverged, np.nan, history.test_accuracy)[:count]
        highest = np.nan_to_num(accuracy).max(axis=1).tolist()
        best = max(best, *zip(highest, indices, strict=True))
        point = ", ".join(f"{k}={v}" for k, v in every.points[best[1]].items())
        words = f"best accuracy {100 * best[0]:.1f} % ({point})"
        samples = int(np.sum(history.samples[:count], dtype=np.int64))
        intervals = count * (chunk.last - chunk.first)
        advance(intervals, samples, chunk.seconds, words if best[0] else "no accuracy")

    return show


def _run_group(
    every: _Sweep,
    members: list[int],
    lanes_per_call: int,
    show: Callable[[list[int], Chunk], None],
    done: Collection[int],
) -> Iterator[tuple[list[int], list[dict[str, np.ndarray]]]]:
    """Run those lanes of one program that are not done, a call at a time."""
    several, stream = every.several, every.stream
    memory.check(several[members[0]], every.mesh.size)
    group = lanes.make_group([several[i] for i in members], every.mesh)
    count = min(lanes_per_call or lanes_of_call(group), len(members))
    todo = [i for i in members if i not in done]
    begun = _path_of(every, group, todo[:count], count)
    if begun is None or not begun.exists():  # else it goes on with its idle lanes
        count = min(count, len(todo))
    compiled = None
    for first in range(0, len(todo), count):
        indices = todo[first : first + count]
        arrays = lanes.make_lanes(group, [several[i] for i in indices], count)
        compiled = compiled or group.program.compile(arrays, stream=stream)
        path = _path_of(every, group, indices, count)
        history, seconds = calls.run_call(
            compiled,
            arrays,
            path,
            functools.partial(show, indices),
            every.stop,
            progress.warn_to(stream),
        )
        named = history.named(every.metrics())
        found = _histories(every, indices, named, seconds)
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        yield indices, found


def _histories(
    every: _Sweep,
    indices: list[int],
    named: dict[str, Any],
    seconds: float,
) -> list[dict[str, np.ndarray]]:
    """The histories of a call's lanes, each written to its file."""
    found = []
    for lane, index in enumerate(indices):
        workload = every.several[index].workload
        one = {name: a[lane] for name, a in named.items()} | {
            "tau": workload.schedule.tau,
            "virtual_time": workload.seconds,
            "seconds": np.float64(seconds / len(indices)),
        }
        if workload.schedule.delivery is not None:
            one[calls.CLIENT] = np.asarray(workload.schedule.delivery.client)
        if every.folder is not None:
            folder = every.folder / "lanes"
            calls.write_lane(folder, every.names[index], one)
        found.append(one)
    return found


def _path_of(
    every: _Sweep, group: lanes.Group, indices: list[int], count: int
) -> pathlib.Path | None:
    """The folder of a running call's checkpoints; None: nothing is kept."""
    first = every.several[indices[0]]
    if every.folder is None or not first.config.checkpoint:
        return None
    files.prepare_workdir(every.folder / _RUNNING)
    # The width of a block can change last bits, and so can some rules.
    depends = depends_on_devices(first.config, first.own.aggregator)
    devices = every.mesh.size if depends or first.mapping == "vmap" else ""
    names = [every.names[i] for i in indices]
    # In their order the states of several rules are kept side by side.
    rules = list(dict.fromkeys(p.config.algorithm for p in group.members))
    text = f"{names}{count}{devices}{rules}"
    return every.folder / _RUNNING / hashlib.sha256(text.encode()).hexdigest()[:20]


def _about(several: list[Prepared]) -> str:
    names = [f"{p.dataset.name}, {p.network.name}" for p in several]
    return "; ".join(dict.fromkeys(names))


def _result(
    config: Config,
    every: _Sweep,
    rows: list[dict],
    histories: list[dict[str, np.ndarray]],
) -> SweepResult:
    """Rows and histories of all lanes; written to the folder."""
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
        settings = {"config": dataclasses.asdict(config), "lanes": every.points}
        settings |= {
            "device": jax.devices()[0].device_kind,
            "backend": jax.default_backend(),
            "processor": files.processor(),
            "versions": files.versions(),
        }
        files.write_json(folder / "sweep.json", settings)
        about = _about(every.several)
        sweeps.write_sweep(folder, swept, rows, result._runs(), about)
    return result
