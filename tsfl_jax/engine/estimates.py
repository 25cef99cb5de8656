"""Estimates: what is estimated from gradients at w^t before the clients train.

An estimate is computed only if a rule uses it and it was not given, or if the user
asked for it (side by side in `vmap` lanes: if any of their rules uses it).

L, G² and σ² of DMS, by ``Estimates.method``. "quotient": a few clients compute three
mini-batch gradients each at (or next to) w^t:

- g1, g2 on two independent mini-batches at w^t: E‖g‖² and ½‖g1 − g2‖², the latter
  an unbiased estimate of the mini-batch variance E‖g − ḡ‖²;
- g3 on the first mini-batch at w^t − η g1: ‖g3 − g1‖ / (η‖g1‖), the Lipschitz quotient
  along the step actually taken: a lower bound of L for the loss of that mini-batch.

G² and σ² are means over these clients, L their maximum (smoothness must hold for
every client). For the losses F_i the estimate of L is a bound on neither side: one
direction is too low, a mini-batch and the maximum over clients too high. Measured bias
is in docs/theory.md, and smaller for "power", which takes 13 gradients per client: from
u = g1 on, u ← H_b u/‖u‖ with a new mini-batch b in each of `POWER_STEPS` steps, H_b u
from the gradients at w^t and a step of length η‖g1‖ along −u; then |⟨u, H_b u⟩|/‖u‖² on
one more mini-batch. "bounds" does so for all clients, and takes the maximum over
clients for G² and σ², too, which are to bound every one.

σ_i², ‖∇F_i − ∇F‖² and ‖∇F‖². Every client that takes part computes g_i1 and g_i2 on two
independent mini-batches at w^t. With ḡ_b = Σ_i p_i g_ib, p_i = |D_i|/Σ|D_j|, these are
unbiased, since the factors of each product are independent:

- σ_i²: ½‖g_i1 − g_i2‖², each batch drawn without replacement, as in training;
- ‖∇F_i − ∇F‖²: ⟨g_i1 − ḡ_1, g_i2 − ḡ_2⟩, which may be negative;
- ‖∇F‖²: ⟨ḡ_1, ḡ_2⟩, which may be negative as well.

NOT done: Γ_i = ‖w* − w_i*‖² and ‖w^t − w*‖² cannot be seen in gradients at one point.
If all F_i have the Hessian L·I, they are the last two over L²; in general those are
estimates that gradients allow, and lower bounds of ‖w^t − w*‖² (of Γ_i only at
w^t = w*).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Bool, Float, Int

from tsfl_jax import rng, trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, exact_sums
from tsfl_jax.engine.program_spec import Parts
from tsfl_jax.engine.structures import Interval
from tsfl_jax.types import Array, ClientGradients, Constants, HParams, Params, PRNGKey

ESTIMATING_CLIENTS = 8  # for L, G², σ², unless all are asked for
POWER_STEPS = 5
# Numbers kept of all clients' gradients together: 32 MB for the two of each, and more
# only if 4,096 clients or more keep the least.
_KEPT = 2**22
_LEAST = 1024  # of one gradient

_Gradient = Callable[[Params, Int[Array, ""]], Params]  # of a mini-batch, by number


def estimate(
    interval: Interval, key: PRNGKey, clients: local.Client
) -> tuple[Constants, ClientGradients]:
    """All estimates of one interval; NaN: neither given nor estimated.

    Clients ``[N]`` have the τ that they report: those that claim to take part are asked
    even if they do nothing.
    """
    parts, state, _, hparams, problem, _ = interval
    inputs = parts, state.params, key, clients, problem.samples

    def constants() -> Constants:
        return completed(hparams.constants, estimate_constants(*inputs, hparams))

    missing = jnp.full(clients.tau.shape, jnp.nan, jnp.float32)
    no_gradients = ClientGradients(missing, missing, jnp.float32(jnp.nan))
    used, settings = parts.spec.estimates, jax.tree.map(jnp.asarray, hparams.constants)
    gradients = functools.partial(client_gradients, *inputs)
    return (
        _if_used(used.constants, constants, settings, hparams),
        _if_used(used.gradients, gradients, no_gradients, hparams),
    )


def completed(constants: Constants, estimated: Constants) -> Constants:
    """The constants, with estimates in place of those that are NaN."""
    pairs = zip(constants, estimated, strict=True)
    return Constants(*(jnp.where(jnp.isnan(c), e, c) for c, e in pairs))


def _if_used(
    used: tuple[bool, ...], make: Callable[[], Any], otherwise: Any, hparams: HParams
) -> Any:
    """`make()` if the rule ``hparams.rule`` uses it; a static choice if all agree."""
    if len(set(used)) > 1:
        return lax.cond(jnp.asarray(used)[hparams.rule], make, lambda: otherwise)
    return make() if used[0] else otherwise


def estimate_constants(
    parts: Parts,
    variables: Params,
    key: PRNGKey,
    clients: local.Client,
    samples: local.Samples,
    hparams: HParams,
    draws: int = 1,
) -> Constants:
    """Estimate L, G² and σ² at the global model; see the module docstring.

    Args:
      parts: the network and what shapes the program.
      variables: the global model w^t.
      key: of this interval.
      clients: leading axis ``[N]``; only those with τ > 0 are estimated, at most
        `ESTIMATING_CLIENTS` of them unless ``Estimates.method`` is "bounds".
      samples: the training samples.
      hparams: η is the length of the step that measures L.
      draws: estimates of each client that are averaged before the largest is taken,
        which is too large where they vary.

    Returns:
      `Constants` of float32 scalars; zeros if no client takes part.
    """
    spec, method = parts.spec, parts.spec.estimates.method
    is_power = method != "quotient"
    batches = POWER_STEPS + 2 if is_power else 2

    def one(key: PRNGKey, client: local.Client) -> Constants:
        drawn = _drawn_gradients(parts, variables, key, client, samples, batches)
        return _in_turns(drawn, variables["params"], hparams.lr, is_power)

    def mean_of_draws(item: tuple[PRNGKey, local.Client]) -> Constants:
        key, client = item
        if draws == 1:
            return one(key, client)
        keys = _folded(key, jnp.arange(draws))
        estimates = lax.map(lambda key: one(key, client), keys)
        return jax.tree.map(jnp.mean, estimates)

    keys = _folded(rng.fold(key, "constants"), clients.id)
    lots = jax.vmap(lambda k: jax.random.uniform(rng.fold(k, "constants clients")))
    number = None if method == "bounds" else ESTIMATING_CLIENTS
    present = clients.tau > 0
    chosen = jnp.argsort(jnp.where(present, lots(keys), 2.0))[:number]
    # Side by side where clients train so: a loop would be launched by the host.
    estimated = devices.shared_map(
        mean_of_draws, trees.take((keys, clients), chosen), spec.axis, spec.width
    )
    present = present[chosen]
    estimated = jax.tree.map(lambda a: jnp.where(present, a, 0.0), estimated)
    largest = jax.tree.map(jnp.max, estimated)
    if method == "bounds":
        return largest
    count = jnp.maximum(present.sum(), 1)
    means = exact_sums.scalars(None, *estimated[1:])
    return Constants(largest.smoothness, *(total / count for total in means))


def _folded(key: PRNGKey, numbers: Int[Array, "n"]) -> PRNGKey:
    """A key for each number."""
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


def _drawn_gradients(
    parts: Parts,
    variables: Params,
    key: PRNGKey,
    client: local.Client,
    samples: local.Samples,
    number: int,
) -> _Gradient:
    """(parameters, b) → the gradient on mini-batch b, with its samples and dropout."""
    batch_size = parts.spec.batch_size
    draw_key, dropout_key = rng.keys(key, "constants batches", "constants dropout")
    places = jax.random.randint(draw_key, (number, batch_size), 0, client.size)
    no_padding = jnp.ones(batch_size, bool)
    # A short step vanishes in the rounding of a network in bfloat16.
    model = parts.model.exact or parts.model

    def gradient(params: Params, batch: Int[Array, ""]) -> Params:
        # Computed, not sliced: the graph of a GPU cannot hold such slices in a loop.
        is_batch = (jnp.arange(number) == batch)[:, None]
        rows = client.row[jnp.where(is_batch, places, 0).sum(axis=0)]
        noise = jax.random.fold_in(dropout_key, batch)
        drawn = local.batch_of(samples, rows, no_padding, noise)
        at = {**variables, "params": params}
        return local.batch_gradient(model, at, drawn)[1]

    return gradient


def _in_turns(
    gradient_of: _Gradient, params: Params, lr: Array | float, is_power: bool
) -> Constants:
    """(L, G², σ²) of one client at the global model."""
    # A scan, so that the gradient is traced and compiled once. Turn 0: g1, the first u.
    # "quotient": g2 at w^t on the other batch, and g3 ahead, at w^t − η g1, with the
    # batch and the dropout of g1. "power": on a new mini-batch for each two turns, the
    # gradient at w^t (odd), and ahead, at the end of a step along −u (even).
    turns = 2 * POWER_STEPS + 3 if is_power else 3
    at_w = np.array([0, *range(1, turns, 2)])

    def gradient(carry: tuple[Params, Params, Array, Array], _: Any) -> tuple:
        base, u, length, turn = carry
        ahead, norm = (turn > 0) & (turn % 2 == 0), optax.tree.norm(u)
        step = _quotient_of(length, norm) if is_power else lr
        at = jax.tree.map(lambda w, d: w - jnp.where(ahead, step, 0.0) * d, params, u)
        g = gradient_of(at, (turn + 1) // 2 if is_power else turn % 2)
        square = optax.tree.norm(g, squared=True)
        change = optax.tree.sub(base, g)
        apart = optax.tree.norm(change, squared=True)
        if is_power:
            bent = jax.tree.map(lambda d: _quotient_of(d, length), change)  # H u/‖u‖
            curvature = jnp.abs(_quotient_of(optax.tree.vdot(u, bent), norm))
            u = optax.tree.where(turn == 0, g, optax.tree.where(ahead, bent, u))
            base = optax.tree.where(ahead, base, g)
        else:
            curvature = _quotient_of(jnp.sqrt(apart), length)
            base = u = optax.tree.where(turn == 0, g, u)
        length = jnp.where(turn == 0, lr * jnp.sqrt(square), length)
        return (base, u, length, turn + 1), (square, apart, curvature)

    zeros = optax.tree.zeros_like(params)
    start = zeros, zeros, jnp.float32(0.0), jnp.int32(0)
    square, apart, curvature = lax.scan(gradient, start, None, length=turns)[1]
    return Constants(curvature[-1], square[at_w].mean(), 0.5 * apart[at_w[1:]].mean())


def _quotient_of(value: Any, by: Any) -> Array:
    """value/by, and 0 where by = 0."""
    return jnp.where(by > 0, value / jnp.where(by > 0, by, 1.0), 0.0)


def client_gradients(
    parts: Parts,
    variables: Params,
    key: PRNGKey,
    clients: local.Client,
    samples: local.Samples,
) -> ClientGradients:
    """Estimates for all clients at the global model; see the module docstring.

    Of large networks a random selection of a gradient's entries stands for all of them
    in the products, drawn anew in every interval: still unbiased. Clients with τ = 0
    have no share in F, and NaN.
    """
    spec, number, present = parts.spec, clients.tau.shape[0], clients.tau > 0
    stream, common = rng.keys(key, "gradients", "gradients entries")
    # Which entries are kept, and how many one of them stands for.
    total = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    kept_of_each, entries, scale = max(_KEPT // number, _LEAST), slice(None), 1.0
    if total > kept_of_each:
        entries = jax.random.randint(common, (kept_of_each,), 0, total)
        scale = total / kept_of_each

    def one(item: tuple[PRNGKey, local.Client, Array]) -> tuple[Array, Array]:
        key, client, is_present = item

        def measured() -> tuple[Array, Array]:
            return _two_gradients(parts, variables, key, client, samples, entries)

        def nothing() -> tuple[Array, Array]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(measured))

        return lax.cond(is_present, measured, nothing)

    items = _folded(stream, clients.id), clients, present
    variance, kept = devices.shared_map(one, items, spec.axis, spec.width)
    return _products(variance, kept, scale, clients.size, present)


def _two_gradients(
    parts: Parts,
    variables: Params,
    key: PRNGKey,
    client: local.Client,
    samples: local.Samples,
    entries: Int[Array, "m"] | slice,
) -> tuple[Float[Array, ""], Float[Array, "2 m"]]:
    """(½‖g_1 − g_2‖², kept entries of g_1 and g_2) of one client."""
    batch_size = parts.spec.batch_size
    order_key, noise_key = rng.keys(key, "gradients batches", "gradients dropout")
    batches = jnp.arange(2)
    orders = jax.vmap(lambda b: local.pass_order(order_key, client, b))(batches)
    orders = orders[:, :batch_size]
    mask = jnp.arange(batch_size) < client.size

    def gradient(first: Params, turn: tuple[Array, PRNGKey]) -> tuple[Params, Any]:
        order, noise = turn
        batch = local.batch_of(samples, client.row[order], mask, noise)
        _, g = local.batch_gradient(parts.model, variables, batch)
        change = optax.tree.norm(optax.tree.sub(g, first), squared=True)
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(g)])
        return g, (change, flat[entries])

    zeros = optax.tree.zeros_like(variables["params"])
    noises = _folded(noise_key, batches)
    _, (change, kept) = lax.scan(gradient, zeros, (orders, noises))
    return 0.5 * change[1], kept


def _products(
    variance: Float[Array, "N"],
    kept: Float[Array, "N 2 m"],
    scale: float,
    size: Int[Array, "N"],
    present: Bool[Array, "N"],
) -> ClientGradients:
    """Estimates from all clients' kept entries of g_i1 and g_i2."""
    share = jnp.where(present, size, 0).astype(jnp.float32)
    share = share / jnp.maximum(share.sum(), 1)
    mean = jnp.tensordot(share, kept, 1)  # [2, m]
    apart = kept - mean[None]
    dissimilarity = scale * jnp.sum(apart[:, 0] * apart[:, 1], axis=1)
    return ClientGradients(
        jnp.where(present, variance, jnp.nan),
        jnp.where(present, dissimilarity, jnp.nan),
        jnp.where(present.any(), scale * jnp.sum(mean[0] * mean[1]), jnp.nan),
    )
