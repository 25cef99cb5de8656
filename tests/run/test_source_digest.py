"""A change of a user's part gives another text, and nothing else does."""

import json
import linecache
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import optax
import pytest

import tsfl_jax
from tests.problems import small
from tsfl_jax.models import networks
from tsfl_jax.prepare import prepare
from tsfl_jax.run import identity
from tsfl_jax.run.identity import describe
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
IMPORTS = """
import dataclasses, functools, typing
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax, tsfl_jax
from flax import nnx
"""
# Each makes a `thing`; VALUE is 1, and 2 in the changed one.
CASES = {
    "code": "thing = lambda x: VALUE * x",
    "closure": """
def made(rate):
    return lambda x: rate * x
thing = made(VALUE)
""",
    "default": "thing = lambda x, rate=VALUE: rate * x",
    "partial": "thing = functools.partial(optax.sgd, learning_rate=VALUE)",
    "object": """
class Loss:
    def __init__(self, rate):
        self.rate = rate
    def __call__(self, outputs, labels):
        return self.rate * outputs[:, 0]
thing = Loss(VALUE).__call__
""",
    "linen module": """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(VALUE)(x)
thing = nn.remat(Net)()
""",
    "nnx module": """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.act = lambda x: VALUE * x
thing = Net(nnx.Rngs(0))
""",
    "key": "thing = jax.random.key(VALUE)",
    "optimizer": "thing = optax.adam(optax.cosine_decay_schedule(0.1, VALUE))",
    "rule": "thing = tsfl_jax.rule(lambda info: info.tau**VALUE)",
}


def thing(name, value=1, above=""):
    """A part, as a module of the user's has it, from another folder and line."""
    module = types.ModuleType("own_module")
    module.__file__ = f"/somewhere{len(above)}/own_module.py"
    sys.modules["own_module"] = module  # as classes and dataclasses expect
    text = above + IMPORTS + CASES[name].replace("VALUE", str(value))
    lines = text.splitlines(keepends=True)
    linecache.cache[module.__file__] = len(text), None, lines, module.__file__
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module.thing


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Forget the module that a test makes."""
    monkeypatch.setitem(sys.modules, "own_module", None)


@pytest.mark.parametrize("name", CASES)
def test_a_change_alone_gives_another_text(name):
    text = describe(thing(name))
    assert text != describe(thing(name, 2))
    assert text == describe(thing(name, above="# A comment.\n" * 300))
    assert "0x" not in text and "/" not in text and len(text) < 80


def test_another_process_gives_the_same_texts():
    program = (
        "import json; from tests.run.test_source_digest import *; "
        "print(json.dumps([describe(thing(name)) for name in CASES]))"
    )
    seed = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": seed},  # sets have another order there
        capture_output=True,
        text=True,
        check=True,
    )
    there = dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))
    del there["rule"]  # in tests, annotations of the package's functions are checked
    assert there == {name: describe(thing(name)) for name in there}


def test_a_run_with_a_changed_rule_or_of_another_version_is_refused(
    tmp_path, monkeypatch
):
    settings = small(num_intervals=1, num_clients=2, schedule__data_size=16)

    def run(value=1):
        rule = thing("rule", value)
        return tsfl_jax.simulate(settings, aggregator=rule, workdir=tmp_path)

    assert run().summary["final_test_loss"] == run().summary["final_test_loss"]
    with pytest.raises(UserError, match="own aggregator: .*choose another") as error:
        run(3)
    assert "\n" not in str(error.value)
    monkeypatch.setattr("tsfl_jax.run.identity._VERSION", 1)
    with pytest.raises(UserError, match="identity version: 4 → 1.*another --workdir"):
        run()


def custom(value):
    """One of each custom part that can change a result; `value` is in all of them."""
    x, y = np.random.default_rng(value).normal(size=(90, 4)), np.arange(90) % 3
    net = networks.MLP(3, 2 + value)

    def step(step):
        found = step.gradient(step.variables["params"])
        return step.apply(found) if value == 1 else step.apply(found)

    return {
        "model": net,
        "dataset": tsfl_jax.make_dataset(x, y, x, y),
        "optimizer": optax.sgd(0.1 * value),
        "aggregator": tsfl_jax.rule(lambda info: info.tau**value),
        "loss": lambda outputs, labels: value * outputs.sum(axis=-1),
        "augment": lambda key, x, y: (value * x, y),
        "client_step": step,
        "partition": [range(9 + value), range(9 + value, 90)],
        "sampler": lambda draw: np.arange(draw.size) * value,
        "params": net.init(jax.random.key(value), x[:1].astype(np.float32)),
    }


def said(**changes):
    """What files say of the custom parts of an experiment of two clients."""
    parts = changes.pop("parts")
    changes["schedule__data_size"] = None if "partition" in parts else 16
    changes["cohort__size"] = 1 if "sampler" in parts else 0
    config = small(None, num_intervals=1, num_clients=2, batch_size=2, **changes)
    prepared = prepare.prepare(config, **parts)
    return identity.custom_values(prepared)


def test_files_name_each_custom_part_with_a_digest_of_it():
    first, again, other = (said(parts=custom(value)) for value in (1, 1, 2))
    assert first == again and first.pop("algorithm") == other.pop("algorithm")
    names = {name: name for name in custom(1)} | {"sampler": "cohort.sampler=lambda"}
    assert first.keys() == other.keys() == {f"custom {n}" for n in names.values()}
    assert all(first[name] != other[name] for name in first)
    # The digest is that of the samples as they were given, whatever a seed makes of
    # them; and neither what the settings load nor metrics make another experiment.
    parts = {"dataset": custom(1)["dataset"]}
    digests = [said(parts=parts, seed=s, partition__label_noise=0.5) for s in (0, 1)]
    assert digests == [{"custom dataset": first["custom dataset"]}] * 2
    loaded = {"dataset": prepare.load_dataset(tsfl_jax.Config())}
    assert said(parts={"metrics": {"loss_2": custom(2)["loss"]}} | loaded) == {}
