"""Gaussian noise on clipped updates, for differential privacy of a client's all data.

    server:  Σ_i ρ_i u_i + N(0, (z S)² I),   S = C max_i Σ_k |ρ_k|
    client:  u_i + N(0, (z C)² I) of each delivery, before it is weighted

with ‖u_i‖₂ ≤ C by `clip` and Σ_k over the deliveries k of client i in this update. The
weights are known before training: τ, |D_i|, who delivers and when are public.

Protected is whether a client's updates were all 0 ("zero-out": the weights of the
others stay; for one client in place of another z counts half). "server" is against all
who see the models w^t, not against the server. "client" is against the server, too.
Not protected are losses, accuracies and estimates in files, and the end of a run whose
models are all lost. A discarded model counts as 0; its share does not go to others.
This is a simulation: nothing is kept secret, the generator is not a cryptographic one,
and noise of floating-point numbers is not quite Gaussian.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018. Which ε that gives is found by `prepare.privacy`.
"""

from typing import Any

import jax
from jax.flatten_util import ravel_pytree

from tsfl_jax import trees
from tsfl_jax.components import component, setting
from tsfl_jax.types import Params
from tsfl_jax.uplink.link import LinkInfo, SumInfo, Uplink


@component("noise")
class Noise:
    """Gaussian noise for differential privacy."""

    multiplier: float = setting(1.0, "z, noise over sensitivity", low=0)
    where: str = setting(
        "server", "who adds the noise", ("server", "client"), static=True
    )
    epsilon: float = setting(
        0.0, "target ε, from which z is found before training; 0: z is given", low=0
    )
    delta: float = setting(1e-5, "δ of (ε, δ)", above=0, below=1)


def _noised(params: Params, info: LinkInfo | SumInfo, std: Any) -> Params:
    """With noise on all that trains."""
    vector, to_params = ravel_pytree(params)
    noise = std * jax.random.normal(info.key, vector.shape)
    return jax.tree.map(
        lambda is_still, value, part: value if is_still else value + part,
        trees.marked(params, info.frozen),
        params,
        to_params(noise.astype(vector.dtype)),
    )


def send(
    update: Params, state: Any, info: LinkInfo, settings: Noise
) -> tuple[Params, Any]:
    """The update with the client's noise."""
    if settings.where == "server":
        return update, state
    params, std = {"params": update["params"]}, settings.multiplier * info.bound
    return {**update, **_noised(params, info, std)}, state


def receive(sums: Params, info: SumInfo, settings: Noise) -> Params:
    """The sum with the server's noise."""
    if settings.where == "client":
        return sums
    return _noised(sums, info, settings.multiplier * info.bound * info.exposure)


NOISE = Uplink(
    send=send,
    receive=receive,
    bound=lambda before, state, settings: before,
    multiplier=lambda settings: settings.multiplier,
    section=Noise,
)
