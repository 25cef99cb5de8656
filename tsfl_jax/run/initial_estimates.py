"""Initial estimates of L, G² and σ²: once, at w⁰, before training.

Algorithm 1 of the paper takes these constants as inputs. With the default,
``constants.when="once"``, those that are not given are estimated from gradients of all
clients at the initial model, and stay fixed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import rng, trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import estimates, optimizers
from tsfl_jax.engine.program_spec import Estimates, Parts, ProgramSpec
from tsfl_jax.prepare.prepare import Prepared
from tsfl_jax.prepare.rule_settings import needs_constants
from tsfl_jax.rules.averages import FEDAVG
from tsfl_jax.timeline import deliveries
from tsfl_jax.types import Constants, HParams, Params, PRNGKey

DRAWS = 4  # estimates of a client, of which the mean is taken


def when(prepared: Prepared) -> str:
    """When L, G² and σ² are estimated: "once", "interval", or "" for never."""
    settings = prepared.config.constants
    numbers = settings.smoothness, settings.grad_sq_norm, settings.grad_variance
    if min(numbers) >= 0 or not needs_constants(prepared.config, prepared.rule):
        return ""
    return "once" if settings.when == "once" else "interval"


@functools.partial(jax.jit, static_argnames="parts")
def _estimate(parts: Parts, *arrays: Any) -> Constants:
    """The estimates at w⁰."""
    with trees.arithmetic():  # as in `scan.make_run`
        return estimates.estimate_constants(parts, *arrays, draws=DRAWS)


def clients_of(prepared: Prepared, width: int = 0) -> local.Client:
    """All clients ``[N]``, with all they hold, in at least `width` columns of rows.

    Of cohorts the first one, so that the estimates do not depend on T.
    """
    rows, count = prepared.partition.indices, prepared.partition.capacity
    ids, works = prepared.workload.drawn, np.ones(len(rows), bool)
    if prepared.config.cohort.size:
        place = prepared.workload.places
        works = deliveries.claimed(prepared.workload.schedule) > 0
        first = works.any(axis=1).argmax()
        works = works[first]
        ids, rows, count = (a[place[first]] for a in (ids, rows, count))
    extra = max(width - rows.shape[1], 0)
    zeros = jnp.zeros(len(ids), jnp.int32)
    return local.Client(
        id=jnp.asarray(ids),
        tau=jnp.asarray(works, jnp.int32),
        size=jnp.asarray(count, jnp.int32),
        row=jnp.asarray(np.pad(rows, ((0, 0), (0, extra)))),
        place=jnp.arange(len(ids)),
        task=zeros,
        snapshot=zeros,
    )


def fill(
    prepared: Prepared,
    samples: local.Samples,
    params: Params,
    key: PRNGKey,
    width: int = 0,
) -> HParams:
    """The hyper-parameters with estimated constants in place of missing ones.

    Args:
      prepared: an experiment; its hyper-parameters unless it asks for estimates.
      samples: the training samples, on all devices.
      params: its w⁰.
      key: of the seed.
      width: columns of the index tables of its program, at least.
    """
    hparams = prepared.hparams
    if when(prepared) != "once":
        return hparams
    clients = clients_of(prepared, width)
    widest = min(prepared.config.batch_size, clients.row.shape[-1])
    method = prepared.config.constants.estimator
    spec = ProgramSpec(widest, 1, estimates=Estimates(method=method))
    # Of the network only gradients are used, and of the other parts nothing: runs with
    # other rules and first parameters share a compiled estimate.
    model = prepared.network.model._replace(init=None)
    parts = Parts(model, (FEDAVG,), optimizers.sgd, spec)
    # Of arrays that every device has, that of the first: the same program on however
    # many devices, so that it has the bits of one.
    scalars = hparams._replace(settings={})
    inputs = params, rng.fold(key, "initial estimates"), clients, samples, scalars
    inputs = jax.tree.map(
        lambda a: a.addressable_data(0) if isinstance(a, jax.Array) else a, inputs
    )
    estimated = jax.device_get(_estimate(parts, *inputs))
    return hparams._replace(constants=estimates.completed(hparams.constants, estimated))
