"""What a client's number of local steps, and its delay, mean to its update.

FedNova's normalisation by the local work, and how much a late update still counts. All
functions are pure and work under jit, vmap and grad; values are not checked.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tsfl_jax import rng
from tsfl_jax.types import Array, HParams


def accumulation(steps: Array, momentum, proximal=0.0) -> jax.Array:
    """Σ_k a_k of s steps v ← m v + g + μ(w − w^t), w ← w − η v; ‖a‖₁ where all a_k ≥ 0.

    How often the s gradients count in the client's update: with every g = 1 it is
    −η Σ a_k. For α = ημ = 0 it is [s − m(1 − m^s)/(1 − m)]/(1 − m), for m = 0 it is
    [1 − (1 − α)^s]/α. Section 4 of Wang, Liu, Liang, Joshi, Poor, "Tackling the
    Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
    2020 (FedNova).

    >>> print(accumulation(jnp.array([0, 1, 2, 3]), 0.5))  # + 1, + 1.5, + 1.75
    [0.   1.   2.5  4.25]

    Args:
      steps: s ``[N]`` ≥ 0, integer.
      momentum: m ``[]`` in [0, 1].
      proximal: α = ημ ``[]`` in [0, 2).

    Returns:
      ``[N]`` ≥ 0, floating, in steps: s for m = α = 0. A few units in the last place
      off, and up to 5e-5 where a large m and α make it swing.
    """
    dtype = jnp.result_type(float, momentum, proximal)
    momentum, alpha = jnp.asarray(momentum, dtype), jnp.asarray(proximal, dtype)
    steps = jnp.asarray(steps)

    # (v, u) with w = w^t − η u and unit gradients: v ← m v − α u + 1, u ← u + v. The
    # closed form cancels where s(1 − m) is small. With A the matrix of that step and
    # z_s its s-th state from 0, z_{s+t} = z_t + A^t z_s, for each bit of s. A^t − I is
    # what is kept: squaring A^t itself would double its error.
    def bit(i, carry):
        (a, b, c, d), v_t, u_t, v, u = carry  # A^t − I, t = 2^i
        have = (steps >> i) & 1 == 1
        v, u = (
            jnp.where(have, v_t + v + a * v + b * u, v),
            jnp.where(have, u_t + u + c * v + d * u, u),
        )
        twice = 2 * v_t + a * v_t + b * u_t, 2 * u_t + c * v_t + d * u_t
        square = a * a + b * c, a * b + b * d, c * a + d * c, c * b + d * d
        power = tuple(2 * x + y for x, y in zip((a, b, c, d), square, strict=True))
        return power, *twice, v, u

    one, zeros = jnp.ones_like(momentum), jnp.zeros(steps.shape, dtype)
    start = (momentum - 1, -alpha, momentum, -alpha)
    bits = jnp.iinfo(steps.dtype).bits - 1
    return lax.fori_loop(0, bits, bit, (start, one, one, zeros, zeros))[-1]


def nova_weights(share: Array, work: Array) -> jax.Array:
    """ρ_i = τ_eff·p_i/‖a_i‖₁ with τ_eff = Σ_i p_i‖a_i‖₁, for w + Σ_i ρ_i (w_i − w).

    Section 4 of Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency
    Problem in Heterogeneous Federated Optimization", NeurIPS 2020 (FedNova).

    >>> print(nova_weights(jnp.array([0.5, 0.5]), jnp.array([1.0, 4.0])))
    [1.25   0.3125]

    Args:
      share: p ``[N]`` ≥ 0 of sum 1, floating; 0 for the absent.
      work: ‖a_i‖₁ ``[N]`` ≥ 0, floating, up to a common factor.

    Returns:
      ρ ``[N]`` ≥ 0, floating; 0 where ‖a_i‖₁ = 0. Equal work gives ρ = p; otherwise
      the sum is not 1, so ρ applies to the updates and not to the models.
    """
    worked = work > 0
    amount = jnp.where(worked, work, 1)
    share = jnp.where(worked, share, 0)
    return (share * amount).sum() * (share / amount)


def _path(transformation: optax.GradientTransformation, gradients: Array, mu=0.0):
    """w⁰ − w ``[s]`` after each of these gradients, of one number from w⁰ = 0."""

    def step(carry, gradient):
        w, state = carry
        gradient = {"w": gradient + mu * w["w"]}
        updates, state = transformation.update(gradient, state, w)
        w = optax.apply_updates(w, updates)
        return (w, state), -w["w"]

    w = {"w": jnp.zeros((), gradients.dtype)}
    return lax.scan(step, (w, transformation.init(w)), gradients)[1]


def measured_accumulation(
    optimizer: Callable[[HParams], optax.GradientTransformation], most: int
) -> Callable[[Array, HParams], Array]:
    """Σ_k a_k of any linear optimizer, by giving it unit gradients; see `accumulation`.

    Args:
      optimizer: hyper-parameters → optax transformation for which `is_linear` holds.
      most: steps ≥ 1 of the client that makes most.

    Returns:
      (steps ``[N]`` ≤ most, `HParams`) → Σ_k a_k ``[N]``, times the learning rate.
    """

    def work(steps, hparams):
        path = _path(optimizer(hparams), jnp.ones(most), hparams.mu)
        return jnp.concatenate([jnp.zeros(1), path])[steps]

    return work


def is_linear(transformation: optax.GradientTransformation, steps: int = 24) -> bool:
    """Whether w − w⁰ is a fixed linear function of the gradients, tried out.

    So it is for SGD with any momentum and schedule, and not for Adam, for clipping or
    with weight decay.
    """
    draws = rng.generator(0, "linearity").normal(size=(2, steps))
    one, two = jnp.asarray(draws, jnp.float32)
    w, zero = {"w": jnp.ones(())}, {"w": jnp.zeros(())}
    first, second = _path(transformation, one), _path(transformation, two)
    pairs = [
        (_path(transformation, 1e3 * one) / 1e3, first),
        (_path(transformation, 1e-3 * one) * 1e3, first),
        (_path(transformation, one + two), first + second),
    ]
    still = transformation.update(zero, transformation.init(w), w)[0]
    slack = 1e-4 * jnp.abs(first).max()
    near = all(bool((jnp.abs(a - b) <= slack).all()) for a, b in pairs)
    return near and bool(slack > 0) and bool(still["w"] == 0)


def staleness_factor(lag: Array, kind, a, b) -> jax.Array:
    """s(l): 1, (l + 1)^−a, 1 if l ≤ b else 1/(a(l − b) + 1), or (e/2)^−l, by `kind`.

    The first three from section 5 of Xie, Koyejo, Gupta, "Asynchronous Federated
    Optimization", 2019; the last from Chen, Sun, Jin, "Communication-Efficient
    Federated Deep Learning with Layerwise Asynchronous Model Update and Temporally
    Weighted Aggregation", IEEE Transactions on Neural Networks and Learning Systems,
    2020.

    >>> print(staleness_factor(jnp.array([0, 2, 6]), 2, 0.5, 4))
    [1.  1.  0.5]

    Args:
      lag: l ``[N]`` ≥ 0, integer: global updates since the client's base model.
      kind: ``[]`` integer, index into `config.STALENESS`.
      a: ``[]`` ≥ 0 of "polynomial" and "hinge"; not read, so it may be NaN, by others.
      b: ``[]`` ≥ 0, updates, of "hinge"; likewise.

    Returns:
      s ``[N]`` in [0, 1], floating.
    """
    kind = jnp.asarray(kind, jnp.int32)
    dtype = jnp.result_type(float, a, b)
    lag = jnp.asarray(lag, dtype)
    # Parameters that do not apply are replaced before use: NaN·0 would reach gradients.
    exponent, slope, free = (
        jnp.where(kind == owner, jnp.asarray(x, dtype), 0)
        for owner, x in ((1, a), (2, a), (2, b))
    )
    late = jnp.where(lag > free, lag - free, 0)
    factors = (
        jnp.ones_like(lag),
        jnp.exp(-exponent * jnp.log1p(lag)),
        1 / (slope * late + 1),
        jnp.exp(-lag * (1 - jnp.log(jnp.asarray(2, dtype)))),
    )
    return lax.select_n(kind, *factors)
