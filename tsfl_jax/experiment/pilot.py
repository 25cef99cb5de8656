"""L, G² and σ² once, at w⁰, before training: ``dms.constants="once"``.

Algorithm 1 of the paper takes G and σ as inputs. A pilot is what a user would do to
know them: gradients of all clients at the initial model, and then they are fixed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tsfl_jax import rng
from tsfl_jax.engine import client as local
from tsfl_jax.engine import probes, scan
from tsfl_jax.engine.recipe import Parts, Probes, Recipe
from tsfl_jax.experiment.prepare import Prepared
from tsfl_jax.types import Constants, HParams, Params, PRNGKey

DRAWS = 16  # estimates that the pilot is the mean of


@functools.partial(jax.jit, static_argnames="parts")
def _mean(
    parts: Parts,
    params: Params,
    keys: PRNGKey,
    problem: scan.Problem,
    size: Float[Array, "N"],
    hparams: HParams,
) -> Constants:
    """The mean of several estimates; every client takes part with all it holds."""
    clients = local.Client(
        jnp.asarray(problem.client),
        jnp.ones(size.shape, jnp.int32),
        size,
        jnp.asarray(problem.rows),
    )

    def one(key: PRNGKey) -> Constants:
        return probes.estimate_constants(
            parts, params, key, clients, problem.samples, hparams
        )

    return jax.tree.map(lambda a: a.mean(), jax.lax.map(one, keys))


def fill(
    prepared: Prepared,
    key: PRNGKey,
    params: Params,
    problem: scan.Problem,
    hparams: HParams,
    like: Prepared | None = None,
    width: int = 0,
) -> HParams:
    """The hyper-parameters with constants of a pilot in place of missing ones.

    Args:
      prepared: an experiment; the same hyper-parameters unless it asks for a pilot.
      key: of the seed.
      params: its w⁰.
      problem: its samples and index table.
      hparams: its scalars; NaN marks a constant that was not given.
      like: another one of the same program, whose compiled pilot is used.
      width: columns of the index tables of that program, at least.
    """
    given = Constants(hparams.smoothness, hparams.grad_sq_norm, hparams.grad_variance)
    missing = np.isnan([float(value) for value in given]).any()
    if prepared.config.dms.constants != "once" or not missing:
        return hparams
    if not prepared.rule.uses_constants and not prepared.config.measure_clients:
        return hparams
    first = prepared if like is None else like
    method = prepared.config.dms.estimator
    recipe = Recipe(prepared.config.batch_size, 1, probes=Probes(method=method))
    parts = Parts(first.network.model, first.rule, first.optimizer, recipe)
    stream = rng.fold(key, "pilot")
    keys = jax.vmap(lambda i: jax.random.fold_in(stream, i))(jnp.arange(DRAWS))
    rows = prepared.partition.indices
    extra = max(width - rows.shape[1], 0)
    problem = problem._replace(rows=np.pad(rows, ((0, 0), (0, extra))))
    size = np.asarray(prepared.partition.capacity, np.int32)
    found = jax.device_get(_mean(parts, params, keys, problem, size, hparams))
    pairs = zip(given, found, strict=True)
    whole = [jnp.float32(f if np.isnan(g) else g) for g, f in pairs]
    return hparams._replace(**Constants(*whole)._asdict())
