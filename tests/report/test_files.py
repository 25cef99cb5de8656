"""Workdir files are whole and strict; the terminal shows true numbers."""

import importlib.metadata
import io
import itertools
import json
import os
import re
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import pandas
import pytest

from tsfl_jax.report import files, progress
from tsfl_jax.types import UserError


def strict(text):
    """JSON as other languages read it: no NaN, no Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_workdir_has_parents_and_nothing_in_it_and_is_no_file(tmp_path, monkeypatch):
    path = files.prepare_workdir(str(tmp_path / "a" / "b"))
    assert path == tmp_path / "a" / "b" == files.prepare_workdir(path)
    assert list(path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    for make in (files.prepare_workdir, lambda path: files.new_workdir(path, "label")):
        with pytest.raises(UserError, match="--workdir"):
            make(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"
    monkeypatch.setattr(files.time, "strftime", lambda form: "20261121-0642")
    paths = [files.new_workdir(tmp_path / "runs", "digits dms/0") for _ in range(3)]
    stem = "digits_dms_0-20261121-0642"
    assert [path.name for path in paths] == [stem, f"{stem}-2", f"{stem}-3"]


def test_write_json_is_strict_and_keeps_order(tmp_path):
    value = {
        "z": np.float32(0.5),
        "a": [np.nan, -np.inf, np.float64(np.nan)],
        "array": np.array([[1, 2], [3, 4]], np.int32),
        "device": jnp.float32(2),
        "path": tmp_path,
        "nested": {"tuple": (1, None, "ü")},
    }
    files.write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    read = strict(text)
    assert list(read) == list(value)
    assert read == {
        "z": 0.5,
        "a": [None] * 3,
        "array": [[1, 2], [3, 4]],
        "device": 2.0,
        "path": str(tmp_path),
        "nested": {"tuple": [1, None, "ü"]},
    }


class _Unsavable:
    def __array__(self, dtype=None, copy=None):
        raise ValueError("half")


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    files.write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"new": object()})
    with pytest.raises(TypeError):
        files.write_metrics(path, [{"interval": 1}, {"interval": object()}])
    with pytest.raises(ValueError, match="half"):
        files.write_arrays(path, {"a": _Unsavable()})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left") as caught:
        files.write_metrics(path, [{"interval": 1}])
    assert str(path) in str(caught.value)
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other").write_text("theirs")
    for target in ("other", "gone"):
        path = tmp_path / f"to {target}"
        path.symlink_to(tmp_path / target)
        files.write_text(path, "ours")
        assert path.read_text() == "ours" and not path.is_symlink()
    assert (tmp_path / "other").read_text() == "theirs"
    assert not (tmp_path / "gone").exists()


def test_metrics_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"interval": 1, "virtual_time": 1.0, "test_accuracy": None, "num_discarded": 0},
        {"interval": 2, "virtual_time": 2.0, "test_accuracy": 0.5, "num_discarded": 1},
    ]
    files.write_metrics(path, rows)
    assert files.read_metrics(path) == rows
    lines = path.read_text().splitlines()
    assert [list(strict(line)) for line in lines] == [list(row) for row in rows]
    files.write_metrics(path, [])
    assert files.read_metrics(path) == []
    path.write_text('{"interval": 1}\n{"inter\n{"interval": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        files.read_metrics(path)
    with pytest.raises(UserError, match="nowhere"):
        files.read_metrics(tmp_path / "nowhere")


def test_arrays_round_trip(tmp_path):
    rho = np.random.default_rng(0).random((4, 3), np.float32)
    arrays = {"rho": rho, "params/Dense_0/kernel": rho[:1]}
    for compress in (False, True):
        files.write_arrays(tmp_path / "a.npz", arrays, compress=compress)
        read = files.read_arrays(tmp_path / "a.npz")
        assert list(read) == list(arrays) and read["rho"].dtype == np.float32
        np.testing.assert_array_equal(read["rho"], rho)


def test_versions_name_the_packages_and_do_without_git(monkeypatch):
    versions = files.versions()
    assert versions["jax"] == importlib.metadata.version("jax")
    assert set(versions) >= {"python", "jaxlib", "flax", "optax", "numpy", "tsfl_jax"}

    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(files.subprocess, "run", missing)
    uncached = files._commit.__wrapped__  # conftest keeps its answer
    monkeypatch.setattr(files, "_commit", uncached)
    assert files.versions()["git_commit"] is None


def test_tables_have_empty_cells_for_what_is_missing_and_keep_bars(tmp_path):
    path = tmp_path / "x.csv"
    files.write_csv(path, [{"a": 1, "b": None}, {"a": 2, "c": 0.1}])
    assert path.read_text() == "a,b,c\n1,,\n2,,0.1\n"
    columns = {"i": [1, 2], "x": np.array([0.1, np.inf], np.float32)}
    files.write_csv(path, pandas.DataFrame(columns))
    assert path.read_text() == "i,x\n1,0.10000000149011612\n2,\n"
    head, _, row = files.markdown([{"weights": "by |D_i|", "%": 1}]).splitlines()
    assert head == "| weights | % |" and row == "| by \\|D_i\\| | 1 |"


def test_summary_text_is_aligned_and_leaves_out_what_is_not_known():
    summary = {"data": "digits", "algorithm": "dms", "seed": 3, "num_discarded": 0}
    summary |= {"best_test_accuracy": 0.9412, "final_test_accuracy": 0.9351}
    summary |= {"final_test_loss": 0.2, "diverged_at": None}
    assert progress.summary_text(summary, "runs/x").splitlines() == [
        "run            digits, dms, seed 3",
        "test accuracy  best 94.1 %, final 93.5 %",
        "files          runs/x",
    ]
    trouble = {"num_discarded": 4, "diverged_at": 12, "best_test_accuracy": np.nan}
    lines = progress.summary_text(trouble | {"final_test_loss": 0.25}).splitlines()
    assert lines[0] == "test loss      final 0.25" and len(lines) == 3
    assert "4 client models" in lines[1] and "interval 12" in lines[2]
    assert progress.summary_text({}) == ""


def test_elsewhere_every_call_is_a_line_and_a_resumed_run_has_its_own_speed():
    stream = io.StringIO()
    compiles = [20.0, 40.0, 0.0]  # still to come
    advance = progress.bar(stream, 60, 20, lambda: compiles.pop(0))
    advance(10, 300, 5.0, "accuracy 50.0 %")
    progress.warn_to(stream)("a warning")
    advance(20, 600, 70.0, "accuracy 60.0 %")
    advance(10, 300, 0.0, "accuracy 70.0 %")
    assert stream.getvalue().splitlines() == [
        "interval 30/60, accuracy 50.0 %, 60 samples/s, 0:00:35 left",
        "a warning",
        "interval 50/60, accuracy 60.0 %, 12 samples/s, 0:01:05 left",
        "interval 60/60, accuracy 70.0 %, 16 samples/s, done in 0:01:15",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_long_task_ticks_and_leaves_no_thread(monkeypatch, capsys, is_terminal):
    stream, seconds = io.StringIO(), itertools.count(0, 10)
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(progress, "PERIOD", 0.002)
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(progress, "time", clock)
    before = threading.active_count()
    with (
        pytest.raises(KeyboardInterrupt),
        progress.ticking(stream, "compiling", " (it)"),
    ):
        while "20 s" not in stream.getvalue():
            time.sleep(0.001)
        raise KeyboardInterrupt
    assert threading.active_count() == before
    lines = re.split("\r\x1b\\[2K|\n", stream.getvalue())
    expected = ["compiling … 10 s (it)", "compiling … 20 s (it)"]
    assert [line for line in lines if line][:2] == expected
    with progress.ticking(None, "compiling"):
        time.sleep(0.01)
    assert threading.active_count() == before and not any(capsys.readouterr())


def test_a_terminal_has_one_line_of_progress(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    stream.isatty = lambda: True
    advance = progress.bar(stream, 50, 0)
    advance(10, 300, 5.0, "accuracy 50.0 % (lr=[0.1])")
    progress.log(stream, "a note")
    advance(40, 600, 70.0, "accuracy 60.0 %")
    text = stream.getvalue()
    first, second, third = text.removeprefix("\r\x1b[2K").split("\r\x1b[2K")
    assert first == "interval 10/50, acc" and second == "a note\n"
    assert third == "interval 50/50, accuracy 60.0 %, 12 samples/s, done in 0:01:15\n"
