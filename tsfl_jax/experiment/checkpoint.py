"""Orbax checkpoints of a run, between two compiled calls.

Each checkpoint is a folder named by its interval: the arrays as Orbax writes them, and
about.json with the interval, the experiment's identity and a digest of every file. It
is renamed to that name when complete, so that a killed process leaves a whole
checkpoint or none. What happens to the files or to the folder's name later is noticed
before Orbax reads them.
Asynchronous and distributed saving are NOT done: a save has finished when it returns.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging

from tsfl_jax.config import flat
from tsfl_jax.types import UserError, one_line

KEEP = 2  # the newest, and one to fall back on when that is damaged
_UNFINISHED = ".unfinished-"  # before the interval in a folder's name, until whole
_ROOM = 2**20  # bytes, ample for all but the arrays
_ARRAYS, _ABOUT = "arrays", "about.json"

_Leaves = dict[str, np.ndarray]  # by path in the tree


class _DamagedError(Exception):
    """A checkpoint that is not what was saved under its name."""


def save(folder: str | pathlib.Path, interval: int, state: Any, identity: dict) -> None:
    """Save ``state`` as the newest checkpoint and delete all but the last two.

    Checkpoints of later intervals are deleted as well: a run that saves an earlier one
    was resumed from before them, because they were damaged.

    Args:
      folder: where the checkpoints of this run are, made if missing.
      interval: finished intervals ≥ 0; an existing checkpoint of it is replaced.
      state: pytree of arrays and numbers, without PRNG keys.
      identity: what the experiment is, as JSON values; ``restore_latest`` compares it.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    leaves = _flatten(state)
    root = pathlib.Path(folder).resolve()  # Orbax insists on an absolute path
    unfinished, finished = root / f"{_UNFINISHED}{interval}", root / str(interval)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for killed in root.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(killed)
        # TensorStore prints a traceback for every array that meets a full disk
        needed = _ROOM + sum(leaf.nbytes for leaf in leaves.values())
        if shutil.disk_usage(root).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with _checkpointer() as checkpointer:
            # Orbax refuses empty arrays; the layout says all about them
            filled = {path: leaf for path, leaf in leaves.items() if leaf.size}
            checkpointer.save(unfinished / _ARRAYS, filled)
        about = {
            "interval": interval,
            "identity": json.loads(json.dumps(identity)),  # as it will be read back
            "layout": _layout(leaves),
            "files": _digests(unfinished),
        }
        _write_about(unfinished / _ABOUT, about)
        if finished.exists():
            shutil.rmtree(finished)
        unfinished.rename(finished)
        kept = [i for i in _intervals(root) if i <= interval][-KEEP:]
        for other in set(_intervals(root)) - set(kept):
            shutil.rmtree(root / str(other))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None)
        if "RESOURCE_EXHAUSTED" in str(error):  # TensorStore's word, in a ValueError
            reason = os.strerror(errno.ENOSPC)
        if reason is None:
            raise
        raise UserError(
            f"cannot save a checkpoint in {folder}: {reason}; make room, choose another"
            " --workdir, or switch checkpoints off (--config.checkpoint=False)"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def restore_latest(
    folder: str | pathlib.Path,
    template: Any,
    identity: dict,
    notice: Callable[[str], None] = logging.warning,
) -> tuple[int, Any] | None:
    """Return the newest intact checkpoint, or None where there is none.

    Args:
      folder: where ``save`` put the checkpoints; may be missing.
      template: pytree of the structure, shapes and dtypes that were saved.
      identity: must equal the saved one.
      notice: gets one line for each damaged, renamed or swapped checkpoint.

    Returns:
      The interval, and the template's structure with NumPy leaves, bit for bit as
      saved.

    Raises:
      UserError: another experiment's checkpoint: its identity or layout differs.
    """
    root = pathlib.Path(folder).resolve()
    target = _flatten(template)
    intervals = _intervals(root)
    for interval in reversed(intervals):
        path = root / str(interval)
        try:
            about = _read_about(path / _ABOUT)
            _check_same_experiment(folder, about, identity, target)
            _check_interval(interval, about)
            _check_files(path, about)
            leaves = _read_arrays(path / _ARRAYS, about, target)
        except (_DamagedError, OSError) as error:
            notice(f"checkpoint {folder}/{interval} is damaged and left out: {error}")
            continue
        return interval, jax.tree.structure(template).unflatten(leaves)
    if intervals:
        notice(f"no intact checkpoint in {folder}; starting from the beginning")
    return None


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """Orbax, quiet: whatever matters, it raises as well."""
    import orbax.checkpoint as ocp  # slow: wait only when saving

    # Orbax makes all processes of a run meet; only this one is here.
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=str(here)
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            yield checkpointer
    finally:
        logging.set_verbosity(verbosity)


def _write_about(path: pathlib.Path, about: dict) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(about | {"sha256": _json_digest(about)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_about(path: pathlib.Path) -> dict:
    """What ``save`` noted about the checkpoint."""
    try:
        about = json.loads(path.read_bytes())
        intact = about.pop("sha256") == _json_digest(about)
    except (
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        RecursionError,
    ):
        intact = False
    if not intact:
        raise _DamagedError(f"{_ABOUT} is missing or has changed")
    return about


def _check_interval(interval: int, about: dict) -> None:
    """A folder's name is not proof: folders get renamed, copied and swapped."""
    if "interval" not in about:
        raise _DamagedError("an earlier version saved it, without its interval")
    if about["interval"] != interval:
        raise _DamagedError(f"its content is of interval {about['interval']}")


def _check_files(path: pathlib.Path, about: dict) -> None:
    found, saved = _digests(path), about["files"]
    for file in dict.fromkeys([*saved, *found]):
        if found.get(file) != saved.get(file):
            what = "has changed" if file in found else "is missing"
            what = what if file in saved else "was added"
            raise _DamagedError(f"{file} {what}")


def _read_arrays(path: pathlib.Path, about: dict, target: _Leaves) -> list[np.ndarray]:
    """The saved leaves in the order of the template's."""
    try:
        with _checkpointer() as checkpointer:
            leaves = checkpointer.restore(path)
        leaves |= {p: np.zeros(n, t) for p, t, n in about["layout"] if 0 in n}
        return [leaves[p] for p in target]
    except Exception as error:  # Orbax decides on the kind
        reason = one_line(error, 200)
        raise _DamagedError(f"Orbax cannot read it ({reason})") from error


def _check_same_experiment(
    folder: str | pathlib.Path, about: dict, identity: dict, target: _Leaves
) -> None:
    # Checkpoints of earlier versions, without an interval, called it meta.
    saved = about.get("identity", about.get("meta", {}))
    asked = json.loads(json.dumps(identity))  # tuples are lists there
    old, new = (
        {n: json.dumps(value, ensure_ascii=False) for n, value in flat(one).items()}
        for one in (saved, asked)
    )
    changed = [k for k in old | new if old.get(k) != new.get(k)]
    shown = [f"{k}: {old.get(k, '–')} → {new.get(k, '–')}" for k in changed[:3]]
    if len(changed) > 3:
        shown.append(f"and {len(changed) - 3} more")
    if not changed and sorted(_layout(target)) != sorted(about["layout"]):
        shown = ["the saved arrays have other names, shapes or types"]
    if shown:
        raise UserError(
            f"{folder} holds a checkpoint of another experiment ({'; '.join(shown)});"
            " choose another --workdir, or delete that folder to start afresh"
        )


def _intervals(root: pathlib.Path) -> list[int]:
    """Names of a folder's checkpoints, ascending; other files there are ignored."""
    if not root.is_dir():
        return []
    names = [p.name for p in root.iterdir() if p.name.isdecimal() and p.is_dir()]
    return sorted(int(name) for name in names if name == str(int(name)))


def _flatten(tree: Any) -> _Leaves:
    """Leaves on the host, by path; a ShapeDtypeStruct may stand for an array."""
    flat = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
    return {
        jax.tree_util.keystr(path): leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        for path, leaf in flat
    }


def _layout(leaves: _Leaves) -> list:
    return [[path, str(x.dtype), list(x.shape)] for path, x in leaves.items()]


def _digests(path: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every file of Orbax's in a checkpoint, by its path there."""
    digests = {}
    for file in sorted(f for f in (path / _ARRAYS).rglob("*") if f.is_file()):
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        digests[file.relative_to(path).as_posix()] = digest
    return digests


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
