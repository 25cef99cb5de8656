"""Workdir files are whole and strict; the terminal shows true numbers."""

import importlib.metadata
import io
import json
import logging
import os
import re

import jax.numpy as jnp
import numpy as np
import pandas
import pytest

from tsfl_jax.report import files, progress
from tsfl_jax.types import UserError


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _strict(text):
    """JSON as other languages read it: no NaN, no Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


# Folders


def test_new_workdirs_of_one_minute_have_different_names(tmp_path, monkeypatch):
    monkeypatch.setattr(files.time, "strftime", lambda form: "20261121-0642")
    made = [files.new_workdir(tmp_path / "runs", "digits dms/0") for _ in range(3)]
    stem = "digits_dms_0-20261121-0642"
    assert [path.name for path in made] == [stem, f"{stem}-2", f"{stem}-3"]
    assert all(path.is_dir() for path in made)


def test_prepare_workdir_makes_parents_and_leaves_nothing_in_it(tmp_path):
    path = files.prepare_workdir(str(tmp_path / "a" / "b"))
    assert path == tmp_path / "a" / "b"
    assert list(path.iterdir()) == []
    assert files.prepare_workdir(path) == path


def test_a_file_cannot_be_a_workdir(tmp_path):
    (tmp_path / "file").write_text("mine")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="--workdir") as caught:
            files.prepare_workdir(bad)
        assert str(bad) in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError):
            files.new_workdir(bad, "label")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_disk_is_reported(tmp_path, monkeypatch):
    def refuse(self, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files.pathlib.Path, "write_bytes", refuse)
    with pytest.raises(UserError, match="Read-only"):
        files.prepare_workdir(tmp_path)


# JSON


def test_write_json_is_strict_and_keeps_order(tmp_path):
    value = {
        "z": np.float32(0.5),
        "a": [np.nan, -np.inf, float("inf"), np.float64(np.nan)],
        "array": np.array([[1, 2], [3, 4]], np.int32),
        "nan_array": np.array([1, np.nan], np.float32),
        "flag": np.bool_(True),
        "count": np.int64(7),
        "device": jnp.float32(2),
        "path": tmp_path,
        "nested": {"tuple": (1, None, "ü")},
    }
    files.write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    found = _strict(text)
    assert list(found) == list(value)
    assert found == {
        "z": 0.5,
        "a": [None] * 4,
        "array": [[1, 2], [3, 4]],
        "nan_array": [1.0, None],
        "flag": True,
        "count": 7,
        "device": 2.0,
        "path": str(tmp_path),
        "nested": {"tuple": [1, None, "ü"]},
    }
    assert type(found["count"]) is int
    assert found["flag"] is True


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"new": object()})
    with pytest.raises(TypeError):
        files.write_metrics(path, [{"interval": 1}, {"interval": object()}])
    with pytest.raises(ValueError, match="half"):
        files.write_arrays(path, {"a": _Unsavable()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["x.json"]


class _Unsavable:
    def __array__(self, dtype=None, copy=None):
        raise ValueError("half")


def test_a_full_disk_is_reported_in_one_line(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match="No space left") as caught:
        files.write_metrics(path, [{"interval": 1}])
    assert str(path) in str(caught.value)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other").write_text("theirs")
    for target in ("other", "gone"):
        path = tmp_path / f"to {target}"
        path.symlink_to(tmp_path / target)
        files.write_text(path, "ours")
        assert path.read_text() == "ours" and not path.is_symlink()
    assert (tmp_path / "other").read_text() == "theirs"
    assert not (tmp_path / "gone").exists()


# Metrics and arrays


def test_metrics_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"interval": 1, "virtual_time": 1.0, "test_accuracy": None, "num_discarded": 0},
        {"interval": 2, "virtual_time": 2.0, "test_accuracy": 0.5, "num_discarded": 1},
    ]
    files.write_metrics(path, rows)
    assert files.read_metrics(path) == rows
    assert [list(_strict(line)) for line in path.read_text().splitlines()] == [
        list(row) for row in rows
    ]
    files.write_metrics(path, [])
    assert files.read_metrics(path) == []


def test_a_broken_line_in_the_middle_is_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"interval": 1}\n{"inter\n{"interval": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        files.read_metrics(path)
    with pytest.raises(UserError, match="nowhere"):
        files.read_metrics(tmp_path / "nowhere")


def test_clients_and_arrays_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    tau = rng.integers(0, 9, (4, 3), np.int32)
    rho = rng.random((4, 3), np.float32)
    arrays = {"tau": tau, "size": tau + 5, "rho": rho, "selected": rho > 0.5}
    files.write_arrays(tmp_path / "clients.npz", arrays, compress=True)
    with np.load(tmp_path / "clients.npz") as found:
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)
        assert found["rho"].dtype == np.float32
    files.write_arrays(tmp_path / "model.npz", {"params/Dense_0/kernel": rho})
    with np.load(tmp_path / "model.npz") as found:
        np.testing.assert_array_equal(found["params/Dense_0/kernel"], rho)
    assert sorted(os.listdir(tmp_path)) == ["clients.npz", "model.npz"]


def test_versions_name_the_packages():
    found = files.versions()
    assert found["jax"] == importlib.metadata.version("jax")
    assert set(found) >= {"python", "jaxlib", "flax", "optax", "numpy", "tsfl_jax"}
    commit = found["git_commit"]
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)


def test_versions_do_without_git(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(files.subprocess, "run", missing)
    assert files.versions()["git_commit"] is None


# Text for a person


def test_summary_text_is_aligned_and_complete():
    summary = {
        "data": "digits",
        "algorithm": "dms",
        "seed": 3,
        "num_intervals": 50,
        "best_test_accuracy": 0.9412,
        "final_test_accuracy": 0.9351,
        "compile_seconds": 4.06,
        "train_seconds": 12.34,
        "samples_per_second": 18345.4,
        "num_discarded": 0,
        "diverged_at": None,
    }
    text = progress.summary_text(summary, "runs/x")
    assert text.splitlines() == [
        "run            digits, dms, seed 3",
        "test accuracy  best 94.1 %, final 93.5 %",
        "intervals      50",
        "time           12.3 s training, 4.1 s compiling",
        "speed          18,345 samples/s",
        "files          runs/x",
    ]


def test_summary_text_reports_trouble_and_needs_no_key():
    trouble = {"num_discarded": 4, "diverged_at": 12, "best_test_accuracy": np.nan}
    text = progress.summary_text(trouble)
    assert "4 client models" in text
    assert "interval 12" in text
    assert "nan" not in text
    assert progress.summary_text({})


def test_progress_line():
    line = progress.progress_line(15, 50, (5, 9_000, 2.0), "accuracy 93.4 %")
    assert line == "interval 15/50, accuracy 93.4 %, 4,500 samples/s, 0:14 left"
    line = progress.progress_line(0, 50, (0, 0, 0.0), "accuracy –")
    assert line == "interval 0/50, accuracy –, – samples/s, –"
    assert progress.results_text(0.934, 0.3124) == "accuracy 93.4 %, loss 0.312"
    assert progress.results_text(np.nan, np.nan) == "accuracy –, loss –"


def test_elsewhere_every_chunk_is_a_line_and_a_resumed_run_has_its_own_speed():
    stream = io.StringIO()
    with progress.bar(stream, 50, 20) as advance:
        advance(10, 300, 5.0, "accuracy 50.0 %")
        progress.warn_to(stream)("a warning")
        advance(20, 600, 70.0, "accuracy 60.0 %")
    assert stream.getvalue().splitlines() == [
        "interval 30/50, accuracy 50.0 %, 60 samples/s, 0:10 left",
        "a warning",
        "interval 50/50, accuracy 60.0 %, 12 samples/s, done in 1:15",
    ]


def test_a_terminal_has_one_bar_in_its_last_row(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    with progress.bar(stream, 50) as advance:
        advance(10, 300, 5.0, "accuracy 50.0 % (lr=[0.1])")
        progress.log(stream, "a note")
        advance(40, 600, 70.0, "accuracy 60.0 %")
    text = stream.getvalue()
    assert "\r\x1b[2Ka note\n" in text
    assert "interval 50/50, accuracy 60.0 %, 12 samples/s, done in 1:15" in text
    assert text.count("\n") <= 3


def test_an_ascii_stream_gets_question_marks():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress.log(stream, "accuracy –")
    assert stream.buffer.getvalue() == b"accuracy ?\n"


def test_without_a_stream_only_warnings_are_passed_on(caplog, capsys):
    with progress.bar(None, 1) as advance:
        advance(1, 1, 1.0, "")
    with caplog.at_level(logging.WARNING, logger="tsfl_jax"):
        progress.warn_to(None)("100 % damaged")
    assert [record.getMessage() for record in caplog.records] == ["100 % damaged"]
    assert capsys.readouterr().out == ""


def test_a_bar_in_a_cell_of_markdown_is_no_border():
    table = files.markdown([{"weights": "by |D_i|", "%": 1}])
    head, _, row = table.splitlines()
    assert head == "| weights | % |" and row == "| by \\|D_i\\| | 1 |"


def test_a_table_has_empty_cells_for_what_is_missing(tmp_path):
    rows = [{"a": 1, "b": None}, {"a": 2, "c": 0.1}]
    files.write_csv(tmp_path / "x.csv", rows)
    assert (tmp_path / "x.csv").read_text() == "a,b,c\n1,,\n2,,0.1\n"
    columns = {"i": [1, 2], "x": np.array([0.1, np.inf], np.float32)}
    files.write_csv(tmp_path / "x.csv", pandas.DataFrame(columns))
    assert (tmp_path / "x.csv").read_text() == "i,x\n1,0.10000000149011612\n2,\n"
