"""Clients without weight can be left untrained: the same models, less work."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import tsfl_jax
from tests import problems
from tests.engine.test_scan import DATA, MAPPINGS, PROBLEM, SIZE, TAU
from tests.experiment.test_runner import small
from tsfl_jax.engine import devices, mapping
from tsfl_jax.engine.program_spec import ProgramSpec
from tsfl_jax.experiment import prepare
from tsfl_jax.types import UserError

# What says how clients were trained; all else must be the same. (The last bit of the
# entropy, of a sum that XLA orders, is not.)
OF_TRAINING = {"train_loss", "samples", "weight_entropy"}


def both(one, *given, **options):
    """Two runs, of all clients and of those with weight."""
    runs = [one(*given, **options, train_all=flag) for flag in (True, False)]
    for name, value in runs[0][-1].items():
        if name == "weight_entropy":
            np.testing.assert_allclose(value, runs[1][-1][name], rtol=1e-6)
        elif name not in OF_TRAINING:
            np.testing.assert_array_equal(value, runs[1][-1][name], err_msg=name)
    chex.assert_trees_all_equal(runs[0][0], runs[1][0])
    return runs[0][-1], runs[1][-1]


def chunk(*given, **options):
    _, state, history = problems.run(*given, **options)
    return state.params, history.named()


@pytest.mark.parametrize(
    ("mapping", "block"),
    [MAPPINGS[0], *(pytest.param(*m, marks=pytest.mark.slow) for m in MAPPINGS[1:])],
)
def test_models_are_the_same_and_only_clients_with_weight_are_trained(mapping, block):
    options = {"mapping": mapping, "block": block}
    options["hp"] = problems.hparams(smoothness=20.0)  # few clients have weight
    everyone, some = both(
        chunk, "dms", DATA, PROBLEM, problems.inputs(TAU, SIZE), **options
    )
    weighted = everyone["rho"] != 0
    assert 0 < weighted.sum() < (TAU > 0).sum()
    np.testing.assert_array_equal(everyone["samples"], TAU * SIZE)
    np.testing.assert_array_equal(some["samples"], np.where(weighted, TAU * SIZE, 0))
    assert np.isfinite(some["train_loss"]).all()
    # Of one client it is that client's loss, which is not the mean of all.
    assert (some["train_loss"] != everyone["train_loss"]).any()


def test_a_client_whose_weight_underflowed_is_trained_for_its_share():
    # Its share goes to the others only if its model is lost, which has to be known.
    clients = problems.members(
        jnp.arange(3), jnp.array([2, 1, 3]), jnp.full(3, 8), PROBLEM.rows[:3]
    )
    spec = ProgramSpec(batch_size=4, passes=3, train_all=False)
    rho, shares = jnp.array([0.0, 1.0, 0.0]), jnp.array([0.5, 0.5, 0.0])
    on_device = mapping.device_clients(spec, clients, jnp.arange(3), rho, shares)
    # In order of work, 2·2 steps of client 0, 1·2 of client 1 and none of client 2.
    assert on_device.place.tolist() == [0, 1, 2]
    assert on_device.clients.tau.tolist() == [2, 1, 0]
    assert on_device.work.tolist() == [4, 2, 0]
    assert on_device.skipped.tolist() == [False, False, True]


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=9), st.integers(1, 4))
def test_clients_are_assigned_inside_a_program_as_before_it(work, number):
    places = -(-len(work) // number)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:number]), (devices.AXIS,))
    assigned = jax.shard_map(
        lambda work: devices.assign_again(work, places, devices.AXIS),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(devices.AXIS),
    )
    before = devices.assign(np.array([work]), number)[0]
    np.testing.assert_array_equal(jax.jit(assigned)(jnp.array(work)), before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "median"}, "algorithm=median needs the models of all clients"),
        ({"algorithm": "scaffold"}, "algorithm=scaffold needs the models of all"),
        ({"algorithm": "fedavg", "measure_regret": True}, "measure_regret=True needs"),
    ],
)
def test_what_needs_all_models(changes, words):
    config = small(train_all=False, **changes)
    config.data.validation = 100 if "measure_regret" in changes else 0
    with pytest.raises(UserError, match=words):
        tsfl_jax.simulate(config)


def test_a_note_says_who_is_not_trained():
    for train_all in (True, False):
        notes = " ".join(prepare.prepare(small(train_all=train_all)).notes)
        assert ("whose weight is 0 are not trained" in notes) == (not train_all)


def test_weights_of_zero_alone_are_noted():
    result = tsfl_jax.simulate(
        small(num_intervals=2, train_all=False),
        aggregator=tsfl_jax.rule(lambda s: 0.0 * s.tau),
    )
    assert any("in 2 of 2 intervals" in note for note in result.summary["notes"])


@pytest.mark.slow
def test_derivatives_are_those_with_all_clients():
    config = small(num_intervals=1, train_all=False)

    def loss(share):
        weights = jnp.array([1.0, 0.0, 0.0, 0.0]).at[1].add(share)
        rule = tsfl_jax.rule(lambda s: weights, normalize=False)
        run, given = tsfl_jax.as_function(config, aggregator=rule)
        return run(*given)[1].test_loss[-1]

    step = 1e-3
    slope = jax.jvp(loss, (jnp.float32(0),), (jnp.float32(1),))[1]
    # At 0 ± step all clients have weight in either program.
    expected = (loss(jnp.float32(step)) - loss(jnp.float32(-step))) / (2 * step)
    np.testing.assert_allclose(slope, expected, rtol=0.05)


def test_it_cannot_be_swept():
    with pytest.raises(UserError, match="--sweep train_all: all runs share it"):
        tsfl_jax.sweep(small(), {"train_all": [True, False]})
