"""σ_i², ‖∇F_i − ∇F‖² and ‖∇F‖² of all clients, from gradients of the running interval.

At the start of interval t every client that takes part computes g_i1 and g_i2 on two
independent mini-batches at the global model w^t. With ḡ_b = Σ_i p_i g_ib, p_i =
|D_i|/Σ|D_j|, these are unbiased, since what is multiplied is independent:

- σ_i²: ½‖g_i1 − g_i2‖², each batch drawn without replacement, as in training;
- ‖∇F_i − ∇F‖²: ⟨g_i1 − ḡ_1, g_i2 − ḡ_2⟩, which may be negative;
- ‖∇F‖²: ⟨ḡ_1, ḡ_2⟩, likewise.

Γ_i = ‖w* − w_i*‖² and ‖w^t − w*‖² cannot be seen in gradients at one point. Where all
F_i have the Hessian L·I they are the last two over L²; in general those are what
gradients let one say, and lower bounds of ‖w^t − w*‖² (of Γ_i only at w^t = w*).
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tsfl_jax import rng
from tsfl_jax.engine import client as local
from tsfl_jax.models.networks import Model
from tsfl_jax.types import Array, ClientGradients, Params, PRNGKey

# Numbers kept of all clients' gradients together: 32 MB for the two of each, and more
# only where 4,096 clients or more keep the least.
_KEPT = 2**22
_LEAST = 1024  # of one gradient


def _coordinates(key: PRNGKey, params: Params, num_clients: int) -> tuple:
    """Which entries of a gradient are kept, None: all; and what one stands for."""
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    count = max(_KEPT // num_clients, _LEAST)
    if total <= count:
        return None, 1.0
    return jax.random.randint(key, (count,), 0, total), total / count


def _two_gradients(model, variables, key, client, samples, batch_size, places):
    """(½‖g_1 − g_2‖², kept entries ``[2, m]`` of g_1 and g_2) of one client."""
    keys = rng.keys(key, "gradients batches", "gradients dropout")
    order = jax.random.uniform(keys[0], (2, client.row.shape[0]))
    held = jnp.arange(client.row.shape[0]) < client.size
    orders = jnp.argsort(jnp.where(held, order, 2.0), axis=1)[:, :batch_size]
    mask = jnp.arange(batch_size) < client.size

    def gradient(first, turn):
        order, noise = turn
        rows = client.row[order]
        x, y = local.scaled(samples, samples.x[rows]), samples.y[rows]
        _, g = local.batch_gradient(model, variables, x, y, mask, noise)
        change = optax.tree.norm(optax.tree.sub(g, first), squared=True)
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(g)])
        return g, (change, flat if places is None else flat[places])

    zeros = jax.tree.map(jnp.zeros_like, variables["params"])
    noises = jax.vmap(lambda b: jax.random.fold_in(keys[1], b))(jnp.arange(2))
    _, (change, kept) = lax.scan(gradient, zeros, (orders, noises))
    return 0.5 * change[1], kept


def client_gradients(
    model: Model,
    variables: Params,
    key: PRNGKey,
    clients: local.Client,
    samples: local.Samples,
    batch_size: int,
    abreast: int = 1,
    axis: str | None = None,
) -> ClientGradients:
    """Estimates for all clients at the global model; see the module docstring.

    Of large networks a random selection of a gradient's entries stands for all of them
    in the products, drawn anew in every interval: still unbiased.

    Args:
      model: the network.
      variables: the global model w^t.
      key: of this interval.
      clients: leading axis ``[N]``; those with τ = 0 have no share in F.
      samples: the training samples.
      batch_size: B.
      abreast: clients measured side by side; 1: one after another.
      axis: name of the mesh axis of devices that share the work; None: one device.

    Returns:
      `ClientGradients`, float32; NaN for clients with τ = 0.
    """
    number = clients.tau.shape[0]
    present = clients.tau > 0
    own, common = rng.keys(key, "gradients", "gradients entries")
    places, scale = _coordinates(common, variables["params"], number)
    # Device d of D measures clients d, d + D, d + 2D, …
    first, step = (
        (0, 1) if axis is None else (lax.axis_index(axis), lax.axis_size(axis))
    )
    mine = first + step * jnp.arange(-(-number // step))
    keys = jax.vmap(lambda i: jax.random.fold_in(own, i))(clients.id)
    here = mine % number
    taking_part = (mine < number) & present[here]

    def one(item):
        key, client, works = item

        def measured():
            return _two_gradients(
                model, variables, key, client, samples, batch_size, places
            )

        def nothing():
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(measured))

        return lax.cond(works, measured, nothing)

    mine_clients = jax.tree.map(lambda a: a[here], clients)
    items = (keys[here], mine_clients, taking_part)
    found = lax.map(one, items, batch_size=abreast if abreast > 1 else None)
    place = jnp.where(mine < number, mine, number)  # beyond the end: dropped
    variance, kept = jax.tree.map(
        lambda a: jnp.zeros((number, *a.shape[1:]), a.dtype).at[place].set(a), found
    )
    if axis is not None:
        variance, kept = lax.psum((variance, kept), axis)
    return _products(variance, kept, scale, clients.size, present)


def _products(
    variance: Array, kept: Array, scale, size: Array, present: Array
) -> ClientGradients:
    """From each client's own numbers to what they say together."""
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
