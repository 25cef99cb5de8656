"""A chain of links, applied to one client: in order on the way to the server."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from tsfl_jax import trees
from tsfl_jax.types import Array, HParams, Params
from tsfl_jax.uplink.link import LinkInfo, SumInfo, Traffic, Uplink

Chain = tuple[Uplink, ...]


def _settings(link: Uplink, hparams: HParams) -> Any:
    return hparams.of(link.section) if link.section else ()


def _each(chain: Chain, states: tuple, info: Any, hparams: HParams) -> Iterator[tuple]:
    """The links, each with its state, what it may see, and its settings."""
    for number, (link, state) in enumerate(zip(chain, states, strict=True)):
        settings = _settings(link, hparams)
        key = jax.random.fold_in(info.key, number)
        yield link, state, info._replace(key=key), settings
        info = info._replace(bound=link.bound(info.bound, state, settings))


def init(chain: Chain, params: Params, hparams: HParams) -> tuple:
    """The state of each link for a client."""
    return tuple(link.init(params, _settings(link, hparams)) for link in chain)


def download(chain: Chain, variables: Params, hparams: HParams) -> Params:
    """What clients download of the server's variables."""
    for link in chain:
        variables = link.download(variables, _settings(link, hparams))
    return variables


def start(
    chain: Chain,
    variables: Params,
    states: tuple,
    interval: Int[Array, ""] | int,
    hparams: HParams,
) -> Params:
    """The variables that a client starts from; with `interval` −1 its own model."""
    for link, state in zip(chain, states, strict=True):
        settings = _settings(link, hparams)
        variables = link.start(variables, state, jnp.asarray(interval), settings)
    return variables


def send(
    chain: Chain, states: tuple, info: LinkInfo, hparams: HParams
) -> tuple[Params, tuple]:
    """What arrives of a client's update at the server, and the new states.

    The update is {"params": w_i − version} with the values of other collections. Leaves
    that are frozen, or that a link takes out, are None for the links after it, and 0 at
    the server.
    """
    params, version = info.model["params"], info.version["params"]
    moved = trees.without(jax.tree.map(jnp.subtract, params, version), info.frozen)
    update = {**info.model, "params": moved}
    new_states = []
    for link, state, seen, settings in _each(chain, states, info, hparams):
        update, state = link.send(update, state, seen, settings)
        new_states.append(state)
    zeros, moved = optax.tree.zeros_like(params), update["params"]
    moved = trees.where_none(moved, zeros, moved)
    return {**update, "params": moved}, tuple(new_states)


def receive(
    chain: Chain, total: Params, states: tuple, info: SumInfo, hparams: HParams
) -> Params:
    """What the server makes of Σ ρ_i u_i, with the links' states ``[U, ...]``."""
    first = trees.take(states, 0)
    for link, _, seen, settings in _each(chain, first, info, hparams):
        total = link.receive(total, seen, settings)
    return total


def adapt(chain: Chain, states: tuple, info: SumInfo, hparams: HParams) -> tuple:
    """The links' states ``[U, ...]`` for the next update; arguments as `receive`."""
    z = sum(
        link.multiplier(_settings(link, hparams)) for link in chain if link.multiplier
    )
    links = _each(chain, states, info._replace(multiplier=z), hparams)
    return tuple(
        link.adapt(state, seen, settings) for link, state, seen, settings in links
    )


def traffic(
    chain: Chain, variables: Params, hparams: HParams, num_intervals: int
) -> Traffic:
    """What one delivery sends in each of T intervals; float32 without a link.

    `hparams` has the settings of the links as the host has them.
    """
    params = variables["params"]
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    values = np.full(num_intervals, float(sum(sizes)))
    sent = Traffic(params, 32 * values, values, leaves=len(sizes))
    for link in chain:
        sent = link.bits(sent, _settings(link, hparams))
    return sent
