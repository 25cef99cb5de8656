"""Scores of tokens: sums over the whole test set, not means over its rows."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.models.text import NextToken, Transformer
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.types import UserError

V, S = 4, 8


class Copy(nn.Module):
    """Predicts that a token comes twice."""

    @nn.compact
    def __call__(self, x):
        return self.param("w", nn.initializers.ones, ()) * jax.nn.one_hot(x, V)


def rows(count, seed):
    """Rows of 1 to S + 1 tokens; long ones repeat their tokens more often."""
    draws = np.random.default_rng(seed)
    x = np.zeros((count, S + 1), int)
    for i, length in enumerate(draws.integers(1, S + 2, count)):
        token = draws.integers(1, V, length)
        x[i, :length] = 1 if length > S // 2 and i % 2 else token
    return x


def test_each_token_counts_alike():
    x, test = rows(40, 0), rows(131, 1)  # two batches of 66 rows, one of them padded
    owners = {"client": np.arange(40) % 2, "test_client": np.arange(131) % 2}
    data = tsfl_jax.make_dataset(x, x[:, 0], test, test[:, 0], num_classes=V, **owners)
    config = tsfl_jax.Config(num_intervals=1, num_clients=2, batch_size=8, lr=1e-3)
    config.algorithm, config.partition.kind = "fedavg", "client"
    config.evaluation.clients, config.devices = "own", 2
    metrics = {
        "token_share": lambda outputs, labels: (outputs[:, 1], outputs[:, 2]),
        "tokens": lambda outputs, labels: outputs[:, 2],
    }
    found = tsfl_jax.simulate(
        config, model=NextToken(Copy()), dataset=data, metrics=metrics
    )
    real = test[:, 1:] != 0
    right = (test[:, 1:] == test[:, :-1]) & real
    share = right.sum() / real.sum()
    history = found.history
    np.testing.assert_allclose(history["test_accuracy"], [share], rtol=1e-6)
    np.testing.assert_array_equal(history["token_share"], history["test_accuracy"])
    np.testing.assert_allclose(history["tokens"], [real.sum(1).mean()], rtol=1e-6)
    shares = [right[i::2].sum() / real[i::2].sum() for i in range(2)]
    np.testing.assert_allclose(
        history["client_accuracy_mean"], [np.mean(shares)], rtol=1e-6
    )
    by_row = (right.sum(1) / np.maximum(real.sum(1), 1)).mean()
    assert abs(by_row - share) > 0.05
    # Training minimizes the mean over rows, which the loss is.
    logits = found.params["params"]["network"]["w"] * np.eye(V)[test[:, :-1]]
    chance = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    of_token = -np.log(np.take_along_axis(chance, test[:, 1:, None], -1))[..., 0]
    loss = ((of_token * real).sum(1) / np.maximum(real.sum(1), 1)).mean()
    np.testing.assert_allclose(history["test_loss"], [loss], rtol=1e-5)


def test_an_accuracy_of_another_form_is_refused():
    """What is right and of how much, in whole numbers."""

    class Shares(NextToken):
        def accuracy(self, outputs, labels):
            return outputs[:, 1] / outputs[:, 2]

    x = rows(8, 0)
    data = tsfl_jax.make_dataset(x, x[:, 0], x, x[:, 0], num_classes=V)
    config = tsfl_jax.Config(num_clients=1)
    with pytest.raises(UserError, match=r"accuracy gives .*expected .* tuple of what"):
        prepare(config, model=Shares(Copy()), dataset=data)


def test_the_transformer_sees_no_later_token():
    module = Transformer(V, 6)
    x = np.random.default_rng(0).integers(0, V, (3, S))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    logits = module.apply(variables, x)
    assert logits.shape == (3, S, V)
    later = x.copy()
    later[:, 5:] = (later[:, 5:] + 1) % V
    changed = module.apply(variables, later)
    np.testing.assert_allclose(changed[:, :5], logits[:, :5], atol=1e-6)
    assert np.abs(changed[:, 5:] - logits[:, 5:]).min(axis=(1, 2)).min() > 0


def test_the_transformer_by_hand():
    """One block after another, in float64 with NumPy."""
    module = Transformer(V, 6)
    x = np.random.default_rng(1).integers(0, V, (2, 5))
    variables = jax.jit(module.init)(jax.random.key(1), x)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])

    def norm(y, of):
        variance = y.var(axis=-1, keepdims=True)
        y = (y - y.mean(axis=-1, keepdims=True)) / np.sqrt(variance + 1e-6)
        return y * of["scale"] + of["bias"]

    def dense(y, of):
        return y @ of["kernel"] + of["bias"]

    y = p["Embed_0"]["embedding"][x] + p["positions"]
    for block in range(2):
        a, z = (
            p[f"MultiHeadDotProductAttention_{block}"],
            norm(y, p[f"LayerNorm_{2 * block}"]),
        )
        q, k, v = (
            np.einsum("bsd,dhe->bshe", z, a[n]["kernel"]) + a[n]["bias"]
            for n in ("query", "key", "value")
        )
        score = np.einsum("bshe,bthe->bhst", q, k) / np.sqrt(3)
        score = np.where(np.tri(5, dtype=bool), score, -np.inf)
        score = np.exp(score - score.max(axis=-1, keepdims=True))
        score /= score.sum(axis=-1, keepdims=True)
        mixed = np.einsum("bhst,bthe->bshe", score, v)
        y = y + np.einsum("bshe,hed->bsd", mixed, a["out"]["kernel"]) + a["out"]["bias"]
        z = dense(norm(y, p[f"LayerNorm_{2 * block + 1}"]), p[f"Dense_{2 * block + 1}"])
        z = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        y = y + dense(z, p[f"Dense_{2 * block}"])
    expected = dense(norm(y, p["LayerNorm_4"]), p["Dense_4"])
    np.testing.assert_allclose(module.apply(variables, x), expected, atol=1e-5)
