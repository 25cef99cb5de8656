"""What is estimated at the global model before an interval, and for which rule.

Only what a rule uses, what was not given and what was asked for costs anything (where
lanes go abreast, `vmap`, what any of their rules uses).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tsfl_jax.engine import client as local
from tsfl_jax.engine.client_gradients import client_gradients
from tsfl_jax.engine.constants import estimate_constants
from tsfl_jax.engine.recipe import Recipe
from tsfl_jax.models.networks import Model
from tsfl_jax.types import (
    Array,
    ClientGradients,
    Constants,
    HParams,
    Params,
    PRNGKey,
)


def _where_used(used: tuple[bool, ...], find: Callable, otherwise, hparams: HParams):
    """`find()` if the rule uses it; which rule it is the hyper-parameters tell."""
    if len(set(used)) > 1:
        return lax.cond(jnp.asarray(used)[hparams.rule], find, lambda: otherwise)
    return find() if used[0] else otherwise


def make_probe(
    model: Model, recipe: Recipe
) -> Callable[..., tuple[Constants, ClientGradients]]:
    """Builds the estimates of one interval.

    Args:
      model: the network.
      recipe: which estimates, mini-batches, clients side by side, the mesh axis.

    Returns:
      ``probe(params, key, clients[N], reported[N], samples, hparams)``: L, G², σ² as
      given or else estimated, and what gradients say about every client or else NaN.
    """
    batch_size, axis, probes = recipe.batch_size, recipe.axis, recipe.probes

    def probe(
        params: Params,
        key: PRNGKey,
        clients: local.Client,
        reported: Array,
        samples: local.Samples,
        hparams: HParams,
    ) -> tuple[Constants, ClientGradients]:
        constants = Constants(
            hparams.smoothness, hparams.grad_sq_norm, hparams.grad_variance
        )

        def completed():
            found = estimate_constants(
                model, params, key, clients, samples, hparams, batch_size, axis
            )
            return jax.tree.map(
                lambda given, f: jnp.where(jnp.isnan(given), f, given), constants, found
            )

        def measured():
            # Whoever claims to take part is asked, also one that does nothing.
            asked = clients._replace(tau=reported)
            return client_gradients(
                model, params, key, asked, samples, batch_size, recipe.width, axis
            )

        missing = jnp.full(clients.tau.shape, jnp.nan, jnp.float32)
        nothing = ClientGradients(missing, missing, jnp.float32(jnp.nan))
        constants = _where_used(probes.constants, completed, constants, hparams)
        return constants, _where_used(probes.gradients, measured, nothing, hparams)

    return probe
