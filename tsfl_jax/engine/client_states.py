"""What links of the chain keep for each client, from one of its tasks to the next.

`uplink` says what a link does with its state; nothing here knows a link.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tsfl_jax import trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import mapping
from tsfl_jax.engine.program_spec import ProgramSpec
from tsfl_jax.types import Params


def kept(
    spec: ProgramSpec,
    states: Any,
    results: local.LocalResult,
    on_device: mapping.DeviceClients,
    clients: local.Client,
) -> Any:
    """All clients' states ``[U, ...]``: the new ones where a model is finite.

    Of several deliveries of one of the K clients the last.
    """
    if not jax.tree.leaves(states):
        return states
    slots, count = clients.tau.shape[0], jax.tree.leaves(states)[0].shape[0]
    entries = results.uplinks, results.finite.astype(jnp.int32)
    new_states, finite = mapping.of_all(entries, on_device, slots, spec.axis)
    worked = (clients.tau > 0) & (finite > 0)
    return trees.put(states, trees.last_of(clients.place, worked, count), new_states)


def stacked_updates(
    train: Callable[..., mapping.Trained],
    states: Any,
    on_device: mapping.DeviceClients,
    clients: local.Client,
    spec: ProgramSpec,
) -> tuple[Params, local.LocalResult]:
    """`mapping.stacked_updates`, in wave j of the j-th tasks of clients in an update.

    So each starts from the state that its client's last task left.
    """
    if spec.waves == 1:
        with_states = functools.partial(train, states)
        return mapping.stacked_updates(with_states, on_device, spec)
    earlier = (clients.task[None] < clients.task[:, None]) & (clients.tau > 0)[None]
    turn = (earlier & (clients.place[None] == clients.place[:, None])).sum(axis=1)
    members, stacked = on_device.clients, cast(Any, None)
    for wave in range(spec.waves):
        in_wave = turn[on_device.place] == wave  # whatever it is of an empty entry
        workers = members._replace(tau=jnp.where(in_wave, members.tau, 0))
        workers = on_device._replace(clients=workers)
        with_states = functools.partial(train, states)
        trained = mapping.stacked_updates(with_states, workers, spec)
        of_wave = clients._replace(tau=jnp.where(turn == wave, clients.tau, 0))
        states = kept(spec, states, trained[1], on_device, of_wave)
        entry: Array = jnp.where(in_wave, jnp.arange(len(in_wave)), len(in_wave))
        stacked = trees.put(stacked or trained, entry, trained)
    return stacked
