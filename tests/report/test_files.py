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


def _screen(text):
    """What remains visible of one terminal row after its carriage returns."""
    row = ""
    for part in text.split("\r"):
        row = part + row[len(part) :]
    return row.rstrip()


# Folders


def test_new_workdirs_of_one_minute_have_different_names(tmp_path, monkeypatch):
    monkeypatch.setattr(files.time, "strftime", lambda form: "20261121-0642")
    made = [files.new_workdir(tmp_path / "runs", "digits dms/0") for _ in range(3)]
    stem = "digits_dms_0-20261121-0642"
    assert [path.name for path in made] == [stem, f"{stem}-2", f"{stem}-3"]
    assert all(path.is_dir() for path in made)


def test_new_workdir_carries_date_and_time(tmp_path):
    name = files.new_workdir(tmp_path, "mnist_case1-fedavg-seed3").name
    assert re.fullmatch(r"mnist_case1-fedavg-seed3-20\d{6}-\d{4}", name)


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


# Metrics and arrays


def test_metrics_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"interval": 1, "virtual_time": 1.0, "test_accuracy": None, "num_dropped": 0},
        {"interval": 2, "virtual_time": 2.0, "test_accuracy": 0.5, "num_dropped": 1},
    ]
    files.write_metrics(path, rows)
    assert files.read_metrics(path) == rows
    assert [list(_strict(line)) for line in path.read_text().splitlines()] == [
        list(row) for row in rows
    ]
    files.write_metrics(path, [])
    assert files.read_metrics(path) == []


def test_metrics_write_nan_as_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    files.write_metrics(path, [{"interval": 1, "test_accuracy": np.float32("nan")}])
    assert path.read_text() == '{"interval": 1, "test_accuracy": null}\n'


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_an_incomplete_last_line_is_left_out(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    files.write_metrics(path, [{"interval": n, "loss": 0.25} for n in (1, 2)])
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2 + cut])
    assert files.read_metrics(path) == [{"interval": 1, "loss": 0.25}]


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
        "num_dropped": 0,
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
    trouble = {"num_dropped": 4, "diverged_at": 12, "best_test_accuracy": np.nan}
    text = progress.summary_text(trouble)
    assert "4 client models" in text
    assert "interval 12" in text
    assert "nan" not in text
    assert progress.summary_text({})


def test_progress_line():
    line = progress.progress_line(15, 50, 0.934, 0.3124, 6.25)
    assert line == (
        "interval 15/50, accuracy 93.4 %, loss 0.312, 2.4 intervals/s, 0:15 left"
        " [###-------]"
    )


def test_progress_counts_only_this_process():
    resumed = progress.progress_line(30, 50, 0.5, 1.0, 5.0, started_at=20)
    assert "2.0 intervals/s, 0:10 left" in resumed
    assert "6.0 intervals/s" in progress.progress_line(30, 50, 0.5, 1.0, 5.0)


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan")])
def test_progress_without_evaluation(missing):
    line = progress.progress_line(1, 50, missing, missing, 1.0)
    assert "accuracy –, loss –," in line


@pytest.mark.parametrize(
    ("done", "elapsed", "expected"),
    [
        (0, 0.0, "– intervals/s, – left [----------]"),
        (1, 0.0, "– intervals/s, – left"),
        (10, 7200.0, "0.0014 intervals/s, 8:00:00 left"),
        (10, 5.0, "2.0 intervals/s, 0:20 left [##--------]"),
        (50, 75.0, "0.67 intervals/s, done in 1:15"),
    ],
)
def test_progress_at_the_edges(done, elapsed, expected):
    assert expected in progress.progress_line(done, 50, 0.5, 1e-5, elapsed)


def test_a_terminal_shows_one_row_and_no_leftovers():
    stream = _Terminal()
    progress.update_line("a long line that will be replaced", stream)
    progress.update_line("short", stream)
    assert "\n" not in stream.getvalue()
    assert _screen(stream.getvalue()) == "short"
    progress.update_line("end", stream, last=True)
    assert stream.getvalue().count("\n") == 1
    assert _screen(stream.getvalue()) == "end"


def test_a_narrow_terminal_omits_the_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = _Terminal()
    line = progress.progress_line(150, 500, 0.934, 0.312, 60.0)
    assert len(line) > 79
    progress.update_line(line, stream)
    assert _screen(stream.getvalue()) == line.split(" [")[0]
    monkeypatch.setenv("COLUMNS", "30")
    stream = _Terminal()
    progress.update_line(line, stream)
    assert stream.getvalue() == f"\r{line[:29]}"


def test_elsewhere_every_update_is_a_line():
    stream = io.StringIO()
    progress.update_line("one", stream)
    progress.update_line("two", stream, last=True)
    progress.log(stream, "three")
    progress.warn_to(stream)("four")
    assert stream.getvalue() == "one\ntwo\nthree\nfour\n"


def test_an_ascii_stream_gets_question_marks():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress.update_line("accuracy –", stream)
    assert stream.buffer.getvalue() == b"accuracy ?\n"


def test_without_a_stream_only_warnings_are_passed_on(caplog, capsys):
    progress.update_line("line", None)
    progress.log(None, "text")
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
