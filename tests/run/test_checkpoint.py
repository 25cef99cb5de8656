"""Checkpoints come back bit for bit, or are known to be damaged; when they are saved.

What a run makes of damaged ones is in `test_damage`.
"""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.run.test_damage import cut, text
from tsfl_jax.report import files
from tsfl_jax.run import checkpoint
from tsfl_jax.types import UserError

META = {"lr": 0.003, "data": {"name": "digits", "shape": (28, 28)}, "seed": 0}


class _State(NamedTuple):
    params: Any
    interval: Any


def _tree(seed):
    """Every kind of leaf that a run may hold, and awkward names and bits."""
    rng = np.random.default_rng(seed)
    kernel = jnp.asarray(rng.normal(size=(64, 33)), jnp.float32)
    params = {"params": {"Dense_0": {"kernel": kernel}}, "batch_stats": {}}
    return {
        "state": _State(params, np.int32(seed)),
        "half": jnp.full((3,), seed + 0.5, jnp.bfloat16),
        "bits": np.array([np.nan, -np.nan, -0.0, np.inf, 5e-324]),
        "scalars": (seed, 0.1, np.bool_(seed % 2), np.uint32(2**32 - 1)),
        "flags": rng.random(7) > 0.5,
        "fortran": np.asfortranarray(rng.normal(size=(3, 4))),
        "empty": np.zeros((0, 3), np.float32),
        "nothing": None,
        "a/b.c ['x']": np.ones(2, np.int8),
        "a": {"b": np.arange(4)},
    }


def _same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b)
        assert type(a) is np.ndarray
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert a.flags.writeable


def _restore(folder, meta=META):
    """(interval or None, notices); the tree has the bits of what was saved then."""
    notices = []
    restored = checkpoint.restore_latest(folder, _tree(99), meta, notices.append)
    assert all("\n" not in notice for notice in notices)
    if restored is None:
        return None, notices
    _same_bits(restored[1], _tree(restored[0]))
    return restored[0], notices


@pytest.fixture
def folder(tmp_path):
    """Intervals 5 and 10."""
    path = tmp_path / "run" / "checkpoints"
    for interval in (5, 10):
        checkpoint.save(path, interval, _tree(interval), META)
    return path


def test_round_trip_of_the_last_two(folder):
    assert _restore(folder) == (10, [])
    assert _restore(folder / "missing") == _restore(folder.parent) == (None, [])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), _tree(0)
    )
    _same_bits(checkpoint.restore_latest(folder, shapes, META)[1], _tree(10))
    for interval in (15, 100):
        checkpoint.save(folder, interval, _tree(interval), META)
    assert sorted(os.listdir(folder)) == ["100.npz", "15.npz"]
    assert _restore(folder) == (100, [])  # by number, not by name


def test_no_changed_bit_passes(folder):
    path = folder / "10.npz"
    content = path.read_bytes()
    restored = set()
    for place in range(0, len(content), 97):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        interval, notices = _restore(folder)  # some bytes of a zip mean nothing
        assert len(notices) == (interval == 5)
        restored.add(interval)
    assert restored == {5, 10}


def _rewritten(path):
    """A whole .npz again, in which one number has changed."""
    arrays = files.read_arrays(path)
    arrays["1"][0] = 7.0
    files.write_arrays(path, arrays)


# (the damage of 10.npz, what is restored, words of the notice)
DAMAGES = [
    (cut, 5, "10.npz"),
    (_rewritten, 5, "10.npz has changed"),
    (lambda path: np.savez(path, about=np.array([{}], object)), 5, "10.npz"),
    (lambda path: path.rename(path.with_name("15.npz")), 5, "is of interval 10"),
    (lambda path: [text("")(other) for other in path.parent.iterdir()], None, "5.npz"),
]


@pytest.mark.parametrize(("damage", "interval", "words"), DAMAGES)
def test_damage_leads_to_the_checkpoint_before(folder, damage, interval, words):
    damage(folder / "10.npz")
    restored, notices = _restore(folder)
    assert restored == interval
    assert any("damaged and left out" in n and words in n for n in notices)
    assert (interval is None) == any("no intact checkpoint" in n for n in notices)


def test_another_experiment_is_recognized_by_its_settings(folder):
    meta = META | {"lr": 0.1, "data": {"name": "mnist", "shape": (28, 28)}, "new": True}
    with pytest.raises(UserError) as caught:
        _restore(folder, meta)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    for part in ("lr: 0.003 → 0.1", '"digits" → "mnist"', "new: – → true", "--workdir"):
        assert part in message
    assert "seed" not in message and "shape" not in message
    with pytest.raises(UserError, match="and 1 more"):
        _restore(folder, {})
    # The settings are compared as JSON.
    same = META | {"data": {"shape": [28, 28], "name": "digits"}}
    assert _restore(folder, same)[0] == 10


def test_another_layout_is_another_experiment(folder):
    with pytest.raises(UserError, match="shapes or types"):
        half = {"half": np.zeros(3, np.float16)}
        checkpoint.restore_latest(folder, _tree(0) | half, META)


def test_a_full_disk_is_reported_in_one_line_and_keeps_the_old(folder, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left") as caught:
        checkpoint.save(folder, 15, _tree(15), META)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(folder)) == ["10.npz", "5.npz"]
