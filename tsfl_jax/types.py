"""Symbols of the paper and the small structures that pass between modules.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning:
Analysis and Optimizations". One legend for the whole package:

====== ==================== =====================================================
symbol in code              meaning
====== ==================== =====================================================
T      num_intervals        intervals (communication rounds), index t
N      num_clients          clients, index i
H      ``tau.max()``        most local iterations of any client in an interval
τ_i^t  ``tau[t, i]``        local iterations of client i in interval t; 0 = absent
|D_i|  ``size[t, i]``       samples client i holds in interval t
B      batch_size           samples in a mini-batch (the paper's |ξ|)
α_i,h  ``alpha``            1 while client i still works at step h, else 0
ρ_i    ``rho[i]``           aggregation weight, Σ ρ_i = 1
β_i    ``selected[i]``      1 where DMS keeps client i
P_i    filter_probability   chance that DMS drops client i, equation (8)
K      threshold            mean of τ, equation (7)
c      coupling             slope of ρ in τ, Corollary 1
θ      weight_limit         ρ_i ≤ θ/N, Definition 1.3
η      lr                   learning rate
μ      mu                   proximal coefficient of FedProx
γ      gamma                FedAsync's share of the old global model
L      smoothness           Lipschitz constant of the gradients
G²     grad_sq_norm         bound on E‖g‖²
σ²     grad_variance        bound on E‖g − ḡ‖² of a mini-batch gradient
Δ      interval_seconds     length of an interval in virtual seconds
====== ==================== =====================================================

Shapes are written ``[N, H]``; a leading client axis is always first.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

Array = jax.Array | np.ndarray
Numbers = ArrayLike | Sequence | Any  # input that the called function checks itself
PRNGKey = jax.Array
Params = Any  # pytree of arrays: Flax variables, {"params": …, "batch_stats": …}


class UserError(ValueError):
    """Wrong input, told in one line: the value, what was expected, the way out."""


def nearest(value: object, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?", or nothing where no known name is close."""
    close = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Dataset(NamedTuple):
    """Images and labels of one data set, on the host.

    ``(x - mean) / std`` is what a model sees; x itself stays as stored.
    """

    name: str  # as shown in every output; synthetic sources say so here
    x_train: np.ndarray  # [M, ...] uint8, or float32 for a user's own float data
    y_train: np.ndarray  # [M] int32 in [0, num_classes)
    x_test: np.ndarray  # [M', ...] like x_train
    y_test: np.ndarray  # [M'] int32
    num_classes: int
    mean: np.ndarray  # [C] or [] float32, in units of x
    std: np.ndarray  # [C] or [] float32, in units of x, > 0


class Partition(NamedTuple):
    """Which training samples each client may use."""

    indices: np.ndarray  # [N, D] int32 into x_train; row i valid up to capacity[i]
    capacity: np.ndarray  # [N] int32, samples in row i
    notes: tuple[str, ...]  # where the request could not be met exactly, and how


class HParams(NamedTuple):
    """Scalars that may be swept without another compilation.

    float32, but for `staleness` and `rule`.
    """

    lr: Any  # η > 0
    momentum: Any  # in [0, 1)
    mu: Any  # μ ≥ 0; 0 is plain local SGD
    gamma: Any  # γ in [0, 1), FedAsync only
    clip_norm: Any  # > 0, global gradient norm; inf switches clipping off
    smoothness: Any  # L ≥ 0 or NaN: estimate it from this interval's gradients
    grad_sq_norm: Any  # G², likewise
    grad_variance: Any  # σ², likewise
    weight_limit: Any  # θ ≥ 1; inf switches the limit off
    server_lr: Any = 1.0  # η_g > 0 of the server's step
    server_momentum: Any = 0.9  # β₁ in [0, 1): FedAvgM, FedAdam, FedYogi
    server_second: Any = 0.99  # β₂ in [0, 1): FedAdam, FedYogi
    server_floor: Any = 1e-3  # added to √v: FedAdam, FedYogi
    trim: Any = 0.1  # in [0, 0.5), share of clients that may be wrong: robust means
    staleness_a: Any = 0.5  # a ≥ 0 of the staleness function
    staleness_b: Any = 4.0  # b ≥ 0 of the hinge, in global updates
    staleness: Any = 0  # int32, which of `local_work.STALENESS`
    rule: Any = 0  # int32, which one of several rules in a program; `aggregate.one_of`


class Delivery(NamedTuple):
    """Who delivers what at a global update, where clients are not all in step.

    A leading axis ``[R]`` makes it a run of R updates. K places; one with τ = 0 is
    empty. A base model is one of P that are kept, so that stale ones are at hand.
    """

    client: Array  # [K] int32, which client
    task: Array  # [K] int32, which of its tasks; names the random stream
    base: Array  # [K] int32 in [0, P), where the model is that it started from
    lag: Array  # [K] int32, global updates since that model
    keep: Array  # [] int32, where the new global model is kept; P: nowhere
    group: Array  # [] int32, tier that delivers; 0 without tiers


class Schedule(NamedTuple):
    """Who works how much and when, drawn before training, on the host.

    Where clients are not in step, T counts global updates and N their deliveries.
    """

    tau: np.ndarray  # [T, N] int32, local iterations ≥ 0
    size: np.ndarray  # [T, N] int32, samples held ≥ 1
    seconds: np.ndarray | None = None  # [T] float64, virtual time of each update
    delivery: Delivery | None = None  # of NumPy arrays, leading axis [T]
    places: int = 0  # P, earlier models kept for those who start from them
    reported: np.ndarray | None = None  # [T, N] int32; None: as many as done
    notes: tuple[str, ...] = ()  # what a user should know about the draw


class ClientGradients(NamedTuple):
    """What gradients at w^t say about every client, float32; NaN: not measured."""

    variance: Any  # [N] σ_i²
    dissimilarity: Any  # [N] ‖∇F_i − ∇F‖²; over L² it stands for Γ_i
    square: Any  # [] ‖∇F‖²; over L² it stands for ‖w^t − w*‖²


class Constants(NamedTuple):
    """The constants behind DMS's weights in one interval, float32 each."""

    smoothness: Any  # L
    grad_sq_norm: Any  # G²
    grad_variance: Any  # σ²
