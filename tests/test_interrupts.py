"""Ctrl-C and the request to end."""

import os
import signal
import subprocess
import sys
import time

import pytest

import tsfl_jax
from tests.launches import ROOT, environment
from tests.problems import small
from tsfl_jax import cli, command


@pytest.mark.slow
def test_the_request_to_end_saves_as_ctrl_c(tmp_path):
    given = [sys.executable, "launch.py", f"--workdir={tmp_path}"]
    given += ["--config.num_intervals=5000", "--config.report_every=5"]
    given += ["--config.algorithm=fedavg", "--config.model.hidden=0"]
    options = {"cwd": ROOT, "env": environment(), "stderr": subprocess.PIPE}
    with subprocess.Popen(given, text=True, **options) as run:
        deadline = time.time() + 60
        while not (tmp_path / "metrics.jsonl").exists() and time.time() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"--workdir={tmp_path} resumes" in errors.splitlines()[-1]
    assert any((tmp_path / "checkpoints").iterdir())


def test_an_interrupt_that_a_callback_dropped_ends_a_study_after_its_call(monkeypatch):
    monkeypatch.setattr(command, "_signals", [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        tsfl_jax.sweep(small(hidden=0, algorithm="fedavg"), {"seed": [0]})
    with pytest.raises(KeyboardInterrupt):
        cli._interrupts()


@pytest.mark.parametrize("error", [None, ImportError])
def test_a_command_whose_ctrl_c_a_library_dropped_ends_as_stopped(
    error, monkeypatch, capsys
):
    def main(texts):
        del texts
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException as lost:
            if error is not None:
                raise error("numpy") from lost

    monkeypatch.setattr(command, "_signals", [])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            command.run("tsfl run", main, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines() == [
        "tsfl run: stopped; the same command reuses what is finished"
    ]
