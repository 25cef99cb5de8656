"""The structures of aggregation rules: how w^{t+1} is made of the clients' w_i^t.

A rule says three things: how the clients' updates become one (`Mixing`), what clients
do differently (`ClientSide`), and what the server does with the mean (`ServerSide`).
Most rules know their weights before training (functions of τ, |D_i|, lag and a key), so
the models never have to be stacked: w^{t+1} = update(Σ_i ρ_i w_i^t, w^t). A client that
did no iteration (τ_i = 0) gets weight 0 under every rule. `apply` applies rules, the
other modules of this folder have them, and `rules` itself the table of all.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from tsfl_jax import types
from tsfl_jax.components import arrays, declared, section_of
from tsfl_jax.sections import ConstantsConfig
from tsfl_jax.types import ClientGradients, Constants, HParams, Params, PRNGKey


class RoundInfo(NamedTuple):
    """What a rule's weights may depend on in an interval.

    A client may have done less than it reports; rules see what it reports.
    """

    key: PRNGKey
    client: Int[Array, "N"]  # ids, which name random streams
    tau: Int[Array, "N"]
    size: Int[Array, "N"]  # samples
    steps: Int[Array, "N"]  # mini-batch steps
    lag: Int[Array, "N"]  # global updates since the model it started from
    group: Int[Array, ""]  # tier that delivers
    constants: Constants
    gradients: ClientGradients | None = None  # of w^t, for a rule that uses them
    interval: Int[Array, ""] | int = 0  # t
    threshold: Float[Array, ""] | float = math.nan  # K of DMS; NaN: the mean of τ
    # Of each in a state of all clients, in [0, Counts.clients); None: the ids.
    place: Int[Array, "N"] | None = None
    # ρ that go with how a cohort was sampled.
    share: Float[types.Array, "N"] | None = None

    @property
    def places(self) -> Int[Array, "N"]:
        """Where a rule's state has each client."""
        return self.client if self.place is None else self.place


class Weights(NamedTuple):
    """A rule's decision in an interval; numbers that do not apply are NaN."""

    rho: Float[Array, "N"]  # float32; all 0 if no client takes part
    selected: Bool[Array, "N"]
    threshold: Float[Array, ""]  # K of DMS
    coupling: Float[Array, ""]  # c of DMS
    # Base shares p_i before factors such as staleness; renormalized when a client's
    # model is discarded. None: ρ.
    shares: Float[Array, "N"] | None = None


class Received(NamedTuple):
    """What is known when the models have arrived."""

    info: RoundInfo
    rho: Float[Array, "N"]
    present: Bool[Array, "N"]  # takes part; for a `combine`, with a finite model
    # [N, ...], downloaded with the model (`Aggregator.broadcast`); None:
    # what the state holds now, for all of them.
    broadcast: Params | None = None
    shares: Float[Array, "N"] | None = None  # as in `Weights`


# ρ [N] -> (F_val(w(ρ)), its derivatives ∂F_val/∂ρ_i [N]) with the interval's updates
# u_i, w(ρ) = w^t + Σ_i ρ_i u_i. NaN or infinite where that model has no finite loss.
Objective = Callable[
    [Float[types.Array, "N"]], tuple[Float[types.Array, ""], Float[types.Array, "N"]]
]


class ClientOutputs(NamedTuple):
    """What training gave, for weights that are chosen after it."""

    # Mean sample loss of each client's training; NaN: absent.
    loss: Float[types.Array, "N"]
    validation: Objective | None  # loss on the validation samples; None: there are none
    updates: Params = None  # u_i of the parameters, leaves [N, ...]
    # Of the server, trained on the validation samples; None: the rule does not ask.
    server_update: Params | None = None


class Counts(NamedTuple):
    """Numbers that give a rule's state its shape."""

    clients: int  # N, of cohorts those that ever work
    groups: int  # tiers, at least 1
    size: Num[Array, "N"] | None = None  # samples per client; None: not known
    idle_size: types.Scalar = 0.0  # samples of all clients that never work

    @property
    def sizes(self) -> tuple[Float[Array, "N"], Float[Array, ""]]:
        """`size` and `idle_size` as float32 arrays, for a state with a field `size`."""
        if self.size is None or np.shape(self.size) != (self.clients,):
            raise types.UserError(
                f"size={self.size}: expected the samples of each of {self.clients} "
                "clients, which the rule's state has; give init_rule(…, size=…)"
            )
        idle_size = jnp.asarray(self.idle_size, jnp.float32)
        return jnp.asarray(self.size, jnp.float32), idle_size


def weights_of(rho: Float[Array, "N"], tau: Int[Array, "N"]) -> Weights:
    """The weights of a rule without a threshold and a coupling."""
    missing = jnp.float32(jnp.nan)
    return Weights(rho.astype(jnp.float32), tau > 0, missing, missing)


def normalized(share: Num[Array, "N"], tau: Int[Array, "N"]) -> Float[Array, "N"]:
    """Weights ρ in proportion to `share` among the clients with τ > 0."""
    share = jnp.where(tau > 0, share.astype(jnp.float32), 0.0)
    total = share.sum()
    return share / jnp.where(total > 0, total, 1.0)


def equal_weights(info: RoundInfo, hparams: HParams) -> Weights:
    """1/n for each of the n clients that take part.

    Also what a rule with `from_updates` has until it has chosen its own, and one whose
    `combine` is no weighted mean.
    """
    del hparams
    return weights_of(normalized(jnp.ones_like(info.size), info.tau), info.tau)


class Mixing(NamedTuple):
    """How the clients' updates become one."""

    weights: Callable[[RoundInfo, HParams], Weights] = equal_weights
    # Whether the server gets w^t + Σ ρ_i (w_i − base_i), base_i being the model that
    # client i started from; Σ ρ need not be 1. Else Σ ρ_i w_i.
    deltas: bool = False
    # (w_i − base_i [N, ...], state, received, hparams) -> (Δ, state): if no weights can
    # say how the updates are combined. The server then gets w^t + Δ. Stacks all models.
    combine: Callable[[Params, Any, Received, HParams], tuple[Params, Any]] | None = (
        None
    )
    # Whether `combine` also gets "others", the clients' own values [N, ...] of other
    # collections, and gives what these become; else they become `apply.mean_values`.
    combines_others: bool = False
    # (outputs, state, received, hparams) -> (weights, state): they count instead of
    # `weights`, chosen after training; 0 where not present. Stacks all models.
    from_updates: (
        Callable[[ClientOutputs, Any, Received, HParams], tuple[Weights, Any]] | None
    ) = None
    uses_constants: bool = False  # whether the weights depend on L, G², σ²
    uses_gradients: bool = False  # likewise on each client's σ_i² and dissimilarity
    # Whether `from_updates` reads `ClientOutputs.validation`, or `server_update`.
    uses_validation: bool = False
    uses_losses: bool = False  # whether it makes no sense without `ClientOutputs.loss`
    # With `uses_validation`: the server trains on these samples, `server_update`.
    trains_server: bool = False
    # hyper-parameters -> whether no L, G², σ² are needed, although `uses_constants`.
    skips_constants: Callable[[HParams], bool] = lambda hparams: False


class ClientSide(NamedTuple):
    """What clients do differently."""

    proximal: bool = False  # whether they add μ/2‖w − w^t‖² to their loss
    # (state, what it downloaded, its place in it) -> added to each of its gradients.
    gradient_correction: Callable[[Any, Params, Array], Params] | None = None
    # state -> what a client downloads with the model. Kept with earlier models, so that
    # a client that is not in step uses what there was when it downloaded.
    broadcast: Callable[[Any], Params] | None = None
    # Whether the rule counts on the steps of the package's own SGD: no `optimizer=` and
    # `client_step=` then.
    counts_on_sgd: bool = False

    @property
    def sends_variates(self) -> bool:
        """Whether control variates go with the models; FedDyn's λ_i need not."""
        return bool(self.gradient_correction and self.broadcast)


class ServerSide(NamedTuple):
    """What the server does with the mean, and what it remembers."""

    # (Σ ρ_i w_i, w^t, state, received, hparams) -> (w^{t+1}, state); default: the mean
    update: Callable[[Params, Params, Any, Received, HParams], tuple[Params, Any]] = (
        lambda mean, params, state, received, hparams: (mean, state)
    )
    init: Callable[[Params, Counts], Any] = lambda params, counts: ()


class Aggregator(NamedTuple):
    """An aggregation rule of pure functions of the parameters, {"params": …}.

    Other collections of a model, such as batch statistics, do not pass through it.
    `tsfl_jax.rule` makes one of its parts' fields.
    """

    mixing: Mixing
    clients: ClientSide = ClientSide()
    server: ServerSide = ServerSide()
    # Components whose settings its functions read, `HParams.of`.
    sections: tuple[type, ...] = ()
    label: str = ""  # its name in figures and tables; "": that of its table

    @property
    def reads(self) -> tuple[str, ...]:
        """The settings that it reads besides those of its sections."""
        return tuple(declared(ConstantsConfig)) if self.mixing.uses_constants else ()

    @property
    def stacks(self) -> bool:
        """Whether it needs all updates at once; then it has a program of its own."""
        return (self.mixing.combine or self.mixing.from_updates) is not None


def with_defaults(rule: Aggregator, hparams: HParams) -> HParams:
    """The hyper-parameters with the defaults of settings that are not given."""
    defaults = {section_of(kind): arrays(kind()) for kind in rule.sections}
    return hparams._replace(settings=defaults | dict(hparams.settings))
