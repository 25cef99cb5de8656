"""Ctrl-C while a command starts."""

import signal
import subprocess
import sys
import time

import pytest

from tests.launches import ROOT
from tsfl_jax import cli, interrupts

COMMANDS = {
    "launch.py": [sys.executable, "launch.py"],
    "tsfl": [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['tsfl', 'run', *sys.argv[1:]]\n"
        "from tsfl_jax.__main__ import main; main()",
    ],
}


@pytest.mark.parametrize(
    ("command", "seconds"), [("launch.py", 0.3), ("tsfl", 1.2), ("launch.py", 2.5)]
)
def test_an_early_stop_is_one_line(command, seconds, tmp_path):
    """From the first line on: the word, exit code 130, no traceback."""
    given = [*COMMANDS[command], f"--workdir={tmp_path}", "--config.num_intervals=5000"]
    with subprocess.Popen(given, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        time.sleep(seconds)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "stopped" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_the_request_to_end_saves_as_ctrl_c(tmp_path):
    given = [*COMMANDS["launch.py"], f"--workdir={tmp_path}"]
    given += ["--config.num_intervals=5000", "--config.report_every=5"]
    with subprocess.Popen(given, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.time() + 60
        while not (tmp_path / "metrics.jsonl").exists() and time.time() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"--workdir={tmp_path} resumes" in errors.splitlines()[-1]
    assert any((tmp_path / "checkpoints").iterdir())


def test_an_interrupt_that_python_has_ignored_is_not_lost(monkeypatch):
    monkeypatch.setattr(interrupts, "_asked", [])
    with pytest.raises(KeyboardInterrupt):
        interrupts._raise(signal.SIGINT, None)  # as in a callback, which drops it
    with pytest.raises(KeyboardInterrupt):
        cli._interrupts()
