"""Folders of runs and sweeps: stopped anywhere, damaged, locked, removed, blocked.

The next call ends with the bits of a run that was left alone, or refuses in one line
and changes nothing.
"""

import io
import json
import pathlib
import shutil

import numpy as np
import pytest

import tsfl_jax
from tests.problems import files, same, same_sweep, small
from tsfl_jax.models import networks
from tsfl_jax.report import files as report
from tsfl_jax.report import runs
from tsfl_jax.run import checkpoint, runner
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]


# Damages: functions of a path


def flip(path, place=0.5):
    """Changes one bit."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0x04
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def gone(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def text(content):
    return lambda path: path.write_text(content)


def folder_instead(path):
    gone(path)
    path.mkdir()
    (path / "file").write_text("")


def swapped(name):
    def swap(path):
        other, aside = path.with_name(name), path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)

    return swap


def edited(**changes):
    def edit(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def arrays(**changes):
    """None leaves an array out."""

    def edit(path):
        with np.load(path) as stored:
            values = dict(stored) | changes
        np.savez(path, **{k: v for k, v in values.items() if v is not None})

    return edit


# Single runs


@pytest.fixture(scope="module")
def exp():
    """A run of 6 intervals in calls of 2, traced once."""
    return runner.build(small(algorithm="fedavg"))


@pytest.fixture(scope="module")
def whole(exp, tmp_path_factory):
    """A finished run; it keeps the checkpoints 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "now", lambda: 0.0)  # all saves are due
        runner.run(exp, folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    """A copy of the finished run; pictures would take most of the time."""
    monkeypatch.setattr(runs, "write_figures", lambda *results: None)
    return pathlib.Path(shutil.copytree(whole, tmp_path / "run"))


NEWEST = "checkpoints/6.npz"
DAMAGED, AFRESH = "damaged and left out: ", "no intact checkpoint in"

# (what is damaged, how, words of a notice). The run ends with the same files as before.
RECOVERED = [
    (NEWEST, cut, DAMAGED),
    (NEWEST, swapped("4.npz"), AFRESH),
    (NEWEST, gone, "resuming after interval 4 of 6"),
    ("metrics.jsonl", gone, ""),
    ("summary.json", edited(best_test_accuracy=0.99, num_intervals=9, seed=7), ""),
    ("clients.npz", arrays(rho=None), ""),
]
TIMES = {"compile_seconds", "train_seconds", "samples_per_second"}


@pytest.mark.parametrize(("name", "damage", "words"), RECOVERED)
def test_damage_that_is_recovered(exp, whole, folder, name, damage, words):
    damage(folder / name)
    printed = io.StringIO()
    result = runner.run(exp, folder, printed)
    assert words in printed.getvalue()
    same(files(folder), files(whole))
    assert (folder / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    summary, before = (report.read_json(f / "summary.json") for f in (folder, whole))
    assert report.plain(result.summary) == summary
    for key in before.keys() | summary.keys() - TIMES:
        if key not in TIMES:
            assert summary[key] == before[key], key


# (what is damaged, how, words of the refusal). Nothing is changed.
REFUSED = [
    ("summary.json", edited(compile_seconds="5"), "compile_seconds is '5'; delete"),
    ("checkpoints", gone, "holds a run without checkpoints; choose another"),
    (".lock", folder_instead, "Is a directory"),
]


@pytest.mark.parametrize(("name", "damage", "words"), REFUSED)
def test_damage_that_cannot_be_recovered_is_refused(exp, folder, name, damage, words):
    damage(folder / name)
    before = {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}
    with pytest.raises(UserError, match=words) as error:
        runner.run(exp, folder)
    message = str(error.value)
    assert "\n" not in message and str(folder) in message
    assert {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")} == before


# Sweeps: two rules whose states have the same shapes (exchanged, they would fit), in
# calls of four runs of which the last has two idle ones, and two chunks each.

SWEPT = {"algorithm": ["fedadam", "fedyogi"], "seed": [0, 1, 2]}


def sweep(folder, **options):
    config = small(num_intervals=4)
    return tsfl_jax.sweep(config, SWEPT, workdir=folder, runs_per_call=4, **options)


@pytest.fixture(scope="module")
def whole_sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    sweep(folder)
    return folder


def asked(calls, number=0):
    """A `stop` that counts its calls and is true at this one."""
    return lambda: calls.append(1) or len(calls) == number


@pytest.mark.parametrize(
    ("stopped_at", "intervals", "finished", "damage", "left"),
    [
        # After the first chunk, which is not trained again.
        pytest.param(1, 8, 0, None, 2, marks=pytest.mark.slow),
        # After the first chunk of the second call, which is lost.
        pytest.param(3, 20, 4, cut, 1, marks=pytest.mark.slow),
        pytest.param(2, 16, 4, None, 1, marks=pytest.mark.slow),  # between the calls
    ],
)
def test_a_stopped_sweep(
    whole_sweep, tmp_path, capsys, stopped_at, intervals, finished, damage, left
):
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, stop=asked([], stopped_at), verbose=True)
    printed = capsys.readouterr().err
    assert f"interval {intervals}/24, best accuracy " in printed and " left" in printed
    if finished:
        lines = (tmp_path / "results.jsonl").read_text().splitlines()
        assert [json.loads(line)["run"] for line in lines] == [*range(finished)]
        about = (tmp_path / "summary.md").read_text()
        assert f"{finished} of 6 runs so far" in about
    if damage:
        (file,) = (tmp_path / "running").glob("*/*.npz")
        damage(file)
    calls = []  # once within a call, and once between two
    sweep(tmp_path, stop=asked(calls), verbose=True)
    assert len(calls) == left
    assert (AFRESH in capsys.readouterr().err) == (damage is not None)
    assert not (tmp_path / "running").exists()
    same_sweep(tmp_path, whole_sweep)


@pytest.mark.slow
def test_damaged_runs_of_a_sweep_are_trained_again(whole_sweep, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(whole_sweep, tmp_path / "sweep"))
    damages = [
        flip,
        cut,
        arrays(rho=None),
        arrays(tau=np.array([{}])),
        arrays(lane=np.array("b")),  # another run's
    ]
    paths = sorted((folder / "lanes").iterdir())
    for path, damage in zip(paths, damages, strict=False):
        damage(path)
    calls = []
    sweep(folder, stop=asked(calls), verbose=True)
    printed = capsys.readouterr().err
    assert printed.count("runs again") == 5 and "1 runs were finished" in printed
    assert 1 < len(calls) < 6
    same_sweep(folder, whole_sweep)


# One process at a time; another kind of content; folders that change under a run


def test_a_second_run_in_a_workdir_is_refused_in_one_line(exp, whole, tmp_path):
    refused = []

    def second(record):
        for start in (
            lambda: runner.run(exp, tmp_path),
            lambda: tsfl_jax.sweep(small(), {"seed": [0]}, workdir=tmp_path),
        ):
            with pytest.raises(UserError, match="is in use") as error:
                start()
            refused.append(str(error.value))

    runner.run(exp, tmp_path, writers=[second])
    for line in refused:
        assert "\n" not in line and str(tmp_path) in line and "--workdir" in line
    assert len(refused) == 12
    same(files(tmp_path), files(whole))  # the first run did not notice
    runner.run(exp, tmp_path)  # and has left it


@pytest.mark.slow
def test_a_single_run_and_a_sweep_do_not_share_a_folder(exp, folder, whole_sweep):
    before = {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}
    with pytest.raises(UserError, match="holds a single run; choose another"):
        tsfl_jax.sweep(small(), {"seed": [0, 1]}, workdir=folder)
    assert {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")} == before
    with pytest.raises(UserError, match="holds a sweep; choose another"):
        runner.run(exp, whole_sweep)


# (changes of the settings, custom parts, words)
OTHERS = [
    ({"lr": 0.5}, {}, "another experiment .*lr"),
    ({"num_intervals": 5}, {}, "another experiment .num_intervals: 6 → 5"),
    ({"model__hidden": 50}, {"model": networks.MLP(10, 9)}, "another experiment"),
]


@pytest.mark.parametrize(("changes", "custom", "words"), OTHERS)
def test_another_experiment_is_refused(whole, changes, custom, words):
    with pytest.raises(UserError, match=words) as error:
        settings = small(**{"algorithm": "fedavg"} | changes)
        tsfl_jax.simulate(settings, workdir=whole, **custom)
    assert "\n" not in str(error.value)
