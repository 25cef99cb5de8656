"""Discriminative model selection (DMS): from τ_i to the aggregation weights ρ_i.

Algorithm 1, equations (6)–(9) of Shao et al., "Robust Model Aggregation for
Heterogeneous Federated Learning: Analysis and Optimizations", exactly as published.

What it is not: an optimum. The paper derives the weights as the minimizer of its
Theorem 1 bound, but the printed proof of Theorem 2 has a sign error (X and Z enter the
derivative with a minus), and the true minimizer of that bound favors clients with
*few* iterations. DMS is a heuristic, to be judged by experiments. The paper does not
say what to do with affine weights below 0 or above θ/N. Here they are replaced by the
nearest point of {ρ ≥ 0, Σρ = 1, ρ ≤ θ/N} (Euclidean projection). In Algorithm 1 G and
σ are inputs; a run that is not given them estimates L, G² and σ² once at w⁰, as bounds
over all clients. ``constants.when="interval"`` estimates them anew in every interval.

τ_i: iterations of client i, H = max τ, K: threshold, P_i: chance of being filtered,
β_i: selected, S: the selected with τ_i > 0, c: coupling, θ: weight limit, u = θ/N;
other symbols are in `types`. All functions are pure and work under jit, vmap and grad.
A wrong shape and, except while tracing, a value out of its range is a `UserError`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax import trees
from tsfl_jax.theory import simplex
from tsfl_jax.theory.bounds import check, check_tau
from tsfl_jax.types import Numbers, PRNGKey


def _tau(tau: Numbers, *scalars: Numbers) -> Float[Array, "N"]:
    """τ in the floating dtype that it and the scalars promote to, checked."""
    check_tau(tau, "[N], N ≥ 1", range(1, 2))
    array = jnp.asarray(tau)
    return array.astype(jnp.result_type(float, array, *scalars))


def _num_clients(tau: Float[Array, "N"]) -> Float[Array, ""]:
    """N, hidden from XLA, which would replace a division by N by · rounded 1/N."""
    return lax.optimization_barrier(jnp.asarray(tau.shape[0], tau.dtype))


def threshold(tau: Numbers) -> Float[Array, ""]:
    """The mean local iterations of all clients, absent ones included: equation (7).

    K = (1/N) Σ_i τ_i.

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.

    Returns:
      K, local iterations, floating.
    """
    tau = _tau(tau)
    # A mean can round to just above the maximum; then (8) could filter every client.
    return jnp.minimum(tau.sum() / _num_clients(tau), tau.max())


@trees.arithmetic()
def filter_probability(
    tau: Numbers, threshold_value: Numbers | None = None
) -> Float[Array, "N"]:
    """The probability that a client is filtered: equation (8).

    P_i = (K − τ_i)/H where τ_i < K, else 0.

    >>> print(filter_probability(jnp.array([1, 1, 4, 4])))
    [0.375 0.375 0.    0.   ]

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.
      threshold_value: K ``[]``, if it is not that of these τ; None or NaN: it is.

    Returns:
      P in [0, 1), floating; 0 everywhere if all τ are 0.
    """
    tau = _tau(tau)
    mean = _threshold_or(threshold_value, tau)
    most = jnp.where(tau.max() > 0, tau.max(), 1.0)  # 0/0 would reach gradients
    return jnp.where(tau < mean, (mean - tau) / most, 0.0)


def select(
    key: PRNGKey | Any,
    tau: Numbers,
    client: Numbers | None = None,
    *,
    threshold_value: Numbers | None = None,
    drop: Numbers = 1.0,
) -> Bool[Array, "N"]:
    """Decide at random which clients are kept: β_i = 1 with probability 1 − P_i (9).

    Args:
      key: of this interval, new-style or uint32.
      tau: ``[N]`` local iterations ≥ 0, integer or floating.
      client: ``[N]`` integer ids, default 0..N−1. Client i uses the key
        ``fold_in(key, client[i])``, so the order of the clients does not matter.
      threshold_value: K as in `filter_probability`.
      drop: factor on P ``[]`` in [0, 1]; 1 is the paper's, 0 filters no client.

    Returns:
      β. True where τ_i ≥ K > 0; False where τ_i = 0, as such a client has nothing to
      deliver.
    """
    check("drop", drop, (), lambda x: (x >= 0) & (x <= 1), "a factor in [0, 1]")
    tau = _tau(tau)
    chance = filter_probability(tau, threshold_value) * jnp.asarray(drop)
    client = jnp.arange(tau.shape[0]) if client is None else client
    check("client", client, tau.shape, lambda x: x % 1 == 0, "integer ids")
    ids = jnp.asarray(client, int)

    # float32 for every τ, so that precision does not change which clients are kept.
    def uniform(client: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(jax.random.fold_in(key, client), dtype=jnp.float32)

    return (jax.vmap(uniform)(ids) >= chance) & (tau > 0)


def _threshold_or(value: Numbers | None, tau: Float[Array, "N"]) -> Float[Array, ""]:
    """K as it was given, at most H; that of τ where it is None or NaN."""
    value = jnp.nan if value is None else value
    check("threshold_value", value, (), lambda x: ~(x < 0), "K ≥ 0", finite=False)
    value = jnp.asarray(value, tau.dtype)
    # Above H, as where only slow clients can upload, it would filter all of them.
    return jnp.where(jnp.isnan(value), threshold(tau), jnp.minimum(value, tau.max()))


@trees.arithmetic()
def coupling(
    tau: Numbers,
    *,
    lr: Numbers,
    smoothness: Numbers,
    grad_sq_norm: Numbers,
    grad_variance: Numbers,
) -> Float[Array, ""]:
    """The slope c of the weights in τ, ρ_i − ρ_j = c(τ_i − τ_j): Corollary 1.

    c = ηL(H−1)G²/(2Nσ²). Units: G² and σ² are of one mini-batch gradient, while τ and
    H − 1 count what the paper calls local iterations, here passes unless
    ``schedule.iteration`` is "step"; and η is the rate of one step without momentum
    (with momentum m a step moves by η/(1 − m) in the end). With τ in mini-batch steps,
    as ``dms.unit="step"`` has it, c is that of the theorem's own iteration.

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.
      lr, smoothness: η > 0 and L ≥ 0, finite scalars.
      grad_sq_norm, grad_variance: G² ≥ 0 and σ² ≥ 0, finite scalars in the same unit.

    Returns:
      c ≥ 0, per local iteration, finite. 0 if H ≤ 1 or G² = 0, even if σ² = 0.
      If σ² = 0 otherwise, or on overflow, the dtype's largest number, with gradient 0:
      `affine_weights` then gives all weight to the largest τ, the limit for c → ∞.
      While tracing, η = 0 gives 0, for rates that end there, and an L, G² or σ² that
      is not finite NaN.
    """
    scalars = (lr, smoothness, grad_sq_norm, grad_variance)
    check("lr", lr, (), lambda x: x > 0, "0 < η < ∞")
    check("smoothness", smoothness, (), lambda x: x >= 0, "0 ≤ L < ∞")
    check("grad_sq_norm", grad_sq_norm, (), lambda x: x >= 0, "0 ≤ G² < ∞")
    check("grad_variance", grad_variance, (), lambda x: x >= 0, "0 ≤ σ² < ∞")
    tau = _tau(tau, *scalars)
    eta, L, G2, variance = (jnp.asarray(x, tau.dtype) for x in scalars)
    above = eta * L * jnp.maximum(tau.max() - 1, 0) * G2
    below = 2 * tau.shape[0] * variance
    # The derivative divides by below², which underflows long before `below` does.
    # Scaling both by a power of two avoids that and does not change the quotient.
    small = float(np.sqrt(jnp.finfo(tau.dtype).tiny))
    boost = jnp.where(below < small, 1 / small, 1.0)
    above, below = above * boost, below * boost
    zero = below < small
    within = jnp.where(zero | jnp.isinf(below), 1.0, below)
    infinite = (above > 0) & (zero | jnp.isinf(above / within))
    is_end = infinite | zero
    quotient = jnp.where(is_end, 0.0, above) / jnp.where(is_end, 1.0, below)
    slope = jnp.where(infinite, jnp.finfo(tau.dtype).max, quotient)
    # Known while tracing, too: an estimate of a gradient that overflowed.
    return jnp.where(jnp.isfinite(jnp.stack([L, G2, variance])).all(), slope, jnp.nan)


@trees.arithmetic()
def affine_weights(
    tau: Numbers,
    selected: Numbers,
    coupling: Numbers,
    weight_limit: Numbers | None = None,
    raw: Numbers = False,
) -> Float[Array, "N"]:
    """Weights that are affine in τ on the selected clients, made feasible.

    ρ_i = 1/|S| + c(τ_i − mean_S τ) on S = {β_i = 1, τ_i > 0}: Corollary 1 (6), which is
    Theorem 3 with Σρ = 1. The limit is that of Definition 1.3.

    >>> tau, selected = jnp.array([1, 1, 4, 4]), jnp.ones(4, bool)
    >>> print(affine_weights(tau, selected, 0.05))
    [0.175 0.175 0.325 0.325]

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.
      selected: ``[N]`` bool, β.
      coupling: c ``[]`` ≥ 0. For c → ∞, and for c = inf, the weight goes to the largest
        τ in S, in equal parts.
      weight_limit: θ ``[]`` ≥ 1 in ρ ≤ θ/N, N being all clients in `tau`; None or inf
        for no limit. Where |S|·θ/N ≤ 1 (up to rounding) the weights are 1/|S| each.
      raw: bool ``[]``; True: the affine values whatever they are, without a limit.

    Returns:
      ρ, floating: the affine values themselves if all are in [0, θ/N] or if `raw`, else
      their Euclidean projection. 0 outside S; all 0 if S is empty.
    """
    check("coupling", coupling, (), lambda x: x >= 0, "c ≥ 0", finite=False)
    weight_limit = float("inf") if weight_limit is None else weight_limit
    theta = "θ ≥ 1, or None"
    check("weight_limit", weight_limit, (), lambda x: x >= 1, theta, finite=False)
    tau = _tau(tau, coupling, weight_limit)
    check("selected", selected, tau.shape, np.isfinite, "booleans")
    inside = jnp.asarray(selected, bool) & (tau > 0)
    # inf·0 is NaN; the largest finite number gives the same weights.
    c = jnp.minimum(jnp.asarray(coupling, tau.dtype), jnp.finfo(tau.dtype).max)
    limit = jnp.asarray(weight_limit, tau.dtype) / _num_clients(tau)

    size = jnp.maximum(inside.sum(), 1).astype(tau.dtype)
    mean = jnp.where(inside, tau, 0.0).sum() / size
    # Feasible values never reach the bounds of this clip. It keeps XLA from fusing the
    # product and the sum into one rounding: same bits inside and outside jit.
    raw = jnp.asarray(raw, bool)
    most = jnp.where(raw, jnp.finfo(tau.dtype).max, 2)
    affine = 1 / size + jnp.clip(c * (tau - mean), -most, most)
    # A large c amplifies the rounding of the mean; then the sum is far from 1.
    slack = 4 * jnp.finfo(tau.dtype).eps * size * jnp.maximum(mean, 1)
    feasible = jnp.abs(jnp.where(inside, affine, 0).sum() - 1) <= slack
    feasible &= jnp.all(~inside | ((affine >= 0) & (affine <= limit)))
    # The projection does not depend on a common shift, so it needs c·τ only.
    rho = simplex.project(tau, c, inside, jnp.minimum(limit, 1.0))
    return jnp.where(inside, jnp.where(feasible | raw, affine, rho), 0.0)


@trees.arithmetic()
def dms_weights(
    key: PRNGKey | Any,
    tau: Numbers,
    *,
    lr: Numbers,
    smoothness: Numbers,
    grad_sq_norm: Numbers,
    grad_variance: Numbers,
    weight_limit: Numbers | None = None,
) -> Float[Array, "N"]:
    """Aggregation weights by discriminative model selection: Algorithm 1.

    >>> key, tau = jax.random.key(0), jnp.array([0, 2, 2, 4, 4])
    >>> constants = dict(smoothness=1.0, grad_sq_norm=1.0, grad_variance=0.6)
    >>> rho = dms_weights(key, tau, lr=0.08, **constants)  # filters client 1
    >>> print(*(f"{x:.2f}" for x in rho))
    0.00 0.00 0.28 0.36 0.36

    Args:
      key: of this interval, new-style or uint32; client i draws with fold_in(key, i).
      tau: ``[N]`` local iterations ≥ 0, integer or floating; 0 = absent.
      lr, smoothness, grad_sq_norm, grad_variance: η, L, G², σ² as in `coupling`.
      weight_limit: θ as in `affine_weights`.

    Returns:
      ρ in [0, 1], Σρ = 1, in the floating dtype that τ and the scalars promote
      to. 0 for filtered and absent clients. All 0 only if all τ are 0: H = max τ ≥ K,
      so P = 0 for a client that reaches H, and it is always selected.
    """
    slope = coupling(
        tau,
        lr=lr,
        smoothness=smoothness,
        grad_sq_norm=grad_sq_norm,
        grad_variance=grad_variance,
    )
    return affine_weights(tau, select(key, tau), slope, weight_limit)
