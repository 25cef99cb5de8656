"""Orbax checkpoints of a run, between two compiled calls.

Each step is a folder named by its number; Orbax writes it under another name and renames
it when complete, so that a killed process leaves a whole checkpoint or none. Orbax does
not notice every later damage, so a digest of all leaves is stored too and verified.
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

_Leaves = dict[str, np.ndarray]  # by path in the tree


def save(folder: str | pathlib.Path, step: int, tree: Any, meta: dict) -> None:
    """Saves ``tree`` as the newest checkpoint and deletes all but the last two.

    Checkpoints of later steps are deleted as well: whoever saves an earlier one was
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
    about = {"meta": meta, "leaves": _layout(leaves), "leaves_sha256": _digest(leaves)}
    # through JSON once, so that what is hashed is what will be read back
    about = json.loads(json.dumps(about))
    root = pathlib.Path(folder).resolve()  # Orbax insists on an absolute path
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _orbax() as ocp, _checkpointer(ocp) as checkpointer:
            checkpointer.save(
                root / str(step),
                args=ocp.args.Composite(
                    leaves=ocp.args.PyTreeSave(leaves),
                    about=ocp.args.JsonSave(about | {"sha256": _json_digest(about)}),
                ),
                force=True,
            )
        for old in _steps(root):
            if old > step or old in [s for s in _steps(root) if s <= step][:-KEEP]:
                shutil.rmtree(root / str(old))
    except (OSError, ValueError) as error:  # TensorStore reports a full disk by the latter
        reason = str(error).splitlines()[0][:200]
        raise UserError(
            f"cannot save a checkpoint in {folder}: {reason}; free some space, choose"
            " another --workdir, or switch checkpoints off"
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
      The step and the tree: the template's structure with NumPy leaves, bit for bit as
      saved.

    Raises:
      UserError: the checkpoint is of another experiment: its meta or layout differs.
    """
    root = pathlib.Path(folder).resolve()
    steps = _steps(root)
    for step in reversed(steps):
        about = _read_about(root / str(step))
        if about is not None:
            _check_same_experiment(folder, about, meta, _layout(_flatten(template)))
            leaves = _read_leaves(root / str(step), about)
            if leaves is not None:
                treedef = jax.tree.structure(template)
                paths = _flatten(template).keys()
                return step, treedef.unflatten([leaves[path] for path in paths])
        notice(f"checkpoint {folder}/{step} is damaged; looking for the one before")
    if steps:
        notice(f"no intact checkpoint in {folder}; starting from the beginning")
    return None


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """Orbax, imported when first needed, and kept from logging its progress."""
    import orbax.checkpoint as ocp  # slow: a run that saves nothing need not wait for it

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield ocp
    finally:
        logging.set_verbosity(verbosity)


def _checkpointer(ocp: Any) -> Any:
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            leaves=ocp.PyTreeCheckpointHandler(), about=ocp.JsonCheckpointHandler()
        )
    )


def _read_about(path: pathlib.Path) -> dict | None:
    """What ``save`` noted about the checkpoint, or None if that is damaged."""
    about = _read(path, "about", "JsonRestore")
    if not isinstance(about, dict):
        return None
    return about if about.pop("sha256", None) == _json_digest(about) else None


def _read_leaves(path: pathlib.Path, about: dict) -> _Leaves | None:
    """The leaves of the checkpoint, or None if they are damaged."""
    leaves = _read(path, "leaves", "PyTreeRestore")
    if not isinstance(leaves, dict):
        return None
    return leaves if _digest(leaves) == about["leaves_sha256"] else None


def _read(path: pathlib.Path, item: str, kind: str) -> Any:
    try:
        with _orbax() as ocp, _checkpointer(ocp) as checkpointer:
            args = ocp.args.Composite(**{item: getattr(ocp.args, kind)()})
            return checkpointer.restore(path, args=args)[item]
    except Exception as error:  # damaged bytes surface as errors of every kind
        logging.debug("cannot read %s: %s", path, error)
        return None


def _steps(root: pathlib.Path) -> list[int]:
    """The steps saved in a folder, ascending; whatever else lies there is ignored."""
    if not root.is_dir():
        return []
    names = [path.name for path in root.iterdir() if path.is_dir()]
    return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))


def _check_same_experiment(
    folder: str | pathlib.Path, about: dict, meta: dict, layout: list
) -> None:
    old = _settings(about["meta"])
    new = _settings(json.loads(json.dumps(meta)))
    changed = [k for k in old | new if old.get(k, "–") != new.get(k, "–")]
    told = [f"{k}: {old.get(k, '–')} → {new.get(k, '–')}" for k in changed[:3]]
    if len(changed) > 3:
        told.append(f"and {len(changed) - 3} more")
    if not changed and json.loads(json.dumps(layout)) != about["leaves"]:
        told = ["the saved arrays have other names, shapes or types"]
    if told:
        raise UserError(
            f"{folder} holds a checkpoint of another experiment ({'; '.join(told)});"
            " choose another --workdir, or delete that folder to start afresh"
        )


def _settings(meta: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as one dict, ``{"data.name": '"digits"'}``, values as JSON."""
    if not (isinstance(meta, dict) and (meta or not prefix)):
        return {prefix: json.dumps(meta, ensure_ascii=False)}
    parts = [_settings(v, f"{prefix}.{k}" if prefix else k) for k, v in meta.items()]
    return {key: value for part in parts for key, value in part.items()}


def _flatten(tree: Any) -> _Leaves:
    """Leaves on the host, by path; shapes alone (ShapeDtypeStruct) may stand for them."""
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
