"""Tests of the clients' own models, where layers stay with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tsfl_jax import trees, types
from tsfl_jax.engine import evaluation
from tsfl_jax.engine.program_spec import Parts
from tsfl_jax.types import HParams, Params
from tsfl_jax.uplink import chain


class Scored(NamedTuple):
    """Clients whose models are tested."""

    client: Int[types.Array, "m"]  # ids; −1 fills up
    # What each group of test samples counts for a client; rows of 0 fill up.
    share: Float[types.Array, "m G"]


def evaluate(
    parts: Parts,
    params: Params,
    states: Any,
    ids: Int[types.Array, "U"],
    scored: Scored,
    hparams: HParams,
    score: Callable[[Params], evaluation.Scores],
) -> evaluation.Scores:
    """Test the clients' own models, one after another.

    Args:
      parts: with the links that keep layers.
      params: the global model.
      states: of the links, leaves ``[U, ...]``.
      ids: of the U clients.
      scored: whom to test, and on what.
      hparams: with the links' settings.
      score: a model's variables → `evaluation.Scores` with scores by group.

    Returns:
      Means over the clients of each score on the whole test set. By group are scores of
      the clients: ``[m]``, NaN for one without test samples.
    """

    def one(client: Scored) -> tuple[Any, Array, Array]:
        layers = trees.take(states, jnp.argmax(ids == client.client))
        scores = score(chain.start(parts.uplinks, params, layers, -1, hparams))
        assert scores.group_accuracy is not None and scores.group_loss is not None
        accuracy = _mixed(client.share, scores.group_accuracy)
        loss = _mixed(client.share, scores.group_loss)
        return (scores.accuracy, scores.loss, scores.metrics), accuracy, loss

    whole, accuracy, loss = lax.map(one, scored)
    is_client = scored.client >= 0

    def mean(values: Float[Array, "m ..."]) -> Float[Array, "..."]:
        mask = is_client.reshape((-1,) + (1,) * (values.ndim - 1))
        return jnp.where(mask, values, 0.0).sum(axis=0) / is_client.sum()

    whole = jax.tree.map(mean, whole)
    return evaluation.Scores(*whole, group_accuracy=accuracy, group_loss=loss)


def _mixed(
    share: Float[types.Array, "G"], score: Float[types.Array, "G"]
) -> Float[Array, ""]:
    """A client's score: the mean over the groups that count; NaN: none is tested."""
    share = jnp.where(jnp.isnan(score), 0.0, share)
    return jnp.where(share > 0, share * score, 0.0).sum() / share.sum()
