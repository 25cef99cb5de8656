"""Run or resume a sweep: groups of lanes, calls of lanes, one file per lane.

Each finished lane is one file named by a digest of its settings, so that a killed sweep
goes on where it stopped, and a larger one reuses what a smaller one has run.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import host_memory
from tsfl_jax.config import Config
from tsfl_jax.engine import scan
from tsfl_jax.experiment import explain, grid, lanes
from tsfl_jax.experiment.backend import notes_of, start_jax
from tsfl_jax.experiment.identity import identity_of, settings_of
from tsfl_jax.experiment.prepare import Own, Prepared, drawn_bytes, prepare_all
from tsfl_jax.experiment.program import Arrays, Compiled
from tsfl_jax.experiment.rule_settings import validate
from tsfl_jax.experiment.runner import scores_of
from tsfl_jax.report import files, progress, sweeps
from tsfl_jax.types import UserError

ONE_CALL = 4  # lanes that run one after another: a killed call loses their work


class SweepResult(NamedTuple):
    """What a sweep leaves behind, lanes in order of the product of its axes."""

    rows: list[dict]  # per lane: swept values, results, fingerprints, all settings
    # [L, T] or [L, T, N], NaN after a divergence. What differs in shape between the
    # lanes (T, N were swept) is left out: it is in the lanes' files.
    history: dict[str, np.ndarray]


def _digest(prepared: Prepared) -> str:
    identity = files.plain(identity_of(prepared))
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


_OF_LANE = ("tau", "virtual_time", "seconds")  # beside the engine's history
_NAME = "lane"  # the digest again: a file's name is not proof of its content


def _finished(
    folder: pathlib.Path, names: list[str], notice: Callable[[str], None]
) -> dict[str, dict]:
    """Lanes that are whole on the disk, as {digest: arrays}; others are left out."""
    wanted = {*scan.History._fields, *_OF_LANE}
    found = {}
    for name in names:
        with (
            contextlib.suppress(
                OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error
            ),
            open(folder / f"{name}.npz", "rb") as file,
            np.load(file) as arrays,
        ):
            lane = {key: arrays[key] for key in arrays.files}
            if str(lane.pop(_NAME)) == name and set(lane) == wanted:
                found[name] = lane
        if name not in found and (folder / f"{name}.npz").exists():
            notice(
                f"{folder / name}.npz is damaged or of an earlier version; that lane "
                "runs again"
            )
    return found


def lanes_of_call(group: lanes.Group) -> int:
    """Choose the number of lanes of one compiled call.

    Sequential lanes: a few. Lanes side by side (vmapped): what fits into 80 % of the
    device's memory, as the compiler reports the memory of one lane.
    """
    members = group.members
    few = min(ONE_CALL, len(members))
    stats = jax.devices()[0].memory_stats() or {}
    if members[0].mapping == "sequential" or "bytes_limit" not in stats:
        return few
    one = lanes.make_lanes(group, members[:1], 1)
    memory = group.program.compile(one).memory()
    free = 0.8 * stats["bytes_limit"] - memory["arguments"]
    fits = int(free // max(memory["temporary"], 1))
    return max(1, min(fits, len(members)))


def _row(prepared: Prepared, values: dict, history: dict, num_devices: int) -> dict:
    """One line of results.csv."""
    settings = settings_of(prepared)
    fingerprints = {f"{k}_sha": v for k, v in prepared.fingerprints.items()}
    return (
        values
        | scores_of(history)
        | {
            "seconds": float(history["seconds"]),
            "notes": "; ".join(prepared.notes),
            "data": prepared.dataset.name,
            "num_devices": num_devices,
            "samples_trained": int(history["samples"].astype(np.int64).sum()),
        }
        | fingerprints
        | {k: v for k, v in settings.items() if k not in values}
    )


def _cut(history: dict) -> dict:
    """A lane that lost every model ended there: NaN and 0 afterwards."""
    lost = np.flatnonzero(history["diverged"])
    if not len(lost):
        return history
    after = np.arange(len(history["diverged"])) > lost[0]
    return {
        name: np.where(
            after.reshape(after.shape + (1,) * (a.ndim - 1)),
            np.nan if np.issubdtype(a.dtype, np.floating) else 0,
            a,
        ).astype(a.dtype)
        if a.ndim and name not in ("tau", "virtual_time", "diverged")
        else a
        for name, a in history.items()
    }


def _show(
    stream: IO[str] | None, numbers: str, begun: float, interval: int, total: int
) -> None:
    """Print the progress of a call."""
    passed = time.perf_counter() - begun
    text = f"{numbers}, interval {interval}/{total}, {passed:.0f} s"
    progress.update_line(text, stream, last=interval == total)


def _run_lanes(
    compiled: Compiled,
    arrays: Arrays,
    show: Callable[[int, int], None],
    stop: Callable[[], bool],
) -> tuple[dict[str, np.ndarray], float]:
    """Run lanes to the end; history ``[L, T, …]`` and seconds of the calls."""
    parts, seconds, total = [], 0.0, compiled.program.intervals
    for chunk in compiled.chunks(arrays):
        seconds += chunk.seconds
        parts.append(chunk.history)
        show(chunk.last, total)
        if chunk.last < total and stop():
            raise KeyboardInterrupt
    history = jax.tree.map(lambda *a: np.concatenate(a, axis=1), *parts)
    return history._asdict(), seconds


def run(
    config: Config, swept: Mapping[str, Sequence] | Sequence[Mapping], **options: Any
) -> SweepResult:
    """Run or resume a sweep.

    Args:
      config: all settings that are not swept.
      swept: setting → its values, such as ``{"seed": range(5), "lr": [0.01, 0.1]}``,
        for their product; or a list of points, ``[{"lr": 0.01}, {"lr": 0.1}]``.
      workdir: folder for files; None keeps everything in memory.
      lanes_per_call: lanes of one compiled call; 0 chooses, see `lanes_of_call`.
      stream: where progress is printed; None: nowhere.
      stop: called after every compiled call; True ends the sweep with
        KeyboardInterrupt, finished lanes kept.
      model, dataset, optimizer, aggregator: as in `runner.simulate`.

    Returns:
      `SweepResult`.

    Raises:
      UserError: a setting or value that cannot work, in one line.
    """
    validate(config)
    points = grid.points(swept)
    configs = [grid.changed(config, values) for values in points]
    return run_validated(config, points, configs, **options)


def run_validated(
    config: Config,
    points: list[dict[str, Any]],
    configs: list[Config],
    *,
    workdir: str | pathlib.Path | None = None,
    lanes_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **own: Any,
) -> SweepResult:
    """Run or resume a sweep of validated configs, one per point; see `run`."""
    if workdir is not None:
        files.folder_of(workdir)  # before the work
    mesh = start_jax(config)  # before anything else uses JAX
    if not isinstance(lanes_per_call, Integral) or lanes_per_call < 0:
        raise UserError(
            f"lanes_per_call={lanes_per_call!r}: expected a whole number >= 0 "
            "(0 chooses)"
        )
    if jax.process_count() > 1:
        raise UserError("a sweep runs in one process; give every process its own part")
    host_memory.require(
        f"sweep {', '.join(points[0])}",
        sum(map(drawn_bytes, configs)),
        f"schedules and splits of {len(configs):,} lanes",
    )
    with contextlib.ExitStack() as stack:
        folder = None if workdir is None else _opened(workdir, stream, stack)
        several = prepare_all(configs, Own(**own))
        done = _train(several, mesh, folder, lanes_per_call, stream, stop)
        return _result(config, points, several, done, mesh.size, folder)


def _opened(
    workdir: str | pathlib.Path, stream: IO[str] | None, stack: contextlib.ExitStack
) -> pathlib.Path:
    """The locked folder; its folder lanes/ exists.

    Raises:
      UserError: it cannot be written, is in use, or holds a single run.
    """
    folder = files.prepare_workdir(workdir)
    stack.enter_context(files.lock(folder, progress.warn_to(stream)))
    if any((folder / n).exists() for n in ("config.json", "metrics.jsonl")):
        raise UserError(f"{folder} holds a single run; choose another --workdir")
    files.prepare_workdir(folder / "lanes")
    return folder


def _train(
    several: list[Prepared],
    mesh: Mesh,
    folder: pathlib.Path | None,
    lanes_per_call: int,
    stream: IO[str] | None,
    stop: Callable[[], bool],
) -> list[dict[str, np.ndarray]]:
    """Histories of all lanes, from the folder or trained and kept there."""
    store = None if folder is None else folder / "lanes"
    notes = [n for p in several for n in p.notes]
    for note in dict.fromkeys((*notes, *notes_of(several[0].config, mesh))):
        progress.log(stream, f"note: {note}")
    names = [_digest(p) for p in several]
    done = {} if store is None else _finished(store, names, progress.warn_to(stream))
    todo = [i for i, name in enumerate(names) if name not in done]
    if done:
        progress.log(stream, f"{len(several) - len(todo)} lanes were finished already")
    groups, causes = lanes.group([several[i] for i in todo])
    for cause in causes:
        progress.log(stream, f"{len(groups)} programs, because of {cause}")
    begun = time.perf_counter()
    for members in groups:
        explain.check_memory(several[todo[members[0]]], mesh.size)
        group = lanes.make_group([several[todo[i]] for i in members], mesh)
        count = min(lanes_per_call or lanes_of_call(group), len(members))
        compiled = None
        for first in range(0, len(members), count):
            indices = [todo[i] for i in members[first : first + count]]
            numbers = f"lanes {indices[0] + 1}–{indices[-1] + 1} of {len(several)}"
            show = functools.partial(_show, stream, numbers, begun)
            here = [several[i] for i in indices]
            arrays = lanes.make_lanes(group, here, count)
            compiled = compiled or group.program.compile(arrays)
            history, seconds = _run_lanes(compiled, arrays, show, stop)
            for lane, index in enumerate(indices):
                workload = several[index].workload
                own = {name: a[lane] for name, a in history.items()} | {
                    "tau": workload.schedule.tau,
                    "virtual_time": workload.seconds,
                    "seconds": np.float64(seconds / len(indices)),
                }
                done[names[index]] = own
                if store is not None:
                    kept = own | {_NAME: np.array(names[index])}
                    files.write_arrays(store / f"{names[index]}.npz", kept)
            if not all(name in done for name in names) and stop():
                raise KeyboardInterrupt
    return [_cut(done[name]) for name in names]


def _result(
    config: Config,
    values: list[dict],
    several: list[Prepared],
    histories: list[dict],
    num_devices: int,
    folder: pathlib.Path | None,
) -> SweepResult:
    """Rows and histories of all lanes; written to the folder."""
    rows = [
        _row(p, v, h, num_devices)
        for p, v, h in zip(several, values, histories, strict=True)
    ]
    fields = [name for name in histories[0] if name != "seconds"]
    same = {f: len({h[f].shape for h in histories}) == 1 for f in fields}
    whole = {f: np.stack([h[f] for h in histories]) for f in fields if same[f]}
    result = SweepResult(rows, whole)
    if folder is not None:
        settings = {"config": dataclasses.asdict(config), "lanes": values}
        files.write_json(folder / "sweep.json", settings)
        about = ", ".join(
            dict.fromkeys(f"{p.dataset.name}, {p.network.name}" for p in several)
        )
        sweeps.write_sweep(folder, list(values[0]), rows, whole, about)
    return result


def sweep(
    config: Config,
    swept: Mapping[str, Sequence] | Sequence[Mapping],
    *,
    verbose: bool = False,
    **options: Any,
) -> SweepResult:
    """Run or resume a sweep, see `run`; `verbose` prints progress on stderr."""
    return run(config, swept, stream=sys.stderr if verbose else None, **options)
