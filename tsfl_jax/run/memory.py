"""Memory of an experiment, estimated from shapes before anything is allocated."""

from typing import Any

import jax
import numpy as np

from tsfl_jax import host_memory, rng
from tsfl_jax.data import targets
from tsfl_jax.engine import optimizers, scan
from tsfl_jax.prepare.custom_hooks import input_dtype
from tsfl_jax.prepare.prepare import Prepared, counts_of

_DATA = ("training samples", "index table", "test samples")


def _bytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def estimate(prepared: Prepared, num_devices: int, width: int) -> dict[str, int]:
    """Estimate bytes on every device by purpose, from shapes; without activations.

    `width` is the number of models that a device trains side by side.
    """
    dataset, slots = prepared.dataset, prepared.slots
    shape = (1, *dataset.x_train.shape[1:])
    counts = counts_of(prepared)
    counts = counts._replace(size=np.ones(counts.clients))
    state = jax.eval_shape(
        lambda x: scan.init_state(
            prepared.network.model,
            (prepared.rule,),
            rng.key(0),
            x,
            counts,
            prepared.workload.schedule.snapshots,
            uplinks=prepared.uplinks,
            hparams=prepared.hparams,
        ),
        jax.ShapeDtypeStruct(shape, input_dtype(dataset)),
    )
    y_train, y_test = targets.of(dataset)
    model, moved = _bytes(state.params), _bytes(state.params["params"])
    optimizer = jax.eval_shape(
        prepared.optimizer(prepared.hparams).init, state.params["params"]
    )
    rows = {
        "training samples": dataset.x_train.nbytes + y_train.nbytes,
        "index table": prepared.partition.indices.nbytes,
        "test samples": (dataset.x_test.nbytes + y_test.nbytes) // num_devices,
        "global model": model,
        "earlier models": _bytes((state.snapshots, state.broadcast)),
        # Personal ones are of each client that ever works.
        "state of rule and links": _bytes((state.server, state.uplinks)),
        "clients in training": width * (model + moved + _bytes(optimizer)),
    }
    stacks = prepared.rule.stacks or any(link.collude for link in prepared.uplinks)
    if stacks or prepared.config.measure_regret or prepared.waves > 1:
        # Models of the device's own clients, and updates of all clients.
        rows["stacked models"] = (-(-slots // num_devices) + slots) * model
    else:
        rows["sum of updates"] = 4 * model  # `exact_sums.Sum` has four arrays
    # Not in place: the state is there before and after a call.
    rows["state after a call"] = _bytes(state)
    return {name: size for name, size in rows.items() if size}


def check(prepared: Prepared, num_devices: int) -> None:
    """Check an optimizer and that a run can fit, before anything is on a device.

    CPU devices share the host's memory; of others only the host's part is checked.
    """
    config, network = prepared.config, prepared.network
    optimizers.check(prepared.optimizer, prepared.hparams, network.params["params"])
    rows = estimate(prepared, num_devices, 1)
    if jax.default_backend() == "cpu":
        needed = num_devices * sum(rows.values())
    else:
        needed = sum(rows[n] for n in _DATA) + 2 * rows["state after a call"]
    most = max(rows, key=rows.__getitem__)
    host_memory.require(
        f"--config.model.hidden={config.model.hidden}, model.name={network.name}, "
        f"num_clients={config.num_clients}, data.name={config.data.name}",
        needed,
        f"training (the largest part: {most})",
    )


def size_text(count: int | float) -> str:
    """Format a number of bytes: 1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
