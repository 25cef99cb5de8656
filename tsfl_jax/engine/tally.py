"""What all clients of an interval did, summed over the devices."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Int

from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, exact_sums, mapping
from tsfl_jax.types import Array


class Tally(NamedTuple):
    """The work of an interval over all devices."""

    loss: Float[Array, ""]  # mean sample loss of the clients with finite models
    samples: Int[Array, "N"]  # samples trained on
    discarded: Int[Array, ""]  # clients that worked and whose model was not finite
    survivors: Int[Array, ""]  # with a finite model, or not trained for lack of weight


def count(
    results: local.LocalResult,
    on_device: mapping.DeviceClients,
    number: int,
    axis: str | None,
) -> Tally:
    """Sum over the clients of all devices; N = `number`."""
    worked = on_device.clients.tau > 0
    usable = results.finite & worked
    loss = exact_sums.scalar(jnp.where(usable, results.loss, 0.0), axis)
    samples = jnp.where(usable, results.samples, 0).astype(jnp.float32)
    return Tally(
        loss / exact_sums.scalar(samples, axis),
        samples=mapping.of_all(results.samples, on_device, number, axis),
        discarded=devices.total(jnp.sum(~results.finite & worked), axis),
        survivors=devices.total((usable | on_device.skipped).sum(), axis),
    )
