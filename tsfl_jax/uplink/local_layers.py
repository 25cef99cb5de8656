"""Layers that stay on the client, always or for some intervals.

Their leaves of the variables, named by parts of their paths, are not sent: each client
starts from its own of its last delivery, and what it would upload of them is 0.

`LOCAL` layers never leave it; the global model keeps those of w^0, so that only clients
can be scored. That is FedBN and FedPer. `PERIODIC` ones are sent in every P-th interval
and downloaded at the beginning of the next one: deep layers that are sent less often
than shallow ones, the layerwise updates of Chen, Sun and Jin. Simplified: in the paper
5 of 15 rounds, one after another, have all layers. A client that is away in the
interval in which they are downloaded goes on from its own, which it trained last.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021. Arivazhagan et al., "Federated Learning with Personalization
Layers", 2019. Y. Chen, X. Sun, Y. Jin, "Communication-Efficient Federated Deep Learning
with Layerwise Asynchronous Model Update and Temporally Weighted Aggregation", IEEE
TNNLS 2020.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.types import Array, Params, UserError, parts_of
from tsfl_jax.uplink.link import LinkInfo, Traffic, Uplink

Leaves = Mapping[str, Array]  # the layers by path, {"params/Dense_1/kernel": array}


@component("model")
class LocalLayers:
    """Layers that stay on the clients."""

    local: str = setting(
        "",
        "variables that stay on the client (FedBN, FedPer): parts of their paths",
        static=True,
    )
    local_period: int = setting(
        0,
        "local: sent in every so many intervals; 0: never",
        low=0,
        static=True,
        used_by=("local", ()),
    )

    def notes(self, config: Any, rule: Any, schedule: Any) -> tuple[str, ...]:
        """Refuse a period where clients are not in step."""
        del rule
        if self.local and self.local_period and schedule.snapshots:
            raise UserError(
                f"--config.model.local_period={self.local_period}: layers have a "
                "period where clients are in step; with "
                f"--config.timeline.framework={config.timeline.framework} they are not"
            )
        return ()


def _layers(variables: Params, settings: Any) -> Leaves:
    """The layers of a client in its variables."""
    parts = parts_of(settings.local)
    leaves = ((trees.path_of(p), w) for p, w in jax.tree.leaves_with_path(variables))
    return {path: leaf for path, leaf in leaves if any(part in path for part in parts)}


def _replaced(variables: Params, leaves: Leaves) -> Params:
    """The variables with these leaves in place of their own."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaves.get(trees.path_of(path), leaf), variables
    )


def init(params: Params, settings: LocalLayers) -> Leaves:
    """The layers of w^0.

    Raises:
      UserError: a part of a path that no variable has, or parts that cover all.
    """
    trees.check_parts("model.local", settings.local, params, "send")
    return _layers(params, settings)


def start(
    variables: Params, layers: Leaves, interval: Int[Array, ""], settings: Any
) -> Params:
    """What a client starts from, with its own layers but after their upload."""
    if period := settings.local_period:
        is_new, new = is_downloaded(interval, period), _layers(variables, settings)
        layers = {p: jnp.where(is_new, new[p], leaf) for p, leaf in layers.items()}
    return _replaced(variables, layers)


def send(
    update: Params, layers: Leaves, info: LinkInfo, settings: Any
) -> tuple[Params, Leaves]:
    """The update, with the client's layers in every P-th interval; it keeps them.

    Neither a sum nor a mean changes where a layer is not sent.
    """
    del layers
    version = _layers(info.version, settings).items()
    sent: Any = {p: None if p.startswith("params/") else leaf for p, leaf in version}
    if period := settings.local_period:
        is_sent, new = is_uploaded(info.interval, period), _layers(update, settings)
        for path, leaf in sent.items():
            sent[path] = jnp.where(is_sent, new[path], 0 if leaf is None else leaf)
    return _replaced(update, sent), _layers(info.model, settings)


def is_downloaded(interval: Any, period: float) -> Any:
    """Whether the layers are downloaded in an interval: those that follow an upload."""
    return (interval % period == 0) & (interval > 0)


def is_uploaded(interval: Any, period: float) -> Any:
    """Whether the layers are uploaded in an interval: every P-th."""
    return (interval + 1) % period == 0


def bits(traffic: Traffic, settings: LocalLayers) -> Traffic:
    """Without the parameters among the layers, with them where they are sent."""
    layers = _layers({"params": traffic.params}, settings)
    size = sum(leaf.size for leaf in layers.values())
    interval, period = np.arange(len(traffic.values)), settings.local_period or np.inf
    return traffic._replace(
        download=traffic.download - 32 * size * ~is_downloaded(interval, period),
        values=traffic.values - size * ~is_uploaded(interval, period),
        leaves=traffic.leaves - (0 if settings.local_period else len(layers)),
    )


LOCAL = Uplink(
    init=init,
    start=start,
    send=send,
    bits=bits,
    section=LocalLayers,
    applies=lambda settings: bool(settings.local) and not settings.local_period,
    keeps_variables=True,
    is_personal=True,
)
PERIODIC = LOCAL._replace(
    applies=lambda settings: bool(settings.local) and settings.local_period > 0,
    is_personal=False,
)
