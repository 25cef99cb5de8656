"""Rows that fill up a short mini-batch: not in batch statistics, or noted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tsfl_jax
from tests import problems
from tsfl_jax import rng
from tsfl_jax.engine import client, optimizers
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.models import networks, replay, rows
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


def two_clients(**changes):
    config = tsfl_jax.Config(
        algorithm="fedavg", num_intervals=1, num_clients=2, lr=LR, momentum=0.0
    )
    config.batch_size, config.devices = 3, 1
    config.schedule.kind, config.schedule.tau = "explicit", (2,)
    for name, value in changes.items():
        setattr(config, name, value)
    data = tsfl_jax.make_dataset(X[:5], Y[:5], X[5:], Y[5:], client=[0, 0, 1, 1, 1])
    config.partition.kind = "client"
    return config, data


def net(function):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(3)(function(x))

    return Net()


def norm(**settings):
    return nn.BatchNorm(use_running_average=False, **settings)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.relu(norm()(nn.Dense(4)(x))), None


Jitted = nn.jit(Block)
AXES = {"params": 0, "batch_stats": 0}
Scanned = nn.scan(Block, AXES, split_rngs={"params": True}, length=2)


class Listed(nnx.Module):
    def __init__(self, rngs):
        layers = [nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)]
        self.layers = nnx.List([layers[0], layers[0], layers[1]])  # one is shared

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)[:, :3] * self.norm.scale[None, :3]


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
    "exact variance": net(lambda x: norm(use_fast_variance=False)(x)),
    "time in rows": net(folded),
    "layer norm over rows": net(lambda x: nn.LayerNorm(reduction_axes=(0, 1))(x)),
    "group norm over rows": net(lambda x: nn.GroupNorm(2, reduction_axes=(0, 1))(x)),
    "jit": net(lambda x: Jitted()(x)[0]),
    "scan": net(lambda x: Scanned()(x, None)[0]),
    "nnx list": lambda rngs: Listed(rngs),
    "nnx scan": lambda rngs: Stacked(rngs),
    "nnx, its attributes": lambda rngs: Scaled(rngs),
}
PER_SAMPLE = {
    "layer norm": net(lambda x: nn.LayerNorm()(x)),
    "attention": net(
        lambda x: nn.MultiHeadDotProductAttention(2)(x[:, :, None].repeat(4, 2)).mean(1)
    ),
    "loop over time": net(lambda x: nn.RNN(nn.GRUCell(4))(x[:, :, None])[:, -1]),
    "an entry each": net(lambda x: x[jnp.arange(len(x)), jnp.argmax(x, 1), None]),
    "unused": net(lambda x: (x.mean(0), x)[1]),
    "own mask": networks.VGG11(norm="batch"),
}
MIXING = {
    "batch mean": net(lambda x: x - x.mean(0, keepdims=True)),
    "after a norm": net(lambda x: norm()(x) - norm()(x).mean(0, keepdims=True)),
    "batch last": net(lambda x: norm(axis=0)(x.T).T),
    "similarity": net(lambda x: x @ x.T @ x),
    "order": net(lambda x: x[jnp.argsort(jnp.sin(jnp.arange(len(x))))]),
    "sum so far": net(lambda x: jnp.cumsum(x, 0)),
    "in a loop": net(
        lambda x: jax.lax.fori_loop(
            0, 2, lambda _, h: x - h.mean(0, keepdims=True), 0 * x
        )
    ),
    "over rows": net(lambda x: jax.lax.scan(lambda c, r: (c + r,) * 2, x[0], x)[1]),
}


def notes_of(module, shape=(4,)):
    model = networks.from_flax(module)._replace(name="Net")
    one = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return rows.notes(model, jax.eval_shape(model.init, KEY, one), shape, one.dtype)


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
    assert notes_of(MASKED[name]) == ()


def test_a_note_only_where_rows_are_mixed():
    for name, module in PER_SAMPLE.items():
        shape = (32, 32, 3) if name == "own mask" else (4,)
        assert notes_of(module, shape) == (), name
    for name, module in MIXING.items():
        (note,) = notes_of(module)
        start = "model=Net: outputs of a sample depend on the other samples"
        assert note.startswith(start), name


def test_the_note_needs_a_short_batch():
    for batch_size in (1, 3):
        config, data = two_clients(batch_size=batch_size)
        parts = {"dataset": data, "model": MIXING["batch mean"]}
        notes = tsfl_jax.prepare.prepare.prepare(config, **parts).notes
        is_noted = any("outputs of a sample depend on" in note for note in notes)
        assert is_noted == (batch_size == 3)


@pytest.mark.slow
def test_estimates_do_not_depend_on_rows_that_fill_up():
    """Two gradients on all samples of a client are the same: no variance."""
    found = []
    for batch_size in (3, 8):
        config, data = two_clients(batch_size=batch_size, algorithm="bound_optimal")
        found.append(tsfl_jax.simulate(config, dataset=data, model=Linen()).history)
        np.testing.assert_allclose(found[-1]["client_variance"], 0, atol=1e-10)
    for name in ("smoothness", "client_dissimilarity", "grad_square"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5)
