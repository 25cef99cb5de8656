"""A chain of links, applied to one client: in order on the way to the server."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from tsfl_jax import rng, trees
from tsfl_jax.types import Array, HParams, Params
from tsfl_jax.uplink.link import LinkInfo, SumInfo, Traffic, Uplink

Chain = tuple[Uplink, ...]


def _settings(link: Uplink, hparams: HParams) -> Any:
    return hparams.of(link.section) if link.section else ()


def init(chain: Chain, params: Params, hparams: HParams) -> tuple:
    """The state of each link for a client."""
    return tuple(link.init(params, _settings(link, hparams)) for link in chain)


def download(chain: Chain, variables: Params, hparams: HParams) -> Params:
    """What clients download of the server's variables."""
    for link in chain:
        if link.download:
            variables = link.download(variables, _settings(link, hparams))
    return variables


def start(
    chain: Chain,
    version: Params,
    states: tuple,
    interval: Int[Array, ""] | int,
    hparams: HParams,
) -> Params:
    """The variables that a client starts from; with `interval` −1 its own model."""
    variables, interval = version, jnp.asarray(interval)
    for link, state in zip(chain, states, strict=True):
        settings = _settings(link, hparams)
        variables = link.start(variables, state, interval, settings)
    return variables


def send(
    chain: Chain,
    states: tuple,
    info: LinkInfo,
    hparams: HParams,
) -> tuple[Params, tuple]:
    """What arrives of a client's update at the server, and the new states.

    The update is {"params": w_i − version} with the values of other collections. Leaves
    that a link takes out are None for those after it, and 0 at the server.
    """
    params, version = info.model["params"], info.version["params"]
    update = {**info.model, "params": jax.tree.map(jnp.subtract, params, version)}
    new_states = []
    for number, (link, state) in enumerate(zip(chain, states, strict=True)):
        key = jax.random.fold_in(info.key, number)
        settings, one = _settings(link, hparams), info._replace(key=key)
        info = info._replace(bound=link.bound(info.bound, state, settings))
        update, state = link.send(update, state, one, settings)
        new_states.append(state)
    moved = jax.tree.map(
        lambda u, w: jnp.zeros_like(w) if u is None else u,
        update["params"],
        params,
        is_leaf=lambda u: u is None,
    )
    return {**update, "params": moved}, tuple(new_states)


def receive(
    chain: Chain, total: Params, states: tuple, info: SumInfo, hparams: HParams
) -> Params:
    """What the server makes of Σ ρ_i u_i, with the links' states ``[U, ...]`` before.

    `info` has the key of the rule.
    """
    key = rng.fold(info.key, "uplink")
    for number, (link, state) in enumerate(zip(chain, states, strict=True)):
        settings = _settings(link, hparams)
        one = info._replace(key=jax.random.fold_in(key, number))
        bound = link.bound(info.bound, trees.take(state, 0), settings)
        info = info._replace(bound=bound)
        total = link.receive(total, one, settings)
    return total


def adapt(chain: Chain, states: tuple, info: SumInfo, hparams: HParams) -> tuple:
    """The links' states ``[U, ...]`` for the next update; arguments as `receive`."""
    key = rng.fold(info.key, "uplink")
    pairs = [(link, _settings(link, hparams)) for link in chain]
    z = sum(link.multiplier(settings) for link, settings in pairs)
    new_states = []
    for number, ((link, settings), state) in enumerate(zip(pairs, states, strict=True)):
        one = info._replace(key=jax.random.fold_in(key, number), multiplier=z)
        new_states.append(link.adapt(state, one, settings))
    return tuple(new_states)


def traffic(
    chain: Chain, params: Params, hparams: HParams, num_intervals: int
) -> Traffic:
    """What one delivery sends in each interval; float32 parameters without a link.

    Args:
      chain: the links.
      params: shapes of the network's variables.
      hparams: with the settings of the links as the host has them.
      num_intervals: T.
    """
    sizes = [leaf.size for leaf in jax.tree.leaves(params["params"])]
    values = np.full(num_intervals, float(sum(sizes)))
    sent = Traffic(32 * values, values, leaves=len(sizes))
    for link in chain:
        sent = link.bits(sent, params, _settings(link, hparams))
    return sent
