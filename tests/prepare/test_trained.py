"""Runs that start from trained parameters, and what a longer run cannot go on from.

That raising T gives the longer run: `test_same_bits`.
"""

import functools
import shutil

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx, serialization, traverse_util

import tsfl_jax
from tests.problems import small
from tsfl_jax import trees
from tsfl_jax.config import replace
from tsfl_jax.prepare import trained
from tsfl_jax.prepare.prepare import load_dataset
from tsfl_jax.types import UserError


def config_of(**changes):
    """Sizes and work are the same in all intervals: nothing depends on T."""
    settings = {
        "hidden": 5,
        "algorithm": "fedavg",
        "num_intervals": 4,
        "report_every": 1,
        "lr": 0.1,
        "schedule__data_size": 32,
        "schedule__kind": "explicit",
        "schedule__tau": (1, 3, 2, 1),
        "partition__kind": "iid",
    }
    return small(**settings | changes)


@pytest.fixture(scope="module")
def params():
    return tsfl_jax.simulate(config_of(num_intervals=2)).params


def equal(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_a_run_starts_where_another_ended(params):
    """With an η of nearly 0 nothing moves; else the loss begins where it ended."""
    still = tsfl_jax.simulate(config_of(num_intervals=1, lr=1e-30), params=params)
    assert equal(still.params, params)
    first = tsfl_jax.simulate(config_of(num_intervals=1), params=params)
    anew = tsfl_jax.simulate(config_of(num_intervals=1))
    assert first.history["train_loss"][0] < anew.history["train_loss"][0]
    assert "first parameters" in first.summary["fingerprints"]
    assert any("starts from trained" in note for note in first.summary["notes"])


def test_every_kind_of_file(params, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    names = traverse_util.flatten_dict(params, sep="/")
    dots = traverse_util.flatten_dict(params["params"], sep=".")
    np.savez(tmp_path / "model.npz", **names)
    safetensors.save_file(dots, tmp_path / "model.safetensors")
    (tmp_path / "model.msgpack").write_bytes(serialization.to_bytes(params))
    state = {**params, "step": np.int32(3), "opt_state": {"mu": np.zeros(2)}}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
    for name in ("model.npz", "model.safetensors", "model.msgpack", "model"):
        found = trained.read(tmp_path / name)
        assert equal(trained.fitted(found, params, name), params), name
    config = config_of(num_intervals=1, lr=1e-30)
    config.model.params = str(tmp_path / "model.npz")
    assert equal(tsfl_jax.simulate(config).params, params)


class Normalized(nnx.Module):
    """Parameters, batch statistics and a random stream."""

    def __init__(self, rngs):
        self.last = nnx.Linear(64, 10, rngs=rngs)
        self.norm = nnx.BatchNorm(10, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.last(x.reshape(len(x), -1))))


@pytest.mark.slow
def test_a_run_starts_from_a_state_of_nnx(tmp_path):
    """A state and its Orbax folder give the bits of the module as it stands."""
    module = Normalized(nnx.Rngs(7))
    module.norm.mean[...] = jnp.arange(10.0)
    state = nnx.state(module)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    config = config_of(num_intervals=1, hidden=None)
    variables = {"params": nnx.state(module, nnx.Param)}
    variables["state"] = nnx.state(module, nnx.BatchStat)
    variables = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.State(variables)))
    apart = variables | {"state": nnx.state(module, nnx.Not(nnx.Param))}
    for tree in (state, module, nnx.to_pure_dict(state), apart):
        assert equal(trained.fitted(trees.named(tree), variables, ""), variables)
    moved = tsfl_jax.simulate(config, model=module).params
    config.model.params = str(tmp_path / "state")
    run = functools.partial(tsfl_jax.simulate, config, model=Normalized)
    assert equal(run().params, moved)
    # What a run ends with is what the next one, and a module, start from.
    config.model.params = ""
    nnx.update(module, moved["params"])
    nnx.update(module, moved["state"])
    once, again = (run(params=tree).params for tree in (moved, nnx.state(module)))
    assert equal(once, again) and not equal(moved, again)


def managed(folder, **items):
    """Steps 2 and 10 of a `CheckpointManager`, and one that was never finished."""
    with orbax.checkpoint.CheckpointManager(folder) as manager:
        for step in (2, 10):
            args = {
                name: orbax.checkpoint.args.StandardSave(
                    {"w": np.full(2, step + place)}
                )
                for place, name in enumerate(items)
            }
            settings = orbax.checkpoint.args.JsonSave({"lr": 0.1})
            composite = orbax.checkpoint.args.Composite(settings=settings, **args)
            manager.save(step, args=composite)
    shutil.copytree(folder / "2", folder / "11.orbax-checkpoint-tmp")


def test_the_newest_finished_step_of_a_manager(tmp_path):
    managed(tmp_path / "one", state=0)
    managed(tmp_path / "two", params=0, ema=0)
    for path in ("one", "one/10", "one/10/state", "two/10/params"):
        assert trained.read(tmp_path / path)["w"].tolist() == [10, 10], path
    assert trained.read(tmp_path / "one/2")["w"].tolist() == [2, 2]
    with pytest.raises(UserError, match="10 holds ema, params; give the folder of one"):
        trained.read(tmp_path / "two")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="none: cannot be read"):
        trained.read(tmp_path / "none")


def test_numbers_of_other_types_keep_their_values():
    """Floats and integers become float32; a counter stays whole or is refused."""
    shapes = {"params": {"w": np.zeros(2, np.float32)}, "state": {"n": np.int32(0)}}

    def leaves(w, n):
        variables = {"params": {"w": w}, "state": {"n": n}}
        return jax.tree.leaves(trained.fitted(trees.named(variables), shapes, "x"))

    for w in (jnp.bfloat16([3, -1]), np.array([3, -1]), np.float64([3, -1])):
        vector, count = leaves(w, 2.0)
        assert (vector.dtype, count.dtype) == (np.float32, np.int32)
        assert (vector.tolist(), count.tolist()) == ([3, -1], 2)
    flat = trained.fitted({"w": np.ones(2), "n": 3}, shapes, "x")
    assert flat["state"]["n"] == 3  # where the network has it
    for n in (2.5, 2**40):
        with pytest.raises(UserError, match="x: state/n holds .*; expected int32 num"):
            leaves(np.zeros(2), n)
    for w in ([0, np.nan], [0, 1e39], [0, 1j]):
        with pytest.raises(UserError, match=r"params/w holds .* at \[[01]\]; expected"):
            leaves(np.array(w), 2)


def test_what_does_not_fit_is_one_line(params, tmp_path):
    wrong = jax.tree.map(np.array, params)
    wrong["params"]["Dense_0"].update(bias=np.zeros(6))
    for call in (tsfl_jax.explain, tsfl_jax.predict):
        with pytest.raises(UserError, match=r"bias is \[6\]; in the network it is \[5"):
            call(config_of(), params=wrong)
    wrong["params"].pop("Dense_0")
    with pytest.raises(UserError, match="no params/Dense_0/bias; the network has"):
        tsfl_jax.explain(config_of(), params=wrong)
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(UserError, match="text.npz"):
        trained.read(tmp_path / "text.npz")


def test_frozen_parameters_do_not_move(params):
    """And the others move as if the network began behind them."""
    config = config_of(num_intervals=2, clip_norm=0.5, model__frozen="Dense_0/")
    trained_params = tsfl_jax.simulate(config, params=params).params["params"]
    first, last = (params["params"][name] for name in ("Dense_0", "Dense_1"))
    assert equal(trained_params["Dense_0"], first)
    assert not np.array_equal(trained_params["Dense_1"]["kernel"], last["kernel"])
    data = load_dataset(config)

    def behind(x):
        x = ((x - data.mean) / data.std).reshape(len(x), -1)
        return np.maximum(x @ first["kernel"] + first["bias"], 0).astype(np.float32)

    other = data._replace(
        x_train=behind(data.x_train),
        x_test=behind(data.x_test),
        mean=np.zeros((), np.float32),
        std=np.ones((), np.float32),
    )
    head = tsfl_jax.simulate(
        replace(config, {"model.frozen": "", "model.hidden": 50}),
        model=nn.Dense(10),
        dataset=other,
        params=last,
    )
    chex.assert_trees_all_close(
        head.params["params"], trained_params["Dense_1"], rtol=1e-4
    )


def test_parameters_are_part_of_the_experiment(params, tmp_path):
    tsfl_jax.simulate(config_of(), params=params, workdir=tmp_path)
    with pytest.raises(UserError, match="another experiment.*first parameters"):
        tsfl_jax.simulate(config_of(), workdir=tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "learned"}, "was begun with 2, which lr_schedule=cosine, al"),
        ({"schedule.size_groups": "uniform(9, 40)"}, "another experiment .split:"),
    ],
)
def test_what_depends_on_t_is_refused(settings, words, tmp_path):
    config = replace(config_of(num_intervals=2), settings)
    tsfl_jax.simulate(config, workdir=tmp_path)
    with pytest.raises(UserError, match=words):
        tsfl_jax.simulate(replace(config, {"num_intervals": 5}), workdir=tmp_path)
