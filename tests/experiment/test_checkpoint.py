"""Checkpoints come back bit for bit, or are known to be damaged."""

import os
import pathlib
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
from absl import logging

from tsfl_jax.experiment import checkpoint
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
    """(step, tree) or None, and the notices given."""
    notices = []
    found = checkpoint.restore_latest(folder, _tree(99), meta, notices.append)
    assert all("\n" not in text for text in notices)
    return found, notices


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 5 and 10, to be copied."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    for step in (5, 10):
        checkpoint.save(folder, step, _tree(step), META)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run" / "checkpoints"))


def _files(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def test_round_trip(folder):
    (step, tree), notices = _restore(folder)
    assert step == 10
    _assert_same_bits(tree, _tree(10))
    assert notices == []


def test_shapes_alone_serve_as_template(folder):
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), _tree(0)
    )
    step, tree = checkpoint.restore_latest(folder, template, META)
    assert step == 10
    _assert_same_bits(tree, _tree(10))


def test_the_last_two_are_kept(folder):
    for step in (15, 100):
        checkpoint.save(folder, step, _tree(step), META)
    assert sorted(os.listdir(folder)) == ["100", "15"]
    (step, tree), _ = _restore(folder)
    assert step == 100  # by number, not by name
    _assert_same_bits(tree, _tree(100))


def test_no_checkpoint_is_no_news(tmp_path):
    assert _restore(tmp_path / "missing") == (None, [])
    assert _restore(tmp_path) == (None, [])


def _cut(path):
    os.truncate(path, path.stat().st_size // 2)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, pathlib.Path.unlink])
def test_damage_to_any_file_leads_to_the_checkpoint_before(folder, damage):
    files = _files(folder / "10")
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        damage(path)
        (step, tree), notices = _restore(folder)
        path.write_bytes(content)
        assert step == 5, path
        _assert_same_bits(tree, _tree(5))
        assert len(notices) == 1
        assert f"{folder}/10 is damaged" in notices[0]
    (step, _), notices = _restore(folder)
    assert (step, notices) == (10, [])


@pytest.mark.parametrize("content", ["", "{}", "[1]", "null", '{"sha256": "0"}'])
def test_a_description_with_other_content_is_damage(folder, content):
    (folder / "10" / "about.json").write_text(content)
    (step, _), notices = _restore(folder)
    assert step == 5
    assert "about.json" in notices[0]


def test_both_broken(folder):
    for step in (5, 10):
        _cut(max(_files(folder / str(step)), key=lambda path: path.stat().st_size))
    found, notices = _restore(folder)
    assert found is None
    assert len(notices) == 3
    assert "no intact checkpoint" in notices[-1]


def test_saving_goes_on_after_a_fallback(folder):
    _cut(max(_files(folder / "10"), key=lambda path: path.stat().st_size))
    assert _restore(folder)[0][0] == 5
    checkpoint.save(folder, 7, _tree(7), META)  # report_every may have changed
    assert sorted(os.listdir(folder)) == ["5", "7"]
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


def test_many_differences_are_counted(folder):
    with pytest.raises(UserError, match="and 1 more"):
        _restore(folder, {})


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree | {"half": np.zeros(4, jnp.bfloat16)},
        lambda tree: tree | {"half": np.zeros(3, np.float16)},
        lambda tree: tree | {"empty": np.zeros((0, 4), np.float32)},
        lambda tree: tree | {"another": 1},
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
    shutil.copytree(folder / "10", folder / ".unfinished-15")
    _cut(_files(folder / ".unfinished-15" / "arrays")[0])
    (folder / "notes.txt").write_text("mine")
    (folder / "20").write_text("a file")
    (folder / "old").mkdir()
    (folder / "007").mkdir()
    (found, _), notices = _restore(folder)
    assert found == 10
    assert notices == []
    checkpoint.save(folder, 15, _tree(15), META)
    assert _restore(folder)[0][0] == 15
    names = {"10", "15", "20", "007", "notes.txt", "old"}
    assert set(os.listdir(folder)) == names


def _swap(folder):
    (folder / "5").rename(folder / "aside")
    (folder / "10").rename(folder / "5")
    (folder / "aside").rename(folder / "10")


def _swap_arrays(folder):
    for name in ("5", "10"):
        (folder / name / "arrays").rename(folder / name / "aside")
    (folder / "5" / "aside").rename(folder / "10" / "arrays")
    (folder / "10" / "aside").rename(folder / "5" / "arrays")


@pytest.mark.parametrize(
    ("move", "found", "words"),
    [
        (_swap, None, "/10 is damaged and left out: its content is of interval 5"),
        (_swap_arrays, None, "/10 is damaged and left out: arrays/"),
        (lambda f: (f / "10").rename(f / "15"), 5, "content is of interval 10"),
        (lambda f: shutil.copytree(f / "5", f / "15"), 10, "content is of interval 5"),
        (lambda f: (f / "10/arrays/more").write_text("x"), 5, "more was added"),
    ],
)
def test_renamed_and_swapped_folders_give_way(folder, move, found, words):
    move(folder)
    restored, notices = _restore(folder)
    assert words in notices[0]
    assert (restored and restored[0]) == found
    if restored:
        _assert_same_bits(restored[1], _tree(found))


def test_a_checkpoint_without_its_interval_is_of_an_earlier_version(folder):
    path = folder / "10" / "about.json"
    about = checkpoint._read_about(path)
    about["meta"] = about.pop("identity")
    del about["interval"]
    checkpoint._write_about(path, about)
    (step, _), notices = _restore(folder)
    assert step == 5 and "an earlier version" in notices[0]


def test_what_orbax_cannot_read_is_a_damaged_checkpoint(folder, monkeypatch):
    import orbax.checkpoint as ocp

    real, calls = ocp.Checkpointer.restore, []

    def restore(self, path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 1:
            raise ValueError("another\nformat")
        return real(self, path, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore)
    (step, _), notices = _restore(folder)
    assert step == 5 and "Orbax cannot read it (another format)" in notices[0]


def test_an_empty_step_folder_is_a_damaged_checkpoint(folder):
    (folder / "15").mkdir()
    (step, _), notices = _restore(folder)
    assert step == 10
    assert len(notices) == 1


_SAVE_FOR_EVER = """
import sys, itertools, numpy as np
from tsfl_jax.experiment import checkpoint
for step in itertools.count(1):
    tree = {"a": np.random.default_rng(step).normal(size=100_000), "step": step}
    checkpoint.save(sys.argv[1], step, tree, {})
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_whole_checkpoints(tmp_path):
    template = {"a": np.zeros(100_000), "step": 0}
    command = [sys.executable, "-c", _SAVE_FOR_EVER, str(tmp_path)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not (tmp_path / "4").exists() and not (tmp_path / "5").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.003)
    process.send_signal(signal.SIGKILL)
    process.wait()
    notices = []
    step, tree = checkpoint.restore_latest(tmp_path, template, {}, notices.append)
    assert step >= 4
    assert notices == []
    expected = np.random.default_rng(step).normal(size=100_000)
    _assert_same_bits(tree, {"a": expected, "step": step})


def test_a_file_in_place_of_the_folder(tmp_path):
    path = tmp_path / "checkpoints"
    path.write_text("mine")
    assert _restore(path) == (None, [])
    with pytest.raises(UserError, match="cannot save") as caught:
        checkpoint.save(path, 1, _tree(1), META)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "mine"


def _half_full(self, path, *args, **kwargs):
    path.mkdir(parents=True)
    (path / "half").write_text("a file")
    raise ValueError("RESOURCE_EXHAUSTED: Error writing\nNo space left on device")


class _FullDisk(NamedTuple):
    free: int = 1000


@pytest.mark.parametrize("noticed", ["before", "while saving"])
def test_a_full_disk_is_reported_in_one_line_and_keeps_the_old(
    folder, monkeypatch, noticed
):
    import orbax.checkpoint as ocp

    monkeypatch.setattr(ocp.Checkpointer, "save", _half_full)
    if noticed == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: _FullDisk())
    with pytest.raises(UserError, match="No space left") as caught:
        checkpoint.save(folder, 15, _tree(15), META)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(folder)) == ["10", "5"]
    monkeypatch.undo()
    assert _restore(folder)[0][0] == 10


def test_mistakes_of_the_caller_are_not_blamed_on_the_disk(tmp_path):
    with pytest.raises(Exception) as caught:  # noqa: B017, Orbax decides on the kind
        checkpoint.save(tmp_path, 1, {"a": np.array(["text", "more"])}, META)
    assert not isinstance(caught.value, UserError)
    assert os.listdir(tmp_path) == []


def test_orbax_is_quiet_and_the_verbosity_restored(tmp_path, capfd):
    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    try:
        checkpoint.save(tmp_path, 1, _tree(1), META)
        _restore(tmp_path)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
