"""Networks on tokens, that predict a class, or each token from those before it.

The LSTM has an embedding of width 8 and two layers of `hidden` cells, 256 for
Shakespeare in McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data" (2017). Token 0 is padding, see `data.tokens`.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from tsfl_jax.components import Part
from tsfl_jax.data.tokens import PADDING
from tsfl_jax.models import losses


class LSTM(nn.Module):
    """The next token, or a class, after ``[B, S]`` tokens: logits ``[B, O]``."""

    num_classes: int  # also of the tokens
    hidden: int
    after_each: bool = False  # logits ``[B, S, O]`` after each token

    @nn.compact
    def __call__(self, x: Int[Array, "B S"]) -> Float[Array, "B ..."]:
        """Return the logits."""
        y: Any = nn.Embed(self.num_classes, 8)(x)
        for _ in range(2):
            y = nn.RNN(nn.LSTMCell(self.hidden))(y)
        return nn.Dense(self.num_classes)(y if self.after_each else y[:, -1])


class Transformer(nn.Module):
    """The next token after each of ``[B, S]`` tokens: logits ``[B, S, O]``.

    Two blocks of causal attention with two heads, and of a hidden layer four times as
    wide; each is a residual after layer normalization (pre-norm, as in GPT-2, Radford
    et al. 2019). Positions are learned.
    """

    num_classes: int  # also of the tokens
    hidden: int  # width, even

    @nn.compact
    def __call__(self, x: Int[Array, "B S"]) -> Float[Array, "B S O"]:
        """Return the logits."""
        D, mask = self.hidden, nn.make_causal_mask(x)
        y = nn.Embed(self.num_classes, D)(x)
        shape = (x.shape[1], D)
        y += self.param("positions", nn.initializers.normal(0.02), shape)[None]
        for _ in range(2):
            y += nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(y), mask=mask)
            y += nn.Dense(D)(nn.gelu(nn.Dense(4 * D)(nn.LayerNorm()(y))))
        return nn.Dense(self.num_classes)(nn.LayerNorm()(y))


class NextToken(nn.Module):
    """Predicts each of ``[B, S + 1]`` tokens but the first, of those before it.

    Its outputs ``[B, 3]`` are the mean cross-entropy of a sample in nats, which is the
    loss, how many tokens are right, and how many there are; padding counts in none.
    Accuracy is Σ right tokens / Σ tokens of the test set.
    """

    network: nn.Module  # tokens [B, S] → logits [B, S, O]
    classifies = False

    @nn.compact
    def __call__(self, x: Int[Array, "B S1"]) -> Float[Array, "B 3"]:
        """Return cross-entropy, right tokens and tokens of each sample."""
        logits, target = self.network(x[:, :-1]), x[:, 1:]
        real = target != PADDING
        right = losses.correct(logits, target) & real
        # float32 also in a network of bfloat16, which cannot count beyond 256.
        right, number = (a.sum(axis=1, dtype=jnp.float32) for a in (right, real))
        loss = jnp.sum(losses.cross_entropy(logits, target) * real, axis=1)
        loss /= jnp.maximum(number, 1).astype(loss.dtype)
        return jnp.stack([loss, right, number], axis=1)

    def loss(
        self, outputs: Float[Array, "B 3"], labels: Int[Array, "B"]
    ) -> Float[Array, "B"]:
        """The mean cross-entropy of each sample; labels are ignored."""
        del labels
        return outputs[:, 0]

    def accuracy(
        self, outputs: Float[Array, "B 3"], labels: Int[Array, "B"]
    ) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
        """Right tokens and tokens of each sample; labels are ignored."""
        del labels
        return outputs[:, 1], outputs[:, 2]


# By `ModelConfig.name`, as in `networks.MODELS`; they alone take tokens.
MODELS = {
    "lstm": Part(lambda k, s, form: LSTM(k, s.hidden), ("model.hidden",)),
    "next_token_lstm": Part(
        lambda k, s, form: NextToken(LSTM(k, s.hidden, True)), ("model.hidden",)
    ),
    "next_token_transformer": Part(
        lambda k, s, form: NextToken(Transformer(k, s.hidden)), ("model.hidden",)
    ),
}
