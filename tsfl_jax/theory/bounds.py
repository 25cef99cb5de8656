"""The paper's theorems as functions: one pure function per equation.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". Every equation is implemented *as printed*. Where the paper contains
an error, the docstring names it and docs/theory.md explains it. Not here: Theorems 2
and 3 are solved in `fixed_point`; Corollary 1 and (7)–(9) are in `dms`.

All functions are pure, work under jit, vmap and grad, in float32 and float64, and raise
`UserError` for a wrong shape or a value out of its range; while tracing it gives NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from tsfl_jax import trees
from tsfl_jax.types import ClientGradients, Numbers, UserError

Result = TypeVar("Result")


class BoundConstants(NamedTuple):
    """The constants of Theorem 1's bound, finite; after `inputs` of one JAX dtype."""

    lr: Any  # [] η > 0
    smoothness: Any  # [] L > 0
    grad_sq_norm: Any  # [] G² ≥ 0, bound on E‖g‖²
    weight_limit: Any  # [] θ ≥ 1, ρ_i ≤ θ/N
    distance: Any  # [] ‖w⁰ − w*‖² ≥ 0
    grad_variance: Any  # [N] σ_i² ≥ 0, of a mini-batch gradient
    dissimilarity: Any  # [N] Γ_i = ‖w* − w_i*‖² ≥ 0


class Coefficients(NamedTuple):
    """A, B, C of Theorem 2, with which X + Z and W are linear in ρ."""

    A: Float[Array, ""]  # of Γ_i τ_i: η{2L[ηL(1+θ) − 1] + η}
    B: Float[Array, ""]  # of τ_i in W: 2ηL[1 − ηL(1+θ)]
    C: Float[Array, ""]  # of τ_i²: η³L(H−1)G²


class Bound(NamedTuple):
    """Theorem 1: the items of the bound, and whether it is valid."""

    initial: Float[Array, ""]  # ‖w⁰ − w*‖²/W
    gradient: Float[Array, ""]  # X/W
    mini_batch: Float[Array, ""]  # Y/W
    data_distribution: Float[Array, ""]  # Z/W
    total: Float[Array, ""]  # their sum
    W: Float[Array, ""]  # denominator
    limit_holds: Bool[Array, ""]  # ηL(1+θ) ≥ 1 and all ρ ≤ θ/N: Definition 1.3
    valid: Bool[Array, ""]  # W > 0 and limit_holds


class Terms(NamedTuple):
    """The terms of Theorem 1's bound (‖w⁰ − w*‖² + X + Y + Z)/W."""

    X: Float[Array, ""]  # gradient
    Y: Float[Array, ""]  # mini-batch
    Z: Float[Array, ""]  # data distribution
    W: Float[Array, ""]


class GradientBound(NamedTuple):
    """Theorem 4, as printed and as its proof gives it."""

    printed: Float[Array, ""]  # (12); inf where not valid
    derived: Float[Array, ""]  # the same over η²; inf where not valid
    valid: Bool[Array, ""]  # 0 < η < 2ε/(V²L)


@trees.arithmetic()
def tightest_limit(
    weight_limit: ArrayLike, num_clients: int, lr: ArrayLike, smoothness: ArrayLike
) -> Float[Array, ""]:
    """The smallest θ with ρ ≤ θ/N for the limit in use and ηL(1+θ) ≥ 1.

    Weights that satisfy a limit satisfy every larger one. Where ηL(1+θ) < 1, contrary
    to Definition 1.3, Theorem 1 bounds nothing: A < 0 would reward dissimilarity.

    Args:
      weight_limit: θ of the weights ``[]``; inf for no limit, which means θ = N.
      num_clients: N.
      lr, smoothness: η and L, > 0.
    """
    theta = jnp.where(jnp.isinf(weight_limit), num_clients, weight_limit)
    # Slightly more than needed, so that rounding does not give too small a θ.
    least = (1 / (lr * smoothness) - 1) * (1 + 8 * jnp.finfo(jnp.float32).eps)
    return jnp.maximum(theta, least)


def estimated(
    lr: ArrayLike,
    weight_limit: ArrayLike,
    smoothness: ArrayLike,
    grad_sq_norm: ArrayLike,
    measured: ClientGradients,
    present: Bool[Array, "N"],
) -> BoundConstants:
    """Constants of one interval, T = 1 and w⁰ = w^t, estimated from gradients at w^t.

    Γ_i = ‖∇F_i − ∇F‖²/L² and ‖w^t − w*‖² = ‖∇F‖²/L². Unbiased estimates of nonnegative
    quantities can be negative; they are clipped at 0. θ is the tightest that Definition
    1.3 allows. The constants of clients that are not present are 0.
    """
    L = smoothness

    def usable(values: Float[ArrayLike, "N"]) -> Float[Array, "N"]:
        return jnp.where(present, jnp.maximum(values, 0.0), 0.0)

    return BoundConstants(
        lr=lr,
        smoothness=L,
        grad_sq_norm=grad_sq_norm,
        weight_limit=tightest_limit(weight_limit, present.shape[0], lr, L),
        distance=jnp.maximum(measured.square, 0.0) / L**2,
        grad_variance=usable(measured.variance),
        dissimilarity=usable(measured.dissimilarity) / L**2,
    )


_RANGES = {  # constant, in order → whether a value is in range, and the range in words
    "lr": (lambda x: x > 0, "0 < η < ∞"),
    "smoothness": (lambda x: x > 0, "0 < L < ∞"),
    "grad_sq_norm": (lambda x: x >= 0, "0 ≤ G² < ∞"),
    "weight_limit": (lambda x: x >= 1, "1 ≤ θ < ∞; without a limit: tightest_limit"),
    "distance": (lambda x: x >= 0, "0 ≤ ‖w⁰ − w*‖² < ∞"),
    "grad_variance": (lambda x: x >= 0, "0 ≤ σ_i² < ∞ per client"),
    "dissimilarity": (lambda x: x >= 0, "0 ≤ Γ_i < ∞ per client"),
}


def check(
    name: str,
    value: Numbers,
    shape: tuple[int, ...] | range,
    valid: Callable[[np.ndarray], Any],
    expected: str,
    finite: bool = True,
) -> tuple[int, ...]:
    """The shape; `UserError` if it is wrong, or a value that is known (no tracer's).

    `shape` is the only one that is accepted, or how many axes are, none of them empty.
    """
    try:
        actual = np.shape(value)
        problem = f" has shape {list(actual)}"
    except ValueError:
        actual, problem = (0,), f" = {value!r}"  # a ragged list
    is_range = isinstance(shape, range)
    fits = len(actual) in shape and 0 not in actual if is_range else actual == shape
    if not fits:
        shapes = "" if is_range else f"{list(shape)}, "
        raise UserError(f"{name}{problem}: expected {shapes}{expected}")
    if isinstance(value, Tracer):
        return actual
    entries = np.asarray(jax.device_get(value))  # explicit: transfer guards allow it
    in_range = np.zeros(actual, bool)
    if entries.dtype.kind not in "OUSc":  # objects, strings, complex numbers
        in_range = valid(entries) & (np.isfinite(entries) if finite else True)
    if not np.all(in_range):
        first = np.unravel_index(np.argmin(in_range), actual)
        index = f"[{', '.join(map(str, first))}]" if actual else ""
        raise UserError(f"{name}{index} = {entries[first]}: expected {expected}")
    return actual


def check_tau(tau: Numbers, axes: str, num_axes: range) -> tuple[int, ...]:
    """The shape of τ; raises `UserError` unless it is finite, ≥ 0 and not empty."""
    expected = f"{axes}, finite local iterations ≥ 0 (0 = absent)"
    return check("tau", tau, num_axes, lambda x: x >= 0, expected)


def check_constants(constants: BoundConstants, num_clients: int | None) -> None:
    """Raise `UserError` where a constant has a wrong shape or is out of its range.

    Without N the two constants that are per client are not checked.
    """
    for name, (valid, expected) in _RANGES.items():
        shape: Any = (num_clients,) if expected.endswith("per client") else ()
        if shape != (None,):
            check(f"constants.{name}", getattr(constants, name), shape, valid, expected)


def nan_unless(good: Bool[Array, ""], result: Result) -> Result:
    """Replace floating leaves by NaN and booleans by False unless `good`."""

    def replaced(x: Array) -> Array:
        if x.dtype == bool:
            return x & good
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.where(good, x, jnp.nan) if floating else x

    return jax.tree.map(replaced, result)


def inputs(
    constants: BoundConstants, tau: Numbers, rho: Numbers | None = None
) -> tuple[BoundConstants, Float[Array, "T N"], Float[Array, "T N"], Bool[Array, ""]]:
    """Check the constants, τ and ρ, and convert them to one floating dtype.

    Also whether all values are in their ranges, for `nan_unless`. Without ρ, τ stands
    in for it.
    """
    shape = check_tau(tau, "[N] or [T, N]", range(1, 3))
    rho = tau if rho is None else rho
    check("rho", rho, shape, np.isfinite, "finite numbers, as many as τ has")
    check_constants(constants, shape[-1])
    scalars = [jnp.asarray(x) for x in constants]
    arrays = [jnp.atleast_2d(jnp.asarray(x)) for x in (tau, rho)]
    dtype = jnp.result_type(float, *scalars, *arrays)
    tau, rho = (x.astype(dtype) for x in arrays)
    constants = BoundConstants(*(x.astype(dtype) for x in scalars))
    good = jnp.ones((), bool)
    if any(isinstance(x, Tracer) for x in (*constants, tau, rho)):
        in_range = [
            (valid(x) & jnp.isfinite(x)).all()
            for x, (valid, _) in zip(constants, _RANGES.values(), strict=True)
        ]
        good = jnp.stack(in_range).all() & jnp.all((tau >= 0) & jnp.isfinite(tau))
        good &= jnp.isfinite(rho).all()
    return constants, tau, rho, good


@trees.arithmetic()
def coefficients(
    constants: BoundConstants, most: Numbers, repaired: bool = False
) -> Coefficients:
    """A, B and C: equation (5).

    Args:
      constants: η, L, G², θ; the others are not used.
      most: H ``[]`` ≥ 0, most local iterations of any client in any interval.
      repaired: A = 2ηL[ηL(1+θ) − 1] + 1, see `theorem1_bound`.

    Returns:
      `Coefficients`. B ≤ 0 ≤ A where ηL(1+θ) ≥ 1 (Definition 1.3), C = 0 if H ≤ 1.
    """
    check_constants(constants, None)
    check("most", most, (), lambda x: x >= 0, "0 ≤ H < ∞")
    eta, L, square, theta = constants[:4]
    excess = eta * L * (1 + theta) - 1
    return Coefficients(
        A=jnp.asarray(2 * eta * L * excess + (1 if repaired else eta**2)),
        B=jnp.asarray(-2 * eta * L * excess),
        C=jnp.asarray(eta**3 * L * jnp.maximum(jnp.asarray(most) - 1, 0) * square),
    )


def _terms(
    rho: Float[Array, "T N"],
    tau: Float[Array, "T N"],
    constants: BoundConstants,
    repaired: bool = False,
) -> tuple[Coefficients, Terms]:
    """Coefficients, and X, Y, Z, W of equation (3)."""
    factors = coefficients(constants, tau.max(), repaired)
    N, variance, gamma = tau.shape[1], constants.grad_variance, constants.dissimilarity
    return factors, Terms(
        X=factors.C * (rho * tau**2).sum(),
        Y=constants.lr**2 * N * (variance * (rho**2 * tau).sum(0)).sum(),
        Z=factors.A * (gamma * (rho * tau).sum(0)).sum(),
        W=1 + factors.B * (rho * tau).sum(),
    )


@trees.arithmetic()
def theorem1_terms(rho: Numbers, tau: Numbers, constants: BoundConstants) -> Terms:
    """The terms X, Y, Z and W of equation (3) of `theorem1_bound`, also where W ≤ 0."""
    constants, tau, rho, good = inputs(constants, tau, rho)
    return nan_unless(good, _terms(rho, tau, constants)[1])


@trees.arithmetic()
def theorem1_bound(
    rho: Numbers, tau: Numbers, constants: BoundConstants, repaired: bool = False
) -> Bound:
    """The bound of Theorem 1 on the distance to the optimum: equations (2)–(3).

    ‖∇F(w^T)‖²/L² ≤ (‖w⁰ − w*‖² + X + Y + Z)/W, in the proof also ‖w^T − w*‖² ≤ it.

    The printed proof has several errors (docs/theory.md, point 2). Because of one of
    them, the factor η² instead of 1 in Z and A, quadratic losses violate the bound as
    printed; `repaired` corrects only that one. Then it holds for convex losses and
    exact gradients if ηL ≤ 1, see `convex`; losses that are not convex can violate it.

    Where ηL(1+θ) ≥ 1, as Definition 1.3 demands, B ≤ 0 and W ≤ 1, so the bound is never
    below the initial distance: it limits how far w can drift and does not show
    convergence. With ρ ≥ 0 it then also grows with each single ρ_i^t.

    >>> known = BoundConstants(0.1, 5.0, 2.0, 1.0, 3.0, jnp.ones(2), jnp.zeros(2))
    >>> print(theorem1_bound(jnp.full(2, 0.5), jnp.array([1, 3]), known).total)
    3.12

    Args:
      rho: ``[T, N]``, or ``[N]`` for one interval, finite; Σρ = 1 is not checked.
      tau: like `rho`, local iterations ≥ 0. H is the largest of all.
      constants: see `BoundConstants`.
      repaired: Z with 1 instead of η².

    Returns:
      `Bound`, floating. All items are inf, with gradient 0, where W ≤ 0: there the
      bound is void. Elsewhere they are the values of (2), whether or not `limit_holds`,
      which is decided up to rounding.
    """
    constants, tau, rho, good = inputs(constants, tau, rho)
    _, (X, Y, Z, W) = _terms(rho, tau, constants, repaired)
    slack = 1 + 8 * jnp.finfo(tau.dtype).eps
    theta, N = constants.weight_limit, tau.shape[1]
    limit = jnp.all(rho <= slack * theta / N)
    limit &= constants.lr * constants.smoothness * (1 + theta) * slack >= 1
    positive = W > 0
    divisor = jnp.where(positive, W, 1.0)  # 1/0 of the other branch reaches gradients
    terms = constants.distance, X, Y, Z
    items = [jnp.where(positive, x / divisor, jnp.inf) for x in terms]
    total = jnp.asarray(sum(items))
    return nan_unless(good, Bound._make([*items, total, W, limit, positive & limit]))


@trees.arithmetic()
def printed_derivative(
    rho: Numbers, tau: Numbers, constants: BoundConstants, sign: int = -1
) -> Float[Array, "..."]:
    """The derivative of the bound by ρ_i^t that the proof of Theorem 2 prints.

    W·2η²Nσ_i²ρ_i^tτ_i^t + sign·W·[AΓ_iτ_i^t + C(τ_i^t)²] − Bτ_i^t[‖w⁰−w*‖² + X+Y+Z].

    The proof prints it with a minus, where the sign is plus (docs/theory.md, point 1):
    with `sign` = 1 this is W²·∂(bound)/∂ρ_i^t, which is ≥ 0 for all ρ ≥ 0 with
    W ≥ 0 ≥ B. The missing factor 1/W² does not matter where the derivative is 0.

    Args:
      rho, tau, constants: as in `theorem1_bound`.
      sign: −1 as printed, 1 for the correct derivative.

    Returns:
      Like `rho`, without L².
    """
    constants, tau, rhos, good = inputs(constants, tau, rho)
    (A, B, C), (X, Y, Z, W) = _terms(rhos, tau, constants)
    variance, gamma = constants.grad_variance[None], constants.dissimilarity[None]
    linear = A * gamma * tau + C * tau**2
    square = 2 * constants.lr**2 * tau.shape[1] * variance * rhos * tau
    slope = W * (square + sign * linear) - B * tau * (constants.distance + X + Y + Z)
    return nan_unless(good, slope.reshape(np.shape(rho)))


@trees.arithmetic()
def theorem4_bound(
    num_intervals: Numbers,
    gap: Numbers,
    *,
    lr: Numbers,
    smoothness: Numbers,
    epsilon: Numbers,
    dissimilarity_sq: Numbers,
) -> GradientBound:
    """The bound of Theorem 4 on the mean squared gradient: equation (12).

    (1/T) Σ_t ‖∇F(w^t)‖² ≤ 2[F(w⁰) − F(w*)]/{ηT(2ε − ηLV²)}.

    The print has η in the numerator, where its own proof has it in the denominator: for
    η < 1 the printed bound is too small by a factor of η². The proof is rigorous only
    for H = 1, full batches, and all clients participating (docs/theory.md, point 3).

    >>> print(theorem4_bound(10, 1.9, lr=0.1, smoothness=1.0, epsilon=1.0,
    ...                      dissimilarity_sq=1.0).derived)
    2.0

    Args:
      num_intervals: T ≥ 1.
      gap: F(w⁰) − F(w*) ``[]`` ≥ 0.
      lr, smoothness: η > 0 and L > 0.
      epsilon: ε ``[]`` > 0, ∇F·E_i[∇F_i] ≥ ε‖∇F‖²: Assumption 2.2.
      dissimilarity_sq: V² ``[]`` > 0, E_i‖∇F_i‖² ≤ V²‖∇F‖²: Definition 3.

    Returns:
      `GradientBound`, floating; inf, with gradient 0, where η ≥ 2ε/(V²L).
    """
    positive = {"lr": lr, "smoothness": smoothness, "epsilon": epsilon}
    positive["dissimilarity_sq"] = dissimilarity_sq
    check("num_intervals", num_intervals, (), lambda x: x >= 1, "1 ≤ T < ∞")
    check("gap", gap, (), lambda x: x >= 0, "0 ≤ F(w⁰) − F(w*) < ∞")
    for name, value in positive.items():
        check(name, value, (), lambda x: x > 0, "0 < x < ∞")
    scalars = num_intervals, gap, *positive.values()
    dtype = jnp.result_type(float, *scalars)
    T, gap, eta, L, eps, V2 = (jnp.asarray(x, dtype) for x in scalars)
    below = 2 * eps - eta * L * V2
    valid = (below > 0) & (eta > 0)
    quotient = 2 * gap / (T * jnp.where(valid, below, 1.0))
    bound = GradientBound(
        printed=jnp.where(valid, eta * quotient, jnp.inf),
        derived=jnp.where(valid, quotient / jnp.where(valid, eta, 1.0), jnp.inf),
        valid=valid,
    )
    above_zero = jnp.stack([T, eta, L, eps, V2])
    good = jnp.isfinite(above_zero).all() & (above_zero > 0).all() & (T >= 1)
    return nan_unless(good & (gap >= 0) & jnp.isfinite(gap), bound)


def heterogeneity_degree(tau: Numbers) -> float | np.ndarray | Array:
    """The variance of the clients' work, δ = (1/N) Σ_i (τ_i − τ̄)²: section V.

    Does not initialize JAX unless `tau` is a JAX array.

    Args:
      tau: ``[..., N]`` local iterations.

    Returns:
      ``[...]``, floating: a JAX array for a JAX array, else float64; a float for
      ``[N]``. 2.25 in Case 1, 1.25 in Case 2.
    """
    check_tau(tau, "[..., N]", range(1, 65))
    if isinstance(tau, jax.Array):
        return tau.var(axis=-1)
    degree = np.asarray(tau, np.float64).var(axis=-1)
    return degree if degree.ndim else float(degree)
