"""Rows that fill up a short mini-batch have no part in normalizations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests import problems
from tsfl_jax import rng
from tsfl_jax.engine import client, optimizers
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.models import networks, replay
from tsfl_jax.rules import AGGREGATORS

KEY = jax.random.key(0)
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(1.0, 2.0, (44, 5)).astype(np.float32)
Y = (np.arange(44) % 3).astype(np.int32)
LR = 0.5


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(4, name="body")(x)
        x = nn.BatchNorm(not train, momentum=0.9, name="norm")(x)
        return nn.Dense(3, name="head")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(5, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.body(x)))


NETWORKS = {"linen": Linen(), "nnx": lambda rngs: Nnx(rngs)}


@jax.jit
def flax_step(params, stats, x, y):
    """A step of SGD in plain Flax, on real samples alone."""

    def loss(params):
        variables = {"params": params, "batch_stats": stats}
        logits, changed = Linen().apply(variables, x, True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), changed["batch_stats"]

    gradient, stats = jax.grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda w, g: w - LR * g, params, gradient), stats


def assert_close(found, expected, rtol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol), found, expected
    )


@pytest.mark.parametrize(
    ("library", "size", "batch_size", "lock_step"),
    [("linen", 44, 32, True), ("nnx", 2, 3, False)],
)
def test_a_client_trains_as_plain_flax_on_its_samples(
    library, size, batch_size, lock_step
):
    """Two passes; no rule has a part in them, so they are those of every rule."""
    model = networks.from_flax(NETWORKS[library])
    shapes = jax.eval_shape(model.init, KEY, X[:1])
    x = jax.ShapeDtypeStruct((batch_size, 5), jnp.float32)
    model, _ = replay.replay(model, "fast", shapes, x)
    variables = model.init(KEY, X[:1])
    collection = {"linen": "batch_stats", "nnx": "state"}[library]
    row = jnp.arange(44) % size
    member = problems.members(jnp.int32(0), jnp.int32(2), jnp.int32(size), row)
    spec = ProgramSpec(batch_size, passes=2)
    parts = Parts(model, (AGGREGATORS["fedavg"],), optimizers.sgd, spec)
    scale = jnp.float32(0), jnp.float32(1)
    samples = client.Samples(jnp.asarray(X), jnp.asarray(Y), *scale)
    start, hparams = client.Start(variables, KEY), problems.hparams(lr=LR)
    limit = jnp.int32(9) if lock_step else None  # steps beyond its own are frozen
    found, result = jax.jit(
        lambda start: client.train(parts, start, member, samples, hparams, limit)
    )(start)

    order_key, _ = rng.keys(KEY, "sample order", "training dropout")
    params, stats = variables["params"], variables[collection]
    for number in range(2):
        order = np.asarray(client.pass_order(order_key, member, number))[:size]
        for first in range(0, size, batch_size):
            batch = row[order[first : first + batch_size]]
            params, stats = flax_step(params, stats, X[batch], Y[batch])
    assert result.samples == 2 * size
    assert_close(found, {"params": params, collection: stats})


def net(function):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(3)(function(x))

    return Net()


def norm():
    return nn.BatchNorm(use_running_average=False)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.relu(norm()(nn.Dense(4)(x))), None


AXES = {"params": 0, "batch_stats": 0}
Scanned = nn.scan(Block, AXES, split_rngs={"params": True}, length=2)


class Stacked(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.BatchNorm(4, rngs=rngs), axis_size=2)
        self.layers = make(rngs.split(2))
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(scan(lambda x, layer: layer(x))(x, self.layers))


def folded(x):
    return norm()(x.reshape(-1, 2)).reshape(x.shape)  # time in the rows


MASKED = {
    "time in rows": net(folded),
    "layer norm over rows": net(lambda x: nn.LayerNorm(reduction_axes=(0, 1))(x)),
    "scan": net(lambda x: Scanned()(x, None)[0]),
    "nnx scan": lambda rngs: Stacked(rngs),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_rows_have_no_part(name):
    """Outputs, statistics and gradients are those of the real rows alone."""
    model = networks.from_flax(MASKED[name])
    variables = model.init(KEY, X[:1, :4])

    @jax.jit  # of which some networks trace a part once only
    def train(x, mask):
        def outputs(params):
            logits, changed = model.train(variables | {"params": params}, x, mask, KEY)
            return jnp.sum(jnp.where(mask[:, None], jnp.sin(logits), 0)), changed

        return jax.value_and_grad(outputs, has_aux=True)(variables["params"])

    padded = jnp.where(jnp.arange(4)[:, None] < 3, X[:4, :4], 9.0)
    expected = train(X[:3, :4], jnp.ones(3, bool))
    assert_close(train(padded, jnp.arange(4) < 3), expected)
