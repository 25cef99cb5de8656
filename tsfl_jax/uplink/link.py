"""The structure of a link on the way of an update from a client to the server.

A client starts from the server's model w^t or an earlier one, its *version*, trains,
and sends its update w_i − version. A chain of links changes that on its way: what the
client starts from, what it sends, and the weighted sum of all at the server. Each link
is pure functions of ONE client; the engine maps them. The table of all is in `uplink`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tsfl_jax.types import Array, Params, PRNGKey


class LinkInfo(NamedTuple):
    """What a link may see of a client's task."""

    key: PRNGKey  # of this task and this link
    interval: Int[Array, ""]  # t
    version: Params  # the variables that the update is measured against
    model: Params  # the client's variables after training
    client: Int[Array, ""] | int = 0  # its id
    is_attacker: Bool[Array, ""] | bool = False
    # ‖update‖₂ of the parameters is at most that after the links before; inf: unknown.
    bound: Float[Array, ""] | float = math.inf
    frozen: tuple[str, ...] = ()  # parts of the paths of parameters that do not train


class SumInfo(NamedTuple):
    """What a link may see of the weighted sum of an update."""

    key: PRNGKey  # of this update, and of this link
    # max_i Σ_k |ρ_k| over the deliveries k of client i in this update.
    exposure: Float[Array, ""]
    count: Int[Array, ""]  # clients that deliver
    frozen: tuple[str, ...] = ()  # as in `LinkInfo`
    bound: Float[Array, ""] | float = math.inf  # likewise
    multiplier: Float[Array, ""] | float = 0.0  # z of the chain's noise; 0: none


class Traffic(NamedTuple):
    """What one delivery sends in each interval."""

    params: Params  # shapes of the network's
    download: Float[np.ndarray, "T"]  # bits
    values: Float[np.ndarray, "T"]  # numbers of the upload
    width: float = 32.0  # bits of each of them
    extra: Float[np.ndarray, "T"] | float = 0.0  # bits besides: indices, norms
    leaves: int = 1  # arrays that have a value at all

    @property
    def upload(self) -> Float[np.ndarray, "T"]:
        """Bits of the upload."""
        return self.values * self.width + self.extra


class Uplink(NamedTuple):
    """One link of the chain; a field that is not given changes nothing.

    `settings` are those of `section`: arrays in the compiled program, where they may be
    swept, but for the static ones; `()` without a section. `init` and `bits` get them
    as the host has them.
    """

    # (variables, settings) -> the state of a client, a tree of arrays; of static
    # settings only. Raises `UserError` where the link cannot work with this network.
    init: Callable[[Params, Any], Any] = lambda params, settings: ()
    # (variables, settings) -> what the client downloads of them; the server has it, too
    download: Callable[[Params, Any], Params] = lambda variables, settings: variables
    # (version, state, t, settings) -> the variables that the client starts from, and in
    # which its own model is tested, then with t = −1
    start: Callable[[Params, Any, Int[Array, ""], Any], Params] = lambda w, *_: w
    # (update, state, info, settings) -> (update, state): {"params": w_i − version} and
    # the values of other collections, before they are weighted
    send: Callable[[Params, Any, LinkInfo, Any], tuple[Params, Any]] = (
        lambda update, state, info, settings: (update, state)
    )
    # (updates [K, ...], present [K], is_attacker [K], settings) -> updates, of all
    # clients of an interval at once: these are stacked then
    collude: Callable[[Params, Any, Any, Any], Params] | None = None
    # (Σ ρ_i u_i of the parameters, info, settings) -> the sum, once at the server; a
    # rule that combines updates in another way has no sum
    receive: Callable[[Params, SumInfo, Any], Params] = lambda sums, info, _: sums
    # (bound before, the state of any client, settings) -> `bound` after this link
    bound: Callable[[Any, Any, Any], Any] = lambda before, state, settings: math.inf
    # (states [U, ...] of all clients, info, settings) -> states, once at the server
    adapt: Callable[[Any, SumInfo, Any], Any] = lambda states, info, settings: states
    # settings -> z of its noise; then no share of a discarded model goes to the others
    multiplier: Callable[[Any], Any] | None = None
    # (traffic after the links before, settings) -> traffic
    bits: Callable[[Traffic, Any], Traffic] = lambda traffic, settings: traffic
    section: Any = None  # the component with its settings
    # settings -> whether they put it in the chain; None: `uplink.chain` names it
    applies: Callable[[Any], bool] | None = None
    # Whether its state is variables by path that are results of a run, {path: leaf}.
    keeps_variables: bool = False
    # Whether these are never sent, so that a client's model is tested, not the global.
    is_personal: bool = False
    reads: tuple[str, ...] = ()  # as in `components.Part`

    @property
    def sections(self) -> tuple[type, ...]:
        """As in `components.Part`."""
        return (self.section,) if self.section else ()
