"""Checkpoints come back bit for bit, or are known to be damaged."""

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tsfl_jax.experiment import checkpoint
from tsfl_jax.report import files
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


def _assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b)
        assert type(a) is np.ndarray
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert a.flags.writeable


def _restore(folder, meta=META):
    """(interval, tree) or None, and the notices given."""
    notices = []
    found = checkpoint.restore_latest(folder, _tree(99), meta, notices.append)
    assert all("\n" not in text for text in notices)
    return found, notices


@pytest.fixture
def folder(tmp_path):
    """Intervals 5 and 10."""
    path = tmp_path / "run" / "checkpoints"
    for interval in (5, 10):
        checkpoint.save(path, interval, _tree(interval), META)
    return path


def test_round_trip(folder):
    (interval, tree), notices = _restore(folder)
    assert interval == 10
    _assert_same_bits(tree, _tree(10))
    assert notices == []
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), _tree(0)
    )
    _assert_same_bits(checkpoint.restore_latest(folder, shapes, META)[1], _tree(10))


def test_the_last_two_are_kept(folder):
    for interval in (15, 100):
        checkpoint.save(folder, interval, _tree(interval), META)
    assert sorted(os.listdir(folder)) == ["100.npz", "15.npz"]
    (interval, tree), _ = _restore(folder)
    assert interval == 100  # by number, not by name
    _assert_same_bits(tree, _tree(100))


def test_no_checkpoint_is_no_news(tmp_path):
    assert _restore(tmp_path / "missing") == (None, [])
    assert _restore(tmp_path) == (None, [])


def test_no_changed_bit_passes(folder):
    path = folder / "10.npz"
    content = path.read_bytes()
    found = set()
    for place in range(0, len(content), 97):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        (interval, tree), notices = _restore(folder)
        _assert_same_bits(tree, _tree(interval))  # some bytes of a zip mean nothing
        assert len(notices) == (interval == 5)
        found.add(interval)
    assert found == {5, 10}


def _rewritten(change):
    """The arrays of a checkpoint after a change, as a whole .npz again."""

    def rewrite(path):
        arrays = files.read_arrays(path)
        change(arrays)
        files.write_arrays(path, arrays)

    return rewrite


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: path.write_text("no archive"),
        _rewritten(lambda arrays: arrays.clear()),
        _rewritten(lambda arrays: arrays.pop("sha256")),
        _rewritten(lambda arrays: arrays.update(more=np.ones(1))),
        _rewritten(lambda arrays: arrays.update({"0": arrays["1"]})),
        _rewritten(lambda arrays: arrays["1"].__setitem__(0, 7.0)),
    ],
)
def test_damage_leads_to_the_checkpoint_before(folder, damage):
    damage(folder / "10.npz")
    (interval, tree), notices = _restore(folder)
    assert interval == 5
    _assert_same_bits(tree, _tree(5))
    assert len(notices) == 1
    assert "damaged and left out" in notices[0]
    assert str(folder / "10.npz") in notices[0]


def test_pickles_are_not_read(folder):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(folder / "trap"),)

    np.savez(folder / "10.npz", about=np.array([Trap()], object))
    assert _restore(folder)[0][0] == 5
    assert not (folder / "trap").exists()


def test_both_broken(folder):
    for path in folder.iterdir():
        path.write_text("")
    found, notices = _restore(folder)
    assert found is None
    assert len(notices) == 3
    assert "no intact checkpoint" in notices[-1]


def test_saving_goes_on_after_a_fallback(folder):
    (folder / "10.npz").write_text("")
    assert _restore(folder)[0][0] == 5
    checkpoint.save(folder, 7, _tree(7), META)  # report_every may have changed
    assert sorted(os.listdir(folder)) == ["5.npz", "7.npz"]
    assert _restore(folder)[0][0] == 7
    checkpoint.save(folder, 7, _tree(8), META)
    _assert_same_bits(_restore(folder)[0][1], _tree(8))


def test_another_experiment_is_recognized_by_its_settings(folder):
    meta = META | {"lr": 0.1, "data": {"name": "mnist", "shape": (28, 28)}, "new": True}
    with pytest.raises(UserError) as caught:
        _restore(folder, meta)
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        str(folder),
        "lr: 0.003 → 0.1",
        'data.name: "digits" → "mnist"',
        "new: – → true",
        "--workdir",
        "delete",
    ):
        assert part in text
    assert "seed" not in text
    assert "shape" not in text
    with pytest.raises(UserError, match="and 1 more"):
        _restore(folder, {})


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree | {"half": np.zeros(4, jnp.bfloat16)},
        lambda tree: tree | {"half": np.zeros(3, np.float16)},
        lambda tree: {k: v for k, v in tree.items() if k != "a"},
    ],
)
def test_another_layout_is_another_experiment(folder, change):
    with pytest.raises(UserError, match="shapes or types"):
        checkpoint.restore_latest(folder, change(_tree(0)), META)


def test_meta_is_compared_as_json(folder):
    meta = META | {"data": {"shape": [28, 28], "name": "digits"}}
    assert _restore(folder, meta)[0][0] == 10
    meta = {"odd": {2: None, 10: float("nan")}}
    checkpoint.save(folder, 15, _tree(15), meta)
    assert _restore(folder, meta)[0][0] == 15


def test_leftovers_and_junk_are_ignored(folder):
    (folder / ".15.npz.4321").write_text("half")
    for name in ("notes.txt", "20", "007.npz", "old.npz"):
        (folder / name).write_text("mine")
    (folder / "30.npz").mkdir()
    (interval, _), notices = _restore(folder)
    assert (interval, notices) == (10, [])
    checkpoint.save(folder, 15, _tree(15), META)
    assert _restore(folder)[0][0] == 15
    names = {path.name for path in folder.iterdir() if path.stem.isdecimal()}
    assert names == {"10.npz", "15.npz", "20", "007.npz", "30.npz"}


def _swap(folder):
    (folder / "5.npz").rename(folder / "aside")
    (folder / "10.npz").rename(folder / "5.npz")
    (folder / "aside").rename(folder / "10.npz")


@pytest.mark.parametrize(
    ("move", "found", "words"),
    [
        (_swap, None, "10.npz is of interval 5"),
        (lambda f: (f / "10.npz").rename(f / "15.npz"), 5, "15.npz is of interval 10"),
        (lambda f: shutil.copy(f / "5.npz", f / "15.npz"), 10, "is of interval 5"),
    ],
)
def test_renamed_and_swapped_files_give_way(folder, move, found, words):
    move(folder)
    restored, notices = _restore(folder)
    assert words in notices[0]
    assert (restored and restored[0]) == found
    if restored:
        _assert_same_bits(restored[1], _tree(found))


_SAVE_FOR_EVER = """
import sys, itertools, numpy as np, pathlib
from tsfl_jax.experiment import checkpoint
for step in itertools.count(1):
    tree = {"a": np.random.default_rng(step).normal(size=100_000), "step": step}
    checkpoint.save(pathlib.Path(sys.argv[1]), step, tree, {})
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_whole_checkpoints(tmp_path):
    template = {"a": np.zeros(100_000), "step": 0}
    command = [sys.executable, "-c", _SAVE_FOR_EVER, str(tmp_path)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("[0-9]*.npz"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.003)
    process.send_signal(signal.SIGKILL)
    process.wait()
    notices = []
    step, tree = checkpoint.restore_latest(tmp_path, template, {}, notices.append)
    assert notices == []
    expected = np.random.default_rng(step).normal(size=100_000)
    _assert_same_bits(tree, {"a": expected, "step": step})


def test_a_file_in_place_of_the_folder(tmp_path):
    path = tmp_path / "checkpoints"
    path.write_text("mine")
    assert _restore(path) == (None, [])
    with pytest.raises(UserError, match="cannot use") as caught:
        checkpoint.save(path, 1, _tree(1), META)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "mine"


def test_a_full_disk_is_reported_in_one_line_and_keeps_the_old(folder, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left") as caught:
        checkpoint.save(folder, 15, _tree(15), META)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(folder)) == ["10.npz", "5.npz"]
    monkeypatch.undo()
    assert _restore(folder)[0][0] == 10


def test_a_save_waits_until_the_last_one_is_amortized():
    assert checkpoint.LastSave().due(0.0)
    written = checkpoint.LastSave(at=100.0, cost=0.2)  # 2 % of 10 s
    assert not written.due(109.9) and written.due(110.1)
    slow = checkpoint.LastSave(at=100.0, cost=1000.0)
    assert not slow.due(390.0) and slow.due(401.0)
