"""The border of a user's network: switches by any name, and what cannot be trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import tsfl_jax
from tests import problems
from tsfl_jax.config import Config, replace
from tsfl_jax.models import networks, tracing
from tsfl_jax.prepare import prepare
from tsfl_jax.types import UserError

TRAINING = ["train", "training", "is_training", "is_train", "training_mode"]
TESTS = ["deterministic", "use_running_average", "eval", "is_eval", "inference_mode"]
X, MASK = jnp.ones((3, 5)) * jnp.arange(1.0, 6), jnp.ones(3, bool)


class Body(nn.Module):
    """Dropout and batch normalization, switched by `on`."""

    @nn.compact
    def __call__(self, x, on):
        x = nn.Dropout(0.5, deterministic=not on)(x)
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not on)(x))


class Layers(nnx.Module):
    """The same of nnx."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def run(self, x, on):
        x = self.norm(self.drop(x, deterministic=not on), use_running_average=not on)
        return self.head(x)


def linen(call, **fields):
    """A linen module from (module, x) -> outputs, with switches as fields."""
    kinds = {"__annotations__": dict.fromkeys(fields, bool)}
    return type("Net", (nn.Module,), kinds | fields | {"__call__": nn.compact(call)})()


def layers(call, **attributes):
    """The same of nnx."""

    def make(rngs):
        network = type("Net", (Layers,), {"__call__": call})(rngs)
        vars(network).update(attributes)
        return network

    return make


def named(switch):
    """A linen module with an argument of that name."""
    on = switch if switch in TRAINING else f"not {switch}"
    return linen(eval(f"lambda self, x, *, {switch}: Body()(x, {on})", {"Body": Body}))


# Every name as an argument; one of them in other forms.
SWITCHED = {name: named(name) for name in (*TRAINING, *TESTS, "testing")} | {
    "by position": linen(lambda self, x, eval, /: Body()(x, not eval)),
    "with a default": linen(lambda self, x, eval=False: Body()(x, not eval)),
    "a field": linen(lambda self, x: Body()(x, not self.eval), eval=False),
    "nnx": layers(lambda self, x, eval: self.run(x, not eval)),
    "nnx attribute": layers(lambda self, x: self.run(x, not self.eval), eval=False),
}
IDLE = {
    "another name": linen(lambda self, x, active=False: Body()(x, active)),
    "nowhere": linen(lambda self, x: Body()(x, False)),
    "nnx": layers(lambda self, x, active=False: self.run(x, active)),
}


@pytest.mark.parametrize("model", SWITCHED.values(), ids=SWITCHED)
def test_every_name_of_the_switch(model):
    """Training draws random numbers and moves statistics: there is no note."""
    *_, notes = tracing.trace(networks.from_flax(model), (5,), np.float32)
    assert notes == ()


@pytest.mark.parametrize("form", ["train", "nnx"])
def test_training_draws_by_key_and_moves_statistics(form):
    model = networks.from_flax(SWITCHED[form])
    variables, train = model.init(jax.random.key(0), X), jax.jit(model.train)
    drawn = [train(variables, X, MASK, jax.random.key(i)) for i in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0][0], drawn[1][0])
    assert (drawn[0][0] != drawn[2][0]).any()
    (moved,) = [n for n in variables if n != "params"]
    old, new = (jax.tree.leaves(v[moved]) for v in (variables, drawn[0][1]))
    assert all((a != b).any() for a, b in zip(old, new, strict=True))
    assert np.isfinite(model.predict(variables, X)).all()


@pytest.mark.parametrize("model", IDLE.values(), ids=IDLE)
def test_layers_that_training_does_not_switch_on_are_noted(model):
    *_, notes = tracing.trace(networks.from_flax(model), (5,), np.float32)
    first, second = sorted(notes)
    assert "holds BatchNorm, but training moves no batch statistics" in first
    assert "holds Dropout, but training draws no random numbers" in second


class Streams(nn.Module):
    """Noise of two streams, and of none in tests."""

    @nn.compact
    def __call__(self, x, train):
        if train:
            noise = [jax.random.normal(self.make_rng(n), x.shape) for n in ("a", "b")]
            x = x + noise[0] + 100 * noise[1]
        return nn.Dense(3, kernel_init=nn.initializers.ones)(x)


def test_random_streams_of_any_name_have_keys_of_their_own():
    model = networks.from_flax(Streams())
    variables = model.init(jax.random.key(0), X)
    one, two = (model.train(variables, X, MASK, jax.random.key(i))[0] for i in (1, 2))
    assert (one != two).all()
    assert tracing.trace(model, (5,), np.float32)[2] == ()


def always(self, x):
    return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


# A module, and words of the one line about it.
REFUSED = {
    "no parameters": (linen(lambda self, x: x[:, :3]), "expected float32"),
    "one sample": (
        linen(lambda self, x: nn.Dense(3)(x).sum(0, keepdims=True)),
        "training gives float32[1, 3] for 3 samples",
    ),
    "reshape": (
        linen(lambda self, x: nn.Dense(3)(x.reshape(-1, 28))),
        "initialization fails (TypeError: cannot reshape",
    ),
    "dropout in tests": (linen(always), "a test fails (InvalidRngError: Dropout_0"),
    "model": (tsfl_jax.Model(lambda key, x: None, len, len), "model=Model: "),
}
CONFIG = replace(Config(num_clients=2, batch_size=8), {"schedule.data_size": 16})


@pytest.mark.parametrize(("model", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_one_line(model, words):
    with pytest.raises(UserError) as error:
        prepare.prepare(CONFIG, model=model, dataset=problems.dataset())
    message = str(error.value)
    assert words in message and "\n" not in message and "expected" in message
    assert message.startswith("model=")


def test_metrics_that_give_no_number_per_sample():
    metrics = {"m": lambda outputs, labels: (outputs[:, 0], outputs)}
    with pytest.raises(UserError, match="or a tuple of values and wei"):
        prepare.prepare(CONFIG, dataset=problems.dataset(), metrics=metrics)
