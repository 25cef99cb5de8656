"""Orbax checkpoints of a run, between two compiled calls.

Each step is a folder named by its number. Orbax writes it under another name and
renames it when complete, so that a killed process leaves a whole checkpoint or none.
Orbax does not notice every later damage, so digests are stored too and verified.
Asynchronous and distributed saving are NOT done: a save has finished when it returns.
"""

import contextlib
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging

from tsfl_jax.types import UserError

KEEP = 2  # the newest, and one to fall back on when that is damaged
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name Orbax gives until it commits

_Leaves = dict[str, np.ndarray]  # by path in the tree


class _DamagedError(Exception):
    """A checkpoint whose bytes are not those that were saved."""


def save(folder: str | pathlib.Path, step: int, tree: Any, meta: dict) -> None:
    """Saves ``tree`` as the newest checkpoint and deletes all but the last two.

    Checkpoints of later steps are deleted as well: a run that saves an earlier one was
    resumed from before them, because they were damaged.

    Args:
      folder: where the checkpoints of this run are, made if missing.
      step: finished intervals ≥ 0; an existing checkpoint of this step is replaced.
      tree: pytree of arrays and numbers, without PRNG keys.
      meta: what the experiment is, as JSON values; ``restore_latest`` compares it.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    leaves = _flatten(tree)
    about = {"meta": meta, "layout": _layout(leaves), "leaves_sha256": _digest(leaves)}
    about = json.loads(json.dumps(about))  # hash what will be read back: no tuples
    root = pathlib.Path(folder).resolve()  # Orbax insists on an absolute path
    try:
        root.mkdir(parents=True, exist_ok=True)
        for killed in root.glob(f"*{_UNFINISHED}*"):
            shutil.rmtree(killed)
        with _orbax() as (ocp, checkpointer):
            args = ocp.args.Composite(
                # Orbax refuses empty arrays; the layout says all about them
                leaves=ocp.args.PyTreeSave({p: x for p, x in leaves.items() if x.size}),
                about=ocp.args.JsonSave(about | {"sha256": _json_digest(about)}),
            )
            checkpointer.save(root / str(step), args=args, force=True)
        kept = [s for s in _steps(root) if s <= step][-KEEP:]
        for other in set(_steps(root)) - set(kept):
            shutil.rmtree(root / str(other))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None)
        if "RESOURCE_EXHAUSTED" in str(error):  # TensorStore's word, in a ValueError
            reason = "no space left on the disk"
        if reason is None:
            raise
        raise UserError(
            f"cannot save a checkpoint in {folder}: {reason}; make room, choose another"
            " --workdir, or switch checkpoints off (--config.checkpoint=False)"
        ) from error


def restore_latest(
    folder: str | pathlib.Path,
    template: Any,
    meta: dict,
    notice: Callable[[str], None] = logging.warning,
) -> tuple[int, Any] | None:
    """Returns the newest intact checkpoint, or None where there is none.

    Args:
      folder: where ``save`` put the checkpoints; may be missing.
      template: pytree of the structure, shapes and dtypes that were saved.
      meta: must equal the saved one.
      notice: is told, in one line, of each damaged checkpoint.

    Returns:
      The step, and the template's structure with NumPy leaves, bit for bit as saved.

    Raises:
      UserError: the checkpoint is another experiment's: its meta or layout differs.
    """
    root = pathlib.Path(folder).resolve()
    target = _flatten(template)
    steps = _steps(root)
    for step in reversed(steps):
        try:
            about = _read_about(root / str(step))
            _check_same_experiment(folder, about, meta, target)
            leaves = _read_leaves(root / str(step), about)
        except _DamagedError as error:
            notice(f"checkpoint {folder}/{step} is damaged and left out: {error}")
            continue
        return step, jax.tree.structure(template).unflatten(leaves[p] for p in target)
    if steps:
        notice(f"no intact checkpoint in {folder}; starting from the beginning")
    return None


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """Orbax and a checkpointer, quiet: whatever matters, it raises as well."""
    import orbax.checkpoint as ocp  # slow: wait only when saving

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    items = {
        "leaves": ocp.PyTreeCheckpointHandler(),
        "about": ocp.JsonCheckpointHandler(),
    }
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**items)) as checkpointer:
            yield ocp, checkpointer
    finally:
        logging.set_verbosity(verbosity)


def _read(path: pathlib.Path, item: str, kind: str) -> Any:
    try:
        with _orbax() as (ocp, checkpointer):
            args = ocp.args.Composite(**{item: getattr(ocp.args, kind)()})
            return checkpointer.restore(path, args=args)[item]
    except Exception as error:  # damaged bytes surface as errors of every kind
        reason = (str(error) or repr(error)).splitlines()[0][:120]
        raise _DamagedError(f"cannot read its {item} ({reason})") from error


def _read_about(path: pathlib.Path) -> dict:
    """What ``save`` noted about the checkpoint."""
    about = _read(path, "about", "JsonRestore")
    if not isinstance(about, dict) or about.pop("sha256", "") != _json_digest(about):
        raise _DamagedError("its description has changed")
    return about


def _read_leaves(path: pathlib.Path, about: dict) -> _Leaves:
    """The leaves as they were saved."""
    leaves = _read(path, "leaves", "PyTreeRestore")
    leaves |= {p: np.zeros(shape, t) for p, t, shape in about["layout"] if 0 in shape}
    if _digest(leaves) != about["leaves_sha256"]:
        raise _DamagedError("its arrays have changed")
    return leaves


def _check_same_experiment(
    folder: str | pathlib.Path, about: dict, meta: dict, target: _Leaves
) -> None:
    old = _settings(about["meta"])
    new = _settings(json.loads(json.dumps(meta)))
    changed = [k for k in old | new if old.get(k) != new.get(k)]
    told = [f"{k}: {old.get(k, '–')} → {new.get(k, '–')}" for k in changed[:3]]
    if len(changed) > 3:
        told.append(f"and {len(changed) - 3} more")
    if not changed and sorted(_layout(target)) != sorted(about["layout"]):
        told = ["the saved arrays have other names, shapes or types"]
    if told:
        raise UserError(
            f"{folder} holds a checkpoint of another experiment ({'; '.join(told)});"
            " choose another --workdir, or delete that folder to start afresh"
        )


def _settings(meta: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as one dict of JSON: ``{"data.name": '"digits"', …}``."""
    if not isinstance(meta, dict) or not meta:
        return {prefix: json.dumps(meta, ensure_ascii=False)} if prefix else {}
    parts = [_settings(v, f"{prefix}.{k}" if prefix else k) for k, v in meta.items()]
    return {key: value for part in parts for key, value in part.items()}


def _steps(root: pathlib.Path) -> list[int]:
    """The steps saved in a folder, ascending; whatever else lies there is ignored."""
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


def _digest(leaves: _Leaves) -> str:
    """SHA-256 over path, dtype, shape and bytes of every leaf."""
    digest = hashlib.sha256()
    for path, leaf in sorted(leaves.items()):
        digest.update(json.dumps(_layout({path: leaf})).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
