"""How much memory an experiment takes on every device, from shapes."""

from typing import Any

import jax
import numpy as np

from tsfl_jax import host_memory, rng
from tsfl_jax.engine import optimizers, scan
from tsfl_jax.experiment.prepare import Prepared, counts_of


def _bytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def state_of(prepared: Prepared) -> scan.State:
    """Shapes of the state; nothing is computed."""
    x = jax.ShapeDtypeStruct((1, *prepared.dataset.x_train.shape[1:]), np.float32)

    def start(key, x):
        counts, places = counts_of(prepared), prepared.times.places
        return scan.init_state(prepared.model, prepared.rule, key, x, counts, places)

    return jax.eval_shape(start, rng.key(0), x)


def estimated(
    prepared: Prepared, state: scan.State, num_devices: int, lanes: int
) -> dict[str, int]:
    """Bytes on every device by what they are for, from shapes; without activations.

    Args:
      prepared: the experiment.
      state: its shapes.
      num_devices: that share the test set and the clients.
      lanes: models that a device trains side by side.
    """
    dataset, model = prepared.dataset, _bytes(state.params)
    trained = _bytes(state.params["params"])
    optimizer = jax.eval_shape(
        prepared.optimizer(prepared.hparams).init, state.params["params"]
    )
    places = prepared.times.tau.shape[1]
    rows = {
        "training samples": dataset.x_train.nbytes + dataset.y_train.nbytes,
        "index table": prepared.dealt.indices.nbytes,
        "test samples": (dataset.x_test.nbytes + dataset.y_test.nbytes) // num_devices,
        "global model": model,
        "earlier models": _bytes((state.pool, state.sent)),
        "server state": _bytes(state.server),
        "clients in training": lanes * (model + trained + _bytes(optimizer)),
        "stacked models": 0,
    }
    if prepared.rule.combine is None:
        rows["sum of updates"] = 4 * model  # `exact_sums.Sum` has four arrays
    else:  # its own clients' models, and everybody's updates
        rows["stacked models"] = (-(-places // num_devices) + places) * model
    # Not in place: the state is there before and after a call.
    rows["state after a call"] = _bytes(state)
    return {name: size for name, size in rows.items() if size}


def check(prepared: Prepared, num_devices: int) -> None:
    """Checks an optimizer and that a run can fit, before anything is on a device.

    Args:
      prepared: the experiment.
      num_devices: that share the clients. CPU devices share the host's memory, of
        others only what lies on the host is checked.

    Raises:
      UserError: the optimizer does not work, or there is less memory than needed.
    """
    state = state_of(prepared)
    optimizers.check(prepared.optimizer, prepared.hparams, state.params["params"])
    rows = estimated(prepared, state, num_devices, 1)
    if jax.default_backend() == "cpu":
        needed = num_devices * sum(rows.values())
    else:
        names = ("training samples", "index table", "test samples")
        needed = sum(rows[name] for name in names) + 2 * _bytes(state)
    config, most = prepared.config, max(rows, key=rows.get)
    setting = {
        "training samples": f"data.name={config.data.name}",
        "test samples": f"data.name={config.data.name}",
        "index table": f"num_clients={config.num_clients}",
        "stacked models": f"num_clients={config.num_clients}",
    }.get(most, f"model.name={prepared.model_name}")
    if setting.startswith("model.") and prepared.model_name in ("mlp", "mnist_cnn"):
        setting = f"model.hidden={config.model.hidden}"
    host_memory.require(
        f"--config.{setting}", needed, f"training (the largest part: {most})"
    )
