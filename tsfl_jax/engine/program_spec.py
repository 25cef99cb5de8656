"""What shapes the compiled program: one frozen value, made once and handed down whole.

Everything else that a program depends on is an array: hyper-parameters, schedules and
data may change without another compilation.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import optax

from tsfl_jax.engine.hooks import Hooks
from tsfl_jax.models.networks import Model
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.timeline.feedback import Choice
from tsfl_jax.types import HParams
from tsfl_jax.uplink.chain import Chain


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Which estimates at w^t a program must be able to make, per rule of the program.

    Attributes:
      constants: for each rule whether L, G², σ² are used and some are to be estimated.
      gradients: for each rule whether σ_i² and dissimilarities are used or reported.
      method: how L, G², σ² are estimated: "quotient", "power" or "bounds".
    """

    constants: tuple[bool, ...] = (False,)
    gradients: tuple[bool, ...] = (False,)
    method: str = "quotient"


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """All that shapes a compiled program besides the shapes of its arrays.

    Attributes:
      batch_size: B ≥ 1, samples of a mini-batch.
      iteration: what a local iteration is: a "pass" over the data or a "step".
      passes: most passes of any client over its data, see `client.most_passes`.
      mapping: clients one after another ("sequential") or side by side ("vmap").
      block: clients side by side under "vmap".
      longest: mini-batch steps of the longest client in any interval, so that loops
        have known lengths under "vmap"; None: determined as the program runs.
      even: every client does `longest` steps in every interval, so that no step is
        frozen under "vmap".
      proximal: whether gradients get μ(w − w^t); False if μ = 0.
      lr_varies: whether η follows a schedule over intervals; False only if it is
        constant everywhere.
      estimates: which estimates the program can make.
      choice: how clients are chosen of the candidates; None: all in the slots train.
      regret: whether the regret of the weights is measured in every interval.
      train_all: also train clients with zero weight. Changes the logged loss and the
        divergence check, never the model. True for a rule that `stacks`.
      frozen: parts of the paths of parameters that are not trained.
      snapshots: P, earlier models that clients start from; 0: all start from w^t.
      waves: most deliveries of a client in an update, if links have a state; else 1.
      axis: mesh axis of devices that share the clients; set by `scan.make_run`.
    """

    batch_size: int
    passes: int
    iteration: str = "pass"
    mapping: str = "sequential"
    block: int = 1
    longest: int | None = None
    even: bool = False
    proximal: bool = True
    lr_varies: bool = False
    estimates: Estimates = Estimates()
    choice: Choice | None = None
    regret: bool = False
    train_all: bool = True
    frozen: tuple[str, ...] = ()
    snapshots: int = 0
    waves: int = 1
    axis: str | None = None

    @property
    def width(self) -> int:
        """Clients trained side by side."""
        return self.block if self.mapping == "vmap" else 1


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
