"""What shapes the compiled program: one frozen value, made once and handed down whole.

Everything else that a program depends on is an array: hyper-parameters, schedules and
data may change without another compilation.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from tsfl_jax.engine.optimizers import Factors
from tsfl_jax.models.networks import Model
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.timeline.feedback import Choice
from tsfl_jax.types import HParams, Params, PRNGKey
from tsfl_jax.uplink.chain import Chain


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Which estimates at w^t a program must be able to make, by its rules."""

    constants: tuple[bool, ...] = (False,)  # L, G², σ² are used, and not all given
    gradients: tuple[bool, ...] = (False,)  # σ_i² and dissimilarities: used or reported
    method: str = "quotient"  # of L, G², σ²: "quotient", "power" or "bounds"


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """All that shapes a compiled program besides the shapes of its arrays."""

    batch_size: int  # B ≥ 1, samples of a mini-batch
    passes: int  # most of any client over its data, see `client.most_passes`
    iteration: str = "pass"  # what a local iteration is: a "pass" or a "step"
    mapping: str = "sequential"  # clients one after another, or "vmap", side by side
    block: int = 1  # clients side by side under "vmap"
    # Mini-batch steps of the longest client in any interval, so that loops have known
    # lengths under "vmap"; None: determined as the program runs.
    longest: int | None = None
    even: bool = False  # all do `longest` steps always: "vmap" freezes none
    proximal: bool = True  # gradients get μ(w − w^t); False if μ = 0
    lr_factors: Factors = ()  # of η_t, by `hparams.lr_schedule`; (): η is constant
    estimates: Estimates = Estimates()
    choice: Choice | None = None  # of the candidates; None: all in the slots train
    regret: bool = False  # measured in every interval
    # Also train clients with zero weight. Changes the logged loss and the divergence
    # check, never the model. True for a rule that `stacks`.
    train_all: bool = True
    frozen: tuple[str, ...] = ()  # parts of the paths of parameters that do not train
    snapshots: int = 0  # P, earlier models that clients start from; 0: all from w^t
    waves: int = 1  # most deliveries of a client in an update, if links have a state
    # Whether the share of a discarded model goes to the others.
    renormalizes: bool = True
    axis: str | None = None  # of the devices that share the clients; `scan.make_run`

    @property
    def width(self) -> int:
        """Clients trained side by side."""
        return self.block if self.mapping == "vmap" else 1


# Functions of the user's own inside of a client's training.


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
    client: Int[Array, ""] | int  # id of this client, from 0
    gradient: Callable[[Params], BatchGradient]  # at params, on this mini-batch
    apply: Callable[[BatchGradient], Stepped]  # the optimizer's step


class Hooks(NamedTuple):
    """A user's own functions; pure, of JAX arrays, one client at a time."""

    # (key, x [B, ...], y [B, ...]) -> (x, y), same shapes and dtypes, in training only
    augment: Callable[[PRNGKey, Any, Any], tuple[Any, Any]] | None = None
    # The plain one: lambda step: step.apply(step.gradient(step.variables["params"]))
    client_step: Callable[[Step], Stepped] | None = None


class Parts(NamedTuple):
    """What a program is put together from; static, as the spec."""

    model: Model
    rules: tuple[Aggregator, ...]  # ``hparams.rule`` says which counts
    # Hyper-parameters → optax transformation of the clients, fresh in every interval.
    optimizer: Callable[[HParams], optax.GradientTransformation]
    spec: ProgramSpec
    hooks: Hooks = Hooks()
    uplinks: Chain = ()  # what updates pass on their way to the server

    @property
    def rule(self) -> Aggregator:
        """The first rule: all agree on what shapes the program besides weights."""
        return self.rules[0]
