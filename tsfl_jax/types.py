"""Symbols of the package, and the structures that pass between folders.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning:
Analysis and Optimizations". Dimensions in annotations are these symbols, with a client
axis before all others; P, R, L, D, M are among the words of docs/architecture.md.

====== ==================== =====================================================
symbol in code              meaning
====== ==================== =====================================================
T      num_intervals        intervals (communication rounds), index t
N      num_clients          clients, index i
H      ``tau.max()``        most local iterations of any client in an interval
τ_i^t  ``tau[t, i]``        local iterations of client i in interval t; 0 = absent
|D_i|  ``size[t, i]``       samples client i holds in interval t
B      batch_size           samples in a mini-batch (the paper's |ξ|)
α_i,h  ``k < work``         whether client i still works at step k of an interval
ρ_i    ``rho[i]``           aggregation weight, Σ ρ_i = 1
β_i    ``selected[i]``      1 where DMS keeps client i
P_i    filter_probability   chance that DMS filters client i, equation (8)
K      threshold            mean of τ, equation (7)
c      dms.coupling         slope of ρ in τ, Corollary 1
θ      dms.weight_limit     ρ_i ≤ θ/N, Definition 1.3
η      lr                   learning rate
μ      mu                   proximal coefficient of FedProx; α of FedDyn
γ      fedasync.gamma       FedAsync's share of the old global model
L      smoothness           Lipschitz constant of the gradients
G²     grad_sq_norm         bound on E‖g‖²
σ²     grad_variance        bound on E‖g − ḡ‖² of a mini-batch gradient
Δ      ``interval_seconds`` length of an interval in virtual seconds
η_g    server.lr, fedopt.lr step of the server
κ      ``adapt``            factor on c and P_i per interval, dms_adaptive
T_c    dms.decay_time       intervals in which c and P_i fade
C      num_classes          classes; as the last axis of images: channels
O      —                    outputs of a network, one per class where it classifies
====== ==================== =====================================================
"""

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Shaped

Array = jax.Array | np.ndarray
Scalar = jax.Array | float  # [], or [L] for the lanes of a sweep
Numbers = ArrayLike | Sequence | Any  # input that the called function checks itself
PRNGKey = jax.Array
Kind = TypeVar("Kind")
INT32_MAX = 2**31 - 1
Params = Any  # pytree of arrays: Flax variables, {"params": …, "batch_stats": …}


class UserError(ValueError):
    """Wrong input, reported in one line: the value, what was expected, the way out."""


def nearest(value: object, names: Iterable[str]) -> str:
    """ "; did you mean 'x'?", or nothing where none of the names is close."""
    close = difflib.get_close_matches(str(value), list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parts_of(text: str, mark: str = ",") -> tuple[str, ...]:
    """The parts of a text between the marks, without spaces and empty ones."""
    return tuple(part for part in map(str.strip, text.split(mark)) if part)


def one_line(error: BaseException, most: int | None = None) -> str:
    """What an exception says, in one line of at most so many characters."""
    return " ".join(str(error).split())[:most] or type(error).__name__


@contextlib.contextmanager
def user_code(failure: str, expected: str) -> Iterator[None]:
    """Make one line of what a user's code raises: the failure, why, `expected`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
        raise UserError(f"{failure} ({reason}); {expected}") from error


class Dataset(NamedTuple):
    """Samples and labels of one data set, on the host.

    ``(x - mean) / std`` is what a model sees; x itself stays as stored.
    """

    name: str  # as shown in every output; synthetic data is named so here
    x_train: Shaped[np.ndarray, "M ..."]  # uint8, float32, or int32 tokens
    y_train: Int[np.ndarray, "M"]  # int32 in [0, num_classes)
    x_test: Shaped[np.ndarray, "M_test ..."]  # like x_train
    y_test: Int[np.ndarray, "M_test"]  # int32
    num_classes: int
    mean: Float[np.ndarray, "..."]  # [], [C] or [F] float32, in units of x
    std: Float[np.ndarray, "..."]  # like mean, > 0
    # int32 in [0, clients): which client each training sample belongs to; None: unknown
    client: Int[np.ndarray, "M"] | None = None
    test_client: Int[np.ndarray, "M_test"] | None = None  # likewise of test samples
    # float32, what loss and metrics get instead of labels; None: the labels
    target: Float[np.ndarray, "M *O"] | None = None
    test_target: Float[np.ndarray, "M_test *O"] | None = None
    source: str = ""  # the settings that it was loaded with; "": none

    def __repr__(self) -> str:
        """What it is, and what a network sees of it, in one line."""
        x, shape = np.asarray(self.x_train), [*np.shape(self.x_train)[1:]]
        tokens = x.dtype.kind in "iu" and x.dtype != np.uint8
        learned = f"{self.num_classes} classes"
        if self.target is not None and self.num_classes == 1:
            learned = f"targets {[*self.target.shape[1:]]} of a regression"
        return (
            f"{self.name}: {len(x)} training and {len(self.x_test)} test samples "
            f"{x.dtype} {shape}, {learned}; a network sees "
            f"{'int32' if tokens else 'float32'} [B, {str(shape)[1:]}"
        )


class OnChanged(NamedTuple):
    """A metric of the model's outputs on changed test samples."""

    change: Any  # samples as stored [B, ...] -> the same shape and dtype
    metric: Any  # as of `models.model.Model`: (outputs, labels) -> values, weights


class Partition(NamedTuple):
    """Which training samples each client may use."""

    indices: Int[np.ndarray, "N D"]  # int32 into x_train; row i valid to capacity[i]
    capacity: Int[np.ndarray, "N"]  # int32, samples in row i
    notes: tuple[str, ...]  # where the request could not be met exactly, and how


class Constants(NamedTuple):
    """The constants behind DMS's weights, float32; NaN: to be estimated."""

    smoothness: Array | float = math.nan  # L
    grad_sq_norm: Array | float = math.nan  # G²
    grad_variance: Array | float = math.nan  # σ²


class HParams(NamedTuple):
    """What may be swept without another compilation; float32 but for the indices.

    The defaults are plain SGD without limits.
    """

    lr: Scalar = 0.003  # η > 0
    momentum: Scalar = 0.0  # in [0, 1)
    mu: Scalar = 0.0  # μ ≥ 0; 0 is plain local SGD
    clip_norm: Scalar = math.inf  # > 0, global gradient norm; inf: no clipping
    lr_schedule: Scalar = 0  # int32, index into `sections.LR_SCHEDULES`
    lr_decay: Scalar = 1.0  # d in (0, 1]
    lr_every: Scalar = 1.0  # E ≥ 1
    lr_total: Scalar = 1.0  # T ≥ 1 of cosine
    lr_warmup: Scalar = 0.0  # W ≥ 0, factor (t + 1)/W up to 1; 0: none
    rule: Scalar = 0  # int32, which of the rules in a program; `rules.apply`
    constants: Constants = Constants()
    settings: Mapping[str, Any] = {}  # of the program's rules, by section; see `of`

    def of(self, kind: type[Kind]) -> Kind:
        """The settings of a component that the rule names in its `sections`."""
        name = kind.__name__
        expected = f"expected sections=({name},) in the rule"
        with user_code(f"the rule reads the settings of {name}", expected):
            return self.settings[getattr(kind, "section", "")]


class Delivery(NamedTuple):
    """What the clients of an update started from.

    A leading axis ``[R]`` makes it a chunk of R updates. K slots; one with τ = 0 is
    empty. Clients start from one of P snapshots of earlier global models; with P = 0
    all start from the newest one, w^t.
    """

    # int32, which of its tasks, with P = 0 the interval; names the random stream
    task: Int[Array, "... K"]
    snapshot: Int[Array, "... K"]  # int32 in [0, P), which one it started from
    lag: Int[Array, "... K"]  # int32, global updates since that model
    keep: Int[Array, "..."]  # int32, the snapshot that the new model becomes; P: none
    group: Int[Array, "..."]  # int32, tier that delivers; 0 without tiers


class Lots(NamedTuple):
    """What Oort's choice needs besides training; see `timeline.feedback`."""

    gumbel: Float[Array, "... d"]  # float32, of the standard Gumbel distribution
    factor: Float[Array, "... d"]  # float32 in [0, 1], the penalty of long durations


class Schedule(NamedTuple):
    """How much each client works and when, drawn before training, on the host.

    K slots: all N clients in order, or those of a cohort or of an update. Made by
    `timeline.schedule.complete`, which fills in what is the same for all.
    """

    tau: Int[np.ndarray, "T K"]  # int32, local iterations ≥ 0
    size: Int[np.ndarray, "T K"]  # int32, samples held ≥ 1
    seconds: Float[np.ndarray, "T"]  # float64, virtual time of updates
    client: Int[np.ndarray, "T K"]  # int32, who is in a slot
    in_order: bool  # whether client i is in slot i in all intervals
    delivery: Delivery  # of NumPy arrays, leading axis [T]
    snapshots: int  # P, kept at a time; 0: all start from the newest model
    reported: Int[np.ndarray, "T K"]  # int32; −1: as many as done
    threshold: Float[np.ndarray, "T"]  # K of DMS; NaN: the mean of τ
    # float32, ρ that go with how a cohort was sampled; NaN: the rule's own.
    share: Float[np.ndarray, "T K"]
    lots: Lots | None = None  # of candidates; None: Oort does not choose among them
    notes: tuple[str, ...] = ()  # what a user should know about the draw


class ClientGradients(NamedTuple):
    """Statistics of the clients' gradients at w^t, float32; NaN: not measured."""

    variance: Float[Array, "*lanes N"]  # σ_i²
    dissimilarity: Float[Array, "*lanes N"]  # ‖∇F_i − ∇F‖²; over L² stands for Γ_i
    square: Float[Array, "*lanes"]  # ‖∇F‖²; over L² it stands for ‖w^t − w*‖²
