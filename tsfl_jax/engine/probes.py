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
from tsfl_jax.models.networks import Model
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import (
    Array,
    ClientGradients,
    Constants,
    HParams,
    Params,
    PRNGKey,
)


def _where_used(uses, find: Callable, otherwise, hparams: HParams):
    """`find()` if a rule uses it, which only the hyper-parameters may tell."""
    if callable(uses):
        return lax.cond(uses(hparams), find, lambda: otherwise)
    return find() if uses else otherwise


def make_probe(
    model: Model,
    aggregator: Aggregator,
    *,
    batch_size: int,
    estimates: bool,
    measures: bool,
    abreast: int,
    axis: str | None,
) -> Callable[..., tuple[Constants, ClientGradients]]:
    """Builds the estimates of one interval.

    Args:
      model, aggregator, batch_size, estimates, measures: as in `engine.make_run`.
      abreast: clients measured side by side; 1: one after another.
      axis: name of the mesh axis of devices that share the work; None: one device.

    Returns:
      ``probe(params, key, clients[N], reported[N], samples, hparams)``: L, G², σ² as
      given or else estimated, and what gradients say about every client or else NaN.
    """

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
                model, params, key, asked, samples, batch_size, abreast, axis
            )

        missing = jnp.full(clients.tau.shape, jnp.nan, jnp.float32)
        nothing = ClientGradients(missing, missing, jnp.float32(jnp.nan))
        if estimates:
            uses = measures or aggregator.uses_constants
            constants = _where_used(uses, completed, constants, hparams)
        uses = measures or aggregator.uses_gradients
        return constants, _where_used(uses, measured, nothing, hparams)

    return probe
