"""Local training of one client: freezing, short batches, state beside the weights."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import problems
from tsfl_jax.engine import client, optimizers
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.models import networks
from tsfl_jax.rules import AGGREGATORS

DATA = problems.dataset()
PROBLEM = problems.problem(DATA, 3, 12)


def one_client(tau, size, i=0):
    count, samples = jnp.int32(tau), jnp.int32(size)
    return problems.members(jnp.int32(i), count, samples, PROBLEM.rows[i])


def make(model, optimizer=optimizers.sgd, **options):
    spec = ProgramSpec(**{"batch_size": 4, "passes": 5} | options)
    parts = Parts(model, (AGGREGATORS["fedavg"],), optimizer, spec)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 5)))
    samples = PROBLEM.samples._replace(mean=jnp.zeros(()), inverse_std=jnp.ones(()))

    def run(who, limit=None, hp=None):
        hp = hp or problems.hparams(momentum=0.9)
        start = client.Start(variables, jax.random.key(7))
        return client.train(parts, start, who, samples, hp, limit)

    return variables, run


def test_frozen_client_is_bit_equal_after_its_budget():
    _, run = make(problems.mlp())
    run = jax.jit(run)
    exact, result = run(one_client(2, 10), jnp.int32(2 * 3))
    frozen, longer = run(one_client(2, 10), jnp.int32(40))
    chex.assert_trees_all_equal(exact, frozen)
    assert int(result.samples) == int(longer.samples) == 20
    alone, _ = run(one_client(2, 10))  # in a loop of its own length
    chex.assert_trees_all_close(alone, frozen, rtol=1e-6, atol=1e-7)
    more, _ = run(one_client(3, 10), jnp.int32(40))
    assert any(
        (a != b).any()
        for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(more), strict=True)
    )


def test_nan_in_frozen_steps_does_not_leak():
    _, run = make(problems.mlp())
    hp = problems.hparams(lr=1e30)  # everything after the first steps is NaN
    model, result = jax.jit(run)(one_client(0, 10), jnp.int32(40), hp)
    assert bool(result.finite)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(model))


@pytest.mark.parametrize("size", [1, 5, 12])
def test_a_pass_meets_every_sample_once(size):
    seen = []

    def spy(variables, x, mask, key):
        del key
        # Rows have distinct first features: remember which ones count.
        jax.debug.callback(lambda a, m: seen.extend(a[m].tolist()), x[:, 0], mask)
        return x @ variables["params"]["w"], variables

    model = networks.Model(
        lambda key, x: {"params": {"w": jnp.zeros((5, 3))}}, spy, lambda v, x: x
    )
    _, run = make(model)
    rows = jnp.arange(12, dtype=jnp.int32)
    result = run(one_client(1, size)._replace(row=rows))[1]
    jax.effects_barrier()
    assert sorted(seen) == sorted(DATA.x_train[:size, 0].tolist())
    assert int(result.samples) == size


def test_any_optax_transformation():
    adam = optax.adam(1e-2)
    variables, run = make(problems.mlp(), lambda hparams: adam)
    model, _ = run(one_client(1, 4))
    step = model["params"]["Dense_1"]["bias"] - variables["params"]["Dense_1"]["bias"]
    # Adam's first step has length lr in every coordinate.
    np.testing.assert_allclose(np.abs(step), 1e-2, rtol=1e-3)
