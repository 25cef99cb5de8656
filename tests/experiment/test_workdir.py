"""One run at a time in a workdir, and a workdir that changes under a run."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

import tsfl_jax
from tests.experiment.test_runner import files, same, small
from tsfl_jax.engine import devices
from tsfl_jax.experiment import backend, runner
from tsfl_jax.report import files as report
from tsfl_jax.types import UserError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, to be copied or compared with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tsfl_jax.simulate(small(), workdir=folder)
    return folder


@pytest.fixture(scope="module")
def exp():
    return runner.build(small())


# The lock


def test_a_second_run_in_a_workdir_is_refused_in_one_line(exp, whole, tmp_path):
    refused = []

    def second():
        for start in (
            lambda: runner.run(exp, tmp_path),
            lambda: tsfl_jax.sweep(small(), {"seed": [0]}, workdir=tmp_path),
        ):
            with pytest.raises(UserError, match="is in use") as error:
                start()
            refused.append(str(error.value))
        return False

    runner.run(exp, tmp_path, stop=second)
    for text in refused:
        assert "\n" not in text and str(tmp_path) in text and "--workdir" in text
    assert refused
    same(files(tmp_path), files(whole))  # the first run did not notice
    runner.run(exp, tmp_path)  # and has left it


HOLD = """
import sys, time
from tsfl_jax.report import files as report
with report.lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="is in use"), report.lock(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / ".lock").exists()
    with report.lock(tmp_path):
        pass


# A workdir that changes under a run


def test_a_workdir_removed_while_running_is_made_anew(exp, whole, tmp_path):
    folder, chunks = tmp_path / "run", []

    def stop():
        chunks.append(1)
        if len(chunks) == 1:
            shutil.rmtree(folder)
        return False

    runner.run(exp, folder, stop=stop)
    same(files(folder), files(whole))


def test_checks_of_folders_at_the_same_time_do_not_disturb_each_other(tmp_path):
    def check(name):
        for number in range(200):
            report.check_workdir(tmp_path / f"new{number}" / name)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(check, "abcd"))  # raises what a thread has raised
    assert not list(tmp_path.iterdir())


# Another kind of content


def test_a_single_run_and_a_sweep_do_not_share_a_folder(exp, whole, tmp_path):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    picture = (folder / "curves.png").read_bytes()
    with pytest.raises(UserError, match="holds a single run; choose another"):
        tsfl_jax.sweep(small(), {"seed": [0, 1]}, workdir=folder)
    assert (folder / "curves.png").read_bytes() == picture
    assert not (folder / "lanes").exists()
    sweep = tmp_path / "sweep"
    settings = small(num_intervals=2, algorithm="fedavg")
    tsfl_jax.sweep(settings, {"seed": [0]}, workdir=sweep)
    with pytest.raises(UserError, match="holds a sweep; choose another"):
        runner.run(exp, sweep)


# Files of a finished run


@pytest.mark.parametrize("content", ["", '{"diverged_at": 1}'])
def test_a_summary_is_made_of_the_checkpoint(exp, whole, tmp_path, content):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    before = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(content)
    summary = runner.run(exp, folder).summary
    after = json.loads((folder / "summary.json").read_text())
    assert report.plain(summary) == after == before | {"compile_seconds": 0.0}


def test_an_edited_accuracy_is_not_believed(exp, whole, tmp_path):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    before = json.loads((folder / "summary.json").read_text())
    forged = before | {"best_test_accuracy": 0.99, "seed": 7, "device": "abacus"}
    (folder / "summary.json").write_text(json.dumps(forged))
    summary = runner.run(exp, folder).summary
    # What it ran on is known from there only.
    assert report.plain(summary) == before | {"device": "abacus"}


# Devices


def stopped_on(count, workdir, monkeypatch, **settings):
    """A run that was stopped after its first chunk, on so many devices."""
    on(count, monkeypatch)
    exp = runner.build(small(devices=0, **settings))
    with pytest.raises(KeyboardInterrupt):
        runner.run(exp, workdir, stop=lambda: True)


def on(count, monkeypatch):
    monkeypatch.setattr(
        backend, "start_jax", lambda config: devices.make_mesh(count, 4)
    )


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_devices_with_the_same_bits(
    tmp_path, monkeypatch
):
    stopped_on(2, tmp_path / "cut", monkeypatch)
    on(1, monkeypatch)
    runner.run(runner.build(small(devices=0)), tmp_path / "cut")
    runner.run(runner.build(small(devices=0)), tmp_path / "whole")
    same(files(tmp_path / "cut"), files(tmp_path / "whole"))


@pytest.mark.slow
def test_clients_side_by_side_resume_on_as_many_devices_only(tmp_path, monkeypatch):
    stopped_on(2, tmp_path, monkeypatch, mapping="vmap")
    on(1, monkeypatch)
    exp = runner.build(small(devices=0, mapping="vmap"))
    with pytest.raises(UserError, match="devices that share the clients: 2 → 1"):
        runner.run(exp, tmp_path)
