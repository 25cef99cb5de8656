"""L, G² and σ² behind DMS's weights, estimated from gradients of the running interval.

At the start of interval t a few clients compute three mini-batch gradients each at (or
next to) the global model w^t, before any weight is needed:

- g1, g2 on two independent mini-batches at w^t: E‖g‖² and ½‖g1 − g2‖², the latter
  an unbiased estimate of the mini-batch variance E‖g − ḡ‖²;
- g3 on the first mini-batch at w^t − η g1: ‖g3 − g1‖ / (η‖g1‖), the Lipschitz quotient
  along the step actually taken, a lower bound of L for that client.

G² and σ² are means over the probed clients, L their maximum (smoothness must hold for
every client).
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tsfl_jax import rng
from tsfl_jax.engine import client as local
from tsfl_jax.engine import exact_sums
from tsfl_jax.models.networks import Model
from tsfl_jax.types import Constants, HParams, Params, PRNGKey

PROBED_CLIENTS = 8


def _probe(model, variables, key, client, samples, hparams, batch_size):
    """(L, G², σ²) of one client at the global model."""
    draw_key, dropout_key = rng.keys(key, "constants batches", "constants dropout")
    places = jax.random.randint(draw_key, (2, batch_size), 0, client.size)
    everyone = jnp.ones(batch_size, bool)
    params = variables["params"]

    # A scan, so that the gradient is traced and compiled once and not three times.
    def gradient(first, turn):
        batch, way = turn
        at = jax.tree.map(lambda w, g: w - way * g, params, first)
        rows = client.row[places[batch]]
        x, y = local.scaled(samples, samples.x[rows]), samples.y[rows]
        at = {**variables, "params": at}
        # g3 has g1's batch and its dropout: their difference is the way alone.
        noise = jax.random.fold_in(dropout_key, batch)
        _, g = local.batch_gradient(model, at, x, y, everyone, noise)
        first = jax.tree.map(lambda f, g: jnp.where(way < 0, g, f), first, g)
        square = optax.tree.norm(g, squared=True)
        return first, (square, optax.tree.norm(optax.tree.sub(g, first), squared=True))

    # g1 at w^t, g2 at w^t on the other batch, g3 at w^t − η g1 on the first one; the
    # first turn is marked by a negative way, of no effect while `first` is 0.
    turns = (jnp.array([0, 1, 0]), jnp.stack([-1.0, 0.0, hparams.lr]))
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, (square, change) = lax.scan(gradient, zeros, turns)
    way = hparams.lr * jnp.sqrt(square[0])
    smoothness = jnp.where(
        way > 0, jnp.sqrt(change[2]) / jnp.where(way > 0, way, 1.0), 0.0
    )
    return Constants(smoothness, 0.5 * (square[0] + square[1]), 0.5 * change[1])


def estimate_constants(
    model: Model,
    variables: Params,
    key: PRNGKey,
    clients: local.Client,
    samples: local.Samples,
    hparams: HParams,
    batch_size: int,
    axis: str | None = None,
) -> Constants:
    """Estimates L, G² and σ² at the global model; see the module docstring.

    Args:
      model: the network.
      variables: the global model w^t.
      key: of this interval; which clients are probed and their mini-batches.
      clients: leading axis ``[N]``; only those with τ > 0 are probed, at most
        `PROBED_CLIENTS` of them.
      samples: the training samples.
      hparams: for η, the length of the step that measures L.
      batch_size: B.
      axis: name of the mesh axis of devices that share the work; None: one device.

    Returns:
      `Constants` of float32 scalars; zeros where no client takes part.
    """
    num_probed = min(clients.tau.shape[0], PROBED_CLIENTS)
    mine = rng.fold(key, "constants")
    keys = jax.vmap(lambda i: jax.random.fold_in(mine, i))(clients.id)
    lots = jax.vmap(lambda k: jax.random.uniform(rng.fold(k, "constants clients")))(
        keys
    )
    present = clients.tau > 0
    chosen = jnp.argsort(jnp.where(present, lots, 2.0))[:num_probed]
    # Device d of D probes the chosen clients d, d + D, d + 2D, …
    first, step = (
        (0, 1) if axis is None else (lax.axis_index(axis), lax.axis_size(axis))
    )
    place = first + step * jnp.arange(-(-num_probed // step))
    chosen, taking_part = chosen[place % num_probed], place < num_probed
    taking_part &= present[chosen]
    probes = lax.map(
        lambda item: _probe(
            model, variables, item[0], item[1], samples, hparams, batch_size
        ),
        (keys[chosen], jax.tree.map(lambda a: a[chosen], clients)),
    )
    measured = jax.tree.map(lambda a: jnp.where(taking_part, a, 0.0), probes)
    largest, count = measured.smoothness.max(), taking_part.sum()
    if axis is not None:
        largest, count = lax.pmax(largest, axis), lax.psum(count, axis)
    count = jnp.maximum(count, 1)
    return Constants(
        largest,
        exact_sums.scalar(measured.grad_sq_norm, axis) / count,
        exact_sums.scalar(measured.grad_variance, axis) / count,
    )
