"""Where a NaN comes from, for ``jax_debug_nans``.

JAX looks at what a compiled function returns. Ours leaves out what is not finite, and
NaN stands for "not measured" in its record: what made a NaN has to be repeated.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import rng, trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import evaluation, interval, optimizers
from tsfl_jax.engine.recipe import Parts
from tsfl_jax.types import HParams, Params, PRNGKey


def wanted() -> bool:
    """Whether the user looks for NaN; calls have one interval each then."""
    return bool(getattr(jax.config, "jax_debug_nans"))  # noqa: B009


def search(
    parts: Parts,
    state: interval.State,
    key: PRNGKey,
    hparams: HParams,
    problem: interval.Problem,
    inputs: interval.Inputs,
    after: Params,
) -> None:
    """Repeat an interval's lost training, and its test, by single operations.

    Args:
      parts, state, key, hparams, problem, inputs: as of `interval.run_interval`.
      after: w^{t+1}.

    Raises:
      FloatingPointError: at the operation that makes a NaN, with JAX's traceback.
    """
    if parts.recipe.lr_varies:
        hparams = optimizers.in_interval(hparams, jnp.asarray(inputs.interval))
    problem = interval.renewed(problem, key, inputs.interval)
    stream = rng.fold(key, "training")
    keys = stream, jax.random.fold_in(stream, inputs.interval)
    clients, samples = interval.participants(problem, inputs), problem.samples

    def train(client: local.Client) -> local.LocalResult:
        start = interval.start_of(parts, state, keys, client)
        return local.train(parts, start, client, samples, hparams)[1]

    for i in np.flatnonzero(inputs.tau):
        client = trees.take(clients, i)
        with jax.debug_nans(False):
            finite = jax.jit(train)(client).finite
        if not finite:
            with jax.disable_jit():
                train(client)
    with jax.disable_jit():
        evaluation.evaluate(parts.model, after, samples, problem.test, None)
