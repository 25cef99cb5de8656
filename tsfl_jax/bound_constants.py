"""What the theorems take as known, and checks of what they are given."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax.types import Array, ClientGradients, UserError


class BoundConstants(NamedTuple):
    """What the bound of Theorem 1 takes as known."""

    lr: Array  # [] η > 0
    smoothness: Array  # [] L > 0
    grad_sq_norm: Array  # [] G² ≥ 0, bound on E‖g‖²
    weight_limit: Array  # [] θ ≥ 1, ρ_i ≤ θ/N
    distance: Array  # [] ‖w⁰ − w*‖² ≥ 0
    grad_variance: Array  # [N] σ_i² ≥ 0, of a mini-batch gradient
    dissimilarity: Array  # [N] Γ_i = ‖w* − w_i*‖² ≥ 0


def tightest_limit(weight_limit: Array, num_clients: int, lr, smoothness) -> Array:
    """The smallest θ with ρ ≤ θ/N for the limit in use and ηL(1+θ) ≥ 1.

    Weights within a limit are within every larger one. Where ηL(1+θ) < 1, against
    Definition 1.3, Theorem 1 bounds nothing: A < 0 would reward dissimilarity.

    Args:
      weight_limit: the θ that holds for the weights, inf for none: then it is N.
      num_clients: N.
      lr, smoothness: η and L, > 0.
    """
    own = jnp.where(jnp.isinf(weight_limit), num_clients, weight_limit)
    # A little above, so that rounding does not put it below.
    least = (1 / (lr * smoothness) - 1) * (1 + 8 * jnp.finfo(jnp.float32).eps)
    return jnp.maximum(own, least)


def estimated(
    lr: Array,
    weight_limit: Array,
    smoothness: Array,
    grad_sq_norm: Array,
    measured: ClientGradients,
    present: Array,
) -> BoundConstants:
    """Constants of one interval, T = 1 and w⁰ = w^t, from what gradients at w^t say.

    Γ_i = ‖∇F_i − ∇F‖²/L² and ‖w^t − w*‖² = ‖∇F‖²/L²; an unbiased estimate of what is ≥
    0 may be below, then it is 0. θ is the tightest that Definition 1.3 allows.

    Args:
      lr, weight_limit: η and the θ of the weights, inf for none.
      smoothness, grad_sq_norm: L > 0 and G².
      measured: of all clients.
      present: ``[N]`` bool; the constants of others are 0, which nothing reads.
    """
    L = smoothness

    def usable(values):
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


_RANGES = {  # of the constants: what is in range, and how to say it
    "lr": (lambda x: x > 0, "0 < η < ∞"),
    "smoothness": (lambda x: x > 0, "0 < L < ∞"),
    "grad_sq_norm": (lambda x: x >= 0, "0 ≤ G² < ∞"),
    "weight_limit": (
        lambda x: x >= 1,
        "1 ≤ θ < ∞; without a limit, see tightest_limit",
    ),
    "distance": (lambda x: x >= 0, "0 ≤ ‖w⁰ − w*‖² < ∞"),
    "grad_variance": (lambda x: x >= 0, "0 ≤ σ_i² < ∞, one a client"),
    "dissimilarity": (lambda x: x >= 0, "0 ≤ Γ_i < ∞, one a client"),
}


def shape_of(name: str, value, expected: str) -> tuple:
    """Raises `UserError` where there is none, as of a ragged list."""
    try:
        return np.shape(value)
    except ValueError:
        raise UserError(f"{name} = {value!r}: expected {expected}") from None


def check(name: str, value, shape: tuple, valid, expected: str) -> None:
    """Raises `UserError` for a wrong shape and, where it is known, a wrong value."""
    found = shape_of(name, value, expected)
    if found != shape:
        found, wanted = list(found), list(shape)
        raise UserError(f"{name} has shape {found}: expected {wanted}, {expected}")
    if not isinstance(value, jax.core.Tracer):
        known = np.asarray(jax.device_get(value))  # explicit: transfer guards allow it
        numbers = known.dtype.kind not in "OUSc"
        good = (valid(known) & np.isfinite(known)) if numbers else np.zeros(shape, bool)
        if not np.all(good):
            at = np.unravel_index(np.argmin(good), shape)
            place = f"[{', '.join(map(str, at))}]" if shape else ""
            raise UserError(f"{name}{place} = {known[at]}: expected {expected}")


def check_constants(constants: BoundConstants, num_clients: int | None) -> None:
    """Raises `UserError` where a constant has a wrong shape or is out of its range.

    Args:
      constants: ranges and shapes as in `BoundConstants`, all finite.
      num_clients: N; None: the two entries that are per client are not looked at.
    """
    for name, (valid, expected) in _RANGES.items():
        shape = () if name not in ("grad_variance", "dissimilarity") else (num_clients,)
        if shape != (None,):
            value = getattr(constants, name)
            check(f"constants.{name}", value, shape, valid, expected)


def inputs(constants: BoundConstants, tau: Array, **others: Array):
    """Constants, τ and the others (named, like τ), checked and in one floating dtype.

    Returns:
      `BoundConstants` of JAX arrays, then τ and the others as ``[T, N]``.
    """
    expected = "finite local iterations ≥ 0, [N] or [T, N]"
    shape = shape_of("tau", tau, expected)
    if len(shape) not in (1, 2) or 0 in shape:
        raise UserError(f"tau has shape {list(shape)}: expected {expected}")
    check("tau", tau, shape, lambda x: x >= 0, expected)
    for name, value in others.items():
        check(name, value, shape, np.isfinite, "finite numbers, as many as τ has")
    check_constants(constants, shape[-1])
    constants = BoundConstants(*map(jnp.asarray, constants))
    arrays = [jnp.atleast_2d(jnp.asarray(x)) for x in (tau, *others.values())]
    dtype = jnp.result_type(float, *constants, *arrays)
    cast = [x.astype(dtype) for x in (*constants, *arrays)]
    return BoundConstants(*cast[: len(constants)]), *cast[len(constants) :]
