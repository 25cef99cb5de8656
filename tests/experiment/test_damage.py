"""Damaged files: what was damaged, and what the answer must say or recover."""

import io
import json
import pathlib
import shutil

import numpy as np
import pytest

from tests.experiment.test_runner import files, same, small
from tsfl_jax.engine import scan, structures
from tsfl_jax.experiment import checkpoint, runner, summary, sweep_folder
from tsfl_jax.report import files as report
from tsfl_jax.types import UserError


@pytest.fixture(scope="module")
def exp():
    return runner.build(small(measure_clients=True))


@pytest.fixture(scope="module")
def whole(exp, tmp_path_factory):
    """A finished run of 6 intervals; it keeps the checkpoints 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "now", lambda: 0.0)  # all saves are due
        runner.run(exp, folder)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    """Pictures take most of the time of a finished run."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(summary.runs, "write_figures", lambda *results: None)


# Damages: functions of a path


def flip(path, place=0.5):
    """Changes one bit."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0x04
    path.write_bytes(content)


def flip_number(path):
    """Changes one bit of the first array of an archive; headers hold unused bytes."""
    content = bytearray(path.read_bytes())
    content[content.index(b"\x93NUMPY") + 128 + 4] ^= 0x04
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def gone(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def text(content):
    return lambda path: path.write_text(content)


def raw(content):
    return lambda path: path.write_bytes(content)


def folder_instead(path):
    gone(path)
    path.mkdir()
    (path / "file").write_text("")


def renamed(name):
    return lambda path: path.rename(path.with_name(name))


def swapped(name):
    def swap(path):
        other, aside = path.with_name(name), path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)

    return swap


def edited(**changes):
    def edit(path):
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | changes))

    return edit


def arrays(**changes):
    """None leaves an array out."""

    def edit(path):
        with np.load(path) as held:
            found = dict(held) | changes
        np.savez(path, **{k: v for k, v in found.items() if v is not None})

    return edit


NEWEST, CONFIG = "checkpoints/6.npz", "config.json"
DAMAGED = "damaged and left out: "
AFRESH = "no intact checkpoint in"

# (what is damaged, how, words of a notice). The run ends with the same files as before.
RECOVERED = [
    (NEWEST, flip_number, DAMAGED),
    (NEWEST, swapped("4.npz"), AFRESH),
    (NEWEST, gone, "resuming after interval 4 of 6"),
    ("metrics.jsonl", gone, ""),
    ("summary.json", edited(best_test_accuracy=0.99, num_intervals=9), ""),
    ("clients.npz", arrays(rho=None), ""),
    (".lock", text("process 1 on another host"), ""),
    ("checkpoints/.6.npz.1234", text("half a file"), ""),
]
SINGLE = {"compile_seconds", "train_seconds", "samples_per_second"}


@pytest.mark.parametrize(("name", "damage", "words"), RECOVERED)
def test_damage_that_is_recovered(exp, whole, tmp_path, name, damage, words):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    damage(folder / name)
    printed = io.StringIO()
    result = runner.run(exp, folder, printed)
    assert words in printed.getvalue()
    same(files(folder), files(whole))
    config = (folder / CONFIG).read_bytes()
    assert config == (whole / CONFIG).read_bytes()
    summary, before = (report.read_json(f / "summary.json") for f in (folder, whole))
    assert report.plain(result.summary) == summary
    for key in before.keys() | summary.keys() - SINGLE:
        if key not in SINGLE:
            assert summary[key] == before[key], key


# (what is damaged, how, words of the refusal). Nothing is changed.
REFUSED = [
    ("summary.json", edited(compile_seconds="5"), "compile_seconds is '5'; delete"),
    ("summary.json", edited(versions=["jax"]), "summary.json: versions is "),
    ("checkpoints", gone, "holds a run without checkpoints; choose another"),
    (".lock", folder_instead, "Is a directory"),
    ("lanes", lambda p: p.mkdir(), "holds a sweep"),
]


@pytest.mark.parametrize(("name", "damage", "words"), REFUSED)
def test_damage_that_cannot_be_recovered_is_refused(
    exp, whole, tmp_path, name, damage, words
):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    damage(folder / name)
    before = {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}
    with pytest.raises(UserError, match=words) as error:
        runner.run(exp, folder)
    message = str(error.value)
    assert "\n" not in message and str(folder) in message
    assert {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")} == before


# (what is damaged, how, words): the file cannot be replaced.
BLOCKED = [
    ("metrics.jsonl", folder_instead, "metrics.jsonl"),
    ("clients.npz", folder_instead, "clients.npz"),
    (NEWEST, folder_instead, "cannot use .*6.npz: Is a directory"),
]


@pytest.mark.parametrize(("name", "damage", "words"), BLOCKED)
def test_a_file_that_cannot_be_written_is_named(
    exp, whole, tmp_path, name, damage, words
):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    damage(folder / name)
    with pytest.raises(UserError, match=words) as error:
        runner.run(exp, folder)
    assert "\n" not in str(error.value)
    gone(folder / name)  # then the same command goes on
    runner.run(exp, folder)
    same(files(folder), files(whole))


def test_figures_of_a_finished_run_are_drawn_anew(exp, whole, tmp_path, figures):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    for name in ("curves.png", "participation.png"):
        (folder / name).write_bytes(b"\x89PN")
    runner.run(exp, folder)
    for name in ("curves.png", "participation.png"):
        assert (folder / name).stat().st_size > 1000


@pytest.fixture
def figures():
    """Asks for real figures."""


# Programs that read the files of a finished run

METRICS = "metrics.jsonl"
NO_ROW = "line 1: not JSON of an interval and numbers"
T, N = 6, 4
# (what is damaged, how, words of the refusal)
READERS = [
    (METRICS, gone, "metrics.jsonl: No such file"),
    (METRICS, lambda p: flip(p, 0), "line 1: not JSON"),
    (METRICS, raw(b"\xff\n"), "line 1: not JSON"),
    (METRICS, text('{"interval": "a"}\n'), NO_ROW),
    (METRICS, text("[" * 100_000 + "\n"), "line 1: not JSON"),
    (METRICS, text('{"interval": 1, "test_loss": []}\n'), NO_ROW),
    ("clients.npz", gone, "cannot read .*clients.npz"),
    ("clients.npz", flip, "cannot read .*clients.npz"),
    ("clients.npz", arrays(tau=np.array([{}])), "cannot read .*clients.npz"),
]


@pytest.mark.parametrize(("name", "damage", "words"), READERS)
def test_damaged_files_of_a_finished_run(whole, tmp_path, name, damage, words):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    damage(folder / name)
    read = report.read_metrics if name == METRICS else report.read_arrays
    with pytest.raises(UserError, match=words) as error:
        read(folder / name)
    assert "\n" not in str(error.value)


# Lanes of a sweep

LANES = [
    flip_number,
    cut,
    renamed("b.npz"),
    arrays(lane=np.array("b")),
    arrays(rho=None),
    arrays(tau=np.array([{}])),
]


@pytest.mark.parametrize("damage", LANES)
def test_damaged_lanes_are_left_out(whole, tmp_path, damage):
    names = {*scan.History._fields, "tau", "virtual_time", "seconds"}
    names -= {*structures.OPTIONAL}  # only where they were asked for
    lane = {name: np.ones((T, N)) for name in names}
    path = sweep_folder.path_of(tmp_path, "a")
    path.parent.mkdir()
    report.write_arrays(path, lane | {"lane": np.array("a")})
    notices = []
    found = sweep_folder.finished_run(tmp_path, "a", notices.append)
    assert set(found) == names and not notices
    damage(path)
    for name in "ab":
        assert sweep_folder.finished_run(tmp_path, name, notices.append) is None
    assert len(notices) == 1 and "runs again" in notices[0]
