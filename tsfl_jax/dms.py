"""Discriminative model selection (DMS): from τ_i to the aggregation weights ρ_i.

Algorithm 1, equations (6)–(9) of Shao et al., "Robust Model Aggregation for
Heterogeneous Federated Learning: Analysis and Optimizations", exactly as published.

What it is not: an optimum. The paper derives the weights as the minimiser of its
Theorem 1 bound, but the printed proof of Theorem 2 has a sign error (X and Z enter the
derivative with a minus), and the true minimiser of that bound favours clients with
*few* iterations. DMS is a heuristic, to be judged by experiments. The paper is silent
on affine weights below 0 or above θ/N. Here they are replaced by the nearest point of
{ρ ≥ 0, Σρ = 1, ρ ≤ θ/N} (Euclidean projection).

τ_i: iterations of client i, H = max τ, K: threshold, P_i: chance of being dropped, β_i:
selected, S: the selected with τ_i > 0, c: coupling, θ: weight limit, u = θ/N; the rest
is in `types`. All functions are pure and work under jit, vmap and grad. All raise
`UserError` for a wrong shape and, except while tracing, a value out of its range.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tsfl_jax.types import Array, PRNGKey, UserError


def _check(name: str, value, shape: tuple, valid, expected: str) -> None:
    """Raises `UserError` for a wrong shape and, where it is known, a wrong value."""
    if np.shape(value) != shape:
        found, wanted = list(np.shape(value)), list(shape)
        raise UserError(f"{name} has shape {found}: expected {wanted}, {expected}")
    if not isinstance(value, jax.core.Tracer):
        known = np.asarray(jax.device_get(value))  # explicit: transfer guards allow it
        good = valid(known) if known.dtype.kind not in "OUSc" else np.False_
        if not np.all(good):
            i = int(np.argmin(good))
            at = f"{name}[{i}]" if shape else name
            raise UserError(f"{at} = {known.flat[i]}: expected {expected}")


def _vector(name: str, value, valid, expected: str, shape: tuple | None = None):
    """`value` as a JAX array ``[N]``."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name} = {value!r}: expected [N] {expected}") from None
    if array.ndim != 1 or array.size == 0:
        found = list(array.shape)
        raise UserError(f"{name} has shape {found}: expected [N], N ≥ 1, {expected}")
    _check(name, array, shape or array.shape, valid, expected)
    return array


def _check_key(key) -> None:
    """Raises `UserError` for anything but one PRNG key."""
    try:
        drawn = jax.eval_shape(lambda k: jax.random.uniform(k), key)
    except (TypeError, ValueError):
        drawn = None
    if drawn is None or drawn.shape:
        shown = " ".join(repr(key).split())
        raise UserError(f"key = {shown}: expected one PRNG key, as jax.random.key(0)")


def _tau(tau, *scalars) -> jax.Array:
    """τ in the floating dtype that it and the scalars promote to."""
    expected = "finite local iterations ≥ 0 (0 = absent)"
    tau = _vector("tau", tau, lambda x: (x >= 0) & (x < np.inf), expected)
    return tau.astype(jnp.result_type(float, tau, *scalars))


def _num_clients(tau):
    # Hidden from XLA, which would divide by N by multiplying with a rounded 1/N.
    return lax.optimization_barrier(jnp.asarray(tau.shape[0], tau.dtype))


def threshold(tau: Array) -> jax.Array:
    """K = (1/N) Σ_i τ_i, the mean over all clients, absent ones included: equation (7).

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.

    Returns:
      K ``[]``, local iterations, floating.
    """
    tau = _tau(tau)
    # A mean can round to just above the maximum; then (8) would spare nobody for sure.
    return jnp.minimum(tau.sum() / _num_clients(tau), tau.max())


def filter_probability(tau: Array) -> jax.Array:
    """P_i = (K − τ_i)/H where τ_i < K, else 0: chance to be dropped, equation (8).

    >>> print(filter_probability(jnp.array([1, 1, 4, 4])))
    [0.375 0.375 0.    0.   ]

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.

    Returns:
      P ``[N]`` in [0, 1), floating; 0 everywhere if all τ are 0.
    """
    tau, mean = _tau(tau), threshold(tau)
    most = jnp.where(tau.max() > 0, tau.max(), 1.0)  # 0/0 would reach gradients
    return jnp.where(tau < mean, (mean - tau) / most, 0.0)


def select(key: PRNGKey, tau: Array, client: Array | None = None) -> jax.Array:
    """β_i = 1 with probability 1 − P_i: which clients are kept, equation (9).

    Args:
      key: of this interval, new-style or uint32.
      tau: ``[N]`` local iterations ≥ 0, integer or floating.
      client: ``[N]`` integer ids, default 0..N−1. Client i draws with
        ``fold_in(key, client[i])``, so the order of the clients does not matter.

    Returns:
      β ``[N]`` bool. True where τ_i ≥ K > 0; False where τ_i = 0, as such a client has
      nothing to deliver.
    """
    _check_key(key)
    tau = _tau(tau)
    client = jnp.arange(tau.shape[0]) if client is None else client
    client = _vector("client", client, np.isfinite, "integer ids", tau.shape)
    if not jnp.issubdtype(client.dtype, jnp.integer):
        raise UserError(f"client has dtype {client.dtype}: expected integer ids")

    def draw(i):  # float32 for every τ, so that precision does not change who is kept
        return jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32)

    return (jax.vmap(draw)(client) >= filter_probability(tau)) & (tau > 0)


def coupling(tau: Array, *, lr, smoothness, grad_sq_norm, grad_variance) -> jax.Array:
    """c = ηL(H−1)G²/(2Nσ²), so that ρ_i − ρ_j = c(τ_i − τ_j): Corollary 1.

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.
      lr, smoothness: η > 0 and L ≥ 0, finite scalars.
      grad_sq_norm, grad_variance: G² ≥ 0 and σ² ≥ 0, finite scalars in the same unit.

    Returns:
      c ``[]`` ≥ 0, per local iteration, finite. 0 if H ≤ 1 or G² = 0, even if σ² = 0.
      If σ² = 0 otherwise, or on overflow, the dtype's largest number, with gradient 0:
      `affine_weights` then gives all weight to the largest τ, the limit for c → ∞.
    """
    scalars = (lr, smoothness, grad_sq_norm, grad_variance)
    _check("lr", lr, (), lambda x: (x > 0) & (x < np.inf), "0 < η < ∞")
    for i, name in enumerate(("smoothness", "grad_sq_norm", "grad_variance"), 1):
        _check(name, scalars[i], (), lambda x: (x >= 0) & (x < np.inf), "0 ≤ x < ∞")
    tau = _tau(tau, *scalars)
    eta, L, G2, variance = (jnp.asarray(x, tau.dtype) for x in scalars)
    above = eta * L * jnp.maximum(tau.max() - 1, 0) * G2
    below = 2 * tau.shape[0] * variance
    # The derivative divides by below², which underflows long before `below` does: a
    # power of two on both sides avoids that and leaves the quotient as it is.
    small = float(np.sqrt(jnp.finfo(tau.dtype).tiny))
    boost = jnp.where(below < small, 1 / small, 1.0)
    above, below = above * boost, below * boost
    zero = below < small
    within = jnp.where(zero | jnp.isinf(below), 1.0, below)
    infinite = (above > 0) & (zero | jnp.isinf(above / within))
    apart = infinite | zero
    quotient = jnp.where(apart, 0.0, above) / jnp.where(apart, 1.0, below)
    return jnp.where(infinite, jnp.finfo(tau.dtype).max, quotient)


def _free_and_full(x, scale, mask, upper):
    """How the projection of scale·x divides the entries: (pivot, 0 < ρ < u, ρ = u).

    With m = ⌈1/u⌉ and p the m-th largest of v = scale·x, the level λ in ρ = clip(v − λ,
    0, u) lies in [p − u, p]: at λ = p fewer than m entries are above 0, at p − u at
    least m are full. So only w = clip(v − p, −u, u) matters, however large v is.
    """
    entries = mask.sum()
    rank = jnp.minimum(jnp.ceil(1 / upper), entries).astype(int)
    falling = jnp.sort(jnp.where(mask, x, -jnp.inf), descending=True)
    pivot = jnp.where(entries > 0, falling[jnp.maximum(rank - 1, 0)], 0.0)
    w = jnp.clip(scale * jnp.where(mask, x - pivot, 0.0), -upper, upper)
    # f(λ) = Σ clip(w − λ, 0, u) for λ downwards from max w: it starts from 0, so that
    # f = 1 is met with small numbers. An entry grows between λ = w and λ = w − u.
    level = jnp.concatenate([w, w - upper])
    growing = jnp.concatenate([mask, mask]).astype(x.dtype).at[x.shape[0] :].mul(-1)
    order = jnp.argsort(level, descending=True)
    level, slope = level[order], jnp.cumsum(growing[order])
    steps = slope[:-1] * (level[:-1] - level[1:])
    total = jnp.concatenate([jnp.zeros(1, x.dtype), jnp.cumsum(steps)])
    last = jnp.maximum((total < 1).sum() - 1, 0)
    level = level[last] - (1 - total[last]) / jnp.maximum(slope[last], 1.0)
    level = jnp.clip(level, -upper, 0.0)  # rounding must not free a clipped entry
    empty, full = w <= level, w - level >= upper
    return pivot, mask & ~empty & ~full, mask & full


@jax.jit  # not op by op, where the caller is not compiled
def _project(x, scale, mask, upper):
    """`project` of scale·x for scale ≥ 0, upper ≤ 1."""
    pivot, free, full = _free_and_full(*map(lax.stop_gradient, (x, scale, mask, upper)))
    # λ in closed form from the free entries alone: they lie within u of the pivot, so
    # nothing here is large, and differentiating it is differentiating the projection.
    v = scale * jnp.where(free, x - pivot, 0.0)
    level = (v.sum() + full.sum() * upper - 1) / jnp.maximum(free.sum(), 1)
    rho = jnp.where(free, jnp.clip(v - level, 0, upper), jnp.where(full, upper, 0))
    size = jnp.maximum(mask.sum(), 1).astype(x.dtype)
    too_few = size * upper <= 1 + 4 * jnp.finfo(x.dtype).eps
    return jnp.where(mask, jnp.where(too_few, 1 / size, rho), 0.0)


def project(v: Array, mask: Array, upper) -> jax.Array:
    """argmin ‖ρ − v‖ over {0 ≤ ρ ≤ u, Σρ = 1} on the entries in `mask`, 0 elsewhere.

    ρ_i = clip(v_i − λ, 0, u) with the λ for which Σρ = 1; O(N log N) time, O(N) memory.

    >>> print(project(jnp.array([1.0, 0.2, 9.0]), jnp.array([True, True, False]), 0.7))
    [0.7 0.3 0. ]

    Args:
      v: ``[N]`` finite.
      mask: ``[N]`` bool, M of them true.
      upper: u ``[]`` > 0; values above 1, as inf, do not limit anything.

    Returns:
      ρ ``[N]``, floating. Where M·u ≤ 1 (up to rounding) 1/M each; all 0 if M = 0.
    """
    v = _vector("v", v, np.isfinite, "finite numbers")
    mask = _vector("mask", mask, np.isfinite, "booleans", v.shape).astype(bool)
    _check("upper", upper, (), lambda x: x > 0, "u > 0")
    dtype = jnp.result_type(float, v, upper)
    upper = jnp.minimum(jnp.asarray(upper, dtype), 1.0)
    return _project(v.astype(dtype), jnp.ones((), dtype), mask, upper)


def affine_weights(
    tau: Array, selected: Array, coupling, weight_limit=None
) -> jax.Array:
    """ρ_i = 1/|S| + c(τ_i − mean_S τ) on S = {β_i = 1, τ_i > 0}, made feasible.

    Corollary 1 (6), Theorem 3 with Σρ = 1; the limit is that of Definition 1.3.
    >>> tau, everyone = jnp.array([1, 1, 4, 4]), jnp.ones(4, bool)
    >>> print(affine_weights(tau, everyone, 0.05))
    [0.175 0.175 0.325 0.325]

    Args:
      tau: ``[N]`` local iterations ≥ 0, integer or floating.
      selected: ``[N]`` bool, β.
      coupling: c ``[]`` ≥ 0. For c → ∞, and for c = inf, the weight goes to the largest
        τ in S, in equal parts.
      weight_limit: θ ``[]`` ≥ 1 in ρ ≤ θ/N, N being all clients in `tau`; None or inf
        for no limit. Where |S|·θ/N ≤ 1 (up to rounding) the weights are 1/|S| each.

    Returns:
      ρ ``[N]``, floating: the affine values themselves if all are in [0, θ/N], else
      their Euclidean projection. 0 outside S; all 0 if S is empty.
    """
    _check("coupling", coupling, (), lambda x: x >= 0, "c ≥ 0")
    weight_limit = float("inf") if weight_limit is None else weight_limit
    _check("weight_limit", weight_limit, (), lambda x: x >= 1, "θ ≥ 1, or None")
    tau = _tau(tau, coupling, weight_limit)
    kept = _vector("selected", selected, np.isfinite, "booleans", tau.shape)
    inside = kept.astype(bool) & (tau > 0)
    # inf·0 is NaN; the largest number has the same limit.
    c = jnp.minimum(jnp.asarray(coupling, tau.dtype), jnp.finfo(tau.dtype).max)
    limit = jnp.asarray(weight_limit, tau.dtype) / _num_clients(tau)

    size = jnp.maximum(inside.sum(), 1).astype(tau.dtype)
    mean = jnp.where(inside, tau, 0.0).sum() / size
    # Feasible values never reach the bounds of this clip. Between product and sum, it
    # keeps XLA from fusing them into one rounding: same bits inside and outside jit.
    affine = 1 / size + jnp.clip(c * (tau - mean), -2, 2)
    # A large c can blow up the rounding of the mean; then the sum is far from 1.
    slack = 4 * jnp.finfo(tau.dtype).eps * size * jnp.maximum(mean, 1)
    feasible = jnp.abs(jnp.where(inside, affine, 0).sum() - 1) <= slack
    feasible &= jnp.all(~inside | ((affine >= 0) & (affine <= limit)))
    # The projection does not see a common shift, so it needs c·τ only.
    rho = _project(tau, c, inside, jnp.minimum(limit, 1.0))
    return jnp.where(inside, jnp.where(feasible, affine, rho), 0.0)


def dms_weights(
    key: PRNGKey,
    tau: Array,
    *,
    lr,
    smoothness,
    grad_sq_norm,
    grad_variance,
    weight_limit=None,
) -> jax.Array:
    """Aggregation weights by discriminative model selection: Algorithm 1.

    >>> key, tau = jax.random.key(0), jnp.array([0, 2, 2, 4, 4])
    >>> constants = dict(smoothness=1.0, grad_sq_norm=1.0, grad_variance=0.6)
    >>> rho = dms_weights(key, tau, lr=0.08, **constants)  # drops client 1 by chance
    >>> print(*(f"{x:.2f}" for x in rho))
    0.00 0.00 0.28 0.36 0.36

    Args:
      key: of this interval, new-style or uint32; client i draws with fold_in(key, i).
      tau: ``[N]`` local iterations ≥ 0, integer or floating; 0 = absent.
      lr, smoothness, grad_sq_norm, grad_variance: η, L, G², σ² as in `coupling`.
      weight_limit: θ as in `affine_weights`.

    Returns:
      ρ ``[N]`` in [0, 1], Σρ = 1, in the floating dtype that τ and the scalars promote
      to. 0 for dropped and absent clients. All 0 only if all τ are 0: H = max τ ≥ K, so
      P = 0 for a client that reaches H, and it is always selected.
    """
    constants = dict(
        smoothness=smoothness, grad_sq_norm=grad_sq_norm, grad_variance=grad_variance
    )
    slope = coupling(tau, lr=lr, **constants)
    return affine_weights(tau, select(key, tau), slope, weight_limit)
