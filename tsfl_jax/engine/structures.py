"""What goes into an interval and comes out of it: state, problem, inputs, history."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int

from tsfl_jax.engine import client as local
from tsfl_jax.engine import evaluation, from_updates
from tsfl_jax.engine.program_spec import Parts
from tsfl_jax.types import Array, Delivery, HParams, Params, PRNGKey


class State(NamedTuple):
    """What one interval hands to the next."""

    params: Params  # w^t, the global model's Flax variables
    server: Any  # the aggregation rule's own state
    # No client's model was finite, or not the new global one; params: the last good.
    diverged: Bool[Array, ""]
    snapshots: Params = ()  # [P, ...], earlier models that clients start from; P > 0
    broadcast: Params = ()  # [P, ...], what the rule had broadcast with them
    feedback: Any = None  # `feedback.Known` [U] of clients; None: Oort doesn't choose
    uplinks: Any = ()  # [U, ...], what each link of the chain keeps for each client


class Problem(NamedTuple):
    """Everything on the device that does not change during a run."""

    samples: local.Samples
    test: evaluation.TestSet
    # Of the clients that are ever in a slot; `Inputs.client` has places in these axes.
    rows: Int[Array, "U D"]  # which samples each client may use
    client: Int[Array, "U"]  # ids, which name the clients' random streams
    # Clients get new samples in every interval, of the classes of those in their rows.
    class_index: local.ClassIndex | None = None
    # Samples that no client holds; None: there are none. Lanes have their own.
    validation: evaluation.HeldOut | None = None
    # Number of test samples in each group that has a score of its own; None: no groups.
    group_size: Int[Array, "G"] | None = None
    # Which clients attack; None: no link asks. Lanes have their own.
    attacker: Bool[Array, "U"] | None = None
    # Whose models are tested, where layers stay with the clients. Lanes have their own.
    scored: evaluation.Scored | None = None


class Inputs(NamedTuple):
    """The schedule of interval t; a leading axis ``[R]`` makes a chunk of intervals."""

    interval: Int[Array, "..."]  # t = 0..T−1
    tau: Int[Array, "... K"]  # local iterations of the client in each slot
    size: Int[Array, "... K"]  # samples held
    evaluate: Bool[Array, "..."]
    # Slots that this device trains; K marks an empty entry, see `devices.assign`.
    assigned: Int[Array, "... k"]
    reported: Int[Array, "... K"]  # local iterations that clients report; −1: τ
    client: Int[Array, "... K"]  # who is in a slot: its place in `Problem.client`
    delivery: Delivery  # what each starts from
    threshold: Float[Array, "..."]  # K of DMS; NaN: the mean of τ
    share: Float[Array, "... K"]  # ρ of `weighting`; NaN: the rule's
    lots: Any = None  # `Lots` of d candidates in place of K; see `choosing`


class Interval(NamedTuple):
    """All that one interval is computed from."""

    parts: Parts
    state: State
    key: PRNGKey  # of the run
    hparams: HParams
    problem: Problem
    inputs: Inputs  # of this interval


# Fields of `History` that are None unless they were asked for.
REGRET = from_updates.Regret._fields
OPTIONAL = ("metrics", "group_accuracy", "group_loss", "chosen", *REGRET)


class History(NamedTuple):
    """The record of interval t; NaN if it does not apply or was not measured."""

    test_accuracy: Float[Array, "..."]  # in [0, 1]; NaN: the model does not classify
    test_loss: Float[Array, "..."]  # in nats, or the model's own unit
    train_loss: Float[Array, "..."]  # likewise, mean over all samples trained on
    threshold: Float[Array, "..."]  # K
    num_selected: Int[Array, "..."]
    weight_entropy: Float[Array, "..."]  # nats
    smoothness: Array | float  # L
    grad_sq_norm: Array | float  # G²
    grad_variance: Array | float  # σ²
    grad_square: Float[Array, "..."]  # ‖∇F(w^t)‖²
    coupling: Float[Array, "..."]  # c
    num_discarded: Int[Array, "..."]  # clients with τ > 0 whose model was not finite
    samples: Int[Array, "... N"]  # samples trained on; their sum needs 64 bits
    diverged: Bool[Array, "..."]  # from the interval on in which all models were lost
    rho: Float[Array, "... N"]
    selected: Bool[Array, "... N"]
    client_variance: Float[Array, "... N"]  # σ_i²
    client_dissimilarity: Float[Array, "... N"]  # ‖∇F_i − ∇F‖²
    # Of the user or of the network; None: there are none.
    metrics: Float[Array, "... m"] | None = None
    # By class or client of the test samples; None: not asked for.
    group_accuracy: Float[Array, "... G"] | None = None
    group_loss: Float[Array, "... G"] | None = None
    # See `from_updates.Regret`; None: not measured.
    validation_loss: Float[Array, "..."] | None = None
    regret: Float[Array, "..."] | None = None
    gap: Float[Array, "..."] | None = None
    slope: Float[Array, "... N"] | None = None
    # Who of the candidates is in a slot; None: those of the schedule.
    chosen: Int[Array, "... N"] | None = None

    def named(self, metrics: Sequence[str] = ()) -> dict[str, Any]:
        """All fields by name, the user's own metrics each under its own."""
        fields = self._replace(chosen=None)._asdict()  # "client" says who that is
        arrays = {n: a for n, a in fields.items() if a is not None}
        values = arrays.pop("metrics", None)
        return arrays | {name: values[..., i] for i, name in enumerate(metrics)}
