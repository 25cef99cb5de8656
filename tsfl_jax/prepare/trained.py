"""Parameters of an earlier training as w^0: files of several libraries, and the check.

The order of the leaves does not matter, their names do: ``params/Dense_0/kernel``. A
name without a collection belongs to the one where the network has it; of a train state,
its collections are taken and all else, such as an optimizer's state, is left out.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import data, trees
from tsfl_jax.data.inputs import package
from tsfl_jax.models.networks import ModelConfig
from tsfl_jax.prepare.network import Network
from tsfl_jax.report import files
from tsfl_jax.types import Params, PRNGKey, UserError, user_code

Named = dict[str, Any]  # of `trees.named`, {"params/Dense_0/kernel": array}
_EXPECTED = "expected a model.npz, .safetensors or .msgpack file, or a folder of Orbax"


def _from_orbax(path: pathlib.Path) -> Named:
    """The arrays of a tree, or of the newest finished step of a `CheckpointManager`."""
    orbax = package("orbax.checkpoint", "orbax")
    step = path.resolve()
    if not (step / "_METADATA").exists():
        number = orbax.utils.step_from_checkpoint_name
        steps = orbax.utils.checkpoint_steps_paths(step)
        step = max(steps, key=lambda folder: number(folder.name), default=step)
    folders = [file.parent for file in sorted(step.glob("*/_METADATA"))] or [step]
    if len(folders) > 1:
        raise UserError(
            f"--config.model.params={path}: {step} holds "
            f"{', '.join(folder.name for folder in folders)}; give the folder of one"
        )
    checkpointer = orbax.PyTreeCheckpointer()
    saved = checkpointer.metadata(folders[0]).item_metadata.tree
    # As NumPy arrays: the devices that saved them may not be here.
    restored = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), saved)
    return trees.named(checkpointer.restore(folders[0], restore_args=restored))


def read(path: pathlib.Path) -> Named:
    """The arrays of a file by path.

    Args:
      path: a .npz file, .safetensors, the .msgpack of Flax, or a folder of Orbax.

    Raises:
      UserError: no such file, none of these, damaged, or a library is missing.
    """
    if not path.exists():
        raise UserError(f"--config.model.params={path}: no such file or folder")
    if path.suffix == ".npz":
        return dict(files.read_arrays(path))
    with user_code(f"--config.model.params={path}: cannot be read", _EXPECTED):
        if path.is_dir():
            return _from_orbax(path)
        if path.suffix == ".safetensors":
            arrays = package("safetensors.numpy", "safetensors").load_file(path)
            return {name.replace(".", "/"): array for name, array in arrays.items()}
        if path.suffix == ".msgpack":
            flax = package("flax.serialization", "flax")
            return trees.named(flax.msgpack_restore(path.read_bytes()))
    raise UserError(f"--config.model.params={path}: {_EXPECTED}")


def _value(leaf: Any, like: Any, where: str) -> np.ndarray:
    """A leaf in the network's dtype, in which all of its numbers must be finite."""
    value, is_float = np.asarray(leaf), jnp.issubdtype(like.dtype, jnp.inexact)
    real = value.dtype.kind in "biuf" or jnp.issubdtype(value.dtype, jnp.floating)
    fits = real or value.dtype == like.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        cast = value.astype(like.dtype) if fits else np.full(value.shape, np.nan)
    is_kept = np.isfinite(cast) if is_float else cast == value
    for place in np.argwhere(~is_kept)[:1].tolist():
        raise UserError(
            f"{where} holds {value[tuple(place)]} ({value.dtype}) at {place}; expected "
            f"{'finite ' if is_float else ''}{like.dtype} numbers"
        )
    return cast


def fitted(arrays: Named, shapes: Params, source: str) -> Params:
    """The variables of a network with these arrays.

    Args:
      arrays: from `trees.named` or `read`.
      shapes: the network's variables; arrays or their shapes.
      source: where they are from, for messages.

    Returns:
      NumPy arrays in the network's structure and dtypes.

    Raises:
      UserError: a path, shape or value differs, the first in the network's order.
    """
    expected = trees.named(shapes)
    collections = {name.split("/")[0] for name in expected}
    if "params" in collections and not any(n.startswith("params/") for n in arrays):
        full = {name.partition("/")[2]: name for name in expected}
        arrays = {full.get(n, f"params/{n}"): a for n, a in arrays.items()}
    arrays = {n: a for n, a in arrays.items() if n.split("/")[0] in collections}
    for n, like in expected.items():
        if n not in arrays:
            raise UserError(f"{source}: no {n}; the network has it, {list(like.shape)}")
        if (shape := np.shape(arrays[n])) != like.shape:
            raise UserError(
                f"{source}: {n} is {list(shape)}; in the network it is "
                f"{list(like.shape)}"
            )
    # Random streams of nnx, which get new keys in every step.
    names = {
        n[:-4] for n in arrays if n.endswith("/key") and f"{n[:-4]}/count" in arrays
    }
    streams = {f"{name}/{part}" for name in names for part in ("key", "count")}
    if extra := sorted(arrays.keys() - expected.keys() - streams):
        raise UserError(f"{source}: the network has no {extra[0]}")
    leaves = [_value(arrays[n], like, f"{source}: {n}") for n, like in expected.items()]
    return jax.tree.structure(shapes).unflatten(leaves)


def started(
    settings: ModelConfig, custom: Params | None, network: Network
) -> tuple[Network, dict[str, str]]:
    """The network with its w^0 replaced, if a user gave one, and the digest of that.

    Args:
      settings: with a file of first parameters, and what is frozen.
      custom: Flax variables, the user's first parameters; None: none.
      network: traced.

    Raises:
      UserError: two were given, or what was given does not fit the network; or what is
        to be frozen does not.
    """
    params, file = network.params["params"], settings.params
    trees.check_parts("model.frozen", settings.frozen, params, "train")
    if custom is None and not file:
        return network, {}
    if custom is not None and file:
        raise UserError(
            f"params= and --config.model.params={file}: both are the first parameters; "
            "give one of them"
        )
    source = f"--config.model.params={file}" if file else "params="
    arrays = read(pathlib.Path(file)) if file else trees.named(custom)
    first = fitted(arrays, network.params, source)

    def init(key: PRNGKey, x: jax.Array) -> Params:
        del key, x
        return jax.tree.map(jnp.asarray, first)

    digest = data.fingerprint(*jax.tree.leaves(first))
    note = f"starts from trained parameters ({source}, {digest})"
    network = network._replace(
        model=network.model._replace(init=init), notes=(*network.notes, note)
    )
    return network, {"first parameters": digest}
