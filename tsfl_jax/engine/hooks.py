"""Functions of the user's own inside of a client's training; None: there is none."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from tsfl_jax.types import HParams, Params, PRNGKey


class BatchGradient(NamedTuple):
    """A gradient on the mini-batch, and what came with it."""

    # Of the mean loss, with μ(w − w^t) and the rule's gradient correction.
    gradient: Params
    variables: Params  # all collections after the forward pass (batch statistics)
    loss: Float[Array, ""]  # sum over the samples


class Stepped(NamedTuple):
    """A client after a mini-batch step."""

    variables: Params
    optimizer: optax.OptState
    loss: Float[Array, ""]  # sum over the samples, as reported


class Step(NamedTuple):
    """One mini-batch step of one client, before it is made."""

    variables: Params  # w, {"params": …} and other collections
    optimizer: optax.OptState
    x: Shaped[Array, "B ..."]  # network input
    y: Num[Array, "B ..."]
    mask: Bool[Array, "B"]  # False on the padding of a short batch
    key: PRNGKey  # for this step alone
    start: Params  # the global model that the client downloaded
    hparams: HParams
    k: Int[Array, ""] | int  # mini-batch steps of this client in this interval so far
    gradient: Callable[[Params], BatchGradient]  # at params, on this mini-batch
    apply: Callable[[BatchGradient], Stepped]  # the optimizer's step


class Hooks(NamedTuple):
    """A user's own functions; pure, of JAX arrays, one client at a time."""

    # (key, x [B, ...], y [B, ...]) -> (x, y), same shapes and dtypes, in training only
    augment: Callable[[PRNGKey, Any, Any], tuple[Any, Any]] | None = None
    # The plain one: lambda step: step.apply(step.gradient(step.variables["params"]))
    client_step: Callable[[Step], Stepped] | None = None
